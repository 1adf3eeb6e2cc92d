"""Rounds of reinforcement learning in Megatron-Core: between two trainings all memory is given to somebody else.

    python tests/gpu/megatron_rounds.py [RECIPE]

The model of `examples/megatron_moe.py`, ten rounds of two steps. After each round weights go to the host, gradient
buffers go, others use the memory, and all comes back elsewhere, as RL frameworks do it around a generation. Graphs off
is compared with the recipe of docs/reinforcement-learning.md (delete the graphs before weights go, capture again when
they are back), and with graphs that are kept, which ought to raise. One line of JSON for each, and a conclusion. Exits
with 0 if the recipe gives every loss, gradient and parameter of graphs off with memory flat from the second round on,
and kept graphs raise.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import te_graph_fixes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import megatron_moe as moe

ROUNDS, STEPS = 10, 2
OFF, RECIPE, KEPT = "graphs off", "deleted and captured again", "kept"
TRANSFORMER_ENGINE = "transformer_engine"


def grad_buffers(model: Any) -> list[Any]:
    return [buffer.grad_data for buffer in model.buffers + model.expert_parallel_buffers]


def give_away(gpt: Any, model: Any) -> dict[str, Any]:
    """Offload the weights, which are returned, and free the gradient buffers."""
    import torch

    on_host = {}
    for name, parameter in gpt.named_parameters():
        on_host[name] = parameter.data.to("cpu", copy=True)
        parameter.data = parameter.data.new_empty(0)
    for grads in grad_buffers(model):
        grads.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
    return on_host


def bring_back(gpt: Any, model: Any, on_host: dict[str, Any]) -> None:
    for name, parameter in gpt.named_parameters():
        parameter.data = on_host[name].to("cuda", copy=True)
    for grads in grad_buffers(model):
        grads.untyped_storage().resize_(grads.numel() * grads.element_size())
        grads.zero_()


def generate() -> Any:
    """Others use the memory: NaN in what is free, and some of it stays theirs until the weights are back."""
    import torch

    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    return blocks[::7]


def train(setting: str, recipe: str) -> dict[str, Any]:
    """Losses and ``main_grad``s of each step, the parameters at the end, memory after each round, what was raised."""
    import torch

    graphs = {} if setting == OFF else {"cuda_graph_impl": TRANSFORMER_ENGINE}
    gpt, model = moe.build(recipe, False, **graphs)
    helper = moe.capture(model) if graphs else None
    result: dict[str, Any] = {"losses": [], "grads": [], "MiB": []}
    try:
        for number in range(ROUNDS):
            for step in range(number * STEPS, number * STEPS + STEPS):
                result["losses"].append(moe.step(model, moe.batches(step)))
                grads = {name: parameter.main_grad.cpu().clone() for name, parameter in gpt.named_parameters()}
                result["grads"].append(grads)
                moe.update(gpt)
            if setting == RECIPE:
                helper.delete_cuda_graphs()
                torch._C._cuda_clearCublasWorkspaces()  # those of the streams of this capture
            on_host = give_away(gpt, model)
            theirs = generate()
            bring_back(gpt, model, on_host)
            del theirs
            if setting == RECIPE:
                helper = moe.capture(model)
            gc.collect()
            torch.cuda.empty_cache()
            result["MiB"].append([torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20])
    except RuntimeError as error:
        result["raised"] = str(error)
    result["parameters"] = {name: parameter.data.cpu().clone() for name, parameter in gpt.named_parameters()}
    return result


def differences(run: dict[str, Any], wanted: dict[str, Any]) -> dict[str, int]:
    """How many losses, gradients and parameters are not those of ``wanted``."""
    import torch

    grads = [
        torch.equal(grad, there[name])
        for here, there in zip(run["grads"], wanted["grads"], strict=False)
        for name, grad in here.items()
    ]
    weights = [torch.equal(value, wanted["parameters"][name]) for name, value in run["parameters"].items()]
    losses = [a == b for a, b in zip(run["losses"], wanted["losses"], strict=False)]
    return {name: same.count(False) for name, same in (("losses", losses), ("grads", grads), ("parameters", weights))}


def is_flat(memory: list[list[float]]) -> bool:
    """Whether what is allocated is the same from the second round on, and what is reserved does not grow by 5 %."""
    (allocated, *others), (reserved, *_, last) = ([sizes[i] for sizes in memory[1:]] for i in range(2))
    return all(size == allocated for size in others) and last <= 1.05 * reserved


def main(recipe: str = "fp8-delayed") -> int:
    moe.start()
    wanted = train(OFF, recipe)
    good = not all(a == b for a, b in zip(wanted["losses"], wanted["losses"][1:], strict=False))
    for setting in (OFF, RECIPE, KEPT):
        run = train(setting, recipe)
        differ = differences(run, wanted)
        report = {"setting": setting, "recipe": recipe, "steps": len(run["losses"]), "different": differ}
        print(json.dumps({**report, "MiB": run["MiB"], "raised": run.get("raised", "")}), flush=True)
        if setting == KEPT:
            good = good and "raised" in run and not differ["grads"]
        else:
            good = good and len(run["MiB"]) == ROUNDS and is_flat(run["MiB"]) and not any(differ.values())
    print(f"TransformerEngine {te_graph_fixes.report().te_version}, {recipe}: ", end="")
    print("as it should be" if good else "NOT as it should be", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
