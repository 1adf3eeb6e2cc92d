"""Train two MoE layers in FP8, eagerly or through graphs: ``python -m tests.demo.train eager|graphs STEPS FILE``.

Each layer is a dense projection and two experts. FILE then holds the loss, outputs and gradients of each step.
"""

from __future__ import annotations

import sys

import torch

import te_graph_fixes  # noqa: F401
from te_graph_fixes.verify.driver.events import train
from te_graph_fixes.verify.driver.program import Program
from te_graph_fixes.verify.driver.setting import use


def main(way: str, steps: int, file: str) -> None:
    program = Program(
        modules=("linear", "grouped_linear") * 2,
        recipe="current",
        weights="marked",
        fused=True,
        residual=True,
        fit=True,
        microbatches=3,
        drops_dummies=True,
        clean_start=True,
        events=("step",) * steps,
    )
    use(program)
    seen = train(graphed=way == "graphs")
    torch.save(
        [
            {
                "loss": float(torch.stack(seen[f"{step} step: loss"]).mean()),
                "outputs": seen[f"{step} step: outputs"],
                "gradients": seen[f"{step} step: wgrads"],
            }
            for step in range(steps)
        ],
        file,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
