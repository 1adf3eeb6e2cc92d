"""Compare the arguments of a replay with the sample arguments of its capture."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast
from transformer_engine.pytorch.tensor import QuantizedTensor

from ._te_warn_once import warn_once

_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.nn.Module, torch.nn.Parameter)
"""Types of keyword arguments that hold no tensors, or only tensors that the graph reads anyway."""

_CALL = torch.nn.Module.__call__


def _of(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor that a graph fixes: shape, ``requires_grad`` and dtype.

    The class of a quantized tensor stands for its dtype. All three are empty for an argument that is no tensor.
    """
    if not isinstance(leaf, torch.Tensor):
        return None, False, None
    return leaf.shape, leaf.requires_grad, type(leaf) if isinstance(leaf, QuantizedTensor) else leaf.dtype


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
    except Exception:  # for example, NumPy arrays of different shapes
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


def _read_keywords(function: Any) -> Callable[[str], bool]:
    """Return a function that tells whether a module or function may read the keyword argument of a name.

    It may, unless no instruction of its forward loads the parameter (such as the mask of a Mamba layer) or its
    ``**kwargs``. If the forward is not a function of Python, or looks at its own variables, it may read every keyword.
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


def refuse_quantized_outputs(function: Any, outputs: Sequence[Any], reuses_buffers: bool) -> None:
    """Refuse the training graph of a callable with quantized outputs, if TE would quantize their gradients too.

    If TE reuses the memory of outputs, it also loses their scales.
    """
    if any(isinstance(output, QuantizedTensor) and (output.requires_grad or reuses_buffers) for output in outputs):
        raise ValueError(
            f"{type(function).__name__} returns a quantized tensor, as with fp8_output=True. A graph would also "
            "quantize its gradient. Capture it together with the module that reads the tensor, or return a tensor in "
            "high precision."
        )


def refuse_backward(_ctx: Any) -> None:
    """Refuse the backward of a graph without one."""
    raise RuntimeError(
        "This graph was captured for a forward alone: under torch.no_grad(), or with outputs that need no gradient"
    )


def _scales(attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the scales and amax histories of a module or operation with these attributes."""
    metas = [attributes.get("fp8_meta"), *(attributes.get("_fp8_metas") or {}).values()]
    states = [state for meta in metas for state in (meta or {}).values()]
    return [value for state in states for value in _fields(state).values() if isinstance(value, torch.Tensor)]


