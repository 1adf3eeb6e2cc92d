"""The environment variables, and the errors for values that are not understood."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .checking import VARIABLE as CHECK
from .checking import Options

SWITCH = "TE_GRAPH_FIXES"
DISABLE = "TE_GRAPH_FIXES_DISABLE"
STRICT = "TE_GRAPH_FIXES_STRICT"
EXPECT = "TE_GRAPH_FIXES_EXPECT"
VERBOSE = "TE_GRAPH_FIXES_VERBOSE"
REQUIRED = "TE_GRAPH_FIXES_REQUIRED"
"""Set by ``te-graph-fixes run --required`` in every process below it."""
VARIABLES = (SWITCH, DISABLE, STRICT, EXPECT, VERBOSE, REQUIRED, CHECK)

UPSTREAM = "upstream"
"""The value of `SWITCH` for the corrections that upstream has merged in a later release."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


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
        """The environment's settings, with each argument that is not None in the place of its variable.

        Raises ValueError for an unknown fix id or value, naming the valid ones.
        """
        _require_known(environ)
        word, required = environ.get(SWITCH, "").strip().lower(), bool(environ.get(REQUIRED))
        found = cls(
            _switch(word, environ) if only is None else fix_ids(only, "only"),
            fix_ids(_split(environ, DISABLE), DISABLE) if disable is None else fix_ids(disable, "disable"),
            bool(_flag(environ.get(STRICT, ""), STRICT) if strict is None else _flag(strict, "strict")) or required,
            _flag(environ.get(VERBOSE, ""), VERBOSE),
            only is None and word == UPSTREAM,
        )
        if required and found.off:
            raise ValueError(f"{SWITCH} is off below `te-graph-fixes run --required`; unset one of the two")
        return found


def _split(environ: Mapping[str, str], name: str) -> list[str]:
    value = environ.get(name, "")
    found = [part.strip() for part in value.split(",") if part.strip()]
    if value.strip() and not found:
        raise ValueError(f"{name}={value!r} names no fix: unset it, or see te-graph-fixes list")
    return found


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
            valid = ", ".join([*also, "see te-graph-fixes list"])
            near = nearest(unknown, [*CATALOGUE, *also])
            raise ValueError(f"{prefix}unknown fix {', '.join(unknown)}; {near}valid: {valid}")
    return wanted


def nearest(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question for the names that are like words which are not understood; "" where none is."""
    from difflib import get_close_matches

    names = list(known)
    near = [name for word in unknown for name in get_close_matches(word, names, 2) if name != word]
    return f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""


def _require_known(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable that looks like one of ours, and is none."""
    for name in sorted(environ):
        if name.startswith(SWITCH) and name not in VARIABLES:
            raise ValueError(f"{name} is no setting; {nearest([name], VARIABLES)}valid: {', '.join(VARIABLES)}")
    Options.parse(environ.get(CHECK, ""))
    expect = environ.get(EXPECT, "")
    if expect and not re.fullmatch(r"te=[^,=]+(,[a-z0-9-]+=[a-z-]+)+", expect):
        raise ValueError(
            f"{EXPECT}={expect!r} is not understood; it must be what `te-graph-fixes run --print-env` prints, or unset"
        )
