"""Check that the modules, parameters and memory of a callable's graphs are the same as at the capture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import getitem, is_
from typing import Any

import torch
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors of FP8 parameters, except their transposes: these may be recomputed."""
FUSES_WGRADS = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The module attributes with which a backward adds wgrads to the ``main_grad`` of weights."""

Slot = tuple[Any, Any, str]
"""The place of a tensor: the dictionary or list that contains it, its key there, and its name in errors."""


class WarmupRecord:
    """Facts about the warmup of each callable, by its number: its modules, and the recipe if it computes in FP8.

    The record also knows which tensors the forwards write. ``functions`` are the callables of the capture, and
    ``inputs`` the tensors in their sample arguments.
    """

    def __init__(self, functions: Iterable[Any], inputs: Iterable[Iterable[Any]]) -> None:
        self.recipes: dict[int, Any] = {}
        self.modules: dict[int, set[torch.nn.Module]] = {}
        self._draws: set[int] = set()
        self._random_states = _random_states()
        held = tensors_in(list(functions))
        self._versions = {id(tensor): (tensor, version(tensor)) for tensor in [*held, *tensors_in(inputs)]}
        buffers = [tensor for tensor in held if not isinstance(tensor, torch.nn.Parameter)]
        self._buffers = {storage_of(tensor): tensor for tensor in buffers}
        self._returned: dict[int, list[torch.Tensor]] = {}

    def note(self, number: int, module: torch.nn.Module, outputs: Any) -> None:
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
        states, self._random_states = self._random_states, _random_states()
        if not all(map(torch.equal, states, self._random_states)):
            self._draws.add(number)
        for key in {storage_of(output) for output in tensors_in(outputs)} & self._buffers.keys():
            self._returned.setdefault(key, []).append(self._buffers[key].detach().clone())

    def repeats(self, number: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether a forward returns equal values whenever its inputs and ``tensors`` have equal values.

        It then draws no random numbers, does not compute in FP8, whose scales change, and writes none of these tensors.
        False if no forward ran in the warmup, or if the callable is a plain function, because then nothing is known.
        """
        modules = self.modules.get(number)
        if not modules or number in self._draws or number in self.recipes or any(map(_has_fp8_state, modules)):
            return False
        tensors = [*tensors]
        return len(self.unwritten(tensors)) == len(tensors)

    def unwritten(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of ``tensors`` that existed before the warmup and that no forward has written since.

        Batch norm writes its buffers without a new version. The values of a buffer that a module returns are therefore
        compared too. If it was returned only once, nothing is known, and it counts as written.
        """
        return [tensor for tensor in tensors if self._is_unwritten(tensor)]

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        _, version_before = self._versions.get(id(tensor), (None, None))
        returned = self._returned.get(storage_of(tensor))
        return version_before == version(tensor) and (
            returned is None or (len(returned) > 1 and all(torch.equal(value, returned[0]) for value in returned))
        )


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, and the parameters, buffers and attributes of the modules in them."""
    found: dict[int, Any] = {}
    rest = [value]
    while rest:
        value = rest.pop()
        if id(value) in found or not isinstance(value, (torch.Tensor, torch.nn.Module, dict, list, tuple, set)):
            continue
        found[id(value)] = value
        if isinstance(value, torch.nn.Module):
            rest += vars(value).values()
        elif not isinstance(value, torch.Tensor):
            rest += value.values() if isinstance(value, dict) else value
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def version(tensor: torch.Tensor) -> Any:
    """Return the number of in-place changes to a tensor; for an inference tensor, an object unlike all others."""
    return object() if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _random_states() -> list[torch.Tensor]:
    states = get_all_rng_states().values()
    return [
        torch.cuda.get_rng_state(),
        *(state if isinstance(state, torch.Tensor) else state.get_state() for state in states),
    ]


def _has_fp8_state(module: torch.nn.Module) -> bool:
    states = (getattr(module, "_fp8_metas", None) or {}).values()
    return getattr(module, "fp8_initialized", False) or any(states)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Return a callable and the modules inside it; none for a function."""
    return [*function.modules()] if isinstance(function, torch.nn.Module) else []
