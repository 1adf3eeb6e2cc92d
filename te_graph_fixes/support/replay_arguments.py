"""Compare the arguments of a replay with the sample arguments of its capture."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._te_warn_once import warn_once

_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.nn.Module, torch.nn.Parameter)
"""Types of keyword arguments that hold no tensors, or only tensors that the graph reads anyway."""


def _of(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor that a graph fixes: shape, ``requires_grad`` and dtype.

    All three are empty for any other argument.
    """
    return (leaf.shape, leaf.requires_grad, leaf.dtype) if isinstance(leaf, torch.Tensor) else (None, False, None)


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes and slots of an object, or {} if it has none."""
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return {name: getattr(value, name, None) for name in names} | getattr(value, "__dict__", {})


def _holds_tensors(value: Any, is_field: bool = False) -> bool:
    """Return whether a value is a tensor, or a container or an object that holds one."""
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        return not is_field and any(_holds_tensors(field, True) for field in _fields(value).values())
    return any(_holds_tensors(item, is_field) for item in value)


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are known to be equal. Tensors are equal only if they are the same object."""
    if value is other:
        return True
    try:
        result = value == other
        return bool(result.all() if hasattr(result, "all") else result) and not isinstance(value, torch.Tensor)
    except Exception:  # such as an array of another shape
        return False


