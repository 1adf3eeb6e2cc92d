"""What this process was told: the environment variables, with errors for what is not understood, and its command."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .patching.source import Source

SWITCH = "TE_GRAPH_FIXES"
DISABLE = "TE_GRAPH_FIXES_DISABLE"
STRICT = "TE_GRAPH_FIXES_STRICT"
CHECK = "TE_GRAPH_FIXES_CHECK"
VERBOSE = "TE_GRAPH_FIXES_VERBOSE"
VARIABLES = (SWITCH, DISABLE, STRICT, CHECK, VERBOSE)

UPSTREAM = "upstream"
"""The value of `SWITCH` for the corrections that upstream has merged in a later release."""


def _command(python: str) -> str:
    """How to start a command of this package with an interpreter, where PYTHONPATH leads to it also with that."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.environ.get("PYTHONPATH", "")
    prefix = f"PYTHONPATH={shlex.quote(path)} " if root in path.split(os.pathsep) else ""
    return f"{prefix}{shlex.quote(python)} -m te_graph_fixes"


def _started_as() -> str:
    """How this process was started, if it is a command of this package: else it is a program that imports it."""
    name = sys.argv[0] if sys.argv else ""
    after_m = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if name == "-m" else ""
    if after_m == "te_graph_fixes":
        return _command(sys.orig_argv[0])
    return "te-graph-fixes" if os.path.basename(name) == "te-graph-fixes" else ""


STARTED_AS = _started_as()
_SCRIPT = os.path.join(os.path.dirname(sys.executable), "te-graph-fixes")
COMMAND = STARTED_AS or ("te-graph-fixes" if os.path.exists(_SCRIPT) else _command(sys.executable))
"""What messages call the command, for the next one to be typed: as it was started, or as this interpreter has it."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def option(source: Source) -> str:
    """What to add to a command for this TransformerEngine, with a space before it; "" for the installed one."""
    from .patching.source import Source, TENotFoundError

    with contextlib.suppress(TENotFoundError):
        if Source.installed().location == source.location:
            return ""
    return f" --source {shlex.quote(os.path.dirname(source.location))}"


def rank() -> str | None:
    """The rank of this process, as its launcher names it."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


@dataclass(frozen=True)
class Settings:
    """Which fixes are wanted: ``only`` these (None: all) less those in ``disable``; ``strict`` raises on a problem.

    ``with_required``: what the fixes in ``only`` require, where they are applied, is wanted too.
    ``verbose`` lets every process say what was applied, False none, and None the first of a job.
    """

    only: frozenset[str] | None = None
    disable: frozenset[str] = frozenset()
    strict: bool = False
    verbose: bool | None = None
    with_required: bool = False

    def wants(self, fix_id: str) -> bool:
        return (self.only is None or fix_id in self.only) and fix_id not in self.disable

    @property
    def off(self) -> bool:
        return self.only is not None and not self.only

    @property
    def chosen_by(self) -> str:
        """The variables that leave fixes out."""
        return " and ".join([SWITCH] * (self.only is not None) + [DISABLE] * bool(self.disable))

    @classmethod
    def read(
        cls,
        only: Iterable[str] | None = None,
        disable: Iterable[str] | None = None,
        strict: bool | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """The environment's settings; an argument that is not None replaces its variable.

        Raises ValueError for an unknown fix id or value, naming the valid ones, and for a mistyped variable.
        """
        for name in sorted(environ):
            if intended := _intended(name):
                raise ValueError(f"{name} is not a setting; did you mean {intended}?")
        word = environ.get(SWITCH, "").strip().lower()
        return cls(
            _switch(word, environ) if only is None else fix_ids(only, "only"),
            fix_ids(_split(environ, DISABLE), DISABLE) if disable is None else fix_ids(disable, "disable"),
            bool(_flag(environ.get(STRICT, ""), STRICT) if strict is None else _flag(strict, "strict")),
            _flag(environ.get(VERBOSE, ""), VERBOSE),
            only is None and word == UPSTREAM,
        )


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that begins as ours do and is no setting, as an image's TE_GRAPH_FIXES_VERSION.

    None on a rank that is not the first, which would say the same.
    """
    if rank() not in (None, "0"):
        return []
    unknown = [name for name in sorted(environ) if name.startswith(SWITCH) and name not in VARIABLES]
    return [f"{name} is not a setting of te-graph-fixes: it changes nothing" for name in unknown]


def _intended(name: str) -> str:
    """The variable of ours that a name is a mistyped form of, by two characters at most; "" if there is none."""
    if name in VARIABLES or not name.upper().startswith("TE_"):
        return ""
    from difflib import ndiff

    typos = {variable: sum(change[0] != " " for change in ndiff(name.upper(), variable)) for variable in VARIABLES}
    return next((variable for variable in VARIABLES if typos[variable] <= 2), "")


def _split(environ: Mapping[str, str], name: str) -> list[str]:
    value = environ.get(name, "")
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if value.strip() and not parts:
        raise ValueError(f"{name}={value!r} names no fix: unset it, or see {COMMAND} list")
    return parts


def _switch(word: str, environ: Mapping[str, str]) -> frozenset[str] | None:
    """The fixes that `SWITCH` chooses: by a word, or by their names."""
    if word in _TRUE or not word:
        return None
    if word in _FALSE:
        return frozenset()
    if word == UPSTREAM:
        from .fixes import CATALOGUE

        return frozenset(fix.id for fix in CATALOGUE.values() if fix.merged)
    return fix_ids(_split(environ, SWITCH), SWITCH, ("on", "off", UPSTREAM))


def _flag(value: object, where: str) -> bool | None:
    """Whether a value says yes or no; None if it says nothing."""
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE, ""):
        raise ValueError(f"{where}={value!r} is not understood; valid: {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE if word else None


def fix_ids(ids: Iterable[str], where: str = "", also: Sequence[str] = ()) -> frozenset[str]:
    """``ids`` as a set; ValueError, which begins with ``where`` they come from, unless all are ids of fixes."""
    if isinstance(ids, str):
        raise ValueError(f"{where} must be a collection of fix ids, not the string {ids!r}")
    if wanted := frozenset(ids):
        from .fixes import CATALOGUE

        if unknown := sorted(map(str, wanted - set(CATALOGUE))):
            prefix = f"{where}: " if where else ""
            valid = ", ".join([*also, f"see {COMMAND} list"])
            near = nearest(unknown, [*CATALOGUE, *also])
            raise ValueError(f"{prefix}unknown fix {', '.join(unknown)}; {near}valid: {valid}")
    return wanted


def nearest(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question for the names that are like words which are not understood; "" where none is."""
    from difflib import get_close_matches

    names = list(known)
    near = [name for word in unknown for name in get_close_matches(word, names, 2) if name != word]
    return f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
