"""Run random programs with graphs and eagerly, and compare the results: ``python -m tests.explore``.

docs/maintainers/explorer.md describes the command.
"""
