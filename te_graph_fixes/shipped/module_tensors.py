"""The modules, parameters and memory that the graphs of a callable use: the same as at the capture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import getitem, is_
from typing import Any

import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors that FP8 parameters consist of, but for their transposes, which may be made again."""
FUSES_WGRADS = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The attributes of modules that say that their backward adds wgrads to the ``main_grad`` of weights."""

Slot = tuple[Any, Any, str]
"""The dictionary or list that holds a tensor, its key there, and its name in errors."""


class WarmupRecord:
    """The modules that the warmup has run, and the recipes of callables in FP8, by the number of the callable."""

    def __init__(self) -> None:
        self.recipes: dict[int, Any] = {}
        self.modules: dict[int, set[torch.nn.Module]] = {}

    def note(self, number: int, module: torch.nn.Module) -> None:
        """Note that a callable has run ``module``, in the autocast of the capture or in one of its own."""
        self.modules.setdefault(number, set()).add(module)
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled() and manager.fp8_graph_capturing():
            recipe = manager.get_fp8_recipe()
            of_operations = (getattr(inner, "_fp8_metas", None) for inner in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            if quantizes and (recipe.fp8_dpa or not hasattr(module, "unfused_attention")):
                self.recipes[number] = recipe


class CallableTensors:
    """The ``members`` that the graphs of one callable use, and the tensors that they ``read``, or add to (``written``).

    ``parameters`` are inputs of its graphs, ``ran`` the modules that its warmup has run.
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
    """The modules inside a callable, and the parameters that it ``reads``: the same objects as at the capture.

    A parameter may be added under a new name: no graph reads it.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], reads: Collection[torch.Tensor]) -> None:
        self._children = [module._modules for module in modules]
        self._children_then = [*map(dict, self._children)]
        slots = [(module._parameters, name, value) for module in modules for name, value in module._parameters.items()]
        slots = [(registry, name, value) for registry, name, value in slots if value is None or value in reads]
        self._registries, self.names = [registry for registry, _, _ in slots], [name for _, name, _ in slots]
        self.parameters = [value for _, _, value in slots]

    def require_same(self, callable_name: str) -> None:
        """RuntimeError where one was replaced, or a module or a parameter that was None was added."""
        parameters = [*map(dict.get, self._registries, self.names)]
        if self._children == self._children_then and all(map(is_, parameters, self.parameters)):
            return
        for children, then in zip(self._children, self._children_then, strict=True):
            for name in {**then, **children}:
                if children.get(name) is not then.get(name):
                    raise _not_there(callable_name, f"a module ({name})")
        for name, parameter, before in zip(self.names, parameters, self.parameters, strict=True):
            if parameter is not before:
                raise _not_there(callable_name, f"a parameter ({name})")


class Addresses:
    """The addresses of tensors. The object there may be another one: a ``main_grad`` may be given up and made again."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        # A tensor that consists of others, as one in FP8, has no address.
        slots = [(owner, key, what) for owner, key, what in slots if _address(owner, key)]
        self._owners, self._keys = [owner for owner, _, _ in slots], [key for _, key, _ in slots]
        self._names = [what for _, _, what in slots]
        self._then = [*map(_address, self._owners, self._keys)]

    def require_same(self, callable_name: str) -> None:
        """RuntimeError where one is elsewhere, or gone."""
        try:
            if [*map(torch.Tensor.data_ptr, map(getitem, self._owners, self._keys))] == self._then:
                return
        except (KeyError, TypeError, RuntimeError):
            pass  # one is gone
        for owner, key, what, then in zip(self._owners, self._keys, self._names, self._then, strict=True):
            if _address(owner, key) != then:
                raise _not_there(callable_name, what)


def _address(owner: Any, key: Any) -> int:
    """0 where there is no tensor, or one without memory."""
    tensor = owner.get(key) if isinstance(owner, dict) else owner[key]
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0


def _not_there(callable_name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{callable_name}: {what} is not where it was when this graph was captured (it was added, replaced, moved or "
        "resized), and the graph would still use what it was captured with. Write into it in place, or capture again"
    )


def modules_of(function: Any) -> list[torch.nn.Module]:
    """A callable and the modules inside; none if it is a function."""
    return [*function.modules()] if isinstance(function, torch.nn.Module) else []
