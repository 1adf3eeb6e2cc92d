"""Refuses arguments of a replay that are not such as the samples which its graph was captured for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ._te_warn_once import warn_once


def _of(leaf: Any) -> tuple[Any, ...]:
    """The properties of an argument that its graph has fixed; it need not be a tensor."""
    return getattr(leaf, "shape", None), getattr(leaf, "requires_grad", False), getattr(leaf, "dtype", None)


class SampleArguments:
    """The samples of a ``function``'s graph: in positional arguments, then in those of ``keywords``, in this order."""

    def __init__(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], keywords: list[str], is_training: bool
    ) -> None:
        layer = getattr(function, "layer_number", None)
        self._graph = f"The graph of {type(function).__name__}{f', layer {layer},' if layer is not None else ''}"
        self._keywords, self._is_training = keywords, is_training
        positional, args_spec = tree_flatten(tuple(args))
        named, kwargs_spec = tree_flatten([kwargs[key] for key in keywords])
        plain = all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        self._specs = None if plain else (args_spec, kwargs_spec)
        self._samples = [*map(_of, (*positional, *named))]

    def check(self, leaves: Sequence[Any], *specs: Any) -> None:
        """Raise `TypeError` or `ValueError` where the ``leaves`` of a replay's arguments are not such as the samples.

        Other dtypes, which the replay casts, are warned of, once for each combination; `torch.autocast` asks for them.
        """
        given = [*map(_of, leaves)]
        if given != self._samples:
            self._compare(given)
        if self._specs is not None and self._specs != specs:
            raise ValueError(
                f"{self._graph} was captured for arguments in the structure {self._specs}; it was given {specs}. "
                "Pass what its samples were, the keys of dicts in the same order, or capture again"
            )

    def _compare(self, given: list[tuple[Any, ...]]) -> None:
        shapes, sample_shapes = ([shape for shape, _, _ in leaves] for leaves in (given, self._samples))
        if shapes != sample_shapes:
            raise (ValueError if len(shapes) == len(sample_shapes) else TypeError)(
                f"{self._graph} was captured for positional arguments, then keywords {self._keywords}, with tensors of "
                f"shapes {[shape and tuple(shape) for shape in sample_shapes]}; it was given shapes "
                f"{[shape and tuple(shape) for shape in shapes]}. Pass what its samples were, or capture again"
            )
        grads, sample_grads = ([bool(grad) for _, grad, _ in leaves] for leaves in (given, self._samples))
        more = any(grad and not sample for grad, sample in zip(grads, sample_grads, strict=True))
        if more and self._is_training and torch.is_grad_enabled():
            raise ValueError(
                f"{self._graph} was captured for samples whose requires_grad is {sample_grads}; it was given {grads}. "
                "Capture again: an input gets its gradient from a graph only if its sample had requires_grad=True"
            )
        dtypes, sample_dtypes = ([dtype for _, _, dtype in leaves] for leaves in (given, self._samples))
        if dtypes != sample_dtypes:
            if torch.is_autocast_enabled():
                return
            warn_once(
                f"{self._graph} was captured for inputs of {sample_dtypes} and is given {dtypes}: it casts them, where "
                "eager training may not. Capture it with samples of these dtypes, or cast the inputs before"
            )
