"""Programs that nobody wrote, through graphs and eagerly: ``python -m tests.explore`` (docs/explorer.md)."""
