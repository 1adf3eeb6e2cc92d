"""The version of this package, written by a build or derived from the commit of a checkout."""

from pathlib import Path

NEXT = "0.1.0"
"""The next release, used in the version of a checkout."""


def _of_checkout(root: Path) -> str | None:
    """Return ``NEXT.dev0+g<commit>``, read from a clone's ``.git``, or None if that fails."""
    try:
        if b"te-graph-fixes" not in (root / "pyproject.toml").read_bytes():
            return None  # a copy in another repository
        commit = (root / ".git" / "HEAD").read_text().strip()
        if commit.startswith("ref: "):
            commit = (root / ".git" / commit.removeprefix("ref: ")).read_text().strip()
        return f"{NEXT}.dev0+g{commit[:9]}"
    except OSError:
        return None


try:
    from ._version import version as _of_build  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # a checkout, or a copy of one
    _of_build = f"{NEXT}.dev0"
__version__: str = _of_checkout(Path(__file__).parents[1]) or _of_build
