"""The statuses of a fix, as `te_graph_fixes.report`, ``te-graph-fixes status`` and their JSON name them."""

from enum import Enum


class Status(str, Enum):
    """A fix's verdict on TransformerEngine's source, or what became of the fix in this process.

    A verdict is one of the first four, ``disabled`` by a bake, or ``failed`` for a bug in this package.
    """

    APPLICABLE = "applicable"
    """TransformerEngine has the bug, and the fix fits."""
    NOT_NEEDED = "not-needed"
    """The bug is fixed by upstream, by the vendor, or by a bake of this package."""
    NOT_APPLICABLE = "not-applicable"
    """This TransformerEngine lacks the feature."""
    UNRECOGNIZED = "unrecognized"
    """Neither the bug nor its upstream fix is in the source. Nothing is changed."""
    DISABLED = "disabled"
    """The settings disable it, or a fix that it requires."""
    FAILED = "failed"
    """It could not be installed, or another package has replaced it."""
    PENDING = "pending"
    """TransformerEngine is not imported yet."""
    APPLIED = "applied"
    REVERTED = "reverted"
    """`te_graph_fixes.deactivate` has reverted it."""

    def __str__(self) -> str:
        return str(self.value)


WITHOUT_BUG = (Status.NOT_NEEDED, Status.NOT_APPLICABLE)
CANNOT_APPLY = (Status.UNRECOGNIZED, Status.FAILED)
"""TransformerEngine needs the fix, or may need it, and it cannot be applied."""
BAKED = "baked by"
"""The reason of a fix begins with this if it is not needed because it is baked into TransformerEngine's files."""
