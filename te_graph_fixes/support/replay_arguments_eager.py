"""Run the eager forward of a captured module to decide whether a replay with other arguments is correct.

The capture does not show how the module uses the shape of an argument, and autograd records nothing about an input
without a gradient. Each question is answered only once, and only if the replay would raise an error otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import autocast

Specs = tuple[Any, Any]


class EagerModule:
    """The eager forward of a captured module. Each run restores the module, its FP8 state and the random states."""

    def __init__(self, module: torch.nn.Module, keywords: Sequence[str]) -> None:
        self._modules, self._forward, self._keywords = [*module.modules()], module.forward, keywords
        self.answers: dict[Any, bool] = {}

    def broadcasts(self, leaves: Sequence[Any], specs: Specs, shapes: Sequence[Any], takes_grads: bool) -> bool:
        """Return whether each operation computes the same values if ``leaves`` are expanded to ``shapes``.

        The result is False if a forward fails. If ``takes_grads`` is true, it is also False if an operation broadcasts
        a tensor that needs a gradient, because autograd then sums this gradient in another order.
        """

        def answer() -> bool:
            full = [leaf if shape is None else leaf.expand(shape) for leaf, shape in zip(leaves, shapes, strict=True)]
            # A compiled function would hide its operations.
            is_eager = getattr(torch.compiler, "set_stance", contextlib.nullcontext)("force_eager")
            with torch.set_grad_enabled(takes_grads), is_eager:
                outputs = self._run(full, specs, of_full := _Operations())
                small_outputs = self._run(leaves, specs, of_small := _SmallerOperations(of_full.found))
            return of_small.are_same() and all(map(_is_same_output, small_outputs, outputs))

        return self._ask((takes_grads, *(getattr(leaf, "shape", None) for leaf in leaves)), answer, if_unknown=False)

    def uses(self, leaves: Sequence[Any], specs: Specs, asked: tuple[bool, ...]) -> bool:
        """Return whether a gradient flows to a leaf for which ``asked`` is true, or True if the forward fails."""

        def answer() -> bool:
            inputs = [
                leaf.detach().requires_grad_() if is_asked else leaf
                for leaf, is_asked in zip(leaves, asked, strict=True)
            ]
            with torch.enable_grad():
                nodes = [getattr(output, "grad_fn", None) for output in self._run(inputs, specs)]
            variables = {id(value) for value, is_asked in zip(inputs, asked, strict=True) if is_asked}
            seen = set()
            while nodes:
                if (node := nodes.pop()) is not None and node not in seen:
                    seen.add(node)
                    if id(getattr(node, "variable", None)) in variables:
                        return True
                    nodes += [following for following, _ in node.next_functions]
            return False

        return self._ask(asked, answer, if_unknown=True)

    def _ask(self, question: Any, answer: Callable[[], bool], if_unknown: bool) -> bool:
        if question not in self.answers:
            try:
                self.answers[question] = answer()
            except Exception:  # for example, because the module needs FP8, or cannot run with these arguments
                self.answers[question] = if_unknown
        return self.answers[question]

    def _run(self, leaves: Sequence[Any], specs: Specs, operations: Any = None) -> list[Any]:
        """Run the forward without FP8 on copies of the tensors, and return the outputs in a flat list."""
        count = specs[0].num_leaves
        leaves = [leaf.clone() if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        args, values = tree_unflatten([*leaves[:count]], specs[0]), tree_unflatten([*leaves[count:]], specs[1])
        # These hooks hide the run from a surrounding checkpoint. They also detach the saved tensors: an output that is
        # saved with its node would never be freed, so the node's gradient accumulators would let the next capture fail.
        detached = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
        with self._restored(), autocast(enabled=False), detached, operations or contextlib.nullcontext():
            outputs = self._forward(*args, **dict(zip(self._keywords, values, strict=True)))
        leaves_of_outputs: list[Any] = tree_flatten(outputs)[0]
        return leaves_of_outputs

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        if any("backward_dw" in vars(module) for module in self._modules[1:]):
            raise RuntimeError("a submodule has a graph of its own, which the forward would replay")
        states = get_all_rng_states()
        dicts: list[dict[Any, Any]] = [states, *(module.__dict__ for module in self._modules)]
        dicts += [value for attributes in dicts for value in attributes.values() if type(value) is dict]
        tensors = [buffer for module in self._modules for buffer in module.buffers(recurse=False)]
        tensors += [tensor for module in self._modules for tensor in _scales(module)]
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


_NOT_COMPUTED = {
    *("__get__", "__getitem__", "view", "view_as", "reshape", "flatten", "expand", "expand_as", "squeeze", "unsqueeze"),
    *("transpose", "permute", "movedim", "contiguous", "detach", "chunk", "split", "unbind"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
}
"""The names of functions that return an attribute or a part of their argument, or uninitialized memory."""


class _Operations(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """The operations of torch in a forward: each function, with the shapes and checksums of its tensors (``found``)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, list[tuple[Any, int]]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _NOT_COMPUTED and _tensors(result):
            self.note(func, _tensors((args, kwargs, result)))
        return result

    def note(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.found.append((func, [(tensor.shape, _checksum(tensor)) for tensor in tensors]))


class _SmallerOperations(_Operations):
    """The operations of a forward with smaller inputs, compared with the operations of a forward with full inputs."""

    def __init__(self, expected: Sequence[Any]) -> None:
        super().__init__()
        self._expected = [*reversed(expected)]
        self._is_same = True

    def note(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Compare an operation. A smaller tensor must broadcast to the full tensor, and need no gradient."""
        expected_func, expected = self._expected.pop() if self._expected else (None, [])
        self._is_same &= func is expected_func and len(tensors) == len(expected)
        pairs = [*zip(tensors, expected, strict=False)]
        if self._is_same and any(tensor.shape != shape for tensor, (shape, _) in pairs):
            for tensor, (shape, checksum) in pairs:
                is_smaller = tensor.shape != shape
                self._is_same &= (
                    not (is_smaller and tensor.requires_grad) and _checksum(tensor.expand(shape)) == checksum
                )

    def are_same(self) -> bool:
        """After the forward, return whether its operations were the same as with full inputs."""
        return self._is_same and not self._expected


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the plain tensors in nested containers, without the tensors of `torch.func`, which have no memory."""
    plain = [leaf for leaf in tree_flatten(values)[0] if type(leaf) is torch.Tensor and leaf.layout == torch.strided]
    return [tensor for tensor in plain if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number that depends on every bit of a tensor and on the order of its elements."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    integers = values.view({1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)).long()
    odd_numbers = torch.arange(1, 2 * len(integers), 2, device=tensor.device)
    return int((integers * odd_numbers).sum())


def _scales(module: Any) -> list[torch.Tensor]:
    """Return the scales and amax histories of a module or operation."""
    metas = [getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()]
    states = [getattr(state, "__dict__", {}) for meta in metas for state in (meta or {}).values()]
    return [value for attributes in states for value in attributes.values() if isinstance(value, torch.Tensor)]


def _is_same_output(output: Any, other: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return bool(output.dtype == other.dtype and torch.equal(output, other))
    return bool(output == other)
