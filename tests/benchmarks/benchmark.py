"""What the fixes cost and gain on the installed TransformerEngine (TE): JSON, a table and a picture.

    python tests/benchmarks/benchmark.py --json benchmark.json --png benchmark.png

Three variants of the same TE are compared, in processes of their own that take turns: ``unpatched``, ``patched`` (by
this package, in memory) and ``source`` (a copy of TE that ``te-graph-fixes bake`` has corrected, this package off).
With ``--imports`` only import times are measured; in ``baked_import_ms`` ``patched`` is that copy. Needs
matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from te_graph_fixes.commands.answers import corrected
from te_graph_fixes.commands.bake import in_place
from te_graph_fixes.decision import Decision
from te_graph_fixes.patching.source import Source, TENotFoundError
from te_graph_fixes.settings import Settings

ROOT = Path(__file__).parents[2]
UNPATCHED, PATCHED, SOURCE, WRAPT = "unpatched", "patched", "source", "wrapt"
ROUNDS = {"forward": 25, "replay": 5, "captures": 3}

Samples = dict[str, dict[str, list[float]]]
"""Measure -> variant -> one number for each round."""


def baked_copy(source: Source, folder: Path) -> None:
    """A copy of TE that `te-graph-fixes bake` has corrected; what is not Python is linked to."""

    def copy(old: str, new: str) -> str:
        shutil.copyfile(old, new) if old.endswith(".py") else os.symlink(old, new)
        return new

    for entry in Path(source.location).parent.glob("transformer_engine*"):
        if entry.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, folder / entry.name, copy_function=copy, ignore=ignore, symlinks=False)
        else:
            copy(str(entry), str(folder / entry.name))
    decision = Decision(Source.at(folder), Settings())
    in_place(Path(decision.source.location), corrected(decision))


class Worker:
    """A process of `worker.py`."""

    def __init__(self, switch: str, first_on_path: Path | None = None) -> None:
        path = [str(first_on_path)] if first_on_path else []
        path += [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            env={**os.environ, "TE_GRAPH_FIXES": switch, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hello(self) -> dict[str, Any]:
        """The version of TE, the GPU and the fixes that are applied, once it has started."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def measure(self, part: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(part, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def import_ms(*statements: str, path: str = "") -> list[float]:
    """The time that each statement takes in one fresh interpreter, with bytecode as pip installs it."""
    timed = "; ".join(f"{statement}; times.append(time.perf_counter())" for statement in statements)
    code = f"import time; times = [time.perf_counter()]; {timed}; print(*times)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    times = list(map(float, done.stdout.split()[-len(statements) - 1 :]))
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


def imports(source: Source | None, rounds: int) -> Samples:
    """Import times of this package and of wrapt, in pairs that run side by side; and of TE, torch included, in rounds.

    A round has TE without and with this package, which is imported after TE, so that all the fixes are put in place at
    once and their time is added; and in turn with it a baked copy of TE, without this package.
    """
    statements = "import wrapt", "import te_graph_fixes"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(import_ms, statements))  # fills the caches
        measured = [time for (time,) in pool.map(import_ms, statements * rounds)]
    found: Samples = {"import_ms": {WRAPT: measured[::2], PATCHED: measured[1::2]}}
    if source:
        te = "import transformer_engine.pytorch"
        with tempfile.TemporaryDirectory() as folder:
            baked_copy(source, Path(folder))
            turns = [(*import_ms(te, statements[1]), *import_ms(te, path=folder)) for _ in range(rounds + 1)]
        alone, added, baked = map(list, zip(*turns[1:], strict=True))  # the first one writes bytecode
        found["te_import_ms"] = {UNPATCHED: alone, PATCHED: list(map(sum, zip(alone, added, strict=True)))}
        found["baked_import_ms"] = {UNPATCHED: alone, PATCHED: baked}
    return found


