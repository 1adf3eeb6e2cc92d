"""``python -m tests.demo.train eager|graphs STEPS FILE``: train a dense layer and experts in FP8.

The program prints a ``#`` for each step, and stores the loss, the outputs and the gradients of each step in FILE.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import te_graph_fixes  # noqa: F401
from tests.verify.driver.modules import Experts, made
from tests.verify.driver.program import Program
from tests.verify.driver.setting import random, use
from tests.verify.driver.training import Training

eight_experts = made("eight_experts", Experts, 8)
MODULES = ("linear", "eight_experts")
PROGRAM = Program(modules=MODULES, recipe="current", weights="marked", fused=True, fit=True, microbatches=3)
"""All steps have the same inputs. The loss is the mean squared difference between the outputs and targets."""
RATE = 1.0


def train(graphs: bool, count: int) -> list[dict[str, Any]]:
    """Train for ``count`` steps, and return the loss, the outputs and the gradients of each step."""
    use(PROGRAM)
    training = Training(graphs)
    torch.manual_seed(0)  # the driver draws its inputs and targets with this seed
    targets = [(random(), random())[1] for _ in range(PROGRAM.microbatches)]
    steps = []
    for number in range(count):
        training.event = str(number)
        training.run(RATE)
        outputs: Any = training.seen[f"{number}: outputs"]
        errors = [(a.float() - b.float()).square().mean() for a, b in zip(outputs, targets, strict=True)]
        loss = float(sum(errors)) / len(errors)
        steps.append({"loss": loss, "outputs": outputs, "gradients": training.seen[f"{number}: wgrads"]})
        print("#", end="", flush=True)
    training.release()
    return steps


if __name__ == "__main__":
    torch.save(train(sys.argv[1] == "graphs", int(sys.argv[2])), sys.argv[3])
