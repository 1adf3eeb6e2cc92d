"""The record of a capture: facts about each callable from its warmup and its captures."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import gt
from typing import Any

import torch
from torch._C import _storage_Use_Count
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor

from ._te_replay_contract_members import CallableTensors, UsedMembers, tensors_in
from ._te_replay_contract_order import NEVER, MemoryPool

_is_inference = torch.Tensor.is_inference
# Records own the pools. A reload of this module must not lose them.
_pools: weakref.WeakValueDictionary[Any, MemoryPool] = globals().get("_pools", weakref.WeakValueDictionary())


class _Observed:
    """The facts about one callable so far, from its warmup and captures."""

    def __init__(self) -> None:
        self.positions: dict[str, tuple[MemoryPool, int]] = {}  # by kind of graph
        self.computes_fp8 = False  # True if a module computes in FP8 in the autocast of the capture
        self.ran: set[torch.nn.Module] = set()  # the modules that the warmup ran
        self.draws = False  # True if the warmup draws random numbers
        self.used = UsedMembers(self.note_fp8)

    def note_fp8(self, module: torch.nn.Module) -> None:
        """Note whether ``module`` computes in FP8 inside the autocast of the capture."""
        manager = FP8GlobalStateManager
        # `fp8_graph_capturing` is also true in a module's own autocast.
        if manager.is_fp8_enabled() and manager.get_autocast_state()[-1]:
            of_operations = (getattr(inner, "_fp8_metas", None) for inner in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            self.computes_fp8 |= quantizes and (
                manager.get_fp8_recipe().fp8_dpa or not hasattr(module, "unfused_attention")
            )

    def repeats(self) -> bool:
        """Return whether a forward returns equal values whenever all tensors that it reads have equal values.

        Such a forward draws no random numbers, and does not compute in FP8, whose scales change. The result is False if
        no forward ran in the warmup, because nothing is known then.
        """
        computes_fp8 = self.computes_fp8 or any(map(_has_fp8_state, self.ran))
        return bool(self.ran) and not self.draws and not computes_fp8


class CaptureRecord:
    """A collector of the facts of a capture, from before its warmup on.

    ``functions`` are the callables. ``inputs`` and ``replays`` are the sample arguments and replays of each callable
    and microbatch. References to tensors are weak, because a capture must not need more GPU memory than TE's.
    """

    def __init__(self, functions: Sequence[torch.nn.Module], inputs: Sequence[Any], replays: Sequence[Any]) -> None:
        self.observed = {replay: _Observed() for replay in replays}
        self._random_states = _random_states()
        held = tensors_in(list(functions))
        self._versions = {id(t): (weakref.ref(t), version(t)) for t in [*held, *tensors_in([*inputs])]}

    def note_warmup(self, replay: Any, module: torch.nn.Module, outputs: Any) -> None:
        """Note that a callable ran ``module`` in the warmup, and that ``module`` returned ``outputs``."""
        observed = self.observed[replay]
        observed.ran.add(module)
        observed.note_fp8(module)
        for output in map(_base, tensors_in(outputs)):
            known, _ = self._versions.get(id(output), (None, None))
            if known is None or known() is not output:
                self._versions[id(output)] = weakref.ref(output), version(output)
        states, self._random_states = self._random_states, _random_states()
        observed.draws |= not all(map(torch.equal, states, self._random_states))

    def note_graph(self, kind: str, replay: Any, handle: Any) -> None:
        """Note the position of a graph in the memory pool with this ``handle``.

        In TE 2.10 with `backward-dw-order`, the code of a dgrad also runs for its wgrad, but captures nothing.
        """
        if kind != "forward" and not torch.cuda.is_current_stream_capturing():
            return
        pool = _pools.setdefault(handle, MemoryPool())
        self.observed[replay].positions[kind] = pool, pool.new_position()

    @contextmanager
    def during_forward(self, replay: Any, handle: Any) -> Iterator[None]:
        """Note the position of a captured forward, and the members that it uses."""
        self.note_graph("forward", replay, handle)
        with self.observed[replay].used.recording():
            yield

    def has_same_version(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor existed before the capture, and no forward has given it a new version since.

        Batch norm writes its buffers without a new version, in a graph as in an eager run.
        """
        known, version_before = self._versions.get(id(tensor), (None, None))
        return known is not None and known() is tensor and version_before == version(tensor)


