"""``tests/gpu/megatron_pipeline.py`` on the simulator: one process a stage, gloo between them, a tiny model.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.simulator \
        tests/support/megatron_on_simulator.py [megatron_pipeline.py]

runs that program of ``tests/gpu``, or another. It needs Megatron-Core. gloo reads what is sent when the receiver is
ready, as NCCL does; the receiver is late because it sleeps. What Megatron needs beyond the simulator is stood in for
here: torch.device of a number, and random states that a graph may hold (the model has no dropout, so that nothing draws
random numbers in a graph).
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
Device = torch.device


class _MetaDevice(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Device)


class _AnyDevice(metaclass=_MetaDevice):
    """`torch.device`, which also takes the number of a GPU where there is none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return Device("cuda", args[0]) if args and isinstance(args[0], int) else Device(*args, **kwargs)


def stand_in() -> None:
    torch.device = _AnyDevice  # type: ignore[assignment, misc]
    torch.cuda._sleep = lambda cycles: time.sleep(cycles / 1.9e9)
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    connect = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend: connect("gloo")

    import megatron.core.tensor_parallel as tensor_parallel
    import transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention as attention
    import transformer_engine.pytorch.graph as graph

    seed = tensor_parallel.model_parallel_cuda_manual_seed
    tensor_parallel.model_parallel_cuda_manual_seed = lambda value, **kwargs: seed(value, force_reset_rng=True)
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    graph.get_all_rng_states = dict
    attention.CudaRNGStatesTracker = object


if __name__ == "__main__":
    os.environ.update(LOCAL_RANK="0", HIDDEN="64", TOKENS="64", NVTE_MASKED_SOFTMAX_FUSION="0")
    stand_in()
    program = sys.argv[1] if sys.argv[1:] else "megatron_pipeline.py"
    runpy.run_path(str(ROOT / "tests" / "gpu" / program), run_name="__main__")
