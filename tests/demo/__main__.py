"""``python -m tests.demo [VERSION ...]``: train without and with the fixes, and print what each way gives.

Exit status 0 if graphs without the fixes are wrong and with the fixes are the eager numbers, bit for bit.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.child import ROOT
from tests.published import source

VERSIONS = ("2.12.0", "2.15.0")
WAYS = (("eager", "eager", "off"), ("graphs", "graphs", "off"), ("graphs with the fixes", "graphs", "on"))


def main(versions: list[str]) -> int:
    """Train every way with each version of TransformerEngine (TE)."""
    start = time.perf_counter()
    right = [_version(version) for version in versions]
    print(f"\n{time.perf_counter() - start:.0f} s. On a GPU, `te-graph-fixes verify` measures it on your own TE.")
    return 0 if all(right) else 1


def _version(version: str) -> bool:
    path = source(version)
    print(f"\nTransformerEngine {version}: two MoE layers in FP8, 4 steps of 3 microbatches, on the CPU simulator\n")
    with tempfile.TemporaryDirectory() as folder:
        found = {name: _train(name, way, switch, path, Path(folder)) for name, way, switch in WAYS}
    eager, graphs, fixed = found.values()
    pairs = (("graphs", graphs), ("with the fixes", fixed))
    _table(
        "gradient norm of the experts",
        [("eager", [1.0] * len(eager))] + [(name, _norms(way, eager)) for name, way in pairs],
    )
    _table("error of the gradients", [(name, _errors("gradients", way, eager)) for name, way in pairs])
    _table("error of the outputs", [(name, _errors("outputs", way, eager)) for name, way in pairs])
    _table("loss", [(name, [step["loss"] for step in way]) for name, way in (("eager", eager), *pairs)])
    same = all(error == 0.0 for name in ("outputs", "gradients") for error in _errors(name, fixed, eager))
    print(f"\n  with the fixes {'every number is that of eager training, bit for bit' if same else 'NUMBERS DIFFER'}")
    return same and max(_errors("outputs", graphs, eager)) > 0.1


def _train(name: str, way: str, switch: str, path: Path, folder: Path) -> list[dict[str, Any]]:
    result = folder / f"{name}.pt"
    print(f"  {name:22} ", end="", flush=True)
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), "TE_GRAPH_FIXES": switch}
    command = [sys.executable, "-m", "tests.simulator", "-m", "tests.demo.train", way, str(result)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    steps: list[dict[str, Any]] = torch.load(result)
    return steps


def _table(title: str, rows: list[tuple[str, list[float]]]) -> None:
    print(f"\n  {title:34}" + "".join(f"{f'step {step}':>9}" for step in range(1, len(rows[0][1]) + 1)))
    for name, numbers in rows:
        print(f"    {name:32}" + "".join(f"{number:9.3f}" if number else f"{'0':>9}" for number in numbers))


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


def _norms(found: list[dict[str, Any]], eager: list[dict[str, Any]]) -> list[float]:
    return [_norm(a["gradients"]) / _norm(b["gradients"]) for a, b in zip(found, eager, strict=True)]


def _errors(name: str, found: list[dict[str, Any]], eager: list[dict[str, Any]]) -> list[float]:
    """For each step the norm of the difference over the norm of the eager value."""
    return [
        _norm([c.double() - d.double() for c, d in zip(a[name], b[name], strict=True)]) / _norm(b[name])
        for a, b in zip(found, eager, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(VERSIONS)))
