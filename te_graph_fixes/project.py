"""The project's address, as pyproject.toml gives it to a release."""

from __future__ import annotations


def issues() -> str:
    """Where reports go; "" where the package was put in place without its metadata."""
    from importlib.metadata import PackageNotFoundError, metadata  # slow to import

    try:
        urls = metadata("te-graph-fixes").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    return next((url.partition(", ")[2] for url in urls if url.startswith("Issues, ")), "")


def how_to_report() -> str:
    """What to do about a TransformerEngine that is not recognized."""
    where = issues()
    return f"`te-graph-fixes issue` prints what a report{f' at {where}' if where else ''} needs"
