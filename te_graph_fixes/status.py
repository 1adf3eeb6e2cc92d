"""The words for what becomes of a fix: in `te_graph_fixes.report`, in ``te-graph-fixes status`` and in their JSON."""

from enum import Enum

ON_DISK = "corrected on disk"
"""How the reason begins why a fix is not needed, where this package has put it into the files."""


class Status(str, Enum):
    """What the source says of a fix (the first four), or what was made of it."""

    APPLICABLE = "applicable"
    """The defect is there, and can be corrected."""
    NOT_NEEDED = "not-needed"
    """Upstream or the vendor has corrected it, or this package has, on disk."""
    NOT_APPLICABLE = "not-applicable"
    """This TransformerEngine lacks the feature."""
    UNRECOGNIZED = "unrecognized"
    """Neither the defect nor its correction was found: nothing is changed."""
    DISABLED = "disabled"
    """The settings leave it out."""
    FAILED = "failed"
    """It could not be put in place, or is no longer what runs."""
    PENDING = "pending"
    """TransformerEngine is not imported yet."""
    APPLIED = "applied"
    REVERTED = "reverted"
    """`te_graph_fixes.deactivate` has taken it back."""

    def __str__(self) -> str:
        return str(self.value)


REFUSED = (Status.UNRECOGNIZED, Status.FAILED)
"""A fix that TransformerEngine needs, or may need, cannot be applied."""
