"""What the user is told: the status of every fix, read from the live objects."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from . import __version__


class FixNotAppliedError(RuntimeError):
    """Strict mode: a fix that the installed TransformerEngine needs cannot be applied."""


class TEGraphFixesWarning(UserWarning):
    """A fix that the installed TransformerEngine needs cannot be applied."""


@dataclass(frozen=True)
class FixStatus:
    """The ``status`` of one fix, why, its upstream links, and the modules that it changes.

    Statuses: ``pending`` (TransformerEngine not imported yet), ``applied``, ``not-needed`` (upstream or the vendor has
    it), ``not-applicable`` (this TransformerEngine lacks the feature), ``unrecognized`` (its source is neither the
    defect nor the correction), ``disabled``, ``failed``, ``reverted``.
    """

    status: str
    reason: str
    upstream: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The version of TransformerEngine (None: not found, or without metadata) and a `FixStatus` for each fix.

    ``version`` is that of te-graph-fixes. As a string it is a table.
    """

    te_version: str | None
    fixes: dict[str, FixStatus]
    version: str = __version__

    def __str__(self) -> str:
        width = max(map(len, self.fixes), default=0)
        lines = [f"te-graph-fixes {self.version}, TransformerEngine {self.te_version or '(version unknown)'}"]
        return "\n".join(
            [*lines, *(f"  {fix:{width}}  {status.status:14}  {status.reason}" for fix, status in self.fixes.items())]
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, ready for JSON."""
        return {
            "te_graph_fixes_version": self.version,
            "te_version": self.te_version,
            "fixes": {
                fix_id: {**asdict(status), "upstream": list(status.upstream), "targets": list(status.targets)}
                for fix_id, status in self.fixes.items()
            },
        }
