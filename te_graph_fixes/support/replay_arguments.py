"""Compare the arguments of a replay with the sample arguments of its capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ._te_warn_once import warn_once


def _of(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of an argument that a graph fixes: shape, ``requires_grad`` and dtype."""
    return getattr(leaf, "shape", None), getattr(leaf, "requires_grad", False), getattr(leaf, "dtype", None)


class SampleArguments:
    """The sample arguments of one graph: positional arguments, then the ``keywords``, in this order."""

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
        """Raise `TypeError` or `ValueError` if the ``leaves`` of a replay's arguments differ from the sample arguments.

        The replay casts tensors of another dtype, with one warning for each combination (none in `torch.autocast`).
        """
        given = [*map(_of, leaves)]
        if given != self._samples:
            self._compare(given)
        if self._specs is not None and self._specs != specs:
            raise ValueError(
                f"{self._graph} was captured for arguments with the structure {self._specs}, and got {specs}. "
                "Pass arguments like the sample arguments, with dict keys in the same order, or capture again."
            )

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
