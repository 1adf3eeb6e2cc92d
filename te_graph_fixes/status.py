"""The verdicts on TransformerEngine's source, the statuses of fixes in a process, and the report of all statuses."""

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .text import count, te_name
from .version import __version__

BAKED = "baked by"
"""The first words of the reason of a fix that is not needed because it is baked into TransformerEngine's files."""


class _Word(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Verdict(_Word):
    """The conclusion about a fix that follows from the source of a TransformerEngine."""

    APPLICABLE = "applicable"
    """TransformerEngine has the bug, and the fix can be applied."""
    NOT_NEEDED = "not-needed"
    """TransformerEngine is older than the bug, or its maintainers, a vendor or a bake of this package fixed the bug."""
    NOT_APPLICABLE = "not-applicable"
    """TransformerEngine lacks the feature that has the bug."""
    UNRECOGNIZED = "unrecognized"
    """The source does not show whether TransformerEngine has the bug, so the fix changes nothing."""


class Status(_Word):
    """The status of a fix in this process. It is ``pending`` until TransformerEngine is imported."""

    PENDING = "pending"
    APPLIED = "applied"
    NOT_NEEDED = "not-needed"
    NOT_APPLICABLE = "not-applicable"
    UNRECOGNIZED = "unrecognized"
    DISABLED = "disabled"
    """The settings or a bake disable the fix, or another fix that it requires."""
    FAILED = "failed"
    """The fix could not be installed, or another package has replaced the fixed code."""
    REVERTED = "reverted"
    """`te_graph_fixes.deactivate` has reverted the fix."""


CANNOT_APPLY = (Status.UNRECOGNIZED, Status.FAILED)
"""The statuses of a fix that cannot be applied although TransformerEngine needs it, or may need it."""


@dataclass(frozen=True)
class FixStatus:
    """The ``status`` of one fix with the ``reason``, the upstream links, and the changed or added modules.

    ``status`` is a `Status`, which is a string. ``earlier_graphs`` is the number of graphs captured before the fix was
    applied. These graphs still have the bug.
    """

    status: Status
    reason: str
    upstream: tuple[str, ...]
    targets: tuple[str, ...]
    earlier_graphs: int = 0

    @property
    def is_baked(self) -> bool:
        return self.status == Status.NOT_NEEDED and self.reason.startswith(BAKED)


@dataclass(frozen=True)
class Report:
    """The `FixStatus` of every fix, by its id. ``str(report)`` is a table.

    ``te_version`` is None if TransformerEngine is not found or its version is unknown. ``version`` is the version of
    te-graph-fixes. ``copies`` names modules that are copies of TransformerEngine's graph.py, which are not fixed.

    ``mode`` is ``memory``, ``baked``, ``off``, ``failed``, or ``pending`` before the import of TransformerEngine.
    ``digest`` has eight hexadecimal digits. docs/launchers.md describes ``mode`` and ``digest``.
    """

    te_version: str | None
    fixes: dict[str, FixStatus]
    version: str = __version__
    copies: tuple[str, ...] = ()
    mode: str = "pending"
    digest: str = "00000000"

    @property
    def active(self) -> list[str]:
        """The fixes whose code runs in this process, from memory or from TransformerEngine's files."""
        return [fix_id for fix_id, fix in self.fixes.items() if fix.status == Status.APPLIED or fix.is_baked]

    @property
    def missing(self) -> dict[str, str]:
        """The reasons of the fixes that TransformerEngine needs, or may need, but that cannot be applied."""
        return self.having(*CANNOT_APPLY)

    def __str__(self) -> str:
        width = max(map(len, self.fixes), default=0)
        lines = [f"te-graph-fixes {self.version}, {te_name(self.te_version)}"]
        for fix_id, fix in self.fixes.items():
            earlier = f" (not in {count(fix.earlier_graphs, 'graph')} captured before)" if fix.earlier_graphs else ""
            lines.append(f"  {fix_id:{width}}  {fix.status:14}  {fix.reason}{earlier}")
        return "\n".join([*lines, *(f"  {text}" for text in self.copy_warnings())])

    def copy_warnings(self) -> list[str]:
        return [
            f"{name} is a copy of TransformerEngine's graph.py. The fixes do not apply to graphs that it captures."
            for name in self.copies
        ]

    def having(self, *statuses: str) -> dict[str, str]:
        """Return the reason of each fix that has one of these statuses, by id, or {} if none has."""
        return {fix_id: fix.reason for fix_id, fix in self.fixes.items() if fix.status in statuses}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists, ready for JSON."""
        import json  # slow to import

        plain = json.loads(json.dumps(asdict(self)))
        return {"te_graph_fixes_version": plain.pop("version"), **plain}
