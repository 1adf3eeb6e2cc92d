"""The modules and tensors of a callable that its graphs use, and the check that they are the same as at the capture."""

import functools
import sys
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from operator import eq, is_
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch.nn.utils import _named_member_accessor

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors of FP8 parameters, except their transposes, which may be recomputed."""
FUSES_WGRADS = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The module attributes that make a backward add wgrads to the ``main_grad`` of weights."""

LOOKUP = torch.nn.Module.__getattr__.__code__
_ITEM = torch.nn.ModuleDict.__getitem__.__code__
_ACCESSOR = _named_member_accessor.__file__
"""The file of torch that exchanges parameters during a call of `torch.func.functional_call`."""
_SETTERS = (torch.nn.Module.__setattr__.__code__, torch.nn.Module.__delattr__.__code__)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class UsedMembers:
    """The members of modules that a captured forward used, as a profiler sees them.

    A lookup is ``module.name`` for any name that is not a plain attribute, even if the lookup fails, or an item of a
    `ModuleDict`. ``whole`` are modules whose members may all have been used, because an iteration or compiled code
    reads them without lookups. ``note_forward`` is called for each module that runs.
    """

    def __init__(self, note_forward: Callable[[torch.nn.Module], None]) -> None:
        self.lookups: dict[tuple[torch.nn.Module, str], int] = {}  # the id of the found parameter, or of None
        self.whole: set[torch.nn.Module] = set()
        self._ran: set[torch.nn.Module] = set()
        self._is_recorded = False
        self._note_forward = note_forward

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the members that a forward uses, unless a profiler is active or `Module.__getattr__` was replaced."""
        self._is_recorded = sys.getprofile() is None and LOOKUP.co_varnames[:2] == ("self", "name")
        if self._is_recorded:
            sys.setprofile(self._note)
        try:
            yield
        finally:
            if self._is_recorded:
                sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call of a Python function that looks up a member, reads all members of a module, or runs a module."""
        code = frame.f_code
        if event != "call" or not code.co_argcount:
            return
        if code in (LOOKUP, _ITEM):
            module, name = frame.f_locals["self"], frame.f_locals["name" if code is LOOKUP else "key"]
            self.lookups[module, name] = id(vars(module).get("_parameters", {}).get(name))
        elif (runs := code.co_name == "forward") | (reads := _reads_registries(code) and not _is_for_a_fix(frame)):
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, torch.nn.Module):
                if reads:
                    self.whole.add(module)
                if runs:
                    self._ran.add(module)
                    self._note_forward(module)

    def complete(self, modules: Iterable[torch.nn.Module], ran_in_warmup: set[torch.nn.Module]) -> None:
        """Add to ``whole`` each of ``modules`` whose use the profiler did not see."""
        seen = self._ran.union(module for module, _ in self.lookups)
        for module in modules:
            if not self._is_recorded:
                self.whole.add(module)
            has_own_lookup = type(module).__getattr__ is not torch.nn.Module.__getattr__
            if has_own_lookup or _is_compiled(module) or (module in ran_in_warmup and module not in seen):
                self.whole.update(module.modules())
            ran = {name for name, child in module._modules.items() if child in self._ran or child in ran_in_warmup}
            if any((module, name) not in self.lookups for name in ran):
                self.whole.add(module)

    def include(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether the forward used, or may have used, the parameter ``name`` of ``module``.

        Under `torch.func.functional_call`, a lookup finds another parameter than the module has after the call. The
        module's own parameter was then not used.
        """
        found = self.lookups.get((module, name))
        return module in self.whole if found is None else found == id(module._parameters.get(name))


@functools.cache
def _reads_registries(code: CodeType) -> bool:
    """Return whether a function reads the members of modules without a lookup."""
    if code in _SETTERS or code.co_filename == _ACCESSOR:
        return False
    return not {"_modules", "_parameters"}.isdisjoint(code.co_names)


def _is_for_a_fix(frame: FrameType) -> bool:
    """Return whether a support module, not the forward, asks torch for the members of a module."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == LOOKUP.co_filename:
        caller = caller.f_back
    return caller is not None and "._te_" in caller.f_globals.get("__name__", "")


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a profiler cannot see the Python code of a module."""
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


class CallableTensors:
    """The members and tensors of a callable that its graphs use. The graphs add to the ``main_grad`` of ``fused``.

    The members must be the same objects as at the capture. Other members may be added, replaced or removed, because
    neither the graphs nor the module use them. ``returned`` maps the parameters that are inputs of the graphs to the
    gradients that the dgrad returns. A parameter counts as read if the forward looked it up, because its later use
    cannot be seen. A parameter in a plain attribute, such as a list, counts as read too, because its use needs no
    lookup. ``backward_dw`` adds to ``main_grad`` if wgrads are delayed, else the backward does.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        returned: dict[torch.Tensor, torch.Tensor | None],
        used: UsedMembers,
        delays_wgrad: bool,
    ) -> None:
        modules = [*dict.fromkeys([*modules, *(module for module, _ in used.lookups)])]
        plain = [value for module in modules for name, value in vars(module).items() if name not in _REGISTRIES]
        inputs = {
            *returned,
            *(tensor for tensor in tensors_in(plain, modules) if isinstance(tensor, torch.nn.Parameter)),
        }
        whole = [module for module in modules if module in used.whole]
        parameters = [
            (module._parameters, name, value)
            for module in modules
            for name, value in module._parameters.items()
            if (value in inputs or used.include(module, name)) and (value is None or value.numel())
        ]
        # A module or a parameter may later be registered under a name that the forward looked up without success.
        others = [(module, name) for module, name in used.lookups if name not in module._parameters | module._buffers]
        children = [*others, *((module, name) for module in whole for name in module._modules)]
        names = [(registry, name, f"a parameter ({name})") for registry, name, _ in parameters]
        names += [(module._modules, name, f"a module ({name})") for module, name in children]
        names += [(m._parameters, name, f"a parameter ({name})") for m, name in others if name not in m._modules]
        lists = [(module._modules, "", f"a module in {type(module).__name__}") for module in whole]

        held = [(value, name) for _, name, value in parameters if value is not None]
        parts = [(value, part, f"the {part} of a parameter") for value, _ in held for part in QUANTIZED]
        fuses = [module for module in modules if any(getattr(module, name, False) for name in FUSES_WGRADS)]
        may_fuse = {weight for module in fuses for weight in module.parameters(recurse=False)}
        self.frozen = [value for value, _ in held if not value.requires_grad]
        self.fused = {
            value for value, _ in held if value.requires_grad and _is_fused(value, returned.get(value), may_fuse)
        }
        main_grads = [(value, "main_grad", "the main_grad of a parameter") for value in self.fused]
        # A tensor that consists of other tensors, such as an FP8 weight, has no address.
        with_address = [(value, "", f"a parameter ({name})") for value, name in held if value.data_ptr()]
        members = [
            _Slots(names, lambda registries, keys: map(dict.get, registries, keys), is_),
            _Slots(lists, lambda registries, _: map(len, registries), eq),
        ]
        read = [
            _Slots(with_address, lambda tensors, _: map(torch.Tensor.data_ptr, tensors), eq),
            _Slots([slot for slot in parts if _has_address(*slot[:2])], _addresses_of_attributes, eq),
        ]
        written = [_Slots(main_grads, _addresses_of_attributes, eq)]
        self.of_forward = [*filter(len, members + read)]
        self.of_backward = [*filter(len, read if delays_wgrad else read + written)]
        self.of_wgrad = [*filter(len, written)]