def _reaches(output: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the gradient of an output flows to one of the inputs, which are leaves of autograd."""
    nodes, seen = [getattr(output, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            if any(variable is value for value in inputs):
                return True
            nodes += [following for following, _ in node.next_functions]
    return False


def _is_same_output(output: Any, other: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return bool(output.dtype == other.dtype and torch.equal(output, other))
    return bool(output == other)


def _unchanged(value: Any) -> Any:
    return value


class _Module:
    """Runs the eager forward of a captured module without a trace in the module, its FP8 state or random states."""

    def __init__(self, module: Any) -> None:
        self._modules, self._forward = [*module.modules()], module.forward

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the outputs, without their containers. The module computes without FP8."""
        unchanged = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)  # a checkpoint must not see it
        with self._restored(), autocast(enabled=False), unchanged:
            leaves: list[Any] = tree_flatten(self._forward(*args, **kwargs))[0]
        return leaves

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        if any("backward_dw" in vars(module) for module in self._modules[1:]):
            raise RuntimeError("a submodule has a graph of its own, which the forward would replay")
        states = get_all_rng_states()
        dicts: list[dict[Any, Any]] = [states, *(module.__dict__ for module in self._modules)]
        dicts += [value for attributes in dicts for value in attributes.values() if type(value) is dict]
        tensors = [buffer for module in self._modules for buffer in module.buffers(recurse=False)]
        tensors += [tensor for module in self._modules for tensor in _scales(vars(module))]
        generators = [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
        generators += [state for state in states.values() if isinstance(state, torch.Generator)]

        of_generators = [generator.get_state() for generator in generators]
        of_dicts, of_tensors = [*map(dict, dicts)], [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for generator, state in zip(generators, of_generators, strict=True):
                generator.set_state(state)
            for current, old in zip(dicts, of_dicts, strict=True):
                current.clear()
                current.update(old)
            with torch.no_grad():
                for tensor, copy in zip(tensors, of_tensors, strict=True):
                    tensor.copy_(copy)


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
        self._function, self._reads = function, _read_keywords(function)
        self._module = _Module(function)
        self._answers: dict[Any, bool] = {}  # of the module, to the questions asked at replays
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
            self._compare(given, call.inputs, call.specs)
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
            for key, value in call.keywords.items():
                if key not in self._keywords and self._reads(key):
                    self._require_plain(key, value)

    def _compare(self, given: list[tuple[Any, ...]], leaves: Sequence[Any], specs: tuple[Any, Any]) -> None:
        shapes, sample_shapes = ([shape for shape, _, _ in values] for values in (given, self._samples))
        if shapes != sample_shapes and not self._is_broadcast(given, leaves, specs):
            raise (ValueError if len(shapes) == len(sample_shapes) else TypeError)(
                f"{self._graph} was captured for positional arguments, then keywords {self._keywords}, with tensors of "
                f"shapes {[shape and tuple(shape) for shape in sample_shapes]}, and got shapes "
                f"{[shape and tuple(shape) for shape in shapes]}. Pass arguments like the sample arguments, or "
                "capture again."
            )
        grads, sample_grads = ([bool(grad) for _, grad, _ in values] for values in (given, self._samples))
        if torch.is_grad_enabled() and self._needs_more_grads(leaves, specs) and self._is_training:
            raise ValueError(
                f"{self._graph} was captured for sample arguments with requires_grad {sample_grads}, and got "
                f"{grads}. Capture again: a graph computes the gradient of an input only if its sample argument had "
                "requires_grad=True."
            )
        dtypes, sample_dtypes = ([dtype for _, _, dtype in values] for values in (given, self._samples))
        if dtypes != sample_dtypes:
            self._refuse_quantized(dtypes, sample_dtypes)
            dtypes = [
                sample if isinstance(dtype, type) else dtype
                for dtype, sample in zip(dtypes, sample_dtypes, strict=True)
            ]
        if dtypes != sample_dtypes:
            if torch.is_autocast_enabled():
                return
            warn_once(
                f"{self._graph} was captured for inputs of {sample_dtypes}, and got {dtypes}. It casts them, but "
                "eager training may not. Capture it with sample arguments of these dtypes, or cast the inputs first."
            )

    def _refuse_quantized(self, dtypes: Sequence[Any], sample_dtypes: Sequence[Any]) -> None:
        for name, dtype, sample in zip(self._names, dtypes, sample_dtypes, strict=True):
            is_other = isinstance(dtype, type) and dtype is not sample
            if is_other and FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().delayed():
                raise ValueError(
                    f"{self._graph} was captured with a tensor in {sample} as {name}, and got a {dtype.__name__}. In "
                    "delayed scaling, the graph would quantize it again with another scale. Pass a tensor in high "
                    "precision, such as its dequantize()."
                )

    def _ask(self, question: Any, answer: Callable[[], bool], if_unknown: bool) -> bool:
        """Return the answer of the module, which is asked once for each question."""
        if question not in self._answers:
            try:
                self._answers[question] = answer()
            except Exception:  # the module does not run without FP8, or not with these arguments
                self._answers[question] = if_unknown
        return self._answers[question]

    def _run(self, leaves: Sequence[Any], specs: tuple[Any, Any]) -> list[Any]:
        count = specs[0].num_leaves
        args, values = tree_unflatten(list(leaves[:count]), specs[0]), tree_unflatten(list(leaves[count:]), specs[1])
        return self._module.run(*args, **dict(zip(self._keywords, values, strict=True)))

    def _needs_more_grads(self, leaves: Sequence[Any], specs: tuple[Any, Any]) -> bool:
        """Return whether eager training computes the gradient of an input whose sample argument needed none."""
        more = self._more_grads(leaves)

        def answer() -> bool:
            inputs = [
                leaf.detach().requires_grad_() if needs else leaf for leaf, needs in zip(leaves, more, strict=True)
            ]
            with torch.enable_grad():
                given = [value.clone() if needs else value for value, needs in zip(inputs, more, strict=True)]
                outputs = self._run(given, specs)
            asked = [value for value, needs in zip(inputs, more, strict=True) if needs]
            return any(_reaches(output, asked) for output in outputs)

        return any(more) and self._ask(more, answer, True)

    def _more_grads(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        return tuple(_of(leaf)[1] and not sample for leaf, (_, sample, _) in zip(leaves, self._samples, strict=False))

    def _is_broadcast(self, given: list[tuple[Any, ...]], leaves: Sequence[Any], specs: tuple[Any, Any]) -> bool:
        """Return whether the module computes the same from tensors that the replay broadcasts to the sample shapes."""
        if len(given) != len(self._samples):
            return False
        pairs = [*zip(given, self._samples, strict=True)]
        smaller = [shape != sample for (shape, _, _), (sample, _, _) in pairs]
        takes_grads = self._is_training and torch.is_grad_enabled()
        for (shape, needs_grad, _), (sample, _, _) in pairs:
            if shape != sample and (shape is None or sample is None or (takes_grads and needs_grad)):
                return False  # autograd would sum the gradient of the graph in another order than the module

        def answer() -> bool:
            full = [
                leaf.expand(sample) if is_smaller else leaf
                for leaf, (sample, _, _), is_smaller in zip(leaves, self._samples, smaller, strict=True)
            ]
            with torch.no_grad():
                outputs = self._run(leaves, specs), self._run(full, specs)
            return all(map(_is_same_output, *outputs))

        return self._ask(tuple(shape for shape, _, _ in given), answer, False)

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
        """Refuse an ignored keyword argument that is or holds a tensor.

        Megatron's layers have a `__call__` of their own, so the capture ran another function than `forward`. Megatron
        captures layers without attention from their hidden states alone, and still passes its attention mask to them.
        So a tensor gives only one warning there.
        """
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        own_call = isinstance(self._function, torch.nn.Module) and type(self._function).__call__ is not _CALL
        if is_tensor and own_call and not self._keywords:
            warn_once(
                f"{self._graph} got the tensor {key!r}, which is not in sample_kwargs. A replay ignores it, and uses "
                "the values of the capture. If the module reads it, add it to sample_kwargs.",
                f"ignored {key}",
            )
        elif _holds_tensors(value):
            raise ValueError(
                f"{self._graph} got the keyword argument {key!r}, which {'is' if is_tensor else 'holds'} a tensor but "
                "is not in sample_kwargs. A replay would ignore it, and use the values of the capture. Add "
                f"{'it' if is_tensor else 'each of its tensors'} to sample_kwargs as an argument of its own, or do "
                "not pass it."
            )

    def mark_outputs(self, ctx: Any, outputs: Sequence[Any]) -> None:
        """Tell autograd which outputs need no gradient: those that needed none in the capture."""
        more = self._more_grads(ctx.call.inputs)
        if not (any(more) and self._answers.get(more, True)):
            given = [outputs[index] for index in self._without_grad]
            ctx.mark_non_differentiable(*[output for output in given if output is not None])
