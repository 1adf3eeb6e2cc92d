"""The commands of ``te-graph-fixes``."""

NOT_USABLE = 2
"""The exit status for wrong usage, an invalid setting, or a missing TransformerEngine, GPU or dependency."""
