"""The version of this package: what a build has written into it, or in a checkout its commit."""

from __future__ import annotations

from pathlib import Path

NEXT = "0.1.0"
"""The release that a checkout is on its way to."""


def _of_checkout(root: Path) -> str | None:
    """``NEXT.dev0+g<commit>`` for the checkout at ``root``; None if there is none, or git keeps it in another way."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            shared = git / "commondir"
            home = git / shared.read_text().strip() if shared.exists() else git
            head = _commit_of(head.removeprefix("ref: "), home)
        return f"{NEXT}.dev0+g{head[:9]}" if head else None
    except OSError:
        return None


def _commit_of(ref: str, home: Path) -> str:
    if (home / ref).exists():
        return (home / ref).read_text().strip()
    lines = (home / "packed-refs").read_text().splitlines()
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {ref}")), "")


def _of_build() -> str:
    try:
        from ._version import version  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # a copy of a checkout, without git
        return f"{NEXT}.dev0"
    return str(version)


__version__ = _of_checkout(Path(__file__).parents[1]) or _of_build()
