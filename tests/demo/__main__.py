"""``python -m tests.demo``: train a small model with the newest TransformerEngine (TE) in three ways, and compare them.

TE's own code trains the model on the CPU simulator: without graphs, with TE's graphs, and with TE's graphs and the
fixes. The exit status is 0 if TE's graphs are wrong without the fixes and if, with the fixes, every loss, output and
gradient is bit-identical to training without graphs. Otherwise it is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from te_graph_fixes.checking.difference import relative_error
from te_graph_fixes.patching.source import Source
from tests.support.child import ROOT
from tests.support.published import source

WAYS = {"graphs off": ("eager", "off"), "TE's graphs": ("graphs", "off"), "with te-graph-fixes": ("graphs", "on")}
Steps = list[dict[str, Any]]
STEPS = 5


def main() -> int:
    """Train in each way, print the losses and the largest error, and return the exit status."""
    folder = source("newest")
    print(
        f"The code of TransformerEngine {Source.at(folder).version} trains a dense layer and experts in FP8 on a CPU, "
        f"three times for {STEPS} steps of 3 microbatches.\n"
        "This takes a minute. torch and TransformerEngine's sources take 2 GB in .tox.\n"
    )
    off, graphs, fixed = ways = [_train(name, *way, folder) for name, way in WAYS.items()]
    named = dict(zip(WAYS, ways, strict=True))
    print(f"\n{'loss':22}" + "".join(f"{f'step {step}':>10}" for step in range(1, STEPS + 1)))
    for name, steps in named.items():
        print(f"  {name:20}" + "".join(f"{step['loss']:10.5f}" for step in steps))
    outputs = [[torch.cat(step["outputs"]) for step in steps] for steps in (graphs, off)]
    errors = [float(relative_error(found, wanted)) for found, wanted in zip(*outputs, strict=True)]
    wrong = next((step for step, error in enumerate(errors, 1) if error > 0.1), None)
    same = all(_same(a, b) for a, b in zip(fixed, off, strict=True))
    if wrong is None or not same:
        print("\nThese are not the expected results. Please report them, with the lines above.")
        return 1
    print(
        f"\nFrom step {wrong} on, TransformerEngine's graphs use the weights of their capture, without an error. "
        f"Outputs have a relative error of up to {max(errors):.2f}. With te-graph-fixes, every loss, output and "
        "gradient is bit-identical to graphs off."
    )
    return 0


def _train(name: str, way: str, switch: str, te: Path) -> Steps:
    print(f"  {name:20} ", end="", flush=True)
    start = time.perf_counter()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(te), str(ROOT)]),
        "TE_GRAPH_FIXES": switch,
        "TE_GRAPH_FIXES_VERBOSE": "0",  # messages would interrupt the progress bar
    }
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        command = [sys.executable, "-m", "tests.simulator", "-m", "tests.demo.train", way, str(STEPS), file.name]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        print(f" {time.perf_counter() - start:.0f} s", flush=True)
        made: Steps = torch.load(file.name)
    return made


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    pairs = [*zip(a["outputs"], b["outputs"], strict=True), *zip(a["gradients"], b["gradients"], strict=True)]
    return bool(a["loss"] == b["loss"]) and all(torch.equal(one, other) for one, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
