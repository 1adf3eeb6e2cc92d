"""Copies where a capture would share memory: of its samples, for each input, and of modules, without their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

OF_A_CAPTURE = ("forward", "backward_dw", "reset", "__reduce_ex__", "__deepcopy__")
"""The attributes that a capture sets on a module."""


def with_own_inputs(
    sample_args: Sequence[Any],
    sample_kwargs: Sequence[Any],
    are_handed_on: bool,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> tuple[list[Any], list[Any]]:
    """The samples of a capture, where a tensor that takes a gradient has a copy for each input that it is given as.

    Inputs of several callables stay one tensor where they ``are_handed_on``. Tensors that need no gradient, as masks,
    have the same values for all in each step. Parameters are not written.
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


def let_copies_be_eager(module: torch.nn.Module) -> None:
    """Have copies of ``module`` be without its graph, which reads the parameters of the original.

    `copy` and `pickle` ask the module itself how it is copied, and this is all that is set. A class that makes deep
    copies in a way of its own goes on to do so.
    """
    kind: Any = type(module)

    def reduce(protocol: int) -> Any:
        made = kind.__reduce_ex__(module, protocol)
        if isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict):
            state = {name: value for name, value in made[2].items() if name not in OF_A_CAPTURE}
            made = (*made[:2], state, *made[3:])
        return made

    def deep_copy(memo: dict[int, Any]) -> Any:
        copied = kind.__deepcopy__(module, memo)
        if copied is not module:
            for name in OF_A_CAPTURE:
                vars(copied).pop(name, None)
        return copied

    vars(module)["__reduce_ex__"] = reduce
    if hasattr(kind, "__deepcopy__"):
        vars(module)["__deepcopy__"] = deep_copy
