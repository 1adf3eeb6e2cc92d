"""Train Megatron-Core GPTs of many kinds with TransformerEngine's (TE's) graphs and without, and compare them.

    python tests/gpu/megatron_configs.py NAME RECIPE               # a JSON line; NAME and RECIPE as below
    torchrun --nproc-per-node 2 tests/gpu/megatron_configs.py NAME RECIPE        # a model of two ranks
    python tests/gpu/megatron_configs.py                           # the names, and the number of ranks of each
    python tests/gpu/megatron_configs.py --all 12 RECIPE ...       # all models of one rank, twelve at a time

Each run changes the model of `examples/megatron_moe.py` and trains it twice eagerly and once with graphs, captured
before the first step or (``late``) after one. Losses, ``main_grad``s and, at the end, parameters and buffers are
compared bit for bit, on every rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / each) for each in (".", "examples")]
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks for no context, which would forbid to fork

import megatron_moe as moe  # noqa: E402

import te_graph_fixes  # noqa: E402

RECIPES: dict[str, dict[str, Any]] = {
    **moe.RECIPES,
    "fp8-block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
DROPLESS: dict[str, Any] = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
ROUTER = {**DROPLESS, "cuda_graph_scope": "attn,moe_router"}
PREPROCESS = {**ROUTER, "cuda_graph_scope": "attn,moe_router,moe_preprocess", "moe_permute_fusion": True}
SHARED = {"moe_shared_expert_intermediate_size": 512}
DENSE: dict[str, Any] = {
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_grouped_gemm": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "ffn_hidden_size": 1024,
}
GATED = {"gated_linear_unit": True, "swiglu": True, "normalization": "RMSNorm", "num_query_groups": 2}
LATENT = {"latent": True, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32}
MAMBA = {"hybrid": "M*-M", "num_layers": 4, "cuda_graph_scope": "mamba"}
RECOMPUTE = {"recompute_granularity": "selective"}
OVERLAP = {**ROUTER, "expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}
CONTEXT = {"context_parallel_size": 2, "fused_attention": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "experts": {},
    "experts-late": {"late": True},
    "experts-shared": SHARED,
    "experts-gated": GATED,
    "experts-own": {"cuda_graph_scope": "moe"},
    "experts-and-dense": {"moe_layer_freq": [0, 1], "ffn_hidden_size": 1024},
    "attention": {**DROPLESS, "cuda_graph_scope": "attn"},
    "attention-late": {**DROPLESS, "cuda_graph_scope": "attn", "late": True},
    "router": ROUTER,
    "router-alone": {**DROPLESS, "cuda_graph_scope": "moe_router"},
    "router-shared": {**ROUTER, **SHARED},
    "router-shared-late": {**ROUTER, **SHARED, "late": True},
    "router-aux-loss": {**ROUTER, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "router-sigmoid-bias": {
        **ROUTER,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    "preprocess": PREPROCESS,
    "preprocess-fp64": {**PREPROCESS, "moe_router_dtype": "fp64"},
    "preprocess-shared-gated": {**PREPROCESS, **SHARED, **GATED},
    "dense": DENSE,
    "dense-late": {**DENSE, "late": True},
    "dense-bias": {**DENSE, "add_bias_linear": True, "add_qkv_bias": True},
    "dense-gated-qk-norm": {**DENSE, **GATED, "qk_layernorm": True},
    "dense-dropout": {**DENSE, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "dense-attention": {**DENSE, "cuda_graph_scope": "attn"},
    "dense-mlp": {**DENSE, "cuda_graph_scope": "mlp"},
    "dense-both": {**DENSE, "cuda_graph_scope": "attn,mlp"},
    "dense-last-in-bf16": {**DENSE, "num_layers": 4, "first_last_layers_bf16": True},
    "dense-separate-wgrads": {**DENSE, "gradient_accumulation_fusion": False},
    "recompute-norms": {**ROUTER, **RECOMPUTE, "recompute_modules": ["layernorm"]},
    "recompute-attention": {**DENSE, **RECOMPUTE, "recompute_modules": ["core_attn"]},
    "recompute-mlp": {**DENSE, **RECOMPUTE, "recompute_modules": ["mlp"]},
    "recompute-activations": {**RECOMPUTE, **GATED, "recompute_modules": ["moe_act"]},
    "recompute-shared": {**ROUTER, **SHARED, **RECOMPUTE, "recompute_modules": ["shared_experts"]},
    "overlap-alone": {**ROUTER, "alone": True},
    "overlap-alone-delayed": {**ROUTER, "alone": True, "delay_wgrad_compute": True},
    "mamba": {**DENSE, **MAMBA},
    "mamba-late": {**DENSE, **MAMBA, "cuda_graph_scope": "mamba,attn,mlp", "late": True},
    "latent": {**DROPLESS, **LATENT, "cuda_graph_scope": "attn"},
    "latent-dense-late": {**DENSE, **LATENT, "late": True},
    "latent-recompute": {**ROUTER, **LATENT, **RECOMPUTE, "recompute_modules": ["mla_up_proj", "layernorm"]},
    "more-tokens": {**ROUTER, "mtp_num_layers": 1},
    "reduce": {**DENSE, "reduce": True},
    "reduce-late": {**ROUTER, **SHARED, "reduce": True, "late": True},
    "evaluate": {**DENSE, "between": "evaluate"},
    "evaluate-late": {**ROUTER, **SHARED, "between": "evaluate", "late": True},
    "recapture": {"between": "recapture"},
    "recapture-router": {**ROUTER, **SHARED, "between": "recapture", "late": True},
    "optimizer": {**DENSE, "optimizer": True},
    "optimizer-late": {**ROUTER, **SHARED, "optimizer": True, "late": True},
    "optimizer-fp8-params": {"optimizer": True, "fp8_param": True, "late": True},
}
PAIRS: dict[str, dict[str, Any]] = {
    "tensor-parallel": {**DENSE, **TENSOR},
    "tensor-parallel-late": {**ROUTER, **SHARED, **TENSOR, "late": True},
    "context-parallel": {**DENSE, **CONTEXT},
    "context-parallel-attention": {**DENSE, **CONTEXT, "cuda_graph_scope": "attn", "cp_comm_type": "a2a"},
    "expert-parallel": {**ROUTER, "expert_model_parallel_size": 2},
    "data-parallel": {**ROUTER, **SHARED, "reduce": True},
    "data-parallel-optimizer": {**ROUTER, **SHARED, "optimizer": True, "late": True},
    "overlap": OVERLAP,
    "overlap-shared": {**OVERLAP, **SHARED},
    "overlap-delayed": {**OVERLAP, "delay_wgrad_compute": True},
    "overlap-delayed-shared": {**OVERLAP, **SHARED, "delay_wgrad_compute": True},
    "overlap-delayed-attention": {**OVERLAP, "cuda_graph_scope": "attn", "delay_wgrad_compute": True, "late": True},
    "overlap-delayed-router": {**OVERLAP, **SHARED, "cuda_graph_scope": "moe_router", "delay_wgrad_compute": True},
    "overlap-delayed-preprocess": {**OVERLAP, **SHARED, **PREPROCESS, "delay_wgrad_compute": True},
}
"""Models of two ranks.

