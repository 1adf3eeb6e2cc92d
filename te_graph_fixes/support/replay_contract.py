"""Replay preconditions: a replay raises an error if it would not compute the result of its module.

Memory: no other graph has overwritten the data of this graph (`_te_replay_order`).
Addresses: modules, parameters and each ``main_grad`` are at the same addresses as in the capture
(`_te_module_tensors`).

Recomputation: a checkpoint may run a forward again, in a backward. Eager operations refer to outputs and gradients, and
no code can determine which of these tensors the operations will still read. Two rules follow:

1. Outputs that the recomputation may read must be intact. These are its inputs, and referenced outputs whose backward
   has not run (an eager operation in the checkpoint may read them).
2. The recomputation must not overwrite referenced tensors:

   - gradients of the current run of replays, unless their backward was captured before the forward
   - outputs of another microbatch, unless the forward was captured between their forward and their backward

   Outputs of the same microbatch are computed again, with the same values.

After the first forward in a checkpoint, gradients and the outputs of other forwards are returned as copies. The rules
therefore concern only tensors that were returned earlier.

A forward replay is one of these:

=====================================  =======================================  ============  ============
forward                                detected by                              may be rerun  copy outputs
=====================================  =======================================  ============  ============
in a checkpoint                        its saved-tensor hooks, or grad mode     yes           no
                                       turned off by an autograd function
run again, without reentrant autograd  a backward, and hooks of a checkpoint    yes           no
run again, with reentrant autograd     a backward, no hooks                     yes           yes
inference, or a frozen part            grad mode off                            as before     no
training                               all else, also with other hooks, such    as before     if a checkpoint
                                       as those of activation offloading                      was seen
=====================================  =======================================  ============  ============
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, gt
from typing import Any

import torch
from torch._C import _current_graph_task_id, _is_fwd_grad_enabled, _storage_Use_Count
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ._te_module_tensors import CallableTensors, UsedMembers, WarmupRecord, storage_of, tensors_in, version
from ._te_replay_order import ReplayOrder
from ._te_warn_once import warn_once

_NEVER = sys.maxsize
_autograd = torch._C._autograd
_requires_grad = attrgetter("requires_grad")


class _Pool(ReplayOrder):
    """The graphs of one memory pool, and their use in checkpoints.

    ``may_recompute``: in this run of replays, a checkpoint has run a forward and may run it again. Gradients, and the
    outputs of forwards outside of checkpoints, are then returned as copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self.preconditions: weakref.WeakValueDictionary[int, Preconditions] = weakref.WeakValueDictionary()
        self.may_recompute = False


# Captures own the pools. A reload of this module must not lose them.
_pools: weakref.WeakValueDictionary[Any, _Pool] = globals().get("_pools", weakref.WeakValueDictionary())


def note_capture(cuda_graph: Any = None, pool: Any = None, **_: Any) -> None:
    """Assign the next position in its memory pool to a graph about to be captured."""
    if cuda_graph is not None:
        state = _pools.setdefault(pool, _Pool())
        cuda_graph.position = (state, state.new_position())


