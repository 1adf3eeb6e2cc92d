"""Capture and replay as in ``torch.cuda.CUDAGraph``, with recorded operations on the CPU.

While a graph is captured, a dispatch mode sees every operation of the calling thread, autograd's backward included.
Each operation runs once, so that its result has the correct shape, and the result moves into the memory pool of the
capture. The end of the capture restores all memory that an operation wrote, because on a GPU no kernel runs while a
graph is captured. A replay runs the recorded operations again, each on the same memory as in the capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from . import generators, memory

aten = torch.ops.aten

ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted,
                aten.new_empty, aten.new_empty_strided}  # fmt: skip
"""Operations that only allocate. A replay does not repeat them."""

_REFUSED = {aten.resize_, aten.resize_as_}
"""Operations that cannot be captured, because they allocate memory outside the graph's pool for an existing tensor."""


on_launch: Callable[[Any], None] | None = None
"""None, or a function that is called with each kernel that `launch` runs eagerly, and with each kernel of a replay."""


class GraphError(RuntimeError):
    """An error for a use of CUDA graphs that a GPU, or this simulator, does not allow."""


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self._keep_graph = keep_graph
        self._pool_id: memory.PoolId | None = None
        self._capture: Capture | None = None
        self._operations: list[Callable[[], None]] | None = None
        self._random_states: list[generators.State] = []

    def capture_begin(
        self, pool: memory.PoolId | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Start to record the operations of this thread."""
        if check_input_liveness:
            raise NotImplementedError("the simulator does not support capture_begin(check_input_liveness=True)")
        if self._operations is not None:
            raise GraphError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        refuse_in_capture("CUDAGraph.capture_begin")
        self._pool_id = pool or memory.new_pool_id()
        self._capture = Capture(memory.enter_pool(self._pool_id), [generators.active(), *self._random_states])
        self._capture.begin()

    def capture_end(self) -> None:
        """Stop recording, so that the graph can be replayed. Raise GraphError if the capture is invalid."""
        if self._capture is None or self._capture is not Capture.current:
            raise GraphError("CUDA error: invalid argument: capture_end was called without capture_begin")
        capture, self._capture = self._capture, None
        capture.end()
        if capture.failure is not None:
            self._leave_pool()
            raise GraphError(f"CUDA error: operation failed due to a previous error during capture: {capture.failure}")
        self._operations = capture.operations

    def instantiate(self) -> None:
        """Do nothing, because a captured graph is already executable. Raise an error if no graph was captured."""
        self._require_graph("instantiate")

    def replay(self) -> None:
        """Run the recorded operations again, in order, on the same memory."""
        operations = self._require_graph("replay")
        refuse_in_capture("CUDAGraph.replay")
        memory.overwrite_freed()
        with _plain_execution():
            for operation in operations:
                operation()
                if on_launch is not None:
                    on_launch(_kernel(operation))

    def reset(self) -> None:
        """Delete the captured graph and release its memory pool."""
        if self._capture is not None:
            raise GraphError("CUDAGraph.reset was called during the capture of this graph")
        if self._operations is not None:
            self._operations = None
            self._leave_pool()

    def pool(self) -> memory.PoolId:
        """Return the handle of the memory pool that this graph uses."""
        self._require_graph("pool")
        assert self._pool_id is not None
        return self._pool_id

    def register_generator_state(self, generator: generators.Generator) -> None:
        """Register the state of ``generator``, from which the operations of the graph may then draw."""
        self._random_states.append(generator.state)

    def enable_debug_mode(self) -> None:
        """Do nothing, because the simulator has no debug data."""

    def __del__(self) -> None:
        if self._operations is not None:
            self._operations = None
            self._leave_pool()

    def _require_graph(self, call: str) -> list[Callable[[], None]]:
        if self._operations is None:
            raise GraphError(f"Called CUDAGraph::{call} without a preceding successful capture.")
        return self._operations

    def _leave_pool(self) -> None:
        assert self._pool_id is not None
        memory.leave_pool(self._pool_id)
        self._pool_id = None


class Capture(TorchDispatchMode):
    """A capture in progress, with its recorded operations, and the memory content to restore at its end."""

    current: Capture | None = None
    """The capture in progress, or None. A process has at most one capture in progress."""

    def __init__(self, pool: memory.Pool, random_states: Iterable[generators.State]) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._random_states = [(state, state.numbers) for state in random_states]
        self.failure: str | None = None
        self._pool = pool
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: set[tuple[Any, ...]] = set()

    def begin(self) -> None:
        Capture.current = self
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        Capture.current = None
        with _plain_execution():
            for now, before in reversed(self._before):
                now.copy_(before)
        self._before.clear()
        for state, numbers in self._random_states:  # on a GPU, a capture draws no numbers
            state.numbers = numbers

    def refuse(self, what: str) -> GraphError:
        """Invalidate the capture because of ``what``, an operation that cannot be captured. Return the error."""
        self.failure = self.failure or what
        return GraphError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def launch(self, kernel: Callable[..., None], writes: Iterable[torch.Tensor], arguments: Sequence[Any]) -> None:
        """Run and record one kernel. The kernel writes only into ``writes``, which are among its arguments."""
        with _plain_execution():
            for tensor in writes:
                self._keep(tensor)
            kernel(*arguments)
            self.operations.append(functools.partial(kernel, *_aliases(arguments)))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_takes_itself_apart, types)):
            return self._take_apart(func, types, args, kwargs)
        inputs = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        if inputs and all(map(is_on_host, inputs)):
            return tree_map_only(torch.Tensor, mark_on_host, func(*args, **kwargs))
        self._check(func, args, kwargs)
        with _plain_execution():
            return self._run(func, inputs, args, kwargs)

    def _take_apart(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operation on a tensor subclass, and record the operations that the subclass calls.

        The subclass's ``__torch_dispatch__`` calls operations of torch, which this mode records. It may end with a call
        of ``torch.Tensor.__torch_dispatch__``, which would bypass this mode, so `last` replaces that function during
        the call.
        """

        def last(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if any(_takes_itself_apart(type(value)) for value in tree_iter((args, kwargs))):
                raise self.refuse(f"the simulator cannot replay {func.name()} on a tensor subclass")
            return func(*args, **kwargs)

        plain = torch.Tensor.__torch_dispatch__
        torch.Tensor.__torch_dispatch__ = staticmethod(last)  # type: ignore[assignment]
        try:
            with self:
                results = (kind.__torch_dispatch__(func, types, args, kwargs) for kind in types)
                return next((result for result in results if result is not NotImplemented), NotImplemented)
        finally:
            torch.Tensor.__torch_dispatch__ = plain

    def _check(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tags, name = func.tags, func.name()
        if torch.Tag.data_dependent_output in tags:
            raise self.refuse(f"{name} needs a value from the GPU")
        if func.overloadpacket is aten.index:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise self.refuse(f"{name} with a mask has a result whose size depends on values from the GPU")
        elif torch.Tag.dynamic_output_shape in tags:
            raise self.refuse(f"{name} has a result whose size depends on values from the GPU")
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Generator)]
        known = any(state is generators.active() for state, _ in self._random_states)
        if set(given) - {torch.default_generator} or (torch.Tag.nondeterministic_seeded in tags and not known):
            raise self.refuse(f"{name} draws from a generator that is not registered with the graph")
        if func.overloadpacket in _REFUSED:
            raise self.refuse(f"the simulator cannot replay {name}, which replaces the storage of a tensor")

    def _run(
        self, func: torch._ops.OpOverload, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.Tag.inplace_view in func.tags or func.overloadpacket is aten.set_:
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        for tensor in written:
            self._keep(tensor)
        run = functools.partial(_collective, func) if func.namespace == "c10d" else func
        result = run(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        moved: dict[int, torch.UntypedStorage] = {}
        fresh: list[tuple[torch.Tensor, int]] = []

        def place(position_and_value: tuple[int, Any]) -> Any:
            position, tensor = position_and_value
            if not isinstance(tensor, torch.Tensor) or any(tensor is one for one in inputs):
                return tensor
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in known:
                return tensor
            if storage.data_ptr() not in moved:
                moved[storage.data_ptr()] = self._allocate(storage)
            placed = memory.view(moved[storage.data_ptr()], tensor, tensor.storage_offset() * tensor.element_size())
            fresh.append((memory.alias(placed), position))
            return placed

        values, spec = torch.utils._pytree.tree_flatten(result)
        result = torch.utils._pytree.tree_unflatten([place(pair) for pair in enumerate(values)], spec)
        if func.overloadpacket not in ALLOCATIONS and (fresh or written):
            again = functools.partial(_again, run, *_aliases((args, kwargs)), fresh)
            if torch.Tag.nondeterministic_seeded in func.tags:
                again = functools.partial(_drawing, generators.active(), again)
            self.operations.append(again)
        return result

    def _allocate(self, content: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage from the pool. Until the end of the capture, the storage contains a copy of ``content``."""
        storage = self._pool.allocate(content.nbytes())
        block = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._keep(block)
        block.copy_(torch.empty(0, dtype=torch.uint8).set_(content))
        return storage

    def _keep(self, tensor: torch.Tensor) -> None:
        """Save the content of ``tensor`` before an operation writes it. The end of the capture restores the content."""
        if not tensor.numel():
            return
        key = (memory.address(tensor), tensor.size(), tensor.stride(), tensor.dtype)
        if key in self._kept:
            return
        self._kept.add(key)
        now = memory.alias(tensor)
        self._before.append((now, now.clone()))


def launch(kernel: Callable[..., None], writes: Iterable[torch.Tensor], *arguments: Any) -> None:
    """Run ``kernel(*arguments)``. If a graph is being captured, also record the kernel, so that each replay runs it.

    The kernel writes only into the tensors ``writes``, which are among its arguments.
    """
    if Capture.current is not None:
        Capture.current.launch(kernel, writes, arguments)
    else:
        with _plain_execution():
            kernel(*arguments)
        if on_launch is not None:
            on_launch(kernel)


def refuse_in_capture(what: str) -> None:
    """If a graph is being captured, raise the GPU's error for ``what``, an operation that must not be captured."""
    if Capture.current is not None:
        raise Capture.current.refuse(what)


def mark_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Mark ``tensor`` as host memory, which a program may read during a capture. Return ``tensor``."""
    tensor._simulator_on_host = True  # type: ignore[attr-defined]
    return tensor


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is in host memory.

    A host tensor was created with ``device="cpu"``, ``.cpu()`` or ``.to("cpu")`` or, in a capture, from host tensors.
    """
    return "_simulator_on_host" in tensor.__dict__


def _takes_itself_apart(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and "__torch_dispatch__" in {
        name for base in kind.__mro__[: kind.__mro__.index(torch.Tensor)] for name in vars(base)
    }


class _plain_execution:
    """A context in which operations run without autograd, modes (such as `Capture`) or ``__torch_function__``."""

    def __enter__(self) -> None:
        self._contexts = (_disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad())
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _collective(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a collective operation to its end, and return its results. A later wait for its work does nothing."""
    values, spec = torch.utils._pytree.tree_flatten(func(*args, **kwargs))
    for position, work in enumerate(values):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]
            values[position] = torch.distributed.Work.boxed(FakeWork())
    return torch.utils._pytree.tree_unflatten(values, spec)


def _again(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fresh: list[tuple[torch.Tensor, int]]
) -> None:
    values = torch.utils._pytree.tree_leaves(func(*args, **kwargs))
    for target, position in fresh:
        target.copy_(values[position])


def _kernel(operation: Any) -> Any:
    """Return the kernel of a recorded operation, without its bound arguments."""
    while isinstance(operation, functools.partial):
        if operation.func is _drawing:
            operation = operation.args[1]
        elif operation.func in (_again, _collective):
            operation = operation.args[0]
        else:
            operation = operation.func
    return operation


def _drawing(state: generators.State, operation: Callable[[], None]) -> None:
    before = state.activate()
    operation()
    before.activate()


def _aliases(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.detach() if is_on_host(one) else memory.alias(one), values)


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the arguments that the operation writes, according to its schema.

    Some schemas omit written arguments, so also yield BatchNorm's statistics and all tensors of collectives.
    """
    if func.namespace == "c10d":
        yield from (one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor))
    for position, argument in enumerate(func._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in ("running_mean", "running_var"):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_iter(value) if isinstance(one, torch.Tensor))