Ours are ``late``, ``latent``, ``hybrid`` (Mamba, attention and MLP layers, a letter each; it needs mamba-ssm and
causal-conv1d), ``fused_attention`` (TE has no other for context parallelism), ``alone`` (the schedule of overlapped
all-to-alls, which Megatron refuses for one rank),
``reduce`` (gradients, while others are computed), ``optimizer`` (Megatron's distributed one, which gathers parameters
in hooks of the forward) and what is done ``between`` steps. The rest is Megatron's.
"""


def start(changed: dict[str, Any]) -> None:
    import torch

    moe.stand_in_for_apex()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    sizes = ("tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size")
    # an expert is not split between the ranks of tensor parallelism
    parallel_state.initialize_model_parallel(
        expert_tensor_parallel_size=1, **{name: changed[name] for name in sizes if name in changed}
    )
    data = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, moe.MICROBATCHES * data, 1, data)


class Job:
    """A model in training; ``late`` graphs are captured after the first step."""

    def __init__(
        self,
        recipe: str,
        graphs: bool,
        late: bool = False,
        reduce: bool = False,
        optimizer: bool = False,
        between: str = "",
        hybrid: str = "",
        **changed: Any,
    ) -> None:
        import torch
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        torch.manual_seed(1)
        self.graphs, self.late, self.between = graphs, late, between
        self.config = config(recipe, graphs, **changed)
        sizes, embedding = (moe.VOCABULARY, moe.TOKENS), {"position_embedding_type": "rope"}
        if hybrid:
            from megatron.core.models.mamba import MambaModel
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

            model = MambaModel(self.config, mamba_stack_spec, *sizes, hybrid_override_pattern=hybrid, **embedding)
        else:
            layers = get_gpt_decoder_block_spec(self.config, use_transformer_engine=True)
            ahead = get_gpt_mtp_block_spec(self.config, layers, True) if self.config.mtp_num_layers else None
            model = GPTModel(self.config, layers, *sizes, mtp_block_spec=ahead, **embedding)
        self.gpt = model.cuda().bfloat16()
        settings = {"overlap_grad_reduce": reduce or optimizer, "fp8_param_gather": "fp8_param" in changed}
        settings |= dict.fromkeys(("use_distributed_optimizer", "overlap_param_gather"), optimizer)
        # Like Megatron's training loop: gradients that accumulate on the default stream cannot be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            distributed = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
            self.model = DistributedDataParallel(self.config, distributed, self.gpt)
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer = None
        if optimizer:
            adam = OptimizerConfig(lr=moe.LEARNING_RATE, bf16=True, use_distributed_optimizer=True)
            self.optimizer = get_megatron_optimizer(adam, [self.model], use_gloo_process_groups=False)
        if reduce or optimizer:
            self.config.no_sync_func = self.model.no_sync
            self.config.finalize_model_grads_func = finalize_model_grads
        if graphs and not late:
            self.capture()
        self.run = get_forward_backward_func()

    def capture(self) -> None:
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        optimizers = [self.optimizer] if self.optimizer else []
        self.helper = TECudaGraphHelper([self.model], self.config, moe.TOKENS, 1, optimizers)
        if self.optimizer:
            self.model.disable_forward_pre_hook(param_sync=False)
        self.helper.create_cudagraphs()
        if self.optimizer:
            self.model.enable_forward_pre_hook()
            self.helper.cuda_graph_set_manual_hooks()

    def train(self) -> dict[str, list[Any]]:
        """Return the losses and gradients of each step, and the tensors of the model at the end."""
        found: dict[str, list[Any]] = {}
        for number in range(moe.STEPS + self.late):
            found[f"losses of step {number}"] = self.step(number)
            for name, parameter in self.gpt.named_parameters():
                found.setdefault(f"main_grad of {name}", []).append(parameter.main_grad.clone())
            if self.optimizer:
                self.optimizer.step()
            else:
                moe.update(self.gpt)
            if self.graphs and self.late and not number:
                self.capture()
            if self.graphs and self.between == "recapture" and number == 1:
                self.helper.delete_cuda_graphs()
                self.capture()
            if self.between == "evaluate":
                found[f"losses of evaluation {number}"] = self.evaluate(number)
        if self.optimizer:
            self.model.disable_forward_pre_hook()
        for name, value in self.gpt.state_dict(keep_vars=True).items():
            found[name] = values(value)
        return found

    def evaluate(self, number: int) -> list[float]:
        import torch

        self.model.eval()
        with torch.no_grad():
            losses = self.step(100 + number, forward_only=True)
        self.model.train()
        return losses

    def step(self, number: int, forward_only: bool = False) -> list[float]:
        import torch

        if not forward_only:
            self.model.zero_grad_buffer()
        found = self.run(
            forward_step_func=forward_step,
            data_iterator=({"tokens": tokens} for tokens in moe.batches(number)),
            model=self.model,
            num_microbatches=moe.MICROBATCHES,
            seq_length=moe.TOKENS,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        torch.cuda.synchronize()
        return [float(microbatch["loss"]) for microbatch in found]


def config(recipe: str, graphs: bool, latent: bool = False, alone: bool = False, **changed: Any) -> Any:
    """Return the config of the example with these changes."""
    from megatron.core.transformer import transformer_config

    if changed.pop("swiglu", False):
        import torch

        changed["activation_func"] = torch.nn.functional.silu
    if changed.pop("fused_attention", False):
        from megatron.core.transformer.enums import AttnBackend

        changed["attention_backend"] = AttnBackend.fused
    if not graphs:
        changed.pop("cuda_graph_scope", None)
    plain = transformer_config.TransformerConfig
    moe.RECIPES.update(RECIPES)
    try:
        if latent:
            transformer_config.TransformerConfig = transformer_config.MLATransformerConfig
        delayed = alone and changed.pop("delay_wgrad_compute", False)
        made = moe.config(recipe, graphs, **changed)
        if alone:
            from megatron_pipeline import dispatch_by_copy

            dispatch_by_copy()
            made.overlap_moe_expert_parallel_comm, made.delay_wgrad_compute = True, delayed
        return made
    finally:
        transformer_config.TransformerConfig = plain


def forward_step(data: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    from megatron.core import parallel_state

    tokens = next(data[0] if isinstance(data, list) else data)["tokens"]
    tokens = tokens[:, : moe.TOKENS // parallel_state.get_context_parallel_world_size()]
    return moe.forward_step(iter([tokens]), model.build_schedule_plan if return_schedule_plan else model)


def values(value: Any) -> list[Any]:
    """Return the tensors of a buffer, a parameter or TE's extra state, which is pickled with its addresses."""
    import torch

    if not isinstance(value, torch.Tensor):
        return []
    if value.dtype != torch.uint8:
        return [value.detach().float().clone()]
    state = pickle.loads(value.cpu().numpy().tobytes()) if value.numel() else {}
    return [each for _, each in sorted(state.items()) if isinstance(each, torch.Tensor)]


