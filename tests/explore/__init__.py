"""Run random programs with graphs and eagerly, and compare the results. See docs/maintainers/explorer.md."""
