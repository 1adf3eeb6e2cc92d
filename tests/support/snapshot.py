"""A snapshot of all state that is reachable from some objects, for tests that compare it before and after an event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_STATE = (*_PLAIN, list, dict, torch.Tensor)
_MODULES = ("transformer_engine", "torch.nn", "weakref", "collections", "__main__", "tests")


def snapshot(*roots: Any) -> dict[str, Any]:
    """Return the values, versions and identities of everything reachable from ``roots``, by path."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    pending = [(str(number), root) for number, root in enumerate(roots)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, _PLAIN):
            found[path] = value
            continue
        found[path] = (id(value), _content(value))
        if id(value) not in seen:
            seen[id(value)] = value
            pending += [(f"{path}{name}", part) for name, part in _parts(value)]
    found["alive"] = [*seen.values()]  # keeps all objects alive, so that no id is used again
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the paths whose values differ, or [] if all values are equal."""
    paths = sorted((before.keys() | after.keys()) - {"alive"})
    return [path for path in paths if before.get(path, "none") != after.get(path, "none")]


def _content(value: Any) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        version = None if value.is_inference() else value._version
        return version, str(value.detach().flatten().tolist())
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    return len(value) if isinstance(value, (dict, list, tuple, deque, set, frozenset)) else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{_name(key)}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"[{_name(part)}]", part) for part in value)
    elif isinstance(value, partial):
        yield from (("()", part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield ".self", value.__self__
    elif isinstance(value, FunctionType):
        if value.__module__.startswith(_MODULES):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield f"<{name}>", cell.cell_contents
    else:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        if value.__name__ == "FP8GlobalStateManager":
            yield from ((f".{name}", part) for name, part in vars(value).items() if isinstance(part, _STATE))
    elif isinstance(value, torch.Tensor):
        yield from ((f".{name}", part) for name, part in vars(value).items())
        if isinstance(value, torch.nn.Parameter):
            yield ".grad", value.grad
    elif isinstance(value, torch.nn.Module) or type(value).__module__.startswith(_MODULES):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        yield from (
            (f".{name}", getattr(value, name)) for name in slots if name != "__weakref__" and hasattr(value, name)
        )
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _name(key: Any) -> str:
    return str(key) if isinstance(key, _PLAIN) else f"{type(key).__name__} {id(key)}"