class _Slots:
    """Members or addresses, each with its owner, key and name, that must be the same as at the capture."""

    def __init__(
        self,
        slots: Iterable[tuple[Any, str, str]],
        read: Callable[[Iterable[Any], Iterable[str]], Iterator[Any]],
        is_same: Callable[[Any, Any], bool],
    ) -> None:
        self._read, self._is_same, slots = read, is_same, [*slots]
        self._owners, self._keys, self._names = ([slot[field] for slot in slots] for field in range(3))
        self._at_capture = [*read(self._owners, self._keys)]

    def __len__(self) -> int:
        return len(self._names)

    def require_same(self, callable_name: str) -> None:
        """Raise RuntimeError if a member or address is missing, or differs from the capture."""
        are_same: list[bool] = []
        try:
            are_same += map(self._is_same, self._read(self._owners, self._keys), self._at_capture)
            if all(are_same):
                return
        except (AttributeError, TypeError, RuntimeError):  # a tensor is missing
            are_same.append(False)
        raise RuntimeError(
            f"{callable_name}: {self._names[are_same.index(False)]} was added, replaced, moved or resized after this "
            "graph was captured, but the graph uses the tensor of the capture. Copy into it in place, or capture again."
        )


def _addresses_of_attributes(owners: Iterable[Any], names: Iterable[str]) -> Iterator[int]:
    return map(torch.Tensor.data_ptr, map(getattr, owners, names))


def _has_address(owner: Any, name: str) -> bool:
    tensor = getattr(owner, name, None)
    return isinstance(tensor, torch.Tensor) and tensor.data_ptr() != 0


def _is_fused(weight: torch.Tensor, grad: torch.Tensor | None, may_fuse: set[torch.Tensor]) -> bool:
    """Return whether the backward added the wgrad of ``weight`` to its ``main_grad``.

    In this case, the dgrad returned a dummy and set ``grad_added_to_main_grad``, or it returned no ``grad``. A delayed
    wgrad has no ``grad`` either, so ``weight`` must then be in ``may_fuse``, the weights of modules that fuse wgrads.
    """
    is_marked = bool(getattr(weight, "grad_added_to_main_grad", False))
    return _has_address(weight, "main_grad") and (is_marked or (grad is None and weight in may_fuse))


def tensors_in(value: Any, skipped: Iterable[torch.nn.Module] = ()) -> list[torch.Tensor]:
    """Return the tensors in nested containers, partial functions, and attributes of dataclasses and modules.

    The ``skipped`` modules and all hooks are not searched.
    """
    found: dict[int, Any] = {id(module): module for module in skipped}
    rest = [value]
    while rest:
        value = rest.pop()
        if id(value) in found:
            continue
        parts = _parts(value)
        if parts or isinstance(value, torch.Tensor):
            found[id(value)] = value
            rest += parts
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def _parts(value: Any) -> Collection[Any]:
    """Return the values that a container or an object holds, or () for any other value."""
    if isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, (dict, UserDict, MappingProxyType)):  # other mappings may load their values
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, torch.nn.Module):
        return [part for name, part in vars(value).items() if "_hooks" not in name]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()
