"""Settings from the environment variables and from arguments, with errors for invalid ones."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .launcher.te_graph_fixes_run import OFF, ON
from .ranks import rank

SWITCH = "TE_GRAPH_FIXES"
DISABLE = "TE_GRAPH_FIXES_DISABLE"
STRICT = "TE_GRAPH_FIXES_STRICT"
CHECK = "TE_GRAPH_FIXES_CHECK"
VERBOSE = "TE_GRAPH_FIXES_VERBOSE"
VARIABLES = (SWITCH, DISABLE, STRICT, CHECK, VERBOSE)

UPSTREAM = "upstream"
"""The value of `SWITCH` that selects the fixes for bugs fixed in a later release of TransformerEngine."""


@dataclass(frozen=True)
class Settings:
    """The user's choice of fixes, strict mode and output.

    The fixes in ``only`` (None: all fixes) are selected, except the fixes in ``disable``. If ``strict`` is true, a
    needed fix that cannot be applied is an error. A process in which a fix is missing always prints the status line.
    ``verbose`` selects the other processes that print it: all (True), the first rank of each host (None), none (False).
    """

    only: frozenset[str] | None = None
    disable: frozenset[str] = frozenset()
    strict: bool = False
    verbose: bool | None = None

    @property
    def off(self) -> bool:
        return self.only is not None and not self.only

    @property
    def disabled_by(self) -> str:
        """The names of the environment variables that disable fixes, joined by "and", or "" if none does."""
        is_used = {SWITCH: self.only is not None, DISABLE: bool(self.disable)}
        return " and ".join(name for name in is_used if is_used[name])

    @classmethod
    def read(
        cls,
        only: Iterable[str] | None = None,
        disable: Iterable[str] | None = None,
        strict: bool | None = None,
    ) -> "Settings":
        """Return the settings from the environment variables. An argument that is not None replaces its variable.

        Raise ValueError for an unknown fix id or value. If the variable `SWITCH` turns all fixes off, errors are
        ignored, because turning the fixes off must always work.
        """
        verbose = os.environ.get(VERBOSE, "")
        if only is None and is_off():
            with contextlib.suppress(ValueError):
                return cls(frozenset(), verbose=_flag(verbose, VERBOSE))
            return cls(frozenset())
        return cls(
            _selected() if only is None else fix_ids(only, "only"),
            fix_ids(_split(DISABLE), DISABLE) if disable is None else fix_ids(disable, "disable"),
            bool(_flag(os.environ.get(STRICT, ""), STRICT) if strict is None else _flag(strict, "strict")),
            _flag(verbose, VERBOSE),
        )


def is_off() -> bool:
    """Return whether the variable `SWITCH` turns all fixes off."""
    return os.environ.get(SWITCH, "").strip().lower() in OFF


def unknown_variables() -> list[str]:
    """Return a message for each variable, such as TE_GRAPH_FIXES_VERSION, that has our prefix but is not a setting.

    Only the first rank of a job returns messages. Other ranks return an empty list.
    """
    if rank() not in (None, "0"):
        return []
    unknown = [name for name in sorted(os.environ) if name.startswith(SWITCH) and name not in VARIABLES]
    ignored = "Ignoring {}: te-graph-fixes has no such variable. {}"
    return [ignored.format(name, did_you_mean([name], VARIABLES)).rstrip() for name in unknown]


def _split(name: str) -> list[str]:
    value = os.environ.get(name, "")
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if value.strip() and not parts:
        raise ValueError(f"{name}={value!r} names no fix. Unset it, or see `te-graph-fixes list`.")
    return parts


def _selected() -> frozenset[str] | None:
    """Return the fixes that the variable `SWITCH` selects, by a word or by their ids, or None for all fixes."""
    word = os.environ.get(SWITCH, "").strip().lower()
    if word in ON or not word:
        return None
    if word == UPSTREAM:
        from .fixes import CATALOGUE

        return frozenset(fix.id for fix in CATALOGUE.values() if fix.merged)
    return fix_ids(_split(SWITCH), SWITCH, ("on", "off", UPSTREAM))


def _flag(value: object, where: str) -> bool | None:
    """Return True if a value means yes, False if it means no, and None if it is empty. Errors begin with ``where``."""
    word = str(value).strip().lower()
    if word not in (*ON, *OFF, ""):
        raise ValueError(f"{where}={value!r} is invalid. Valid values: {', '.join(ON + OFF)}")
    return word in ON if word else None


def fix_ids(ids: Iterable[str], where: str = "", also: Sequence[str] = ()) -> frozenset[str]:
    """Return ``ids`` as a set. For an unknown id, raise ValueError, which names ``where`` and also lists ``also``."""
    if isinstance(ids, str):
        raise ValueError(f"{where} must be a collection of fix ids, not the string {ids!r}.")
    if wanted := frozenset(ids):
        from .fixes import CATALOGUE

        if unknown := sorted(map(str, wanted - set(CATALOGUE))):
            prefix = f"{where}: " if where else ""
            valid = ", ".join([*also, "the ids that `te-graph-fixes list` prints"])
            hint = did_you_mean(unknown, [*CATALOGUE, *also])
            raise ValueError(f"{prefix}unknown fix {', '.join(unknown)}. {hint}Valid: {valid}")
    return wanted


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return a question that proposes known names similar to the unknown names, or "" if no known name is similar."""
    from difflib import get_close_matches

    names = list(known)
    near = [name for word in unknown for name in get_close_matches(word, names, 2) if name != word]
    return f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
