"""The modules of `tests.support.recipe_matrix` that the driver of `verify` does not have."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import grouped_linear

from tests.explore.kinds import Layer, options_of_attention
from tests.support.recipe_matrix import GPU_SPLITS
from tests.verify import programs
from tests.verify.driver.modules import layernorm_mlp
from tests.verify.driver.program import Skipped
from tests.verify.driver.setting import HIDDEN, OPTIONS, TOKENS, hidden


def layer(dropout: float = 0.0) -> Any:
    """Return a layer with two sequences, whose attention is TE's own of plain torch operations."""
    size, options = hidden(), {**options_of_attention(), "attention_dropout": dropout}
    return Layer(size, 2 * size, 2, hidden_dropout=dropout, **options)


def recomputed() -> Any:
    """Return a block whose activations are recomputed in its backward."""

    class Recomputing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layernorm_mlp()

        def forward(self, x: Any) -> Any:
            return te.checkpoint(self.inner, x)

    programs.require_recomputation()
    return Recomputing()


def experts(splits: Any, **options: Any) -> Any:
    """Create experts that get these numbers of tokens."""

    class Experts(te.GroupedLinear):
        def forward(self, x: Any, **marks: bool) -> Any:
            return super().forward(x, splits, **marks)

    return Experts(len(splits), HIDDEN, HIDDEN, **{**OPTIONS, **options})


def padded() -> Any:
    """Create two experts whose numbers of tokens no recipe accepts, so TE's modules pad and unpad them."""
    splits = [TOKENS // 2 - 7, TOKENS // 2 + 7]

    class Padded(te.GroupedLinear):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.pad, self.unpad = te.Fp8Padding(2), te.Fp8Unpadding(2)

        def forward(self, x: Any, **marks: bool) -> Any:
            rows, padded_splits = self.pad(x, splits)
            return self.unpad(super().forward(rows, padded_splits, **marks), splits)

    return Padded(2, HIDDEN, HIDDEN, **OPTIONS)


def grouped_operation() -> Any:
    """Create two experts of te.ops without a bias, because a Triton kernel sums the gradient of a bias."""
    made = getattr(te.ops, "GroupedLinear", None)
    if made is None:
        raise Skipped("te.ops.GroupedLinear comes with TransformerEngine 2.14")
    splits = _splits(hasattr(made, "_fuser_forward_grouped_tensor"))

    class Grouped(te.ops.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x, splits)

    return Grouped(made(2, HIDDEN, HIDDEN, **{**_of_operation(), "bias": False}))


def grouped_on_gpu() -> Any:
    """Create two experts without a bias with kernels of grouped tensors. Only the GPU knows their tokens."""
    if not hasattr(grouped_linear._GroupedLinear, "_make_grouped_tensor"):
        raise Skipped("GroupedLinear has no kernels of grouped tensors before TransformerEngine 2.17")
    options: dict[str, Any] = {"bias": False}
    if "use_grouped_tensor" in inspect.signature(te.GroupedLinear.__init__).parameters:  # TE 2.20
        options["use_grouped_tensor"] = True
    else:
        os.environ["NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"] = "1"
    return experts(_splits(on_gpu=True), **options)


def _splits(on_gpu: bool) -> Any:
    if on_gpu:
        return torch.tensor([TOKENS // 4, TOKENS * 3 // 4], device="cuda")
    return torch.tensor([TOKENS // 2] * 2, device="cpu")


def _of_operation() -> dict[str, Any]:
    names = {"params_dtype": "dtype", "fuse_wgrad_accumulation": "accumulate_into_main_grad"}
    return {names.get(name, name): value for name, value in OPTIONS.items() if name != "delay_wgrad_compute"}


MAKERS: dict[str, Callable[[], Any]] = {
    "TransformerLayer": layer,
    "ops.Linear": lambda: te.ops.Sequential(te.ops.Linear(HIDDEN, HIDDEN, **_of_operation())),
    "ops.GroupedLinear": grouped_operation,
    "LayerNormMLP, recomputed": recomputed,
    "TransformerLayer, dropout": functools.partial(layer, 0.1),
    "GroupedLinear, padded": padded,
    "uneven_experts": lambda: experts([TOKENS // 2, TOKENS // 2, 0]),
    GPU_SPLITS: grouped_on_gpu,
}
"""What makes modules that the driver does not have."""
