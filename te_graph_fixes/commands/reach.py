"""Parts of a command line whose Python processes ``te-graph-fixes run`` does not reach."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_OTHER_ENVIRONMENT = ("sudo", "ssh", "su", "runuser")
_SET_BY_RUN = ("PYTHONPATH", "PYTHONWARNINGS")


def unreached(command: Sequence[str]) -> list[str]:
    """Return the parts of a command that drop the environment of ``run``; [] if none is noticed.

    Programs that the command starts only later are not known here.
    """
    return list(dict.fromkeys(_unreached(command)))


def _unreached(command: Sequence[str]) -> Iterator[str]:
    for index, word in enumerate(command):
        name, arguments = os.path.basename(word), command[index + 1 :]
        if name == "env":
            yield from _dropped_by_env(arguments)
        elif name in _OTHER_ENVIRONMENT:
            yield name
        elif name in _SHELLS:
            yield from _in_script(arguments)
        elif _PYTHON.fullmatch(name):
            yield from _ignored_by_python(name, arguments)
        if index == 0:
            yield from _in_file(shutil.which(word) or word)


def _dropped_by_env(arguments: Sequence[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        option = re.fullmatch(r"(?:-u|--unset=?)(\w*)", word)
        unset = (option[1] or next(words, "")) if option else ""
        if word in ("-", "--ignore-environment") or re.fullmatch("-[a-zA-Z]*i[a-zA-Z]*", word):
            yield "env -i"
        elif unset in _SET_BY_RUN or word.partition("=")[0] in _SET_BY_RUN:
            yield f"env -u {unset}" if unset else f"env {word}"
        elif not word.startswith("-") and "=" not in word:
            return


def _ignored_by_python(name: str, arguments: Sequence[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        if not re.match("-[^-]", word):
            if not word.startswith("--"):
                yield from _in_file(word)
                return
            continue
        flags, option, value = (
            re.split("([cmWX])", word[1:], maxsplit=1) if re.search("[cmWX]", word) else (word, "", "")
        )
        for flag in set(flags) & {"I", "E"}:
            yield f"{name} -{flag}"
        if option in ("c", "m"):
            return
        if option and not value:
            next(words, None)


def _in_script(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what the script of ``sh -c SCRIPT`` starts."""
    for option, script in pairwise(arguments):
        if re.fullmatch("-[a-z]*c", option):
            try:
                yield from _unreached(shlex.split(script, comments=True))
            except ValueError:  # the shell reports it
                return


def _in_file(path: str) -> Iterator[str]:
    """Yield how a program starts Python, if it is a script or a PEX."""
    try:
        with open(path, "rb") as file:
            first = file.readline(1000)
        if zipfile.is_zipfile(path) and "PEX-INFO" in zipfile.ZipFile(path).namelist():
            yield f"the PEX {path}"
    except (OSError, zipfile.BadZipFile):
        return
    if first.startswith(b"#!"):
        yield from _unreached(first[2:].decode(errors="replace").split())
