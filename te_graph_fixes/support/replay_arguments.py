"""Compare the arguments of a replay with the sample arguments of its capture, and check the outputs of a capture."""

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


def _properties(leaves: Sequence[Any]) -> tuple[list[Any], list[bool], list[Any]]:
    """Return three lists of properties that a graph fixes: the shapes, each ``requires_grad``, and the dtypes.

    The class of a quantized tensor stands for its dtype. The lists contain None, False and None for an argument that is
    not a tensor.
    """
    tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return (
        [None if tensor is None else tensor.shape for tensor in tensors],
        [tensor is not None and tensor.requires_grad for tensor in tensors],
        [type(tensor) if isinstance(tensor, QuantizedTensor) else getattr(tensor, "dtype", None) for tensor in tensors],
    )


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
        self._properties = _properties(leaves)
        self._values = {i: SampleValue(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._names = [f"positional argument {index}" for index in range(len(positional))]
        self._names += [f"keyword argument {key!r}" for key in keywords for _ in tree_flatten(kwargs[key])[0]]

    def check(self, call: Any) -> None:
        """Raise `TypeError` or `ValueError` if the arguments of a replay differ from the sample arguments.

        A tensor of another dtype causes an error only if it is quantized and the recipe is delayed scaling. Otherwise,
        the replay casts it. Outside of `torch.autocast`, the cast of a tensor that is not quantized causes a warning,
        once for each class of modules, layer number and combination of dtypes.
        """
        if (given := _properties(call.inputs)) != self._properties:
            self._compare(*given, call)
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

    def _compare(self, shapes: list[Any], grads: list[bool], dtypes: list[Any], call: Any) -> None:
        sample_shapes, sample_grads, sample_dtypes = self._properties
        if shapes != sample_shapes and not self._broadcasts(shapes, grads, sample_shapes, call):
            raise (ValueError if len(shapes) == len(sample_shapes) else TypeError)(
                f"{self._graph} was captured for tensors of shapes "
                f"{[shape and tuple(shape) for shape in sample_shapes]}, and got shapes "
                f"{[shape and tuple(shape) for shape in shapes]}. Positional arguments come first, then "
                f"the keywords {self._keywords}. Pass arguments like the sample arguments, or capture again."
            )
        more = self._more_grads(grads)
        is_used = any(more) and torch.is_grad_enabled() and self._eager.uses(call.inputs, call.specs, more)
        if is_used and self._is_training:
            raise ValueError(
                f"{self._graph} was captured for sample arguments with requires_grad {sample_grads}, and got "
                f"{grads}. Capture again: a graph computes the gradient of an input only if its sample argument had "
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
                f"{self._graph} was captured for inputs of {sample_dtypes}, and got {dtypes}. The graph casts "
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
                return False  # autograd would sum this input's gradient in another order than eager training
        return bool(self._eager.broadcasts(call.inputs, call.specs, sample_shapes, takes_grads))

    def _more_grads(self, grads: Sequence[bool]) -> tuple[bool, ...]:
        """Return, for each input, whether it needs a gradient although its sample argument needed none."""
        return tuple(grad and not sample for grad, sample in zip(grads, self._properties[1], strict=True))

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
        Megatron's layers have such a `__call__`, so the capture ran another function than `forward`. For a layer
        without attention, Megatron's only sample argument is the hidden states, but replays also get an attention mask.
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
        return bool(self._eager.answers and self._eager.answers.get(self._more_grads(_properties(leaves)[1])))


def refuse_quantized_outputs(function: Any, outputs: Sequence[Any], reuses_buffers: bool) -> None:
    """Raise ValueError for a training graph with quantized outputs, because TE would quantize their gradients too.

    A quantized output without a gradient causes an error only if TE ``reuses_buffers``, because TE then loses the
    output's scale.
    """
    quantized = [output for output in outputs if isinstance(output, QuantizedTensor)]
    # In TE 2.14 to 2.17, `requires_grad` of a quantized output is False even if autograd has recorded the output.
    if any(output.grad_fn is not None or reuses_buffers for output in quantized):
        raise ValueError(
            f"{type(function).__name__} returns a quantized tensor, as with fp8_output=True. A graph would also "
            "quantize its gradient. Capture it together with the module that reads the tensor, or return a tensor in "
            "high precision."
        )


def refuse_backward(_ctx: Any) -> None:
    """Raise RuntimeError, because no backward was captured."""
    raise RuntimeError(
        "This graph has no backward, because it was captured in evaluation mode or under torch.no_grad(), or its "
        "outputs needed no gradient. Capture it for training."
    )


def mark_outputs(replay: Any, arguments: Any, grad_outputs: Sequence[Any]) -> None:
    """Add a step that tells autograd which outputs need no gradient, because they needed none in the capture.

    ``grad_outputs`` are the buffers for the gradients of the outputs, or None for an output without a gradient. A
    capture under `torch.no_grad` adds no step, because it does not show which outputs need a gradient.
    """
    without = [index for index, grad in enumerate(grad_outputs) if grad is None]

    def mark(ctx: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        if not arguments.need_more_grads(ctx.call.inputs):
            ctx.mark_non_differentiable(*[outputs[index] for index in without if outputs[index] is not None])
        return outputs

    if without and torch.is_grad_enabled():
        replay.add("forward deliver", "mark outputs without gradients", mark)
