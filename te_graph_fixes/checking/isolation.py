"""Isolation of the job's gradients and other tensors from an eager run.

A module may refer to a parameter from anywhere: a helper object, a closure, a view. The eager run therefore uses the
real parameters. Meanwhile, autograd returns gradients instead of accumulating them, so neither an AccumulateGrad node
nor a hook of such a node runs. Writes of torch operators to other tensors of the job, such as a global sum of losses,
are reverted. `reference` restores the values of parameters and buffers, FP8 scales and random states.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MARK = "grad_added_to_main_grad"
"""The attribute of a weight that is true once a backward has added its wgrad to ``main_grad``."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
State = list[tuple[Callable[[Any], Any], Any]]
"""Values, such as those of FP8 scales and of random generators, each with the function that restores it."""


class NotIsolatedError(Exception):
    """The error if an eager run would change the job. Its message is the reason why the module is not checked."""


class IsolatedParameters:
    """Parameters of the job without gradients and marks, and with a copy of their ``main_grad``, until `restore`.

    Until then, this object is also torch's autograd engine, which receives every backward, including the backwards of
    reentrant checkpoints. It adds gradients to the ``.grad`` of the leaves without running their AccumulateGrad nodes.
    """

    def __init__(self, parameters: Iterable[Any], retain_graph: bool) -> None:
        """Isolate ``parameters``.

        If ``retain_graph`` is True, as in the capture, eager backwards retain their autograd graphs, because a second
        backward may need the saved tensors.
        """
        self.grads: dict[Any, Any] = {}
        """The job's ``.grad`` of each leaf."""
        self.main_grads: dict[Any, Any] = {}
        """The job's ``main_grad`` of each parameter."""
        self.marks: dict[Any, bool] = {}
        """For each parameter, whether the job has set its mark."""
        self._engine, self._retain_graph = Variable._execution_engine, retain_graph
        self._undo = ExitStack()
        for parameter in parameters:
            self.set_aside_gradient(parameter)
            self._copy_attributes(parameter)
        self._undo.callback(setattr, Variable, "_execution_engine", self._engine)
        Variable._execution_engine = self

    def restore(self) -> None:
        self._undo.close()

    def set_aside_gradient(self, leaf: Any) -> None:
        """Remove the ``.grad`` of ``leaf`` and the hooks of its gradient."""
        self.grads[leaf] = leaf.grad
        self._undo.callback(setattr, leaf, "grad", leaf.grad)
        leaf.grad = None
        if hooks := leaf._backward_hooks:  # The handles of hooks refer to this dictionary, so it is emptied in place.
            self._undo.callback(hooks.update, dict(hooks))
            hooks.clear()

    def _copy_attributes(self, parameter: Any) -> None:
        """Replace the attributes that a backward writes, or that a quantized parameter caches, by copies."""
        attributes = vars(parameter)
        self._undo.callback(attributes.update, dict(attributes))
        self._undo.callback(attributes.clear)
        self.main_grads[parameter] = getattr(parameter, "main_grad", None)
        self.marks[parameter] = bool(attributes.get(MARK))
        if MARK in attributes:
            setattr(parameter, MARK, False)
        for name in attributes if hasattr(parameter, "_quantizer") else ("main_grad",):
            if isinstance(value := attributes.get(name), torch.Tensor):
                attributes[name] = value.detach().clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def is_checkpoint_valid(self) -> bool:
        """Return True to allow reentrant checkpoints. All leaves are passed as inputs, so all nodes run."""
        return True

    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        arguments = tensors, grad_tensors, keep_graph or self._retain_graph, create_graph
        if not accumulate_grad:
            return self._engine.run_backward(*arguments, inputs, allow_unreachable)
        leaves = tuple(inputs or _leaves(tensors))
        for leaf in leaves:
            if leaf not in self.grads:
                if hasattr(leaf, "main_grad"):
                    raise NotIsolatedError("it uses a parameter that has a main_grad but belongs to another module")
                self.set_aside_gradient(leaf)
        grads = self._engine.run_backward(*arguments, leaves, True) if leaves else ()
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        return None


def _leaves(tensors: Sequence[Any]) -> list[Any]:
    """Return the leaves that a backward of ``tensors`` reaches, or [] if it reaches none."""
    leaves, seen = [], set()
    nodes: list[Any] = [get_gradient_edge(x).node if isinstance(x, torch.Tensor) else x.node for x in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATE:
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


class Writes(TorchDispatchMode):  # type: ignore[misc]
    """A recorder of writes by torch operators to tensors that existed at its start. At its end, it undoes the writes.

    Writes by TE's kernels and by compiled functions are not recorded.
    """

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        """Ignore writes to the tensors ``watched``, because the caller restores them."""
        super().__init__()
        self._ignored = _storages([*watched])  # The storages that the run allocates are added.
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each written tensor and its copy, by address and layout."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run as in the capture. Uncompiled, they would round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = zip(func._schema.arguments, args, strict=False)
        named = ((argument, kwargs.get(argument.name)) for argument in func._schema.arguments[len(args) :])
        for argument, value in (*given, *named):
            if argument.alias_info and argument.alias_info.is_write:
                for tensor in _plain_tensors(value):
                    self._copy(tensor)
        result = func(*args, **kwargs)
        self._ignored |= _storages(result) - _storages((args, kwargs))
        return result

    def _copy(self, tensor: torch.Tensor) -> None:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._before and not _storages(tensor) <= self._ignored:
            self._before[key] = tensor.detach(), tensor.detach().clone()

    def __exit__(self, *exception: Any) -> None:
        """Restore every written tensor."""
        super().__exit__(*exception)
        for tensor, before in reversed(self._before.values()):
            tensor.data.copy_(before)

    def unshared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results ``values`` of the run, with copies of written tensors, because these will be restored.

        A result that the run allocated may count as written, because compiled functions allocate without operators.
        """
        written = _storages([tensor for tensor, _ in self._before.values()])
        return {name: value.clone() if _storages(value) & written else value for name, value in values.items()}


def _plain_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the plain tensors of a tree, or []. Quantized tensors have no memory of their own, so they are omitted."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


def _storages(tree: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in a tree, or an empty set if it has no tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in _plain_tensors(tree)}
