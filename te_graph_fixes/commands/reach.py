"""Find the parts of a command line, such as ``sudo``, that drop the environment of ``te-graph-fixes run``."""

import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Sequence

_DROPS_VARIABLES = re.compile(
    r"""
    (?<![\w.-]) (?:
        (?: sudo | ssh | su | runuser | docker | podman | kubectl ) (?=\s)
        | --(?: export[=\s]NONE | cleanenv ) (?!\S)
        | env (?: \s-u\s?\w+ | \s\w+=\S* )*? \s (?:
            (?: -\w*i\w* | - | --ignore-environment ) (?!\S) | (?: -u\s? | --unset= ) PYTHON (?:PATH|WARNINGS)
        )
        | (?: python | pypy ) [\d.]* t? (?: \s-[WX]\s?\S+ | \s-[^\WcmWX]+ )*? \s -[^\WcmWX]*[IE]\w*
    )
    """,
    re.VERBOSE,
)
"""Commands that start a program without the variables of ``run``, or a Python that ignores them."""


def unreached(command: Sequence[str]) -> list[str]:
    """Return the parts of a command that drop the environment of ``run``, or [] if no such part is found.

    Programs that the command starts later, for example in a script, are not searched.
    """
    path = shutil.which(command[0]) or command[0]
    found = [match[0] for match in _DROPS_VARIABLES.finditer(" ".join([*command, ";", _interpreter(path)]))]
    return found + [f"the PEX {file}" for file in (path, *command[1:]) if _is_pex(file)]


def _interpreter(path: str) -> str:
    """Return the command in the first line of a script, or "" if the file is no script."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.readline(1000)
        return first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ""
    return ""


def _is_pex(path: str) -> bool:
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        return os.path.isfile(path) and zipfile.is_zipfile(path) and "PEX-INFO" in zipfile.ZipFile(path).namelist()
    return False
