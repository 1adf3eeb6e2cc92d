"""The commands of ``te-graph-fixes``."""
