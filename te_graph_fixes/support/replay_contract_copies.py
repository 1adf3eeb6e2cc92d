"""Copies of sample arguments that several inputs share, and copies of modules without their graphs."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

CAPTURE_ATTRIBUTES = ("forward", "backward_dw", "reset", "__reduce_ex__", "__deepcopy__")
"""The attributes that a capture sets on a module."""


def with_own_inputs(
    sample_args: Sequence[Any],
    sample_kwargs: Sequence[Any],
    are_handed_on: bool,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> tuple[list[Any], list[Any]]:
    """Return sample arguments in which no two inputs share a tensor that needs a gradient.

    The first input keeps the tensor, and each other input gets a copy. If inputs ``are_handed_on`` between callables,
    inputs of different callables may share the tensor. A tensor without a gradient, such as a mask, stays shared,
    because it has the same values for all inputs. A parameter stays shared too, because no replay writes it.
    """
    seen: set[int] = set()
    samples = []
    for sample in zip(sample_args, sample_kwargs, strict=True):
        if are_handed_on:
            seen.clear()
        leaves, spec = flatten(sample)
        for i, leaf in enumerate(leaves):
            if getattr(leaf, "requires_grad", False) and not isinstance(leaf, torch.nn.Parameter):
                if leaf.data_ptr() in seen:
                    leaves[i] = leaf.detach().clone().requires_grad_()
                seen.add(leaf.data_ptr())
        samples.append(unflatten(leaves, spec))
    return [args for args, _ in samples], [kwargs for _, kwargs in samples]


def capture_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` that a capture sets, with their current values, or {} if there are none."""
    attributes = vars(module)
    return {name: attributes[name] for name in CAPTURE_ATTRIBUTES if name in attributes}


def drop_graph_from_copies(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Omit the graph from later copies of ``module``, because the graph reads the parameters of the original.

    ``before`` are the `capture_attributes` from before the capture. Instead of the attributes that the capture has set,
    a copy has these earlier attributes, such as a ``forward`` set by the program. Attributes that the program has set
    or deleted since the capture are copied as they are. `copy` and `pickle` call the methods that this function sets on
    the module. The ``__deepcopy__`` of a class is still called.
    """
    kind: Any = type(module)
    without_earlier_graph = getattr(before.get("__reduce_ex__"), "without_graph", dict)
    before = without_earlier_graph(before)

    def without_graph(attributes: dict[str, Any]) -> dict[str, Any]:
        of_graph = [name for name, value in of_capture.items() if attributes.get(name) is value]
        kept = {name: value for name, value in attributes.items() if name not in of_graph}
        return kept | {name: before[name] for name in of_graph if name in before}

    def reduce(protocol: int) -> Any:
        made = before["__reduce_ex__"](protocol) if "__reduce_ex__" in before else kind.__reduce_ex__(module, protocol)
        if isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict):
            made = (*made[:2], without_graph(made[2]), *made[3:])
        return made

    def deep_copy(memo: dict[int, Any]) -> Any:
        copied = before["__deepcopy__"](memo) if "__deepcopy__" in before else kind.__deepcopy__(module, memo)
        if copied is not module:
            memo[id(module)] = copied  # turns methods of the module into methods of the copy
            for name in CAPTURE_ATTRIBUTES:
                vars(copied).pop(name, None)
            vars(copied).update(copy.deepcopy(without_graph(capture_attributes(module)), memo))
        return copied

    reduce.without_graph = without_graph  # type: ignore[attr-defined]
    vars(module)["__reduce_ex__"] = reduce
    if hasattr(kind, "__deepcopy__") or "__deepcopy__" in before:
        vars(module)["__deepcopy__"] = deep_copy
    of_capture = capture_attributes(module)
