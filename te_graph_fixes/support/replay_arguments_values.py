"""Compare arguments that are not tensors, and decide whether a graph may ignore a keyword argument."""

import dis
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.nn.Module, torch.nn.Parameter)
"""Types of keyword arguments that hold no tensors, or only tensors that the graph reads anyway."""


class SampleValue:
    """A sample argument that is not a tensor, with the attributes that it had in the capture."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._fields = {} if isinstance(value, _PLAIN) else fields_of(value)

    def is_value_of(self, other: Any) -> bool:
        """Return whether ``other`` equals the value of the capture. Tensors in attributes must be the same objects."""
        if other is self.value or (self._fields and type(other) is type(self.value)):
            fields = fields_of(other) if self._fields else {}
            return fields.keys() == self._fields.keys() and all(
                _is_equal(fields[name], self._fields[name]) for name in fields
            )
        return _is_equal(other, self.value)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes and slots of an object, or {} if it has none."""
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return {name: getattr(value, name, None) for name in names} | getattr(value, "__dict__", {})


def holds_tensors(value: Any, is_field: bool = False) -> bool:
    """Return whether a value is a tensor, or a container or an object that holds a tensor.

    Parameters and modules do not count, because the graph reads them anyway. If ``is_field`` is true, the value is an
    attribute of another object, and its own attributes are not searched.
    """
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        return not is_field and any(holds_tensors(field, True) for field in fields_of(value).values())
    return any(holds_tensors(item, is_field) for item in value)


def structure(value: Any) -> Any:
    """Return the nesting of arguments as lists. In ``value`` and in the result, None stands for each tensor.

    Structures are equal if a callable finds the same tensors at the same indexes and keys.
    """
    if isinstance(value, dict):
        return [(key, structure(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [*map(structure, value)]
    return None if value is None else object()


def read_keywords(function: Any) -> Callable[[str], bool]:
    """Return a function that maps the name of a keyword argument to whether ``function`` may read this argument.

    A forward reads only the parameters that its bytecode loads. For example, a Mamba layer never loads its mask. A
    forward that is not a Python function, or that calls `locals` or the like, may read every argument.
    """
    own = getattr(function, "__dict__", {}).get("forward", getattr(type(function), "forward", function))
    code = getattr(inspect.unwrap(own) if callable(own) else None, "__code__", None)
    if code is None or {"locals", "vars", "eval", "exec"} & {*code.co_names}:
        return lambda name: True
    count = code.co_argcount + code.co_kwonlyargcount
    named, rest = code.co_varnames[:count], None
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = code.co_varnames[count + bool(code.co_flags & inspect.CO_VARARGS)]
    loaded = {*code.co_cellvars, None}
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_"):
            loaded |= {*instruction.argval} if isinstance(instruction.argval, tuple) else {instruction.argval}
    return lambda name: (name if name in named else rest) in loaded


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are known to be equal. Tensors are equal only if they are the same object."""
    if value is other:
        return True
    try:
        result = value == other
        return bool(result.all() if hasattr(result, "all") else result) and not isinstance(value, torch.Tensor)
    except Exception:  # for example, NumPy arrays of different shapes
        return False
