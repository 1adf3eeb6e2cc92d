"""What the user is told: the status of every fix, read from the live objects."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
    """The version of TransformerEngine (None: not found, or without metadata) and a `FixStatus` for each fix."""

    te_version: str | None
    fixes: dict[str, FixStatus]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, ready for JSON."""
        return {
            "te_version": self.te_version,
            "fixes": {
                fix_id: {**asdict(status), "upstream": list(status.upstream), "targets": list(status.targets)}
                for fix_id, status in self.fixes.items()
            },
        }
