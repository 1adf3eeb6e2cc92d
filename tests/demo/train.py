"""Train two MoE layers in FP8, eagerly or through one graph: ``python -m tests.demo.train eager|graphs STEPS FILE``.

Prints a ``#`` for each microbatch. FILE then holds the loss, the outputs and the gradients of the experts of each step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

import te_graph_fixes  # noqa: F401

MICROBATCHES = 3
TOKENS = 128
HIDDEN = 64
EXPERTS = 4
LEARNING_RATE = 0.02
OPTIONS: dict[str, Any] = {
    "bias": False,
    "fuse_wgrad_accumulation": True,
    "params_dtype": torch.bfloat16,
    "device": "cuda",
    "init_method": lambda weight: torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5),
}


class Linear(te.Linear):
    """As Megatron-Core's: it tells TransformerEngine which microbatch is the first of a step."""

    is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


class Experts(te.GroupedLinear):
    """As Megatron-Core's, with the tokens split evenly over the experts."""

    is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = [TOKENS // EXPERTS] * EXPERTS
        out = super().forward(x, splits, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


class Layer(torch.nn.Module):
    """A dense projection and experts of two layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Linear(HIDDEN, HIDDEN, **OPTIONS)
        self.up = Experts(EXPERTS, HIDDEN, 4 * HIDDEN, **OPTIONS)
        self.down = Experts(EXPERTS, 4 * HIDDEN, HIDDEN, **OPTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(x)
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def train(graphs: bool, count: int) -> list[dict[str, Any]]:
    """The loss, the outputs and the gradients of the experts in each step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(Layer(), Layer())
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    inputs = torch.randn(MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    targets = torch.randn_like(inputs)
    recipe = Float8CurrentScaling()
    run: Any = model
    if graphs:
        sample = torch.randn_like(inputs[0]).requires_grad_()
        run = te.make_graphed_callables(model, (sample,), enabled=True, recipe=recipe)
    steps = []
    for _ in range(count):
        loss, outputs = 0.0, []
        for module in model.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        for microbatch in range(MICROBATCHES):
            with te.autocast(enabled=True, recipe=recipe):
                x = inputs[microbatch].clone().requires_grad_()
                out = run(x)
            error = out.detach().float() - targets[microbatch].float()
            loss += float(error.square().mean()) / MICROBATCHES
            outputs.append(out.detach().clone())
            out.backward((error / (TOKENS * MICROBATCHES)).to(out.dtype))
            print("#", end="", flush=True)
        gradients = [
            parameter.main_grad.clone()
            for module in model.modules()
            if isinstance(module, Experts)
            for parameter in module.parameters()
        ]
        steps.append({"loss": loss, "outputs": outputs, "gradients": gradients})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_((LEARNING_RATE * parameter.main_grad).to(parameter.dtype))
    return steps


if __name__ == "__main__":
    torch.save(train(sys.argv[1] == "graphs", int(sys.argv[2])), sys.argv[3])
