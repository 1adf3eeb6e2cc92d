"""Check that the modules, parameters and memory of a callable's graphs are the same as at the capture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import getitem, is_
from typing import Any

import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors of FP8 parameters, except their transposes: these may be recomputed."""
FUSES_WGRADS = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The module attributes with which a backward adds wgrads to the ``main_grad`` of weights."""

Slot = tuple[Any, Any, str]
"""The place of a tensor: the dictionary or list that contains it, its key there, and its name in errors."""


class WarmupRecord:
    """The modules run in the warmup and the recipes of FP8 callables, by the number of the callable."""

    def __init__(self) -> None:
        self.recipes: dict[int, Any] = {}
        self.modules: dict[int, set[torch.nn.Module]] = {}

    def note(self, number: int, module: torch.nn.Module) -> None:
        """Note that a callable ran ``module``.

        If the module computes in FP8 in the autocast of the capture, note the recipe too.
        """
        self.modules.setdefault(number, set()).add(module)
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled() and manager.fp8_graph_capturing():
            recipe = manager.get_fp8_recipe()
            of_operations = (getattr(inner, "_fp8_metas", None) for inner in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            if quantizes and (recipe.fp8_dpa or not hasattr(module, "unfused_attention")):
                self.recipes[number] = recipe


class CallableTensors:
    """The ``members`` of one callable, and the tensors that its graphs read (``read``) or add to (``written``).

    ``parameters`` are inputs of the graphs. ``ran`` are the modules that ran in the warmup of the callable.
    """

    def __init__(self, function: Any, parameters: Iterable[torch.Tensor], ran: Iterable[torch.nn.Module]) -> None:
        own = {parameter for module in ran for parameter in module.parameters(recurse=False) if parameter.numel()}
        self.frozen = [parameter for parameter in own if not parameter.requires_grad]
        fused = [module for module in ran if any(getattr(module, name, False) for name in FUSES_WGRADS)]
        weights = [weight for module in fused for weight in module.parameters(recurse=False) if weight.requires_grad]
        self.fused = {weight for weight in weights if weight.dim() > 1 and _address(vars(weight), "main_grad")}
        self.members = Members(modules_of(function), {*own, *filter(torch.Tensor.numel, parameters)})
        held, names = self.members.parameters, self.members.names
        slots: list[Slot] = [(held, number, f"a parameter ({name})") for number, name in enumerate(names)]
        quantized = [(vars(parameter), part) for parameter in held if parameter is not None for part in QUANTIZED]
        slots += [(attributes, part, f"the {part} of a parameter") for attributes, part in quantized]
        self.read = Addresses(slots)
        self.written = Addresses((vars(weight), "main_grad", "the main_grad of a parameter") for weight in self.fused)


class Members:
    """The modules inside a callable, and the parameters that it ``reads``.

    They must be the same objects as at the capture. A parameter may be added under a new name, because no graph reads
    it.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], reads: Collection[torch.Tensor]) -> None:
        self._children = [module._modules for module in modules]
        self._children_at_capture = [*map(dict, self._children)]
        slots = [(module._parameters, name, value) for module in modules for name, value in module._parameters.items()]
        slots = [(registry, name, value) for registry, name, value in slots if value is None or value in reads]
        self._registries, self.names = [registry for registry, _, _ in slots], [name for _, name, _ in slots]
        self.parameters = [value for _, _, value in slots]

    def require_same(self, callable_name: str) -> None:
        """Raise RuntimeError if a module or parameter was replaced, or added in place of None."""
        parameters = [*map(dict.get, self._registries, self.names)]
        if self._children == self._children_at_capture and all(map(is_, parameters, self.parameters)):
            return
        for children, then in zip(self._children, self._children_at_capture, strict=True):
            for name in {**then, **children}:
                if children.get(name) is not then.get(name):
                    raise _moved(callable_name, f"a module ({name})")
        for name, parameter, before in zip(self.names, parameters, self.parameters, strict=True):
            if parameter is not before:
                raise _moved(callable_name, f"a parameter ({name})")


class Addresses:
    """The addresses of tensors, which must not change. Another tensor object, such as a new view, is allowed."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        # A tensor that consists of other tensors, such as an FP8 weight, has no address.
        slots = [(owner, key, what) for owner, key, what in slots if _address(owner, key)]
        self._owners, self._keys = [owner for owner, _, _ in slots], [key for _, key, _ in slots]
        self._names = [what for _, _, what in slots]
        self._at_capture = [*map(_address, self._owners, self._keys)]

    def require_same(self, callable_name: str) -> None:
        """Raise RuntimeError if a tensor has another address, or is missing."""
        try:
            if [*map(torch.Tensor.data_ptr, map(getitem, self._owners, self._keys))] == self._at_capture:
                return
        except (KeyError, TypeError, RuntimeError):
            pass  # a tensor is missing; the loop below names it
        for owner, key, what, then in zip(self._owners, self._keys, self._names, self._at_capture, strict=True):
            if _address(owner, key) != then:
                raise _moved(callable_name, what)


def _address(owner: Any, key: Any) -> int:
    """Return the address of a tensor; 0 if it is missing or has no memory."""
    tensor = owner.get(key) if isinstance(owner, dict) else owner[key]
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0


def _moved(callable_name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{callable_name}: {what} was added, replaced, moved or resized after this graph was captured, and the graph "
        "would use the old one. Copy into it in place, or capture again."
    )


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Return a callable and the modules inside it; none for a function."""
    return [*function.modules()] if isinstance(function, torch.nn.Module) else []
