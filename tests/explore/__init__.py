"""Random programs, through graphs and eagerly: ``python -m tests.explore`` (docs/maintainers/explorer.md)."""
