"""Compare the arguments of a replay with the sample arguments of its capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor

from ._te_replay_arguments_eager import EagerModule
from ._te_replay_arguments_values import SampleValue, holds_tensors, read_keywords, structure
from ._te_warn_once import warn_once

_CALL = torch.nn.Module.__call__


def _of(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor that a graph fixes: shape, ``requires_grad`` and dtype.

    The class of a quantized tensor stands for its dtype. For an argument that is not a tensor, return None, False and
    None.
    """
    if not isinstance(leaf, torch.Tensor):
        return None, False, None
    return leaf.shape, leaf.requires_grad, type(leaf) if isinstance(leaf, QuantizedTensor) else leaf.dtype


def _columns(properties: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the shapes, the values of ``requires_grad`` and the dtypes of all arguments, each as a tuple."""
    return [*zip(*properties, strict=True)] or [(), (), ()]


class SampleArguments:
    """The sample arguments of one graph: positional arguments, then keyword arguments in the order of ``keywords``."""

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keywords: list[str],
        is_training: bool,
    ) -> None:
        layer = getattr(function, "layer_number", None)
        self._graph = f"The graph of {type(function).__name__}{f', layer {layer},' if layer is not None else ''}"
        self._keywords, self._is_training = keywords, is_training
        self._function, self._reads, self._eager = function, read_keywords(function), EagerModule(function, keywords)
        positional, args_spec = tree_flatten(tuple(args))
        named, kwargs_spec = tree_flatten([kwargs[key] for key in keywords])
        leaves, self._specs = [*positional, *named], (args_spec, kwargs_spec)
        self._samples = [*map(_of, leaves)]
        self._values = {i: SampleValue(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._names = [f"positional argument {index}" for index in range(len(positional))]
        self._names += [f"keyword argument {key!r}" for key in keywords for _ in tree_flatten(kwargs[key])[0]]

    def check(self, call: Any) -> None:
        """Raise `TypeError` or `ValueError` if the arguments of a replay differ from the sample arguments.

        A tensor of another dtype causes an error only if it is quantized and the recipe is delayed scaling. Otherwise,
        the replay casts it. Outside of `torch.autocast`, a cast between other dtypes causes one warning for each
        combination of dtypes.
        """
        if (given := [*map(_of, call.inputs)]) != self._samples:
            self._compare(given, call)
        for index, sample in self._values.items():
            if not sample.is_value_of(call.inputs[index]):
                raise ValueError(
                    f"{self._graph} was captured with {sample.value!r} as {self._names[index]}, and got "
                    f"{call.inputs[index]!r}. A graph repeats the computation of its capture. Pass an equal value, or "
                    "capture again."
                )
        if call.specs[0] != self._specs[0] or (self._keywords and call.specs[1] != self._specs[1]):
            self._compare_structures(call.specs)
        if len(call.keywords) > len(self._keywords):
            for key, value in call.keywords.items():
                if key not in self._keywords and self._reads(key):
                    self._require_plain(key, value)

    def _compare(self, given: list[tuple[Any, ...]], call: Any) -> None:
        shapes, grads, dtypes = _columns(given)
        sample_shapes, sample_grads, sample_dtypes = _columns(self._samples)
        if shapes != sample_shapes and not self._broadcasts(shapes, grads, sample_shapes, call):
            raise (ValueError if len(shapes) == len(sample_shapes) else TypeError)(
                f"{self._graph} was captured for positional arguments, then keywords {self._keywords}, with tensors of "
                f"shapes {[shape and tuple(shape) for shape in sample_shapes]}, and got shapes "
                f"{[shape and tuple(shape) for shape in shapes]}. Pass arguments like the sample arguments, or "
                "capture again."
            )
        more = self._more_grads(call.inputs)
        is_used = any(more) and torch.is_grad_enabled() and self._eager.uses(call.inputs, call.specs, more)
        if is_used and self._is_training:
            raise ValueError(
                f"{self._graph} was captured for sample arguments with requires_grad {[*sample_grads]}, and got "
                f"{[*grads]}. Capture again: a graph computes the gradient of an input only if its sample argument had "
                "requires_grad=True."
            )
        others = [(n, d, s) for n, d, s in zip(self._names, dtypes, sample_dtypes, strict=True) if d is not s]
        delayed = FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().delayed()
        for name, dtype, sample in others:
            if isinstance(dtype, type) and delayed:
                raise ValueError(
                    f"{self._graph} was captured with a tensor in {sample} as {name}, and got a {dtype.__name__}. In "
                    "delayed scaling, the graph would quantize it again with another scale. Pass a tensor in high "
                    "precision, such as its dequantize()."
                )
        if any(not isinstance(dtype, type) for _, dtype, _ in others) and not torch.is_autocast_enabled():
            warn_once(
                f"{self._graph} was captured for inputs of {[*sample_dtypes]}, and got {[*dtypes]}. The graph casts "
                "them, but eager training may not. Capture it with sample arguments of these dtypes, or cast the "
                "inputs first."
            )

    def _broadcasts(
        self, shapes: Sequence[Any], grads: Sequence[bool], sample_shapes: Sequence[Any], call: Any
    ) -> bool:
        """Return whether the module computes the same values if its inputs are broadcast to the sample shapes."""
        if len(shapes) != len(sample_shapes):
            return False
        takes_grads = self._is_training and torch.is_grad_enabled()
        for shape, needs_grad, sample in zip(shapes, grads, sample_shapes, strict=True):
            if shape != sample and (shape is None or sample is None or (takes_grads and needs_grad)):
                return False  # autograd would sum the gradient of the graph in another order than the module
        return bool(self._eager.broadcasts(call.inputs, call.specs, sample_shapes))

    def _more_grads(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        """Return, for each input, whether it needs a gradient although its sample argument needed none."""
        return tuple(_of(leaf)[1] and not sample[1] for leaf, sample in zip(leaves, self._samples, strict=True))

    def _compare_structures(self, specs: tuple[Any, Any]) -> None:
        given, sample = (
            [structure(tree_unflatten([None] * spec.num_leaves, spec)) for spec in pair]
            for pair in (specs, self._specs)
        )
        if given != sample:
            raise ValueError(
                f"{self._graph} was captured for arguments with the structure {self._specs}, and got {specs}. "
                "Pass arguments like the sample arguments, with dict keys in the same order, or capture again."
            )

    def _require_plain(self, key: str, value: Any) -> None:
        """Raise ValueError for an ignored keyword argument that is or holds a tensor.

        For a module with a `__call__` of its own that was captured without keywords, a tensor only causes a warning.
        Megatron's layers have such a `__call__`, so the capture ran another function than `forward`. Megatron captures
        layers without attention with only their hidden states, but then passes its attention mask to them.
        """
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        own_call = isinstance(self._function, torch.nn.Module) and type(self._function).__call__ is not _CALL
        if is_tensor and own_call and not self._keywords:
            warn_once(
                f"{self._graph} got the tensor {key!r}, which is not in sample_kwargs. A replay ignores it, and uses "
                "the values of the capture. If the module reads it, add it to sample_kwargs.",
                f"ignored {key}",
            )
        elif holds_tensors(value):
            raise ValueError(
                f"{self._graph} got the keyword argument {key!r}, which {'is' if is_tensor else 'holds'} a tensor but "
                "is not in sample_kwargs. A replay would ignore it, and use the values of the capture. Add "
                f"{'it' if is_tensor else 'each of its tensors'} to sample_kwargs as an argument of its own, or do "
                "not pass it."
            )

    def need_more_grads(self, leaves: Sequence[Any]) -> bool:
        """Return whether the module uses an input that needs a gradient although its sample argument needed none."""
        return bool(self._eager.answers and self._eager.answers.get(self._more_grads(leaves)))