class Preconditions:
    """The replay preconditions of one callable and microbatch.

    ``functions`` lists the callables of a capture, once for each microbatch. ``number`` is the index of this callable
    and microbatch, and ``chunks`` are the numbers of callables in each model chunk. ``graphs`` are its forward, dgrad
    and wgrad. Their ``static_inputs`` are user inputs, with the number ``inputs``, followed by parameters.
    """

    def __init__(
        self,
        number: int,
        functions: Sequence[Any],
        chunks: Sequence[int],
        graphs: Sequence[Any],
        outputs: Iterable[Any],
        grad_inputs: Sequence[Any] | None,
        inputs: int,
        static_inputs: Sequence[torch.Tensor],
        delays_wgrad: bool,
        retains_graph: bool,
        warmup: WarmupRecord,
    ) -> None:
        # The memory pool of each graph and its position there. The position of a graph without a capture is 0.
        positions: Iterable[tuple[Any, int]] = (getattr(graph, "position", (None, 0)) for graph in graphs)
        (self.pool, self.forward), (_, self.backward), (wgrad_pool, wgrad) = positions
        # Without an order, `wgrad-memory-reuse` captures wgrads last, in a separate pool.
        self._wgrad = wgrad if wgrad_pool is self.pool else 0
        self._end = self._wgrad or self.pool.count + 1
        self._delays_wgrad = delays_wgrad
        self._outputs = _tensors(outputs)
        self._end_of_forward, self._advice = _end_of_forward(self.backward, retains_graph, self._outputs)
        self._dgrad_time = 0  # the time of the last dgrad until its wgrad is replayed, else 0
        microbatches = len(functions) // sum(chunks)
        callable_number, self._microbatch = _place(number, chunks, microbatches)
        self.pool.captures += number == 0
        self.name = _name(functions[number], callable_number)
        if microbatches > 1:
            self.name += f" of microbatch {self._microbatch}"
        if self.pool.captures > 1:
            self.name += f" of capture {self.pool.captures} in its memory pool"
        kinds = {self.forward: "forward", self.backward: "backward", self._wgrad: "backward_dw"}
        names = {position: f"the {kind} of {self.name}" for position, kind in kinds.items() if position}
        self.pool.names.update(names)
        self.pool.preconditions[self.forward] = self
        self._release_positions = weakref.finalize(self, self.pool.release, [*names])

        function, user_inputs, parameters = functions[number], static_inputs[:inputs], static_inputs[inputs:]
        self._tensors = CallableTensors(function, parameters if self.backward else (), warmup.used_by(number, function))
        self._frozen = self._tensors.frozen if self.backward else []
        self._is_fused = [parameter in self._tensors.fused for parameter in parameters]
        self._recipe = warmup.recipes.get(number)
        self._inputs = range(inputs)
        held = tensors_in(function)
        self._written = _written_outputs(self._outputs, warmup.unwritten(held), warmup.unwritten(_tensors(user_inputs)))
        self._returned_outputs = _ReturnedTensors(self._written)
        self._returned_grads = _ReturnedTensors((grad_inputs or ())[:inputs])
        # A forward that repeats is judged by the last values: what it read, and the time of the first replay with them.
        self._held = held if warmup.repeats(number, held) else None
        self._read: list[weakref.ref[torch.Tensor]] = []
        self._versions: list[Any] = []
        self._since = _NEVER
        self._recomputed: list[int] = []  # the times of recomputations after the last backward

    def release(self) -> None:
        """Release the tensors and positions of reset graphs."""
        self._tensors = CallableTensors(None, (), UsedMembers(lambda _: None))
        self._outputs, self._written, self._frozen, self._held = [], [], [], None
        self.pool.preconditions.pop(self.forward, None)
        self._release_positions()

    def add_to(self, replay: Any) -> None:
        """Add the steps to the replays of the graphs."""
        replay.name = self.name
        replay.add("forward check", "contract", self.check_forward)
        replay.add("forward record", "order of replays", self.note_forward)
        replay.add("forward deliver", "copies", self.copy_outputs)
        replay.add("backward check", "contract", self.check_backward)
        replay.add("backward deliver", "order of replays", self.note_backward)
        replay.add("wgrad check", "contract", self.check_wgrad)
        replay.add("wgrad deliver", "order of replays", self.note_wgrad)
        replay.add("reset", "contract", self.release)

    def check_forward(self, call: Any) -> None:
        """Raise RuntimeError if the result of the forward would differ from the eager module."""
        takes_grads = call.takes_grads
        self._tensors.members.require_same(self.name)
        self._tensors.read.require_same(self.name)
        if takes_grads and any(map(_requires_grad, self._frozen)):
            raise RuntimeError(
                f"{self.name}: a parameter that needed no gradient when this graph was captured needs one now, and the "
                "graph does not compute it. Capture again."
            )
        in_backward = _current_graph_task_id() != -1
        if in_backward:
            self._require_recomputable({storage_of(value) for value in _tensors(call.inputs)})
        elif self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            warn_once(
                f"{self.name}: this FP8 graph is replayed outside te.autocast. It still computes in FP8, unlike its "
                "module, and its scales are not updated. Replay it in the autocast of the capture.",
                "outside te.autocast",
            )
        call.in_backward, call.has_hooks = in_backward, _has_checkpoint_hooks()
        call.in_checkpoint = call.has_hooks or (not takes_grads and _in_autograd_function())

    def note_forward(self, ctx: Any, _outputs: Any) -> None:
        """Note the replay of the forward. The table at the top of this module lists the kinds of forwards."""
        call, pool = ctx.call, self.pool
        inputs, in_backward, takes_grads = _tensors(call.inputs), call.in_backward, call.takes_grads
        if in_backward and takes_grads:
            # A recomputation for a backward writes the values of an earlier forward again.
            self._since = _NEVER
        elif not self._repeats_last_forward(inputs):
            # autograd then raises an error if an eager operation still needs the old values.
            for output in self._written:
                torch.autograd.graph.increment_version(output)
            if self._held is not None:
                self._read = [*map(weakref.ref, inputs)]
                self._versions = self._versions_of(inputs)
                self._since = pool.now + 1

        is_same_run = self.forward > pool.position
        pool.may_recompute = call.in_checkpoint or in_backward or (pool.may_recompute and is_same_run)
        call.copies_outputs = pool.may_recompute and takes_grads and not call.in_checkpoint
        pool.note_replay(self.forward)
        call.time = pool.now
        if not in_backward:
            self._recomputed.clear()
        elif takes_grads and call.has_hooks:
            self._recomputed.append(pool.now)

    def _repeats_last_forward(self, inputs: list[torch.Tensor]) -> bool:
        """Return whether this replay computes the values of the last one again, so that it overwrites nothing.

        Optimizers may write parameters without a new version, but only after a backward.
        """
        return (
            self._since > self.pool.time(self.backward)
            and self._since != _NEVER
            and len(inputs) == len(self._read)
            and all(ref() is value for ref, value in zip(self._read, inputs, strict=True))
            and self._versions == self._versions_of(inputs)
        )

    def _versions_of(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Return the versions of everything that a forward reads, and of the outputs, which the user may write."""
        return [*map(version, inputs), *map(version, self._held or ()), *map(version, self._written)]

    def copy_outputs(self, call: Any, outputs: Any) -> Any:
        """Return the outputs, or copies of them if a recomputation may overwrite them."""
        return tuple(None if o is None else o.clone() for o in outputs) if call.copies_outputs else outputs

    def _require_recomputable(self, inputs: set[int]) -> None:
        """Raise RuntimeError if the forward must not run in a backward. ``inputs`` are the storages of its inputs."""
        if self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                f"{self.name}: a checkpoint recomputes this FP8 graph outside the autocast of its capture. The graph "
                "would compute in FP8, unlike its module. Use te.checkpoint, which enters the autocast again, or run "
                "the backward in the autocast."
            )
        if self._returned_outputs.include(inputs):
            raise RuntimeError(
                f"{self.name}: a checkpoint recomputes this graph from its own output, which the graph overwrites. "
                "Capture the module once for each call in a step (`_order`)."
            )
        for other in self.pool.preconditions.values():
            if other is not self and self.pool.time(other.forward):
                self._require_intact_outputs(other, inputs)
                self._require_harmless(other)

    def _require_intact_outputs(self, other: Preconditions, inputs: set[int]) -> None:
        """Check rule 1 of recomputation for the outputs of another callable or microbatch."""
        pool, outputs = self.pool, other._returned_outputs
        ran = pool.time(other.forward)
        backward_is_to_come = other.backward and pool.time(other.backward) < ran
        if outputs.include(inputs) or (backward_is_to_come and outputs.are_referenced()):
            reader, end = f"forward of {self.name}", other._end_of_forward if other.backward else _NEVER
            pool.require_untouched(reader, other.forward, ran, end, f"the forward of {other.name}")

    def _require_harmless(self, other: Preconditions) -> None:
        """Check rule 2 of recomputation for the last tensors returned by another graph: gradients or outputs."""
        pool = self.pool
        grads_time = pool.time(other.backward)
        if grads_time > pool.time(other.forward):
            kind, returned = "gradient that the backward", other._returned_grads
            is_safe = self.forward > other.backward or grads_time < pool.run_began
        else:
            kind, returned = "output that the forward", other._returned_outputs
            is_safe = self._microbatch == other._microbatch or other.forward < self.forward < other.backward
        if not is_safe and returned.are_referenced():
            raise RuntimeError(
                f"the forward of {self.name} runs in a backward, as in a checkpoint, and may overwrite the {kind} of "
                f"{other.name} returned. Capture the recomputed module separately, so that it shares no memory with "
                "other graphs, or move the checkpoint into the captured module."
            )

    def check_backward(self, ctx: Any) -> None:
        """Raise RuntimeError if the data of the forward, at the time of ``ctx.call``, is lost."""
        pool, call = self.pool, ctx.call
        since = call.time
        trained = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(self._is_fused) :]
        if not all(compress(trained, self._is_fused)):
            raise RuntimeError(
                f"{self.name}: a weight was frozen after this graph was captured, and the graph would still add to its "
                "main_grad. Capture again."
            )
        if call.has_hooks and not call.in_backward and self._recomputed == [pool.time(self.forward)]:
            # A checkpoint without reentrant autograd has recomputed the forward once, for this backward.
            since = pool.time(self.forward)
        elif since >= self._since:
            since = pool.time(self.forward)  # later forwards computed the same values
        reader = f"backward of {self.name}"
        pool.require_untouched(reader, self.forward, since, self._end_of_forward, "its forward", self._advice)
        self._tensors.read.require_same(self.name)
        if not self._delays_wgrad:
            if self._tensors.fused:
                self._tensors.written.require_same(self.name)
        elif self._dgrad_time:
            warn_once(
                f"{self.name}: backward_dw() was not called after the last backward, so its wgrad is lost. Call it "
                "after every backward.",
                "no backward_dw",
            )

    def note_backward(self, ctx: Any, gradients: Any) -> Any:
        """Note the replay of the dgrad. Its gradients are copied if a recomputation may overwrite them."""
        self._recomputed.clear()
        if self.pool.may_recompute:
            ctx.call.copied_inputs = self._inputs
        self.pool.note_replay(self.backward)
        self._dgrad_time = self.pool.now
        return gradients

    def check_wgrad(self) -> None:
        """Raise RuntimeError if no dgrad preceded the wgrad, or its data was overwritten."""
        pool, since = self.pool, self._dgrad_time
        if not since:
            raise RuntimeError(
                f"{self.name}: backward_dw() was called without a backward before it. Call it once after each backward."
            )
        pool.require_untouched(f"backward_dw of {self.name}", self.backward, since, self._end, "its backward")
        self._tensors.written.require_same(self.name)

    def note_wgrad(self) -> None:
        """Note the replay of the wgrad."""
        if self._wgrad:
            self.pool.note_replay(self._wgrad)
        self._dgrad_time = 0


class _ReturnedTensors:
    """The memory of the tensors returned by a graph. The references do not own it, because ``reset()`` must free it."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._storages = [StorageWeakRef(value.untyped_storage()) for value in _tensors(tensors) if value.numel()]
        self._uses_at_capture = self._uses()

    def _uses(self) -> list[int]:
        return [0 if ref.expired() else _storage_Use_Count(ref.cdata) for ref in self._storages]

    def are_referenced(self) -> bool:
        """Return whether any storage has more references than at the capture."""
        return any(map(gt, self._uses(), self._uses_at_capture))

    def include(self, storages: set[int]) -> bool:
        """Return whether these tensors use any of ``storages``."""
        return any(ref.cdata in storages for ref in self._storages)


def _has_checkpoint_hooks() -> bool:
    """Return whether a checkpoint without reentrant autograd is active. It recomputes by saved-tensor hooks.

    Other hooks, such as those of activation offloading, may be active inside it, so all are inspected.
    """
    if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
        return True  # torch before 2.8 cannot list the hooks, so any forward counts as checkpointed
    inner = []
    try:
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            module = str(getattr(hooks[0], "__module__", ""))
            if "checkpoint" in module or module == "transformer_engine.pytorch.distributed":
                return True
            _autograd._pop_saved_tensors_default_hooks()
            inner.append(hooks)
    finally:
        for hooks in reversed(inner):
            _autograd._push_saved_tensors_default_hooks(*hooks)
    return False


def _in_autograd_function() -> bool:
    """Return whether the forward of an autograd function runs, as in a checkpoint with reentrant autograd.

    Such a forward also turns off forward-mode gradients, unlike `torch.no_grad`.
    """
    return not _is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _place(number: int, chunks: Iterable[int], microbatches: int) -> tuple[int, int]:
    """Return the number of a callable and its microbatch. TE lists the microbatches of each model chunk together."""
    first = 0
    for callables in chunks:
        if number < callables * microbatches:
            break
        number -= callables * microbatches
        first += callables
    return first + number % callables, number // callables


def _name(function: Any, number: int) -> str:
    """Return the name of a callable for error messages."""
    layer = f", layer {function.layer_number}" if hasattr(function, "layer_number") else ""
    return f"callable {number} ({type(function).__name__}{layer})"


def _written_outputs(
    outputs: list[torch.Tensor], held: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs whose values a replay overwrites. ``held`` and ``inputs`` are tensors that no forward writes.

    A parameter or a buffer stays as it is. TE copies the next input into a static input, but thereby gives a new
    version to this input and to its views.
    """
    held_storages, storages, inputs = {*map(storage_of, held)} - {0}, {*map(storage_of, inputs)}, {*map(id, inputs)}

    def is_kept(output: torch.Tensor) -> bool:
        is_view_of_input = storage_of(output) in storages and (output._is_view() or id(output) in inputs)
        return storage_of(output) in held_storages or is_view_of_input

    return [output for output in outputs if not is_kept(output)]


def _end_of_forward(backward: int, retains_graph: bool, outputs: Iterable[torch.Tensor]) -> tuple[int, str]:
    """Return the position from which graphs may have received memory that a forward wrote, and advice for an error.

    With ``retains_graph``, autograd's graph of the outputs retains this memory until the end of the capture, unless TE
    has released the outputs to reuse their memory. Functions of TE release in their backward what they saved.
    """
    if not retains_graph:
        return backward, " For several backwards of one forward, capture with retain_graph_in_backward=True."
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    if not nodes:
        return backward + 1, ""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "tensor_objects") or hasattr(node, "backward_objects"):
            return backward, " A module of TransformerEngine runs one backward for each forward: add the losses."
        new = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= new
        nodes += new
    return _NEVER, ""
