"""What the graphs of a callable read and write, compared with the capture: modules, parameters and gradient buffers.

Members of a module are compared as objects, tensors by their addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors that FP8 parameters consist of, but for their transposes, which may be made again."""


class WarmupRecord:
    """What the warmup has run: modules by the number of their callable, and recipes of callables in FP8."""

    def __init__(self) -> None:
        self.modules: dict[int, set[torch.nn.Module]] = {}
        self.recipes: dict[int, Any] = {}

    def note(self, number: int, module: torch.nn.Module) -> None:
        """Note that a callable has run ``module``, in the autocast of the capture or in one of its own."""
        self.modules.setdefault(number, set()).add(module)
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled() and manager.fp8_graph_capturing():
            recipe = manager.get_fp8_recipe()
            of_operations = (getattr(each, "_fp8_metas", None) for each in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            if quantizes and (recipe.fp8_dpa or not hasattr(module, "unfused_attention")):
                self.recipes[number] = recipe


class CallableTensors:
    """The modules, parameters and ``main_grad``s that the graphs of one callable use.

    ``parameters`` are the inputs of its graphs, ``ran`` the modules that its warmup has run.
    """

    def __init__(self, function: Any, parameters: Iterable[torch.Tensor], ran: Iterable[torch.nn.Module]) -> None:
        own = {parameter for module in ran for parameter in module.parameters(recurse=False) if parameter.numel()}
        self.frozen = [parameter for parameter in own if not parameter.requires_grad]
        self.fused = _fused_weights(ran)
        self._members = _Members(modules_of(function), {*own, *filter(torch.Tensor.numel, parameters)})
        named = self._members.named_parameters()
        self._read = [_Addresses(named)]
        for part in QUANTIZED:
            quantized = [each for _, each in named if is_tensor(vars(each).get(part))]
            self._read.append(_Addresses([(f"the {part} of a parameter", each) for each in quantized], part))
        self._written = _Addresses([("the main_grad of a parameter", each) for each in self.fused], "main_grad")

    def require_members(self, callable_name: str) -> None:
        """RuntimeError where a module or parameter was replaced, or a module was added."""
        self._members.require_same(callable_name)

    def require_read(self, callable_name: str) -> None:
        """RuntimeError where a parameter is not at the address that graphs read."""
        for addresses in self._read:
            addresses.require_same(callable_name)

    def require_written(self, callable_name: str) -> None:
        """RuntimeError where a ``main_grad`` is not at the address that graphs add to."""
        self._written.require_same(callable_name)


class _Members:
    """The modules inside a callable, and the parameters that it ``reads``: the same objects as at the capture.

    A parameter may be added under a new name: no graph reads it.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], reads: Collection[torch.Tensor]) -> None:
        modules = [*modules]
        self._children = [module._modules for module in modules]
        self._children_then = [*map(dict, self._children)]
        slots = [(module._parameters, name) for module in modules for name in module._parameters]
        slots = [(registry, name) for registry, name in slots if registry[name] is None or registry[name] in reads]
        self._registries, self._names = [registry for registry, _ in slots], [name for _, name in slots]
        self._parameters_then = [registry[name] for registry, name in slots]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        named = zip(self._names, self._parameters_then, strict=True)
        return [(f"a parameter ({name})", parameter) for name, parameter in named if parameter is not None]

    def require_same(self, callable_name: str) -> None:
        parameters = map(dict.get, self._registries, self._names)
        if self._children == self._children_then and all(map(is_, parameters, self._parameters_then)):
            return
        for children, then in zip(self._children, self._children_then, strict=True):
            for name, module in then.items():
                if module is not None and children.get(name) is not module:
                    raise _not_there(callable_name, f"a module ({name})")
        for registry, name, parameter in zip(self._registries, self._names, self._parameters_then, strict=True):
            if parameter is not None and registry.get(name) is not parameter:
                raise _not_there(callable_name, f"a parameter ({name})")
        raise RuntimeError(
            f"{callable_name}: modules or parameters were added inside since this graph was captured, and it would run "
            "without them. Capture again"
        )


class _Addresses:
    """The addresses of tensors: of the ``named`` ones, or of what these have as ``attribute``.

    What they have there is not held, and may be another object: a ``main_grad`` may be given up between two replays.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], attribute: str = "") -> None:
        self._find = partial(map, attrgetter(attribute)) if attribute else iter
        named = [*named]
        addresses = self._addresses([owner for _, owner in named])
        # A tensor that consists of others, as one in FP8, has no address.
        kept = [(name, owner, address) for (name, owner), address in zip(named, addresses, strict=True) if address]
        self._names, self._owners = [name for name, *_ in kept], [owner for _, owner, _ in kept]
        self._then = [address for *_, address in kept]

    def _addresses(self, owners: Sequence[torch.Tensor]) -> list[int]:
        try:
            return [*map(torch.Tensor.data_ptr, self._find(owners))]
        except (AttributeError, TypeError, RuntimeError):
            return []  # one is gone

    def require_same(self, callable_name: str) -> None:
        if self._addresses(self._owners) == self._then:
            return
        for name, owner, then in zip(self._names, self._owners, self._then, strict=True):
            if self._addresses([owner]) != [then]:
                raise _not_there(callable_name, name)


def _not_there(callable_name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{callable_name}: {what} is not where it was when this graph was captured (its data was replaced, moved or "
        "resized), and the graph would go on with the old memory. Write into it in place, or capture again"
    )


def _fused_weights(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, None]:
    """The weights into whose ``main_grad`` a backward adds its wgrads."""
    names = "fuse_wgrad_accumulation", "_accumulate_into_main_grad"
    fused = [module for module in modules if any(getattr(module, name, False) for name in names)]
    weights = [p for module in fused for p in module.parameters(recurse=False) if p.requires_grad and p.dim() > 1]
    return dict.fromkeys(p for p in weights if is_tensor(vars(p).get("main_grad")) and p.main_grad.numel())


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """A callable and the modules inside; none if it is a function."""
    return [*function.modules()] if isinstance(function, torch.nn.Module) else []