def compare(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> dict[str, float]:
    """Return the relative error of each name that differs."""
    import torch

    differing = {}
    for name in found.keys() | wanted.keys():
        have, want = ([torch.as_tensor(each) for each in run.get(name, [])] for run in (found, wanted))
        if [each.shape for each in have] != [each.shape for each in want]:
            differing[name] = float("inf")
        elif not all(map(torch.equal, have, want)):
            pairs = zip(have, want, strict=True)
            differing[name] = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
    return differing


def measure(name: str, recipe: str) -> dict[str, Any]:
    import torch

    changed = {**CONFIGS, **PAIRS}[name]
    start(changed)
    runs = []
    for graphs in (False, False, True):
        runs.append(Job(recipe, graphs, **changed).train())
        gc.collect()
    eager, again, graphed = runs
    unstable, differing = compare(again, eager), compare(graphed, eager)
    verdict = "not repeated eagerly" if unstable else "wrong" if differing else "equal"
    found: list[Any] = [None] * torch.distributed.get_world_size()
    worst = dict(sorted((unstable or differing).items(), key=lambda item: -item[1] if item[1] >= 0 else 0)[:8])
    mine = {
        "verdict": verdict,
        "compared": sum(map(len, graphed.values())),
        "differing": len(differing),
        "worst": worst,
    }
    torch.distributed.all_gather_object(found, mine)
    return {"ranks": found}


def start_method() -> str:
    """Return ``fork``, or ``spawn`` if an import has already initialized CUDA."""
    import torch

    probe = multiprocessing.get_context("fork").Process(target=torch.cuda.set_device, args=(0,))
    probe.start()
    probe.join()
    return "spawn" if probe.exitcode else "fork"


def measure_all(at_once: int, recipes: list[str]) -> None:
    """Measure each model of one rank in a process of its own, forked after Megatron was imported."""
    moe.stand_in_for_apex()
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    start = multiprocessing.get_context(start_method()).Process
    port, running = int(os.environ["MASTER_PORT"]), list[Any]()
    for number, case in enumerate(product(recipes, CONFIGS)):
        while len(running) == at_once:
            time.sleep(0.05)
            running = [each for each in running if each.is_alive()]
        os.environ["MASTER_PORT"] = str(port + number)
        running.append(start(target=report, args=case))
        running[-1].start()
    for each in running:
        each.join()


def main() -> None:
    match sys.argv[1:]:
        case []:
            for name in {**CONFIGS, **PAIRS}:
                print(name, 1 + (name in PAIRS))
        case ["--all", at_once, *recipes]:
            measure_all(int(at_once), recipes)
        case [name, recipe]:
            report(recipe, name)


def report(recipe: str, name: str) -> None:
    """Print the result of `measure`, or its error."""
    try:
        result = measure(name, recipe)
    except Exception as failure:
        traceback.print_exc()
        result = {"failed": f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"}
    status = te_graph_fixes.report()
    applied = sum(fix.status == "applied" for fix in status.fixes.values())
    found = {"te": status.te_version, "megatron": version("megatron-core"), "config": name, "recipe": recipe}
    if os.environ["RANK"] == "0":
        print(json.dumps({**found, "applied": applied, **result}), flush=True)
    if os.environ["WORLD_SIZE"] != "1":
        os._exit(0)  # a group of processes does not end while graphs hold its collectives


if __name__ == "__main__":
    main()
