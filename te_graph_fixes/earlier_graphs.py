"""The graphs that TransformerEngine (TE) has captured in this process: they keep the code that captured them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Set
from weakref import WeakKeyDictionary


class EarlierGraphs:
    """Which fixes were in place when each graph was captured; those that nobody has noted have the present ones."""

    def __init__(self) -> None:
        self._fixes: WeakKeyDictionary[type, Set[str]] = WeakKeyDictionary()

    def note(self, fixes: Set[str]) -> None:
        """The graphs that are new were captured with ``fixes``, which are about to change."""
        if any(graph not in self._fixes for graph in _graphs()):
            gc.collect()  # those that nobody has any more need not be spoken of
        for graph in _graphs():
            self._fixes.setdefault(graph, fixes)

    def without(self, fixes: Set[str]) -> int:
        """How many graphs there are that were captured without one of ``fixes``."""
        return sum(not fixes <= self._fixes.get(graph, fixes) for graph in _graphs())


def _graphs() -> list[type]:
    """What TE makes for each graph, and what goes with it: a class of autograd functions."""
    function = getattr(getattr(sys.modules.get("torch"), "autograd", None), "Function", None)
    classes: list[type] = function.__subclasses__() if isinstance(function, type) else []
    return [found for found in classes if found.__module__ == "transformer_engine.pytorch.graph"]