class Record:
    """The facts about one callable and microbatch, which do not change after the capture.

    ``forward``, ``backward`` and ``wgrad`` are the positions of the callable's graphs in the memory ``pool``, or 0 if
    the pool has no such graph. Graphs at the position ``end_of_forward`` or later may have received memory that the
    forward wrote, and graphs at ``end_of_backward`` or later may have received memory that the backward wrote.
    ``advice`` is the end of the error that is raised if another graph may have overwritten the memory of the forward
    before the backward, or "". ``computes_fp8`` is True if the forward computes in FP8 in the autocast of the capture.

    ``written`` are the outputs that each replay of the forward overwrites. ``watched`` are these outputs and all
    tensors that the forward reads besides its inputs. While the versions of all watched tensors are unchanged, equal
    inputs lead to equal outputs. ``watched`` is None if equal inputs may nevertheless lead to other outputs.
    ``keeps_output`` states for each output whether it is a parameter, a buffer or a constant to which no forward gives
    a new version.
    ``outputs`` and ``grads`` are the `ReturnedTensors` of the forward (the ``written`` outputs) and of the backward
    (the gradients of inputs).
    """

    def __init__(
        self,
        capture: CaptureRecord,
        replay: Any,
        functions: Sequence[torch.nn.Module],
        number: int,
        chunks: Sequence[int],
        outputs: Iterable[Any],
        grad_inputs: Sequence[Any] | None,
        inputs: int,
        static_inputs: Sequence[torch.Tensor],
        retains_graph: bool,
    ) -> None:
        """Create the record from the facts that were observed for ``replay`` in ``capture``.

        ``functions`` lists the callables of a capture, once for each microbatch. ``number`` is the index of this
        callable and microbatch, and ``chunks`` are the numbers of callables in each model chunk. The first
        ``inputs`` of the ``static_inputs`` are user inputs, and the rest are parameters.
        """
        observed = capture.observed[replay]
        self.pool, self.forward = pool, _ = observed.positions["forward"]
        self.backward = observed.positions.get("backward", (None, 0))[1]
        wgrad_pool, wgrad = observed.positions.get("wgrad", (None, 0))
        self.wgrad = wgrad if wgrad_pool is pool else 0  # `wgrad-memory-reuse` may use a separate pool
        self.delays_wgrad = wgrad_pool is not None
        pool.captures += number == 0
        self.name, self.microbatch = _name(functions, number, chunks, len(functions) // sum(chunks))
        if pool.captures > 1:
            self.name += f" of capture {pool.captures} in its memory pool"

        returned, grads, parameters = [*outputs], grad_inputs or (), static_inputs[inputs:]
        outputs = plain_tensors(returned)
        self.end_of_forward, self.advice = _end_of_forward(self.backward, retains_graph, outputs)
        self.end_of_backward = self.wgrad or pool.count + 1
        self.computes_fp8 = observed.computes_fp8
        self.inputs = range(inputs)
        modules, held = [*functions[number].modules()], tensors_in(functions[number])
        observed.used.complete(modules, observed.ran)
        with_grads = zip(parameters, grads[inputs:] or [None] * len(parameters), strict=True) if self.backward else ()
        self.tensors = CallableTensors(modules, dict(with_grads), observed.used, self.delays_wgrad)
        fused = self.tensors.fused
        self.fused = [parameter in fused for parameter in parameters] if fused else []

        given = plain_tensors(static_inputs[:inputs])
        same_held = [*filter(capture.has_same_version, held)]
        same_given = [*filter(capture.has_same_version, given)]
        constants = {storage_of(output) for output in outputs if capture.has_same_version(_base(output))}
        kept = (constants - {*map(storage_of, given)} | {*map(storage_of, same_held)}) - {0}
        self.keeps_output = [isinstance(output, torch.Tensor) and storage_of(output) in kept for output in returned]
        self.written = _written_outputs(outputs, kept, same_given)
        is_repeatable = observed.repeats() and len(same_held) == len(held) and not any(map(_is_inference, self.written))
        self.watched = [*held, *self.written] if is_repeatable else None
        self.outputs, self.grads = ReturnedTensors(self.written), ReturnedTensors(grads[:inputs])

        kinds = {self.forward: "forward", self.backward: "backward", self.wgrad: "backward_dw"}
        names = {position: f"the {kind} of {self.name}" for position, kind in kinds.items() if position}
        pool.names.update(names)
        pool.records[self.forward] = self
        weakref.finalize(self, pool.release, [*names])


class ReturnedTensors:
    """The memory of the tensors that a graph returns. References to it are weak, because ``reset()`` must free it."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        owners = [value for tensor in plain_tensors(tensors) for value in parts(tensor) if value.numel()]
        self._storages = [StorageWeakRef(value.untyped_storage()) for value in owners]
        self._uses_at_capture = self._uses()

    def _uses(self) -> list[int]:
        return [0 if ref.expired() else _storage_Use_Count(ref.cdata) for ref in self._storages]

    def are_referenced(self) -> bool:
        """Return whether any storage has more references than at the capture."""
        return any(map(gt, self._uses(), self._uses_at_capture))

    def include(self, storages: set[int]) -> bool:
        """Return whether these tensors use any of ``storages``."""
        return any(ref.cdata in storages for ref in self._storages)


def plain_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the items of ``values`` that are tensors, without the tensors inside containers."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that contain the data of a quantized tensor, or [tensor] for a plain tensor."""
    return plain_tensors(vars(tensor).values()) if isinstance(tensor, QuantizedTensor) else [tensor]


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def version(tensor: torch.Tensor) -> Any:
    """Return the number of in-place changes to a tensor, or a new object for an inference tensor."""
    return object() if _is_inference(tensor) else tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, or 0 for a tensor without one, such as an FP8 tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and tensor.data_ptr() else 0


def _random_states() -> list[torch.Tensor]:
    states = get_all_rng_states().values()
    return [
        torch.cuda.get_rng_state(),
        *(state if isinstance(state, torch.Tensor) else state.get_state() for state in states),
    ]


def _has_fp8_state(module: torch.nn.Module) -> bool:
    states = (getattr(module, "_fp8_metas", None) or {}).values()
    return getattr(module, "fp8_initialized", False) or any(states)


def _name(functions: Sequence[Any], number: int, chunks: Iterable[int], microbatches: int) -> tuple[str, int]:
    """Return the name of a callable for error messages, and its microbatch.

    TE lists the microbatches of each model chunk together.
    """
    function, first = functions[number], 0
    for callables in chunks:
        if number < callables * microbatches:
            break
        number -= callables * microbatches
        first += callables
    layer = f", layer {function.layer_number}" if hasattr(function, "layer_number") else ""
    name, microbatch = f"callable {first + number % callables} ({type(function).__name__}{layer})", number // callables
    return (f"{name} of microbatch {microbatch}" if microbatches > 1 else name), microbatch


def _written_outputs(outputs: list[torch.Tensor], kept: set[int], inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs whose values a replay overwrites.

    ``kept`` are the storages of parameters, buffers and constants to which no forward gives a new version, and
    ``inputs`` are such static inputs. An output that is such an input, or a view of it, is excluded too, because TE
    already gives it a new version when it copies the next input into it.
    """
    storages, inputs = {*map(storage_of, inputs)}, {*map(id, inputs)}

    def is_kept(output: torch.Tensor) -> bool:
        is_view_of_input = storage_of(output) in storages and (output._is_view() or id(output) in inputs)
        return storage_of(output) in kept or is_view_of_input

    return [output for output in outputs if not is_kept(output)]


def _end_of_forward(backward: int, retains_graph: bool, outputs: Iterable[torch.Tensor]) -> tuple[int, str]:
    """Return the position from which graphs may have received memory that a forward wrote, and advice for an error.

    With ``retains_graph``, autograd's graph of the outputs retains this memory until the end of the capture, unless TE
    has released the outputs to reuse their memory. Functions of TE release their saved tensors in their backward.
    """
    if not retains_graph:
        return backward, " For several backwards of one forward, capture with retain_graph_in_backward=True."
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    if not nodes:
        return backward + 1, ""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if _releases_tensors(node):
            return backward, " A module of TransformerEngine runs one backward for each forward, so add the losses."
        new = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= new
        nodes += new
    return NEVER, ""


def _releases_tensors(node: Any) -> bool:
    """Return whether a function of TE has released, in its backward, tensors that a second backward would read.

    Up to TE 2.14, attention releases none, and a `GroupedLinear` releases only its copies of the inputs of wgrads.
    """
    is_of_operations = hasattr(node, "backward_ops")
    if getattr(node, "tensor_objects", None) and not is_of_operations:
        return bool(getattr(node, "weights_requires_grad", False) and not node.save_original_input)
    return hasattr(node, "tensor_objects") or hasattr(node, "backward_objects")
