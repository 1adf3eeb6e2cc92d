"""Train a small MoE GPT of Megatron-Core with and without TransformerEngine's (TE's) graphs, and compare gradients.

    python examples/megatron_moe.py                       # one GPU, TE and megatron-core
    TE_GRAPH_FIXES=off python examples/megatron_moe.py    # with the fixes off

The model has two layers, experts padded to their capacity, and weight gradients that are fused into fp32 ``main_grad``.
The argument is the recipe, a key of `RECIPES` (default: ``fp8-delayed``). Whole layers are captured
(``cuda_graph_impl="transformer_engine"``). The program trains for three optimizer steps of three microbatches. Exit
with 1 if a gradient differs.

The line ``import te_graph_fixes`` applies the fixes. A program without this line needs ``te-graph-fixes run``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import te_graph_fixes

os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29511")

RECIPES = {
    "bf16": {},
    "fp8-delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8-current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
}
STEPS = MICROBATCHES = 3
LAYERS, HIDDEN, EXPERTS = 2, 512, 8
TOKENS, VOCABULARY = 1024, 1024
LEARNING_RATE = 1e-3


def start() -> None:
    """Initialize torch.distributed and Megatron-Core for a job of one process."""
    import torch

    stand_in_for_apex()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)


def stand_in_for_apex() -> None:
    """Install a replacement for apex's function that Megatron's embedding and output layers call for fused wgrads."""
    import torch

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grads.t() @ inputs)

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def config(recipe: str, graphs: bool, **changed: Any) -> Any:
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "moe_ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": 8,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_backend": AttnBackend.unfused,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": True,
        "cuda_graph_impl": "transformer_engine" if graphs else "none",
        "cuda_graph_warmup_steps": 0,
    }
    return TransformerConfig(**{**options, **RECIPES[recipe], **changed})


def train(recipe: str, graphs: bool) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Train a model. Return, for each step, the losses of all microbatches and each parameter's ``main_grad``."""
    gpt, model = build(recipe, graphs)
    losses, grads = [], []
    for number in range(STEPS):
        losses.append(step(model, batches(number)))
        grads.append({name: parameter.main_grad.clone() for name, parameter in gpt.named_parameters()})
        update(gpt)
    del model, gpt
    gc.collect()
    return losses, grads


def build(recipe: str, graphs: bool, **changed: Any) -> tuple[Any, Any]:
    """Return a GPT model and its DDP wrapper, captured if ``graphs``. ``changed`` replaces options of the config."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)
    made = config(recipe, graphs, **changed)
    layers = get_gpt_decoder_block_spec(made, use_transformer_engine=True)
    gpt = GPTModel(made, layers, VOCABULARY, TOKENS, position_embedding_type="rope").cuda().bfloat16()
    # Use a side stream for DDP, like Megatron's training loop, because gradient accumulation on the default stream
    # cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(made, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    torch.cuda.current_stream().wait_stream(stream)
    if graphs:
        capture(model)
    return gpt, model


def capture(model: Any) -> Any:
    """Capture the layers of a model, and return Megatron's helper, which can delete the graphs."""
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    helper = TECudaGraphHelper([model], model.config, TOKENS, 1, [])
    helper.create_cudagraphs()
    return helper


def step(model: Any, data: Iterator[Any]) -> list[float]:
    """Run the forwards and backwards of all microbatches, and return the loss of each."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    torch.cuda.synchronize()
    return [float(microbatch["loss"]) for microbatch in found]


def update(gpt: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.sub_(LEARNING_RATE * parameter.main_grad.sign())


def batches(step: int) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()


def forward_step(data: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
    import torch

    tokens = next(data)
    positions = torch.arange(TOKENS, device="cuda").unsqueeze(0)
    mask = torch.ones(1, 1, tokens.shape[1], TOKENS, dtype=torch.bool, device="cuda").triu(1)
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss


def loss(output: Any) -> tuple[Any, dict[str, Any]]:
    mean = output.float().mean()
    return mean, {"loss": mean.detach()}


def main() -> int:
    import torch

    start()
    recipe = sys.argv[1] if len(sys.argv) > 1 else "fp8-delayed"
    eager_losses, eager_grads = train(recipe, graphs=False)
    losses, grads = train(recipe, graphs=True)
    torch.distributed.destroy_process_group()
    differs = False
    for step in range(STEPS):
        wanted = eager_grads[step].items()
        square = sum(float((grads[step][name] - eager).norm()) ** 2 for name, eager in wanted)
        error = (square / sum(float(eager.norm()) ** 2 for _, eager in wanted)) ** 0.5
        differs |= error != 0  # also if the error is NaN
        found, eager = losses[step][-1], eager_losses[step][-1]
        print(f"step {step}: loss {found:.6f}, eager {eager:.6f}; relative error of the gradients {error:.3g}")
    report = te_graph_fixes.report()
    applied = [fix_id for fix_id, status in report.fixes.items() if status.status == "applied"]
    print(f"TransformerEngine {report.te_version}; fixes applied: {', '.join(applied) or 'none'}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
