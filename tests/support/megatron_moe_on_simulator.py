"""``examples/megatron_moe.py`` on the simulator, small: eager and graphs compared.

    TE_GRAPH_FIXES_CHECK=2 MASTER_PORT=29501 python -m tests.simulator tests/support/megatron_moe_on_simulator.py RECIPE

With `megatron_rounds` after the recipe it runs three rounds of that program of ``tests/gpu``, which trains the same
model. It needs Megatron-Core. Beyond what `megatron_on_simulator` stands in for: the tokens of each expert, which
Megatron has on the host, and captures leave their values in graph memory, as torch's index operations raise on the
garbage that a capture of a backward would find there, where a GPU does not run them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests" / "gpu")]

import megatron_moe as moe  # noqa: E402
import torch  # noqa: E402

from tests.simulator.graph import Capture  # noqa: E402
from tests.support.megatron_on_simulator import stand_in  # noqa: E402


class OnHost:
    """A tensor that a capture may read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tolist(self) -> Any:
        return torch._C.TensorBase.tolist(self.tensor)  # type: ignore[attr-defined]


def prepare() -> None:
    """Stand in for what Megatron needs beyond the simulator, and make the model small."""
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", NVTE_MASKED_SOFTMAX_FUSION="0")
    moe.HIDDEN, moe.EXPERTS, moe.TOKENS, moe.VOCABULARY = 64, 4, 64, 128
    moe.stand_in_for_apex()
    connect = torch.distributed.init_process_group
    stand_in()
    torch.distributed.init_process_group = lambda backend, **options: connect("gloo", **options)
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    forward = TEGroupedMLP.forward
    TEGroupedMLP.forward = lambda self, x, tokens, *args: forward(self, x, OnHost(tokens), *args)
    Capture._keep = lambda self, tensor: None  # type: ignore[method-assign]


def compare(recipe: str) -> None:
    moe.start()
    losses, grads = moe.train(recipe, False)
    found, graphed = moe.train(recipe, True)
    same = all(torch.equal(a[name], b[name]) for a, b in zip(grads, graphed, strict=True) for name in a)
    print(f"{recipe}: main_grads equal: {same}, losses equal: {losses == found}")


if __name__ == "__main__":
    prepare()
    if sys.argv[2:] == ["megatron_rounds"]:
        import megatron_rounds

        megatron_rounds.ROUNDS = 3
        sys.exit(megatron_rounds.main(sys.argv[1]))
    compare(sys.argv[1])