class _Value:
    """A sample argument that is no tensor, with the attributes that it had in the capture."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._fields = {} if isinstance(value, _PLAIN) else _fields(value)

    def is_value_of(self, other: Any) -> bool:
        if other is self.value or (self._fields and type(other) is type(self.value)):
            fields = _fields(other) if self._fields else {}
            return fields.keys() == self._fields.keys() and all(
                _is_equal(fields[name], self._fields[name]) for name in fields
            )
        return _is_equal(other, self.value)


def _structure(value: Any) -> Any:
    """Return the nesting of arguments whose tensors were replaced by None.

    Containers have equal structures if a callable finds the same tensors at the same indexes and keys.
    """
    if isinstance(value, dict):
        return [(key, _structure(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [*map(_structure, value)]
    return None if value is None else object()


def refuse_backward(_ctx: Any) -> None:
    """Refuse the backward of a graph without one."""
    raise RuntimeError(
        "This graph was captured for a forward alone: under torch.no_grad(), or with outputs that need no gradient"
    )


class SampleArguments:
    """The sample arguments of one graph: positional arguments, then the ``keywords``, in this order.

    ``outputs`` and ``grad_outputs`` are the static outputs of the graph and their gradients. The gradients are None
    if no backward was captured.
    """

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keywords: list[str],
        is_training: bool,
        outputs: Sequence[Any],
        grad_outputs: Sequence[Any] | None,
    ) -> None:
        layer = getattr(function, "layer_number", None)
        self._graph = f"The graph of {type(function).__name__}{f', layer {layer},' if layer is not None else ''}"
        self._keywords, self._is_training = keywords, is_training
        positional, args_spec = tree_flatten(tuple(args))
        named, kwargs_spec = tree_flatten([kwargs[key] for key in keywords])
        self._specs = (args_spec, kwargs_spec)
        leaves = [*positional, *named]
        self._samples = [*map(_of, leaves)]
        self._values = {index: _Value(leaf) for index, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._names = [f"positional argument {index}" for index in range(len(positional))]
        self._names += [f"keyword argument {key!r}" for key in keywords for _ in tree_flatten(kwargs[key])[0]]
        # A capture under no_grad does not show which outputs need a gradient in grad mode.
        is_known = torch.is_grad_enabled()
        needs_grad = [getattr(output, "requires_grad", False) for output in outputs]
        if grad_outputs is not None:
            needs_grad = [grad is not None for grad in grad_outputs]
        self._without_grad = [index for index, needs in enumerate(needs_grad) if is_known and not needs]

    def add_to(self, replay: Any) -> None:
        """Add the steps to the replays of the graph."""
        replay.add("forward check", "arguments", self.check)
        if self._without_grad:
            replay.add("forward record", "outputs without gradients", self.mark_outputs)

    def check(self, call: Any) -> None:
        """Raise `TypeError` or `ValueError` if the arguments of a replay differ from the sample arguments.

        The replay casts tensors of another dtype, with one warning for each combination (none in `torch.autocast`).
        """
        given = [*map(_of, call.inputs)]
        if given != self._samples:
            self._compare(given)
        for index, sample in self._values.items():
            if not sample.is_value_of(call.inputs[index]):
                raise ValueError(
                    f"{self._graph} was captured with {sample.value!r} as {self._names[index]}, and got "
                    f"{call.inputs[index]!r}. A graph repeats the computation of its capture. Pass an equal value, or "
                    "capture again."
                )
        if call.specs != self._specs:
            self._compare_structures(call.specs)
        if len(call.keywords) > len(self._keywords):
            for key in call.keywords.keys() - set(self._keywords):
                self._require_plain(key, call.keywords[key])

    def _compare(self, given: list[tuple[Any, ...]]) -> None:
        shapes, sample_shapes = ([shape for shape, _, _ in leaves] for leaves in (given, self._samples))
        if shapes != sample_shapes:
            raise (ValueError if len(shapes) == len(sample_shapes) else TypeError)(
                f"{self._graph} was captured for positional arguments, then keywords {self._keywords}, with tensors of "
                f"shapes {[shape and tuple(shape) for shape in sample_shapes]}, and got shapes "
                f"{[shape and tuple(shape) for shape in shapes]}. Pass arguments like the sample arguments, or "
                "capture again."
            )
        grads, sample_grads = ([bool(grad) for _, grad, _ in leaves] for leaves in (given, self._samples))
        more = any(grad and not sample for grad, sample in zip(grads, sample_grads, strict=True))
        if more and self._is_training and torch.is_grad_enabled():
            raise ValueError(
                f"{self._graph} was captured for sample arguments with requires_grad {sample_grads}, and got "
                f"{grads}. Capture again: a graph computes the gradient of an input only if its sample argument had "
                "requires_grad=True."
            )
        dtypes, sample_dtypes = ([dtype for _, _, dtype in leaves] for leaves in (given, self._samples))
        if dtypes != sample_dtypes:
            if torch.is_autocast_enabled():
                return
            warn_once(
                f"{self._graph} was captured for inputs of {sample_dtypes}, and got {dtypes}. It casts them, but "
                "eager training may not. Capture it with sample arguments of these dtypes, or cast the inputs first."
            )

    def _compare_structures(self, specs: tuple[Any, Any]) -> None:
        structures = [
            [_structure(tree_unflatten([None] * spec.num_leaves, spec)) for spec in pair]
            for pair in (specs, self._specs)
        ]
        if structures[0] != structures[1]:
            raise ValueError(
                f"{self._graph} was captured for arguments with the structure {self._specs}, and got {specs}. "
                "Pass arguments like the sample arguments, with dict keys in the same order, or capture again."
            )

    def _require_plain(self, key: str, value: Any) -> None:
        if _holds_tensors(value):
            raise ValueError(
                f"{self._graph} got the keyword argument {key!r}, which is or holds a tensor but is not in "
                "sample_kwargs. A replay would ignore it, and use the values of the capture. Add each of its tensors "
                "to sample_kwargs as an argument of its own, or do not pass it."
            )

    def mark_outputs(self, ctx: Any, outputs: Sequence[Any]) -> None:
        """Tell autograd which outputs need no gradient: those that needed none in the capture."""
        pairs = zip(ctx.call.inputs, self._samples, strict=False)
        if not any(_of(value)[1] and not needs_grad for value, (_, needs_grad, _) in pairs):
            ctx.mark_non_differentiable(*[outputs[index] for index in self._without_grad])
