"""Isolation of the eager run: it uses the parameters of the job, and changes neither their gradients nor their state.

A module may hold a parameter anywhere: in a helper object, a closure, a view. The eager run therefore uses the real
parameters. While it runs, autograd returns gradients instead of accumulating them. So the nodes that accumulate do not
run, and neither do their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from .difference import off_by as relative_error

MARK = "grad_added_to_main_grad"
ACCUMULATE = "torch::autograd::AccumulateGrad"


class NotIsolatedError(Exception):
    """The eager run would change something of the job. The message is the reason why the module is not checked."""


class Isolation(ExitStack):
    """While it is entered, a backward changes no ``.grad``, ``main_grad`` or attribute of a real parameter.

    ``parameters`` and ``modules`` are those that may be used. Each parameter begins without a ``.grad`` and with a copy
    of its ``main_grad``; `gradient` and `before` are for use while it is entered.
    """

    def __init__(self, modules: Iterable[Module], parameters: Iterable[Any], retain_graph: bool) -> None:
        super().__init__()
        self._modules, self._parameters, self._retain_graph = modules, parameters, retain_graph
        self.grads: dict[torch.Tensor, torch.Tensor | None] = {}
        """The ``.grad`` that the job has, of each tensor that has been set aside."""
        self.main_grads: dict[torch.Tensor, Any] = {}
        """The ``main_grad`` that the job has."""
        self.marks: dict[torch.Tensor, bool] = {}
        """Whether the job's ``grad_added_to_main_grad`` is set."""

    def __enter__(self) -> Isolation:
        super().__enter__()
        for parameter in self._parameters:
            self._set_aside(parameter)
            self._copy_attributes(parameter)
        self._engine = Variable._execution_engine
        self.callback(setattr, Variable, "_execution_engine", self._engine)
        Variable._execution_engine = self
        self.callback(register_module_forward_pre_hook(self._require_known).remove)
        return self

    def _set_aside(self, leaf: Any) -> None:
        """Remove the ``.grad`` of ``leaf`` and the hooks of its gradient until the end."""
        self.grads[leaf] = leaf.grad
        self.callback(setattr, leaf, "grad", leaf.grad)
        leaf.grad = None
        if hooks := leaf._backward_hooks:  # emptied in place: the handles of hooks refer to this dictionary
            self.callback(hooks.update, dict(hooks))
            hooks.clear()

    def _copy_attributes(self, parameter: Any) -> None:
        """Exchange what a backward writes, or a quantized parameter caches, for copies."""
        attributes = vars(parameter)
        self.callback(attributes.update, dict(attributes))
        self.callback(attributes.clear)
        self.main_grads[parameter] = getattr(parameter, "main_grad", None)
        self.marks[parameter] = bool(attributes.get(MARK))
        if MARK in attributes:
            setattr(parameter, MARK, False)
        copied = attributes if hasattr(parameter, "_quantizer") else ("main_grad",)
        for name in copied:
            if isinstance(value := attributes.get(name), torch.Tensor):
                setattr(parameter, name, value.detach().clone())

    def _require_known(self, module: Module, _: object) -> None:
        """Refuse a module that is run and was not announced: its FP8 state and buffers would change."""
        if module not in self._modules and (module._buffers or module._parameters):
            raise NotIsolatedError(f"it runs a module ({type(module).__name__}) that is not one of its submodules")

    def run_backward(
        self,
        tensors: Sequence[Any],
        grads: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = True,
        accumulate_grad: bool = True,
    ) -> Any:
        """Run the engine of torch. In place of accumulation, add the gradients to the ``.grad`` set aside.

        Reentrant checkpoints come here within a backward. They are possible, since every leaf is asked for.
        """
        keep_graph = keep_graph or self._retain_graph
        arguments = tensors, grads, keep_graph, create_graph
        if not accumulate_grad:
            return self._engine.run_backward(*arguments, inputs, allow_unreachable, False)
        leaves = inputs or _leaves(tensors)
        for leaf in leaves:
            if leaf not in self.grads:
                if hasattr(leaf, "main_grad"):
                    raise NotIsolatedError("it uses a parameter with a main_grad that is not one of its own")
                self._set_aside(leaf)
        results = self._engine.run_backward(*arguments, tuple(leaves), True, False) if leaves else ()
        for leaf, grad in zip(leaves, results, strict=True):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        return None

    def is_checkpoint_valid(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # of the engine of torch


def _leaves(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """List the leaves that a backward of ``tensors`` reaches."""
    found, seen = [], set()
    nodes = [get_gradient_edge(tensor).node if isinstance(tensor, torch.Tensor) else tensor.node for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATE:
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


class JobState:
    """Copies of the tensors and random states that an eager run may not change."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], random_states: Callable[[], Sequence[Any]]) -> None:
        self._copies = {name: (tensor.detach(), tensor.detach().clone()) for name, tensor in tensors.items()}
        self._random_states, self._random = random_states, random_states()

    def restore(self) -> list[tuple[str, Any]]:
        """Restore everything without waiting for the GPU. Return the relative error that each tensor had."""
        changes: list[tuple[str, Any]] = [(name, relative_error(*pair)) for name, pair in self._copies.items()]
        for tensor, copy in self._copies.values():
            tensor.data.copy_(copy)  # without a new version: the job may have saved the tensor for a backward
        now = self._random_states()
        for (restore, before), (_, after) in zip(self._random, now, strict=True):
            if str(before) != str(after):
                changes.append(("a random state", 1.0))
                restore(before)
        return changes
