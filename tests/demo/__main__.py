"""``python -m tests.demo [VERSION ...]``: train without and with the fixes, and print what each way gives.

Exit status 0 if graphs without the fixes are wrong and with the fixes are the eager numbers, bit for bit.
``--steps N`` trains longer, and ``--json FILE`` records norms and losses: README's picture shows those of one version.
``--gpu`` trains on a GPU, with the TransformerEngine (TE) that is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.support.child import ROOT
from tests.support.published import source

VERSIONS = ("2.12.0", "2.15.0")
WAYS = (("eager", "eager", "off"), ("graphs", "graphs", "off"), ("graphs with the fixes", "graphs", "on"))


def main(arguments: list[str]) -> int:
    """Train every way with each version of TransformerEngine (TE)."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo")
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    recorded: dict[str, Any] = {}
    versions = [metadata.version("transformer_engine")] if options.gpu else options.versions or VERSIONS
    right = [_version(version, options, recorded) for version in versions]
    if options.json:
        Path(options.json).write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s. On a GPU, `te-graph-fixes verify` measures it on your own TE.")
    return 0 if all(right) else 1


def _version(version: str, options: argparse.Namespace, recorded: dict[str, Any]) -> bool:
    where = torch.cuda.get_device_name() if options.gpu else "the CPU simulator"
    model = f"two MoE layers in FP8, {options.steps} steps of 3 microbatches"
    print(f"\nTransformerEngine {version}: {model}, on {where}\n")
    module = ["tests.demo.train"] if options.gpu else ["tests.simulator", "-m", "tests.demo.train"]
    path = [] if options.gpu else [str(source(version))]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: _train(name, switch, path, [*module, way, str(options.steps), f"{folder}/{name}.pt"])
            for name, way, switch in WAYS
        }
    eager, graphs, fixed = found.values()
    recorded[f"{version}, {where}"] = {
        name: {"gradient norm": [_norm(step["gradients"]) for step in way], "loss": [step["loss"] for step in way]}
        for name, way in found.items()
    }
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


def _train(name: str, switch: str, path: list[str], module: list[str]) -> list[dict[str, Any]]:
    print(f"  {name:22} ", end="", flush=True)
    start = time.perf_counter()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
        "TE_GRAPH_FIXES": switch,
        "TE_GRAPH_FIXES_VERBOSE": "0",  # the progress bar stays in one line
    }
    subprocess.run([sys.executable, "-m", *module], cwd=ROOT, env=environment, check=True)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    steps: list[dict[str, Any]] = torch.load(module[-1], map_location="cpu")
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
    sys.exit(main(sys.argv[1:]))