def on_gpu(source: Source) -> tuple[dict[str, Any], Samples]:
    """About the variants, and what they measure in turns."""
    found: Samples = {}
    with tempfile.TemporaryDirectory() as folder:
        baked_copy(source, Path(folder))
        workers = {UNPATCHED: Worker("off"), PATCHED: Worker("on"), SOURCE: Worker("off", Path(folder))}
        try:
            about = {variant: worker.hello() for variant, worker in workers.items()}
            for part, rounds in ROUNDS.items():
                for turn in range(rounds + 1):
                    order = list(workers.items())
                    for variant, worker in order[turn % 3 :] + order[: turn % 3]:
                        for name, value in worker.measure(part).items():
                            if turn:  # the first is for warming up
                                found.setdefault(name, {}).setdefault(variant, []).append(value)
        finally:
            for worker in workers.values():
                worker.close()
    return about, found


def table(samples: Samples) -> str:
    """Medians with the smallest and largest value; the ratio of ``patched`` to each other variant, round by round."""
    others = (UNPATCHED, SOURCE, WRAPT)
    lines: list[tuple[str, ...]] = [("MEASURE", PATCHED, *others, *(f"{PATCHED} / {other}" for other in others))]
    for name, variants in samples.items():
        cells = [_spread(variants.get(variant, [])) for variant in (PATCHED, *others)]
        ratios = [_spread(ratio(variants, other)) for other in others]
        lines.append((name, *cells, *ratios))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def ratio(variants: dict[str, list[float]], other: str) -> list[float]:
    """``patched`` over ``other`` for each round."""
    pairs = zip(variants[PATCHED], variants[other], strict=True) if other in variants else ()
    return [a / b for a, b in pairs if b]


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def picture(samples: Samples, title: str, path: str) -> None:
    """Replay times of the variants, and the ratios of what is patched in memory to what is patched on disk."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    places = {"first_ms": "first microbatch", "later_ms": "later microbatches"}
    for i, variant in enumerate((UNPATCHED, PATCHED, SOURCE)):
        medians = [statistics.median(samples[name][variant]) for name in places]
        bars = left.bar([place + 0.27 * (i - 1) for place in range(len(places))], medians, 0.25, label=variant)
        left.bar_label(bars, fmt="%.2f", fontsize=8)
    left.set_xticks(range(len(places)), list(places.values()))
    left.set_ylabel("forward replay, ms")
    left.set_title("8 experts, 4096 to 14336, FP8 delayed scaling")
    left.set_ylim(0, 1.25 * left.get_ylim()[1])
    left.legend(ncols=3, loc="upper center", fontsize=8)
    names = [name for name, variants in samples.items() if SOURCE in variants]
    for i, name in enumerate(names):
        values = ratio(samples[name], SOURCE)
        right.plot(values, [i] * len(values), "|", color="tab:blue", markersize=12)
        right.plot(statistics.median(values), i, "o", color="tab:blue")
    right.axvline(1.0, color="gray", linewidth=1)
    right.set_yticks(range(len(names)), names)
    right.set_xlabel("patched in memory / patched on disk")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write every sample here")
    parser.add_argument("--png", metavar="FILE", help="draw the picture here")
    parser.add_argument("--imports", action="store_true", help="only import times, of TE too where it is installed")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="of import times (default: 15)")
    options = parser.parse_args()
    try:
        source = Source.installed()
    except TENotFoundError:
        source = None
    if source is None and not options.imports:
        sys.exit("TransformerEngine is not installed: only --imports works")
    samples = imports(source, options.rounds)
    about: dict[str, Any] = {}
    if source is not None and not options.imports:
        about, measured = on_gpu(source)
        samples.update(measured)
        print(
            f"TransformerEngine {about[PATCHED]['te']} on {about[PATCHED]['gpu']}, applied: {about[PATCHED]['applied']}"
        )
    print(table(samples))
    if options.json:
        Path(options.json).write_text(json.dumps({"about": about, "samples": samples}, indent=1) + "\n")
    if options.png and about:
        picture(samples, f"TransformerEngine {about[PATCHED]['te']}, {about[PATCHED]['gpu']}", options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
