"""The possible statuses of a fix in `te_graph_fixes.report`, in ``te-graph-fixes status`` and in their JSON."""

from enum import Enum


class Status(str, Enum):
    """A fix's verdict on TransformerEngine's source, or what became of the fix in this process.

    A verdict is one of the first four, ``disabled`` by a bake, or ``failed`` for a bug in this package.
    """

    APPLICABLE = "applicable"
    """TransformerEngine has the bug, and the fix can be applied."""
    NOT_NEEDED = "not-needed"
    """The bug is fixed by upstream, by the vendor, or by a bake of this package."""
    NOT_APPLICABLE = "not-applicable"
    """This TransformerEngine lacks the feature."""
    UNRECOGNIZED = "unrecognized"
    """Neither the bug nor its upstream fix is in the source. Nothing is changed."""
    DISABLED = "disabled"
    """The settings disable the fix, or another fix that it requires."""
    FAILED = "failed"
    """The fix could not be installed, or another package has replaced the fixed code."""
    PENDING = "pending"
    """TransformerEngine is not imported yet."""
    APPLIED = "applied"
    REVERTED = "reverted"
    """`te_graph_fixes.deactivate` has reverted the fix."""

    def __str__(self) -> str:
        return str(self.value)


WITHOUT_BUG = (Status.NOT_NEEDED, Status.NOT_APPLICABLE)
CANNOT_APPLY = (Status.UNRECOGNIZED, Status.FAILED)
"""The statuses of a fix that cannot be applied although TransformerEngine needs it, or may need it."""
BAKED = "baked by"
"""The first words of the reason if a fix is not needed because it is baked into TransformerEngine's files."""
