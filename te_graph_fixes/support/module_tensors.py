"""Check that the modules, parameters and memory of a callable's graphs are the same as at the capture."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem, is_
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch.nn.utils import _named_member_accessor
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors of FP8 parameters, except their transposes: these may be recomputed."""
FUSES_WGRADS = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The module attributes with which a backward adds wgrads to the ``main_grad`` of weights."""

_LOOKUP = torch.nn.Module.__getattr__.__code__
_ACCESSOR = _named_member_accessor.__file__
"""The file of `torch.func.functional_call` that exchanges parameters for the time of a call."""
_SETTERS = (torch.nn.Module.__setattr__.__code__, torch.nn.Module.__delattr__.__code__)
_REGISTRIES = ("_parameters", "_buffers", "_modules")

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
        # Weak references and copies in CPU memory, because a capture must not need more GPU memory than TE's.
        self._versions = {id(tensor): (ref(tensor), version(tensor)) for tensor in [*held, *tensors_in(inputs)]}
        buffers = [tensor for tensor in held if not isinstance(tensor, torch.nn.Parameter)]
        self._buffers = {storage_of(tensor): ref(tensor) for tensor in buffers}
        self._returned: dict[int, list[torch.Tensor]] = {}
        self._used: dict[int, UsedMembers] = {}

    @contextmanager
    def during_forward(self, number: int) -> Iterator[None]:
        """Record the members that a captured forward uses, unless another profiler or `__getattr__` is in place."""
        is_free = sys.getprofile() is None and _LOOKUP.co_varnames[:2] == ("self", "name")
        if is_free:
            used = self._used[number] = UsedMembers(functools.partial(self._note_recipe, number))
            sys.setprofile(used.note)
        try:
            yield
        finally:
            if is_free:
                sys.setprofile(None)

    def used_by(self, number: int, function: Any) -> UsedMembers:
        """Return the members that the captured forward used: all of the callable if they were not recorded."""
        modules = modules_of(function)
        used = self._used.get(number)
        if used is None:
            used = UsedMembers(lambda _: None)
            used.all_of.update(dict.fromkeys(modules))
        used.complete(modules, self.modules.get(number, ()))
        return used

    def note(self, number: int, module: torch.nn.Module, outputs: Any) -> None:
        """Note that a callable ran ``module``, and what it returned."""
        self.modules.setdefault(number, set()).add(module)
        self._note_recipe(number, module)
        states, self._random_states = self._random_states, _random_states()
        if not all(map(torch.equal, states, self._random_states)):
            self._draws.add(number)
        for key in {storage_of(output) for output in tensors_in(outputs)} & self._buffers.keys():
            values, buffer = self._returned.setdefault(key, []), self._buffers[key]()
            if buffer is not None and (len(values) < 2 or torch.equal(*values)):
                values[1:] = [buffer.detach().to("cpu", copy=True)]  # the first value, and the last or another one

    def _note_recipe(self, number: int, module: torch.nn.Module) -> None:
        """Note the recipe of the capture's autocast if a module computes in FP8 in it."""
        manager = FP8GlobalStateManager
        is_of_capture = manager.get_autocast_state()[
            -1
        ]  # `fp8_graph_capturing` is also true in a module's own autocast
        if manager.is_fp8_enabled() and is_of_capture:
            recipe = manager.get_fp8_recipe()
            of_operations = (getattr(inner, "_fp8_metas", None) for inner in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            if quantizes and (recipe.fp8_dpa or not hasattr(module, "unfused_attention")):
                self.recipes[number] = recipe

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
        known, version_before = self._versions.get(id(tensor), (None, None))
        returned = self._returned.get(storage_of(tensor))
        is_same = known is not None and known() is tensor and version_before == version(tensor)
        return is_same and (returned is None or (len(returned) == 2 and torch.equal(*returned)))


class UsedMembers:
    """The modules that a captured forward ran, and the members that it looked up, as a profiler sees them.

    A lookup is ``module.name`` for any name that is no plain attribute, also if there is no such member. Its value is
    the parameter that was found, which is another one under `torch.func.functional_call`. ``all_of`` are
    modules whose members may all have been used, because an iteration or compiled code reads them without lookups.
    ``note_forward`` is called for each module that runs.
    """

    def __init__(self, note_forward: Callable[[torch.nn.Module], None]) -> None:
        self.lookups: dict[tuple[torch.nn.Module, str], torch.Tensor | None] = {}
        self.all_of: dict[torch.nn.Module, None] = {}
        self._ran: set[torch.nn.Module] = set()
        self._note_forward = note_forward
        self._reads_registries: dict[CodeType, bool] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note the call of a Python function."""
        code = frame.f_code
        if event != "call" or not code.co_argcount:
            return
        if code is _LOOKUP:
            module, name = frame.f_locals["self"], frame.f_locals["name"]
            self.lookups[module, name] = vars(module).get("_parameters", {}).get(name)
            return
        if code not in self._reads_registries:
            names = () if code in _SETTERS or code.co_filename == _ACCESSOR else code.co_names
            self._reads_registries[code] = not {"_modules", "_parameters"}.isdisjoint(names)
        if code.co_name == "forward" or self._reads_registries[code]:
            module = frame.f_locals.get(code.co_varnames[0])
            if not isinstance(module, torch.nn.Module):
                return
            if self._reads_registries[code]:
                self.all_of[module] = None
            if code.co_name == "forward":
                self._ran.add(module)
                self._note_forward(module)

    def complete(self, modules: Iterable[torch.nn.Module], ran_in_warmup: Collection[torch.nn.Module]) -> None:
        """Add to ``all_of`` each of ``modules`` whose use the profiler did not see."""
        seen = self._ran.union(module for module, _ in self.lookups)
        for module in modules:
            has_own_lookup = type(module).__getattr__ is not torch.nn.Module.__getattr__
            if has_own_lookup or _is_compiled(module) or (module in ran_in_warmup and module not in seen):
                self.all_of.update(dict.fromkeys(module.modules()))
            ran = {name for name, child in module._modules.items() if child in self._ran or child in ran_in_warmup}
            if any((module, name) not in self.lookups for name in ran):
                self.all_of[module] = None


class CallableTensors:
    """The ``members`` of one callable, and the tensors that its graphs read (``read``) or add to (``written``).

    ``parameters`` are inputs of the graphs. How a forward uses a parameter that it looked up cannot be seen, so each of
    them counts as read. So does a parameter in a plain attribute, such as a list, because its use is no lookup.
    """

    def __init__(self, function: Any, parameters: Iterable[torch.Tensor], used: UsedMembers) -> None:
        modules = [*dict.fromkeys([*modules_of(function), *(module for module, _ in used.lookups)])]
        plain = [value for module in modules for name, value in vars(module).items() if name not in _REGISTRIES]
        self.members = Members(modules, {*parameters, *_parameters_in(plain)}, used)
        held, names = self.members.parameters, self.members.names
        self.frozen = [parameter for parameter in held if parameter is not None and not parameter.requires_grad]
        fused = [module for module in modules if any(getattr(module, name, False) for name in FUSES_WGRADS)]
        weights = [weight for module in fused for weight in module.parameters(recurse=False) if weight.requires_grad]
        # A bias has a main_grad too, but a backward returns its gradient.
        weights = [weight for weight in weights if weight.dim() > 1 and _address(*_main_grad(weight))]
        self.fused = {*weights}.intersection(weight for weight in held if weight is not None)
        slots: list[Slot] = [(held, number, f"a parameter ({name})") for number, name in enumerate(names)]
        quantized = [(vars(parameter), part) for parameter in held if parameter is not None for part in QUANTIZED]
        slots += [(attributes, part, f"the {part} of a parameter") for attributes, part in quantized]
        self.read = Addresses(slots)
        self.written = Addresses((*_main_grad(weight), "the main_grad of a parameter") for weight in self.fused)


class Members:
    """The modules and parameters that a forward ``used`` or its graphs ``read``.

    They must be the same objects as at the capture. Others may be added, replaced or removed, because neither the graph
    nor its module uses them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], read: Collection[torch.Tensor], used: UsedMembers) -> None:
        iterated = [module for module in modules if module in used.all_of]
        self._iterated = [module._modules for module in iterated]
        self._iterated_at_capture = [*map(dict, self._iterated)]
        looked_up = [member for member in used.lookups if member[1] not in member[0]._parameters | member[0]._buffers]
        self._of_children, self._children = (
            [module._modules for module, _ in looked_up],
            [name for _, name in looked_up],
        )
        self._children_at_capture = [*map(dict.get, self._of_children, self._children)]
        slots = [(module, name, value) for module in modules for name, value in module._parameters.items()]
        slots = [
            (module, name, value)
            for module, name, value in slots
            if value in read
            or (
                (module in used.all_of or (module, name) in used.lookups)
                and used.lookups.get((module, name), value) is value
            )
        ]
        # A parameter may take a name without a member.
        slots += [(module, name, None) for module, name in looked_up if name not in module._modules]
        slots = [(module, name, value) for module, name, value in slots if value is None or value.numel()]
        self._registries = [module._parameters for module, _, _ in slots]
        self.names, self.parameters = [name for _, name, _ in slots], [value for _, _, value in slots]

    def require_same(self, callable_name: str) -> None:
        """Raise RuntimeError if a module or parameter was replaced, or added in place of None or of nothing."""
        parameters = [*map(dict.get, self._registries, self.names)]
        children = [*map(dict.get, self._of_children, self._children)]
        if (
            self._iterated == self._iterated_at_capture
            and all(map(is_, children, self._children_at_capture))
            and all(map(is_, parameters, self.parameters))
        ):
            return
        for registry, before in zip(self._iterated, self._iterated_at_capture, strict=True):
            for name in {**before, **registry}:
                if registry.get(name) is not before.get(name):
                    raise _moved(callable_name, f"a module ({name})")
        for name, child, then in zip(self._children, children, self._children_at_capture, strict=True):
            if child is not then:
                raise _moved(callable_name, f"a module ({name})")
        for name, parameter, then in zip(self.names, parameters, self.parameters, strict=True):
            if parameter is not then:
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


def _main_grad(weight: torch.Tensor) -> tuple[Any, str]:
    """Return the place of a ``main_grad``. A property has none but the object itself."""
    return (vars(weight) if "main_grad" in vars(weight) else _Properties(weight)), "main_grad"


class _Properties:
    """The properties of an object, which are read like the values of a dictionary."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name, None)


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


def _parameters_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, torch.nn.Parameter)]


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a profiler cannot see the Python code of a module."""
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def version(tensor: torch.Tensor) -> Any:
    """Return the number of in-place changes to a tensor; for an inference tensor, an object unlike all others."""
    return object() if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 if it has none, as an FP8 tensor that consists of other tensors."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and tensor.data_ptr() else 0


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
    """Return the module and its submodules, or [] if ``function`` is a plain function."""
    return [*function.modules()] if isinstance(function, torch.nn.Module) else []
