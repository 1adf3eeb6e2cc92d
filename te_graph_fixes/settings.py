"""The environment variables, and the errors for values that are not understood."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SWITCH = "TE_GRAPH_FIXES"
DISABLE = "TE_GRAPH_FIXES_DISABLE"
STRICT = "TE_GRAPH_FIXES_STRICT"
EXPECT = "TE_GRAPH_FIXES_EXPECT"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """Which fixes are wanted: ``only`` these (None: all) less those in ``disable``; ``strict`` raises on a problem."""

    only: frozenset[str] | None = None
    disable: frozenset[str] = frozenset()
    strict: bool = False

    def wants(self, fix_id: str) -> bool:
        return (self.only is None or fix_id in self.only) and fix_id not in self.disable

    @property
    def off(self) -> bool:
        return self.only is not None and not self.only

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
        return cls(
            _switch(environ.get(SWITCH, "on")) if only is None else _ids(only, "only"),
            _ids(_split(environ.get(DISABLE, "")), DISABLE) if disable is None else _ids(disable, "disable"),
            _flag(environ.get(STRICT, "")) if strict is None else strict,
        )


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _switch(value: str) -> frozenset[str] | None:
    word = value.strip().lower()
    if word in _TRUE or not word:
        return None
    if word in _FALSE:
        return frozenset()
    return _ids(_split(value), SWITCH, "on, off, ")


def _flag(value: str) -> bool:
    word = value.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{STRICT}={value!r} is not understood; valid: {', '.join(filter(None, _TRUE + _FALSE))}")
    return word in _TRUE


def _ids(ids: Iterable[str], where: str, also: str = "") -> frozenset[str]:
    if isinstance(ids, str):
        raise ValueError(f"{where} must be a collection of fix ids, not the string {ids!r}")
    wanted = frozenset(ids)
    if wanted:
        from .fixes import CATALOGUE

        unknown = sorted(wanted - set(CATALOGUE))
        if unknown:
            raise ValueError(f"{where}: unknown fix {', '.join(unknown)}; valid: {also}{', '.join(CATALOGUE)}")
    return wanted
