"""The status of every fix, read from the live objects."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from .state import State
from .version import __version__

COPIED = "_make_graphed_callables"
"""A function of TransformerEngine's graph.py, by which a copy of it is known."""


def te_name(version: str | None) -> str:
    """TransformerEngine with its version."""
    return f"TransformerEngine {version or '(version unknown)'}"


def copies_of_graphs(original: str) -> tuple[str, ...]:
    """The imported modules, except the one called ``original``, that define `COPIED`."""
    copies = []
    for name, module in list(sys.modules.items()):
        is_module = issubclass(type(module), ModuleType)
        own = object.__getattribute__(module, "__dict__") if is_module else {}  # loads nothing
        if name != original and getattr(own.get(COPIED), "__module__", None) == name:
            copies.append(name)
    return tuple(sorted(copies))


class FixNotAppliedError(RuntimeError):
    """Strict mode: a fix that the installed TransformerEngine needs cannot be applied."""


class TEGraphFixesWarning(UserWarning):
    """A fix that the installed TransformerEngine needs cannot be applied."""


@dataclass(frozen=True)
class FixStatus:
    """The ``status`` of one fix, why, its upstream links, and the modules that it changes.

    ``status`` is a `te_graph_fixes.state.State` other than ``applicable``, which is a string. ``earlier_graphs`` is the
    number of graphs without an applied fix: they were captured before it was in place.
    """

    status: State
    reason: str
    upstream: tuple[str, ...]
    targets: tuple[str, ...]
    earlier_graphs: int = 0


@dataclass(frozen=True)
class Report:
    """The version of TransformerEngine (None: not found, or without metadata) and a `FixStatus` for each fix.

    ``version`` is that of te-graph-fixes. ``copies`` are modules that hold a copy of TransformerEngine's graph.py under
    another name, as TransformerEngine was imported: no fix reaches them. As a string it is a table.
    """

    te_version: str | None
    fixes: dict[str, FixStatus]
    version: str = __version__
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(map(len, self.fixes), default=0)
        lines = [f"te-graph-fixes {self.version}, {te_name(self.te_version)}"]
        for fix, status in self.fixes.items():
            number = status.earlier_graphs
            graphs = f" (not in {number} graph{'s' * (number > 1)} captured before)" if number else ""
            lines.append(f"  {fix:{width}}  {status.status:14}  {status.reason}{graphs}")
        return "\n".join([*lines, *(f"  {text}" for text in self.said_of_copies())])

    def said_of_copies(self) -> list[str]:
        """A sentence for each copy of TransformerEngine's graphs."""
        return [f"{name} is a copy of TransformerEngine's graph.py: no fix reaches its graphs" for name in self.copies]

    def having(self, *statuses: str) -> dict[str, str]:
        """The fixes with one of these statuses, each with its reason."""
        return {fix_id: fix.reason for fix_id, fix in self.fixes.items() if fix.status in statuses}

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, ready for JSON."""
        import json  # slow to import

        plain = json.loads(json.dumps(asdict(self)))
        return {"te_graph_fixes_version": plain.pop("version"), **plain}
