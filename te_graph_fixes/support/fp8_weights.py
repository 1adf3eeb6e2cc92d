"""Update the FP8 weights of a graph before each replay of its forward.

Before an eager module uses a weight, it computes a missing transpose, or looks up its cached weight. A replay runs no
Python, so the classes below do this work before a replay, on the tensors whose addresses are in the graph.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COLUMNWISE = ("_transpose", "_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
"""The parts of quantized weights, in all formats, that only a dgrad reads."""


class PrimaryWeights:
    """The columnwise data of a module's quantized parameters.

    All of this data is updated, because the capture does not show which parts the kernels of the dgrad read. An update
    that no kernel needs costs only time.
    """

    def __init__(self, replay: Any, module: Any) -> None:
        """Add `refresh` to the steps of ``replay`` if a parameter of ``module`` has columnwise data."""
        parameters: Iterable[Any] = getattr(module, "parameters", tuple)()
        quantized = [(parameter, _tensors(parameter, COLUMNWISE)) for parameter in parameters]
        self._held = [(parameter, tensors) for parameter, tensors in quantized if tensors]
        if self._held:
            replay.add("forward prepare", "recompute transposes", self.refresh)

    def refresh(self, _call: Any) -> None:
        """Update the columnwise data in the graph to the current values of the parameters."""
        for parameter, tensors in self._held:
            valid = not getattr(parameter, "_transpose_invalid", False)
            if valid and _has(parameter, tensors):
                continue
            if not valid or any(getattr(parameter, name) is None for name in tensors):
                if "_transpose" in tensors:
                    parameter._transpose = tensors["_transpose"]
                parameter.update_usage(columnwise_usage=True)
            for name, tensor in tensors.items():
                if getattr(parameter, name) is not tensor:
                    tensor.copy_(getattr(parameter, name))
                    setattr(parameter, name, tensor)


class CachedWeights:
    """The quantized weights cached by the modules of a graph between microbatches.

    All of them are updated to the values that eager calls would use, because the capture does not show which cached
    weights the modules have looked up.
    """

    def __init__(self, replay: Any, module: Any) -> None:
        """Add `refresh` to the steps of ``replay`` if ``module`` or a submodule caches weights."""
        self._held = [
            (owner, name, weight, _tensors(weight, vars(weight)))
            for owner in getattr(module, "modules", tuple)()
            for name, weight in getattr(owner, "_fp8_workspaces", {}).items()
        ]
        if self._held:
            replay.add("forward prepare", "refresh cached weights", self.refresh)

    def refresh(self, call: Any) -> None:
        """Synchronize the cached weights of the graph with the cached weights of its modules, which eager calls use."""
        if (reuses := call.reuses_weights) is None:
            return
        for owner, name, weight, tensors in self._held:
            cached = owner._fp8_workspaces.get(name)
            if cached is not None and _has(cached, tensors):
                continue
            usable = type(cached) is type(weight) and type(cached._quantizer) is type(weight._quantizer)
            if not usable or any(getattr(cached, key, None) is None for key in tensors):
                for key, tensor in tensors.items():
                    setattr(weight, key, tensor)
                owner._fp8_workspaces[name] = weight
                weight.quantize_(_values(owner, name))
            elif reuses:
                for key, tensor in tensors.items():
                    tensor.copy_(getattr(cached, key))
            else:
                cached.quantize_(_values(owner, name))


def _tensors(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    values: dict[str, Any] = {name: getattr(owner, name, None) for name in names}
    return {name: value for name, value in values.items() if hasattr(value, "data_ptr")}


def _has(owner: object, tensors: dict[str, Tensor]) -> bool:
    return all(getattr(owner, name, None) is tensor for name, tensor in tensors.items())


def _values(owner: Any, name: str) -> Tensor:
    """Return the unquantized weight ``name`` of a module, concatenated if it consists of several parameters."""
    if hasattr(owner, name):
        weight: Tensor = getattr(owner, name)
        return weight
    return torch.cat([getattr(owner, part) for part in owner.weight_names])
