"""Code for each rank of a training with Megatron: print norms of gradients, versions and peak memory."""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any


def prepare() -> None:
    """Print the versions (on rank 0) now, the peak memory at exit, and the stack on SIGTERM. Replace a missing apex."""
    import torch

    faulthandler.register(signal.SIGTERM, chain=True)
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        stand_in_for_apex()
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        from megatron.core import package_info

        te, gpu = version("transformer_engine"), torch.cuda.get_device_name(0)
        versions = {"TE": te, "Megatron": package_info.__version__, "torch": torch.__version__, "GPU": gpu}
        print(f"\nversions: {json.dumps(versions)}", flush=True)
    atexit.register(
        lambda: print(f"\npeak memory of rank {rank}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB", flush=True)
    )


def stand_in_for_apex() -> None:
    """Install a replacement for apex's function that Megatron's embedding and output layers call for fused wgrads."""
    import torch

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grads.flatten(0, -2).t() @ inputs.flatten(0, -2))

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def watch(model: list[Any], optimizer: Any, steps: Collection[int]) -> None:
    """Make ``optimizer.step`` print the norms of `main_grad` before the update in these ``steps``, counted from 1."""
    update: Callable[[], Any] = optimizer.step
    count = 0

    def print_and_update() -> Any:
        nonlocal count
        count += 1
        if count in steps:
            print_norms(model, count)
        return update()

    optimizer.step = print_and_update


def print_norms(model: list[Any], step: int) -> None:
    """Gather the norms of `main_grad` of all ranks, and print them on rank 0 as one line of JSON."""
    import torch

    rank = torch.distributed.get_rank()
    mine = {f"{name} of rank {rank}": grad.float().norm().item() for name, grad in reduced_grads(model)}
    norms: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(norms, mine)
    if rank == 0:
        merged = {name: norm for each in norms for name, norm in each.items()}
        print(f"\ngradient norms of step {step}: {json.dumps(merged)}", flush=True)


def reduced_grads(model: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the reduced `main_grad` of each parameter whose first data-parallel rank is this rank.

    With Megatron's distributed optimizer, a rank has only a part of each reduced bucket, so the parts are gathered.
    """
    import torch

    for chunk in model:
        names = {parameter: name for name, parameter in chunk.named_parameters()}
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group, size = buffer.data_parallel_group, buffer.data_parallel_world_size
            for bucket in buffer.buckets:
                grads = bucket.grad_data
                if size > 1 and buffer.ddp_config.use_distributed_optimizer:
                    part = grads.view(size, -1)[torch.distributed.get_rank(group)]
                    grads = torch.empty_like(grads)
                    torch.distributed.all_gather_into_tensor(grads, part.contiguous(), group=group)
                if torch.distributed.get_rank(group) == 0:
                    for parameter, (start, stop) in bucket.param_to_index.items():
                        yield names[parameter], grads[start:stop]
