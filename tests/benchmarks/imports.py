"""What this package adds to an import: of itself against wrapt, and of TransformerEngine (TE), where it is installed.

    python tests/benchmarks/imports.py [ROUNDS]

Milliseconds, each the median with the smallest and largest value. This package and wrapt are imported side by side. TE,
torch included, is imported without this package, which is imported after it, so that all fixes are put in place at once
and their time is added; and, in turn with that, from a copy that ``te-graph-fixes bake`` has corrected. Without a GPU
TE is simulated, and torch is imported before the clock starts.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from te_graph_fixes.patching.source import Source, TENotFoundError
from tests.verify.runner import no_gpu

ROOT = Path(__file__).parents[2]
OURS, TE = "import te_graph_fixes", "import transformer_engine.pytorch"


def baked_copy(source: Source, folder: Path, path: str) -> None:
    """A copy of TE that `te-graph-fixes bake` finds in ``path`` and corrects; what is not Python is linked to."""

    def copy(old: str, new: str) -> str:
        shutil.copyfile(old, new) if old.endswith(".py") else os.symlink(old, new)
        return new

    for entry in Path(source.location).parent.glob("transformer_engine*"):
        if entry.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, folder / entry.name, copy_function=copy, ignore=ignore, symlinks=False)
        else:
            copy(str(entry), str(folder / entry.name))
    bake = [sys.executable, "-m", "te_graph_fixes", "bake"]
    subprocess.run(bake, env=environment(path), stdout=subprocess.DEVNULL, check=True)


def environment(path: str) -> dict[str, str]:
    """Let Python find ``path`` first, and write bytecode as pip installs it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"), str(ROOT))))}


def import_ms(*statements: str, path: str = "") -> list[float]:
    """The time that each statement takes in one fresh interpreter."""
    timed = "; ".join(f"{statement}; times.append(time.perf_counter())" for statement in statements)
    code = f"import time; times = [time.perf_counter()]; {timed}; print(*times)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment(path), capture_output=True, text=True, check=True)
    times = list(map(float, done.stdout.split()[-len(statements) - 1 :]))
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


def show(name: str, values: list[float], digits: int = 1) -> None:
    print(f"{name}: {statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]")


def main(rounds: int) -> None:
    statements = "import wrapt", OURS
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(import_ms, statements))  # fills the caches
        measured = [time for (time,) in pool.map(import_ms, statements * rounds)]
    show("te_graph_fixes, ms", measured[1::2])
    show("te_graph_fixes / wrapt", [ours / wrapt for wrapt, ours in zip(measured[::2], measured[1::2], strict=True)], 2)
    try:
        source = Source.installed()
    except TENotFoundError as error:
        print(error)
        return
    simulator = str(ROOT / "tests" / "simulator" / "everywhere") if no_gpu() else ""
    with tempfile.TemporaryDirectory() as folder:
        with_baked = os.pathsep.join(filter(None, (simulator, folder)))
        baked_copy(source, Path(folder), with_baked)
        turns = [(*import_ms(TE, OURS, path=simulator), *import_ms(TE, path=with_baked)) for _ in range(rounds + 1)]
    alone, added, baked = map(list, zip(*turns[1:], strict=True))  # the first one writes bytecode
    print(f"TransformerEngine {source.version}{', simulated' if simulator else ''}")
    show("without, ms", alone)
    show("with, ms", [a + b for a, b in zip(alone, added, strict=True)])
    show("with / without", [1 + b / a for a, b in zip(alone, added, strict=True)], 3)
    show("baked / without", [b / a for a, b in zip(alone, baked, strict=True)], 3)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 15)
