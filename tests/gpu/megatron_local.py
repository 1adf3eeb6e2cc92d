"""Megatron-Core's own graphs (``cuda_graph_impl="local"``), without and with this package: a line for each case.

    python tests/gpu/megatron_local.py [PART OF A CASE ...]        # RECIPES=bf16,fp8-delayed,... PROCESSES=4

A case is a model of `OWN` in `megatron_configs.py` and a recipe. A line says how graphs compare with eager training
without and with the package, each in a process of its own, and whether the two differ in any bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from megatron_configs import OWN

RECIPES = os.environ.get("RECIPES", "bf16,fp8-delayed,fp8-current,fp8-block").split(",")
PORTS = iter(range(int(os.environ.get("MASTER_PORT", "29600")), 1 << 16))


def train(name: str, recipe: str, setting: str, port: int) -> dict[str, Any]:
    """What `megatron_configs.py` finds, without the package or with it."""
    environment = {**os.environ, "TE_GRAPH_FIXES": setting, "TE_GRAPH_FIXES_VERBOSE": "0", "MASTER_PORT": str(port)}
    program = str(Path(__file__).with_name("megatron_configs.py"))
    done = subprocess.run(
        [sys.executable, program, name, recipe], env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"failed": f"{done.returncode}: {done.stderr[-200:]}"}
    return found["ranks"][0] if "ranks" in found else found


def outcome(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])
    worst = "".join(f", {name} {error:.3g}" for name, error in list(found["worst"].items())[:1])
    return f"{found['verdict']}: {found['differing']} of {found['compared']}{worst}"


def line(case: tuple[str, str, int, int]) -> str:
    name, recipe, *ports = case
    without, fixed = (train(name, recipe, *each) for each in zip(("off", "on"), ports, strict=True))
    alike = all(without.get(key) == fixed.get(key) for key in ("bits", "failed"))
    return f"{name} {recipe}: {outcome(without)} | {outcome(fixed)} | {'alike' if alike else 'DIFFERENT'}"


if __name__ == "__main__":
    cases = [(*case, next(PORTS), next(PORTS)) for case in product(OWN, RECIPES)]
    chosen = [case for case in cases if not sys.argv[1:] or any(part in case[0] for part in sys.argv[1:])]
    with ThreadPoolExecutor(int(os.environ.get("PROCESSES", "4"))) as pool:
        for text in pool.map(line, chosen):
            print(text, flush=True)
