"""The Python sources of published versions of TransformerEngine (TE), fetched once from the package index.

The environment variable ``TE_SOURCES`` names a folder, by default ``.tox/te-sources``. This folder contains a folder
for each version, which `te_graph_fixes.patching.source.Source.at` reads.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from te_graph_fixes.fix import Assessment
from te_graph_fixes.fixes import assess
from te_graph_fixes.patching.source import Source
from te_graph_fixes.status import Verdict

VERSIONS = (
    *("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    *("2.16.0", "2.16.1", "2.17.0", "2.17.1", "2.18.0", "2.19.0", "2.20.2"),
)
COVERED = VERSIONS[1:]
"""The versions that the fixes cover. The first of `VERSIONS` is older."""


@dataclass(frozen=True)
class TE:
    """A TE for tests on the simulator. ``path`` is its folder, or empty for the installed TE."""

    version: str
    path: str
    needed: frozenset[str]
    """The ids of the fixes that apply to this TE."""

    @property
    def minor(self) -> int:
        return int(self.version.split(".")[1])

    def require(self, fix: str) -> None:
        """Skip the test if the fix does not apply to this TE."""
        if fix not in self.needed:
            pytest.skip(f"{fix} does not apply to TransformerEngine {self.version}")


@functools.cache
def te(version: str) -> TE:
    """Return the TE of a published version, or the installed TE for ``installed``."""
    path = "" if version == "installed" else str(source(version))
    return TE(examined(version)[0].version or version, path, frozenset(needed(version)))


@functools.cache
def source(version: str) -> Path:
    """Return the folder with the sources of one version, or of the newest version for ``newest``."""
    folder = Path(os.environ.get("TE_SOURCES") or Path(__file__).parents[2] / ".tox" / "te-sources").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / version).is_dir():
            _fetch(version, folder)
    return folder / version


@functools.cache
def examined(version: str) -> tuple[Source, Mapping[str, Assessment]]:
    """Return the source of a version, or of the ``installed`` TE, and the verdict of each fix on this source."""
    tree = Source.installed() if version == "installed" else Source.at(source(version))
    return tree, assess(tree)


def needed(version: str) -> dict[str, Assessment]:
    """Return the verdicts of the fixes that apply to one version."""
    return {fix: verdict for fix, verdict in examined(version)[1].items() if verdict.verdict == Verdict.APPLICABLE}


def copy_of(root: Path, folder: Path) -> Path:
    """Copy a TE's Python files, except for JAX's, and its metadata from ``root`` to ``folder``. Return ``folder``."""
    python = [path for path in (root / "transformer_engine").rglob("*.py") if "jax" not in path.parts]
    for path in (*root.glob("transformer_engine-*.dist-info/METADATA"), *python):
        place = folder / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    return folder


def altered(folder: Path, version: str, old: str = "", new: str = "", module: str = "graph.py", says: str = "") -> Path:
    """Copy the sources of a version into ``folder``, replace ``old`` by ``new`` in ``module``, and return ``folder``.

    If ``says`` is given, it becomes the version in the metadata.
    """
    copy_of(source(version), folder)
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    changes = [(folder / "transformer_engine" / "pytorch" / module, old, new)]
    if says:
        changes.append((metadata, f"\nVersion: {version}\n", f"\nVersion: {says}\n"))
    for path, before, after in changes:
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))
    return folder


RENAMED = "def _make_graphed_callables(", "def _renamed("


def _fetch(version: str, folder: Path) -> None:
    wanted = "transformer_engine" + ("" if version == "newest" else f"=={version}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", scratch, wanted], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch, "unpacked"))
        Path(scratch, "unpacked").rename(folder / version)
