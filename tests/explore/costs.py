"""The cost of a run on the simulator: kernels, copies among them, and forwards of modules."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulator import graph

aten = torch.ops.aten
COPIES = {aten.copy_, aten.clone, aten._to_copy}


class Costs(TorchDispatchMode):
    """Count the ``launches``, the ``copies`` among them, and the ``forwards`` of modules while this is entered.

    A launch is an operation that writes values. It counts when it runs: eagerly, or at a replay of its graph. The
    counts of captures, which consist of warmups, are separate from those of the training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter[str]()
        self._part = "training"

    def __enter__(self) -> Costs:
        graph.on_launch = self._count_kernel
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._count_forward)
        self._captures = mock.patch.object(te, "make_graphed_callables", self._capture(te.make_graphed_callables))
        self._captures.start()
        super().__enter__()
        return self

    def _capture(self, function: Any) -> Any:
        def capture(*args: Any, **kwargs: Any) -> Any:
            self._part = "capture"
            try:
                return function(*args, **kwargs)
            finally:
                self._part = "training"

        return capture

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._captures.stop()
        self._hook.remove()
        graph.on_launch = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in graph.ALLOCATIONS):
            self._count_kernel(func)
        return result

    def _count_kernel(self, kernel: Any) -> None:
        self._add("launches")
        if getattr(kernel, "overloadpacket", None) in COPIES:
            self._add("copies")

    def _count_forward(self, *_: Any) -> None:
        self._add("forwards")

    def _add(self, name: str) -> None:
        self.counts[f"{name} of the {self._part}"] += 1
