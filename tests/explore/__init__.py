"""Compare random programs with graphs and eagerly: ``python -m tests.explore`` (docs/maintainers/explorer.md)."""
