"""The version of this package: what a build has written into it, or in a checkout its commit."""

from __future__ import annotations

import hashlib
from pathlib import Path

NEXT = "0.1.0"
"""The release that a checkout is on its way to."""


def _of_checkout(root: Path) -> str | None:
    """``NEXT.dev0+g<commit>`` for a clone, by its ``.git``; None where git keeps the commit in another way."""
    try:
        if b"te-graph-fixes" not in (root / "pyproject.toml").read_bytes():
            return None  # a copy in a repository of others
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


def fixes_digest() -> str:
    """A digest of the fixes and of the modules that they ship: all copies without git have the same version."""
    here = Path(__file__).parent
    files = sorted([*here.glob("fixes/*.py"), *here.glob("shipped/*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
