"""A small MoE GPT of Megatron-Core, graphs of TransformerEngine (TE) against eager: losses and gradients by group.

    python tests/gpu/megatron_moe.py fp8-delayed                         # prints a JSON line
    TE_GRAPH_FIXES=off python tests/gpu/megatron_moe.py fp8-delayed
    python tests/gpu/megatron_moe.py table LINES                         # JSON lines as a table

Two layers, experts padded to their capacity, fused weight gradients in fp32 ``main_grad``, whole layers captured
(``cuda_graph_impl="transformer_engine"``), three optimizer steps of three microbatches. For each group of parameters
and step: the norm of ``main_grad`` with graphs over that without, and the norm of the difference over that without.
Norms alone do not tell: after the first step they can be near 1.0 while the gradients are wrong.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import te_graph_fixes

RECIPES = {
    "bf16": {},
    "fp8-delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8-current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
}
GROUPS = {
    "attention": "self_attention",
    "router": "router",
    "experts fc1": "experts.linear_fc1",
    "experts fc2": "experts.linear_fc2",
    "norms": "layernorm",
    "embedding and output": "",
}
STEPS = MICROBATCHES = 3
LAYERS, HIDDEN, EXPERTS = 2, 512, 8
TOKENS, VOCABULARY = 1024, 1024
LEARNING_RATE = 1e-3


def stand_in_for_apex() -> None:
    """Megatron's embedding and output layers take fused weight gradients from an extension of apex."""
    import torch

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grads.t() @ inputs)

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def config(recipe: str, graphs: bool) -> Any:
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=8,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend.unfused,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        cuda_graph_impl="transformer_engine" if graphs else "none",
        cuda_graph_warmup_steps=0,
        **RECIPES[recipe],
    )


def train(recipe: str, graphs: bool) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """The loss of every microbatch and the ``main_grad`` of every parameter, for each step."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)
    made = config(recipe, graphs)
    layers = get_gpt_decoder_block_spec(made, use_transformer_engine=True)
    gpt = GPTModel(made, layers, VOCABULARY, TOKENS, position_embedding_type="rope").cuda().bfloat16()
    model = DistributedDataParallel(made, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    if graphs:
        TECudaGraphHelper([model], made, TOKENS, 1, []).create_cudagraphs()
    losses, grads = [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
        losses.append([float(microbatch["loss"]) for microbatch in found])
        grads.append({name: parameter.main_grad.clone() for name, parameter in gpt.named_parameters()})
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.sub_(LEARNING_RATE * parameter.main_grad.sign())
    return losses, grads


def batches(step: int) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()


def forward_step(data: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
    import torch

    tokens = next(data)
    positions = torch.arange(TOKENS, device="cuda").unsqueeze(0)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss


def loss(output: Any) -> tuple[Any, dict[str, Any]]:
    mean = output.float().mean()
    return mean, {"loss": mean.detach()}


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, list[float]]:
    """For each group: the norm found over the norm wanted, and the norm of the difference over the norm wanted."""
    squares = {group: [0.0, 0.0, 0.0] for group in GROUPS}
    for name, expected in wanted.items():
        group = next(group for group, part in GROUPS.items() if part in name)
        values = found[name].double(), expected.double(), found[name].double() - expected.double()
        squares[group] = [total + float(value.norm()) ** 2 for total, value in zip(squares[group], values, strict=True)]
    return {
        group: [(have / want) ** 0.5, (difference / want) ** 0.5] for group, (have, want, difference) in squares.items()
    }


def measure(recipe: str) -> dict[str, Any]:
    import torch

    stand_in_for_apex()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)
    eager_losses, eager_grads = train(recipe, graphs=False)
    again_losses, again_grads = train(recipe, graphs=False)
    gc.collect()
    graph_losses, graph_grads = train(recipe, graphs=True)
    torch.distributed.destroy_process_group()
    return {
        "eager_repeats": again_losses == eager_losses
        and all(
            torch.equal(again[name], once[name])
            for again, once in zip(again_grads, eager_grads, strict=True)
            for name in once
        ),
        "steps": [compare(found, wanted) for found, wanted in zip(graph_grads, eager_grads, strict=True)],
        "losses": graph_losses,
        "eager_losses": eager_losses,
    }


def table(lines: list[str]) -> str:
    """The JSON lines as a Markdown table: for each group, norm ratio / error at the first and the last step."""
    columns = [json.loads(line) for line in lines if line.startswith("{")]
    columns = [column for column in columns if "steps" in column]
    columns.sort(key=lambda column: (column["te"], column["recipe"], bool(column["applied"])))
    head = [f"TE {c['te']}, {c['recipe']}, {'with' if c['applied'] else 'without'}" for c in columns]
    rows = [["", *head], ["---"] * (len(columns) + 1)]
    for when, step in (("first step", 0), (f"step {STEPS}", -1)):
        for group in GROUPS:
            cells = ["x{:.3f}, {:.3g}".format(*column["steps"][step][group]) for column in columns]
            rows.append([f"{group}, {when}", *cells])
    drift = [
        max(
            abs(a - b)
            for steps in zip(c["losses"], c["eager_losses"], strict=True)
            for a, b in zip(*steps, strict=True)
        )
        for c in columns
    ]
    rows.append(["largest difference of a loss", *(f"{value:.3g}" for value in drift)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    if sys.argv[1] == "table":
        with open(sys.argv[2]) as lines:
            print(table(lines.readlines()))
        return
    (recipe,) = sys.argv[1:]
    try:
        result = measure(recipe)
    except Exception as failure:
        result = {"failed": f"{type(failure).__name__}: {failure}"}
        traceback.print_exc()
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    print(
        json.dumps(
            {
                "te": report.te_version,
                "megatron": version("megatron-core"),
                "recipe": recipe,
                "applied": applied,
                **result,
            }
        )
    )


if __name__ == "__main__":
    main()
