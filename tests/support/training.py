"""Layers and inputs in BF16, and the comparison of graphs with eager training, for the programs of tests.

`tests.support.child.run_program` puts ``from tests.support.training import *`` before a program.
"""
# ruff: noqa: F401

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

import te_graph_fixes

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def random(*shape: int, grad: bool = True, **options: Any) -> torch.Tensor:
    """Return normally distributed numbers, by default in BF16, of shape 32 x 32, and with ``requires_grad``."""
    return torch.randn(*(shape or (32, 32)), **{**BF16, **options}, requires_grad=grad)


def linear(size: int = 32, **options: Any) -> Any:
    """Return a square `te.Linear`, by default of 32 features in BF16."""
    return te.Linear(size, size, **{"params_dtype": torch.bfloat16, "device": "cuda", **options})


class WithSplits(torch.nn.Module):
    """A module that passes its input and ``splits`` to a layer. For experts, ``splits`` are the numbers of tokens."""

    def __init__(self, layer: Any, *splits: Any) -> None:
        super().__init__()
        self.layer, self.splits = layer, splits

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, *self.splits)


def compare(train: Callable[..., Iterable[torch.Tensor | None]], *arguments: Any, **options: Any) -> None:
    """Fail unless ``train(True, ...)``, with graphs, and the eager ``train(False, ...)`` yield equal tensors."""
    eager, graphed = (
        [tensor if tensor is None else tensor.detach().clone() for tensor in train(graphs, *arguments, **options)]
        for graphs in (False, True)
    )
    pairs = [*zip(eager, graphed, strict=True)]
    differing = [i for i, (a, b) in enumerate(pairs) if (a is None) != (b is None) or not (a is None or equal(a, b))]
    assert not differing, f"{len(differing)} of {len(pairs)} tensors differ: {differing}, {arguments}"


def error_of(call: Callable[[], Any]) -> str:
    """Return the text of the error that ``call`` raises, or an empty text if it raises none."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
