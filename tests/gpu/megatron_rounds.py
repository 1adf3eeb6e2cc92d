"""Run rounds of reinforcement learning in Megatron-Core: between two trainings all memory is used by another program.

    python tests/gpu/megatron_rounds.py [RECIPE]

The model of `examples/megatron_moe.py` trains for ten rounds of two steps. After each round the weights are offloaded
and the gradient buffers freed. Other tensors use the memory, and the weights return to other addresses, as in an RL
framework around a generation. Graphs off is compared with the recipe of docs/reinforcement-learning.md (delete the
graphs before the offload, capture again after it) and with graphs that stay, which must raise. It prints one line of
JSON for each, and a conclusion. Exit status 0: with the recipe every loss, gradient and parameter equals graphs off and
memory is flat from the second round on, and graphs that stay raise.
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
    """Offload the weights, return them, and free the gradient buffers."""
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
    """Fill the free memory with NaN; return blocks that stay in use until the weights are back."""
    import torch

    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    return blocks[::7]


def train(setting: str, recipe: str) -> dict[str, Any]:
    """Return losses and ``main_grad``s by step, parameters at the end, memory by round, and the error raised."""
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
    """Return how many losses, gradients and parameters differ from ``wanted``."""
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
    """Return whether, from the second round on, allocated memory is constant and reserved memory grows below 5 %."""
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
