"""Test ``grad-input-lifetime`` under Megatron-Core: compare the gradients of a pipelined MoE model with eager runs.

    python -m torch.distributed.run --nproc-per-node 2 tests/gpu/megatron_pipeline.py
    CHUNKS=3 GROUP=4 MICROBATCHES=6 python -m torch.distributed.run ...  # a last send before a long cooldown

Pipeline stages over all ranks, two virtual stages each, two layers a model chunk, expert-parallel overlap,
TransformerEngine graphs on attention, and a receiver that is late: a sleep kernel before rank 0 exchanges gradients.
Every ``main_grad`` of every rank is compared with an eager run, for several steps: without fixes, with all but this
one, and with all. It prints one JSON line for each rank and setting. Exit status 1: a gradient differs with all fixes,
or none differs without them.

Megatron-Core insists on expert parallelism of two or more for the overlap. The pipeline takes all the ranks here, so
the option is set after that check; tokens are then dispatched within the rank, by a copy (`dispatch_by_copy`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
# A small buffer: a send waits for its receiver, as a large send always does.
os.environ["NCCL_BUFFSIZE"] = str(2**20)
os.environ["NCCL_MAX_P2P_NCHANNELS"] = "2"

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import te_graph_fixes

FIX = "grad-input-lifetime"
SETTINGS = ("no fixes", "all others", "all fixes")
LAYERS_A_CHUNK = 2
CHUNKS = int(os.environ.get("CHUNKS", "2"))
"""Virtual stages of each rank."""
MICROBATCHES = int(os.environ.get("MICROBATCHES", "8"))
GROUP = int(os.environ["GROUP"]) if "GROUP" in os.environ else None
"""Microbatches that go through a virtual stage one after the other; None: as many as there are ranks."""
STEPS = 3
HIDDEN = int(os.environ.get("HIDDEN", "4096"))
TOKENS = int(os.environ.get("TOKENS", "4096"))
ATTENTION = os.environ.get("ATTENTION", "unfused")
VOCABULARY = 512
SLEEP_MS = float(os.environ.get("SLEEP_MS", "20"))


def config(stages: int, graphs: bool) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig(
        num_layers=LAYERS_A_CHUNK * CHUNKS * stages if stages > 1 else 2 * LAYERS_A_CHUNK,
        hidden_size=HIDDEN,
        ffn_hidden_size=256,
        moe_ffn_hidden_size=256,
        num_attention_heads=8,
        num_moe_experts=4,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend[ATTENTION],
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=CHUNKS if stages > 1 else None,
        microbatch_group_size_per_vp_stage=GROUP,
        overlap_p2p_comm=stages > 1,
        batch_p2p_comm=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=False,
        cuda_graph_impl="transformer_engine" if graphs else "none",
        cuda_graph_scope="attn",
        cuda_graph_warmup_steps=1,
    )
    made.overlap_moe_expert_parallel_comm = True
    return made


class Model:
    """This rank's model chunks, and a training step without an optimizer."""

    def __init__(self, stages: int, graphs: bool) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config = config(stages, graphs)
        tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        torch.manual_seed(1 + dist.get_rank())
        self.chunks = []
        for vp_stage in range(CHUNKS) if stages > 1 else [None]:
            where = {"ignore_virtual": False, "vp_stage": vp_stage}
            chunk = GPTModel(
                self.config,
                get_gpt_decoder_block_spec(self.config, use_transformer_engine=True, vp_stage=vp_stage),
                VOCABULARY,
                TOKENS,
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                position_embedding_type="rope",
                vp_stage=vp_stage,
            )
            chunk.cuda().bfloat16()
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
            # Like Megatron's training loop: gradients that accumulate on the default stream cannot be captured.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.chunks.append(DistributedDataParallel(self.config, ddp, chunk))
            torch.cuda.current_stream().wait_stream(stream)
        self.forward_backward = get_forward_backward_func()

    def step(self, number: int) -> list[torch.Tensor]:
        """Run all microbatches; return copies of every ``main_grad``."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=[batches(number) for _ in self.chunks] if len(self.chunks) > 1 else batches(number),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
        torch.cuda.synchronize()
        return [p.main_grad.detach().clone() for chunk in self.chunks for p in chunk.parameters()]

    def capture(self) -> None:
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        TECudaGraphHelper(self.chunks, self.config, TOKENS, 1, []).create_cudagraphs()


def batches(step: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (1, TOKENS), generator=generator).cuda()


def forward_step(
    data: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    tokens = next(data)
    positions = torch.arange(TOKENS, device="cuda").unsqueeze(0)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss


def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = output.float().mean()
    return mean, {"loss": mean.detach()}


def dispatch_by_copy() -> None:
    """Return a new tensor from an all-to-all within one rank, as between ranks: the overlap frees its input."""
    from megatron.core.transformer.moe import token_dispatcher

    exchange = token_dispatcher.all_to_all
    token_dispatcher.all_to_all = lambda *args, **kwargs: exchange(*args, **kwargs).clone()


class Sends:
    """Tensors that this rank sends to the previous stage, and their state at the wait."""

    def __init__(self) -> None:
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None
        self.changed: list[torch.Tensor] = []

    def exchange(self, grad: torch.Tensor | None, overlap: bool) -> None:
        """Record a send of ``grad``; Megatron waits for the last overlapped send right after it."""
        if overlap and self.last is not None:
            self.changed.append((self.last[0] != self.last[1]).any())
        self.last = (grad, grad.clone()) if overlap and grad is not None else None

    def count(self) -> dict[str, int]:
        """Return how many tensors were sent since the last call, and how many of them were overwritten."""
        found = {"sends": len(self.changed), "overwritten": sum(map(bool, self.changed))}
        self.__init__()  # type: ignore[misc]
        return found


def make_rank_0_late(sends: Sends) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    exchange = P2PCommunicator.send_backward_recv_backward

    def late(self: Any, input_tensor_grad: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        sends.exchange(input_tensor_grad, kwargs.get("overlap_p2p_comm", False))
        if dist.get_rank() == 0:
            torch.cuda._sleep(int(SLEEP_MS * 1.9e6))
        return exchange(self, input_tensor_grad, *args, **kwargs)

    P2PCommunicator.send_backward_recv_backward = late  # type: ignore[method-assign]


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, float]:
    square = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in zip(found, wanted, strict=True))
    norms = [sum(float(t.double().norm()) ** 2 for t in grads) ** 0.5 for grads in (found, wanted)]
    different = sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return {
        "different": different,
        "of": len(found),
        "error": square**0.5 / norms[1],
        "norm": norms[0],
        "eager_norm": norms[1],
    }


def main() -> int:
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    te_graph_fixes.deactivate()
    from importlib.metadata import version

    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    dist.init_process_group("nccl")
    virtual = CHUNKS if stages > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
    )
    init_num_microbatches_calculator(rank, None, MICROBATCHES, 1, 1)
    dispatch_by_copy()
    sends = Sends()
    make_rank_0_late(sends)

    eager = Model(stages, graphs=False)
    wanted = [eager.step(number) for number in range(STEPS)]
    again = compare(eager.step(0), wanted[0])
    del eager
    outcomes = {}
    for setting in SETTINGS:
        te_graph_fixes.activate(
            only=[] if setting == "no fixes" else None, disable=[FIX] if setting == "all others" else []
        )
        statuses = {fix: status.status for fix, status in te_graph_fixes.report().fixes.items()}
        gc.collect()
        torch.cuda.empty_cache()
        model = Model(stages, graphs=True)
        warm = compare(model.step(0), wanted[0])
        before = torch.cuda.memory_reserved()
        model.capture()
        graph_mib = (torch.cuda.memory_reserved() - before) / 2**20
        sends.count()
        steps = [compare(model.step(number), wanted[number]) | sends.count() for number in range(STEPS)]
        outcomes[setting] = sum(step["different"] for step in steps)
        print(
            json.dumps(
                {
                    "te": te_graph_fixes.report().te_version,
                    "megatron": version("megatron-core"),
                    "rank": rank,
                    "setting": setting,
                    "steps": steps,
                    "eager_again_different": again["different"],
                    "before_capture_different": warm["different"],
                    "graph_mib": graph_mib,
                    "fixes": statuses,
                }
            ),
            flush=True,
        )
        dist.barrier()
        del model
    counts = torch.tensor([outcomes[setting] for setting in SETTINGS], device="cuda")
    dist.all_reduce(counts)
    if rank == 0:
        print(
            f"main_grads that differ, over all ranks and steps: {dict(zip(SETTINGS, counts.tolist(), strict=True))}",
            flush=True,
        )
    dist.destroy_process_group()
    *without, with_fix = counts.tolist()
    return int(with_fix > 0 or (stages > 1 and 0 in without))


if __name__ == "__main__":
    if torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "0") or 0) or "RANK" not in os.environ:
        sys.exit("skipped: start it with torch.distributed.run on a machine with a GPU for each process")
    sys.exit(main())
