"""Test ``replay-contract`` under Megatron-Core: graphs of four microbatches a step, run with two, four and eight.

    python tests/gpu/megatron_microbatches.py [RANKS]

On as many GPUs as `torch.distributed.run` is to start RANKS (2) for: pipeline stages of two virtual stages each with
expert-parallel overlap, as in `megatron_pipeline`. Microbatches grow as under ``--rampup-batch-size 4 4 8``, by
Megatron-Core's own count of them; Megatron then replays the graph of microbatch k modulo 4. Without the fix the
gradients of some stages are garbage, because their replays leave the sequence of the capture. With the fix the first
such stage raises, and `torch.distributed.run` ends the others. Exit status 0: two and four microbatches are
bit-identical with and without the fix; eight are wrong without it, and with it one rank raises and names the graph.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIX = "replay-contract"
CAPTURED = 4
RUN = (4, 2, 8)
STEPS = 2


def worker() -> None:
    """Run one rank: print one JSON line for each number of microbatches."""
    sys.path.insert(0, str(Path(__file__).parent))
    import megatron_pipeline as pipeline
    import torch
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    import te_graph_fixes

    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    te_graph_fixes.deactivate()
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=pipeline.CHUNKS
    )
    calculator.init_num_microbatches_calculator(rank, [CAPTURED, CAPTURED, STEPS * CAPTURED], max(RUN), 1, 1)
    pipeline.dispatch_by_copy()

    def steps(model: Any, number: int) -> list[list[torch.Tensor]]:
        pipeline.MICROBATCHES = number
        return [model.step(step) for step in range(STEPS)]

    eager = pipeline.Model(stages, graphs=False)
    wanted = {number: steps(eager, number) for number in RUN}
    del eager
    te_graph_fixes.activate(disable=[FIX] if os.environ["FIXES"] == "without" else [])
    model = pipeline.Model(stages, graphs=True)
    steps(model, CAPTURED)
    model.capture()
    for number in RUN:
        if number > CAPTURED:
            calculator.update_num_microbatches(STEPS * CAPTURED)  # by the samples of the steps before
            assert calculator.get_num_microbatches() == number
        about = {"rank": rank, "fixes": os.environ["FIXES"], "microbatches": number}
        try:
            found = steps(model, number)
        except RuntimeError as error:
            print(json.dumps({**about, "raised": str(error)}), flush=True)
            raise
        differ = [pipeline.compare(*both) for both in zip(found, wanted[number], strict=True)]
        print(json.dumps({**about, "steps": differ}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(ranks: str, *program: str) -> int:
    """Run both settings, each in processes of its own; each rank runs ``program`` instead of this file."""
    good = True
    for fixes in ("without", "with"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        start = time.monotonic()
        done = subprocess.run(
            [*command, *(program or [__file__])],
            env={**os.environ, "FIXES": fixes},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            print(json.dumps(line), flush=True)
        exact = {
            (line["rank"], line["microbatches"]): not any(step["different"] for step in line.get("steps", ()))
            for line in lines
            if "steps" in line
        }
        raised = [line["raised"] for line in lines if "raised" in line]
        right = {n: [exact.get((rank, n)) for rank in range(int(ranks))] for n in RUN}
        print(f"{fixes} {FIX}: exact by rank {right}, {len(raised)} raised, status {done.returncode}", flush=True)
        print(f"all ranks ended after {time.monotonic() - start:.0f} s", flush=True)
        good = good and all(right[4]) and all(right[2])
        if fixes == "without":
            good = good and False in right[8] and not raised
        else:
            good = good and done.returncode != 0 and False not in right[8]
            good = good and any("cannot be replayed" in text for text in raised)
        if not lines:
            print(done.stderr[-4000:], file=sys.stderr)
    print("as it should be" if good else "NOT as it should be")
    return int(not good)


if __name__ == "__main__":
    if "FIXES" in os.environ:
        worker()
    else:
        sys.exit(main(*(sys.argv[1:] or ["2"])))
