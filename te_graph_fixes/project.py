"""The project's address, as pyproject.toml gives it to a release."""

from __future__ import annotations

PLACEHOLDER = "https://example.invalid/"


def issues() -> str:
    """Where reports go; "" where the package was put in place without its metadata, or has no address yet."""
    from importlib.metadata import PackageNotFoundError, metadata  # slow to import

    try:
        urls = metadata("te-graph-fixes").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    url = next((url.partition(", ")[2] for url in urls if url.startswith("Issues, ")), "")
    return "" if url.startswith(PLACEHOLDER) else url


def how_to_report() -> str:
    """What to do about a TransformerEngine that is not recognized."""
    where = issues()
    report = f"a report at {where} needs" if where else "whoever gave you the package needs to know"
    return f"`te-graph-fixes issue` prints what {report}"
