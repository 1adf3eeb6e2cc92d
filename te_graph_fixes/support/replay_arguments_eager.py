"""Run the eager forward of a captured module to decide whether a replay with other arguments is correct.

The capture does not show how the module uses the shape of an argument, and autograd records nothing about an input
without a gradient. Each question is answered only once, and only if the replay would raise an error otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import autocast

Specs = tuple[Any, Any]


class EagerModule:
    """The eager forward of a captured module. Each run restores the module, its FP8 state and the random states."""

    def __init__(self, module: torch.nn.Module, keywords: Sequence[str]) -> None:
        self._modules, self._forward, self._keywords = [*module.modules()], module.forward, keywords
        self.answers: dict[Any, bool] = {}

    def broadcasts(self, leaves: Sequence[Any], specs: Specs, shapes: Sequence[Any]) -> bool:
        """Return whether outputs stay equal if ``leaves`` are expanded to ``shapes``, or False if a forward fails."""

        def answer() -> bool:
            full = [leaf if shape is None else leaf.expand(shape) for leaf, shape in zip(leaves, shapes, strict=True)]
            with torch.no_grad():
                outputs = self._run(leaves, specs), self._run(full, specs)
            return all(map(_is_same_output, *outputs))

        return self._ask(tuple(getattr(leaf, "shape", None) for leaf in leaves), answer, if_unknown=False)

    def uses(self, leaves: Sequence[Any], specs: Specs, asked: tuple[bool, ...]) -> bool:
        """Return whether a gradient flows to a leaf for which ``asked`` is true, or True if the forward fails."""

        def answer() -> bool:
            inputs = [
                leaf.detach().requires_grad_() if is_asked else leaf
                for leaf, is_asked in zip(leaves, asked, strict=True)
            ]
            with torch.enable_grad():
                given = [value.clone() if is_asked else value for value, is_asked in zip(inputs, asked, strict=True)]
                nodes = [getattr(output, "grad_fn", None) for output in self._run(given, specs)]
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

    def _run(self, leaves: Sequence[Any], specs: Specs) -> list[Any]:
        """Run the forward without FP8, and return the outputs in a flat list."""
        count = specs[0].num_leaves
        args, values = tree_unflatten([*leaves[:count]], specs[0]), tree_unflatten([*leaves[count:]], specs[1])
        # These hooks hide the run from a surrounding checkpoint.
        unchanged = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with self._restored(), autocast(enabled=False), unchanged:
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


def _scales(module: Any) -> list[torch.Tensor]:
    """Return the scales and amax histories of a module or operation."""
    metas = [getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()]
    states = [state for meta in metas for state in (meta or {}).values()]
    return [
        value
        for state in states
        for value in getattr(state, "__dict__", {}).values()
        if isinstance(value, torch.Tensor)
    ]


def _is_same_output(output: Any, other: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return bool(output.dtype == other.dtype and torch.equal(output, other))
    return bool(output == other)
