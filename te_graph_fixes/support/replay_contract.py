"""Replay preconditions: a replay raises an error if it would not compute the result of its module.

Memory: no other graph has overwritten the data of this graph (`_te_replay_contract_order`).
Members: modules and parameters are the same objects as at the capture, and the data of parameters and each
``main_grad`` are at the same addresses (`_te_replay_contract_members`).
Recomputation: a checkpoint may run a forward again, in a backward. Eager operations refer to outputs and gradients, and
no code can determine which of these tensors the operations will still read. Outputs that the recomputation may read
must therefore be intact, and it must not overwrite referenced tensors. After the first forward in a checkpoint,
gradients and the outputs of other forwards are returned as copies, so this concerns only tensors that were returned
earlier (docs/maintainers/replay-contract.md of te-graph-fixes).
"""

import weakref
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch._C import _current_graph_task_id, _is_fwd_grad_enabled
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ._te_replay_contract_order import NEVER
from ._te_replay_contract_record import Record, parts, plain_tensors, storage_of
from ._te_warn_once import warn_once

_autograd = torch._C._autograd
_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")


class Preconditions:
    """The checks of one callable and microbatch, based on its `Record`.

    Replays change the attributes. ``_dgrad_time`` is the time of the last dgrad until its wgrad is replayed, else 0.
    ``_recomputed`` are the times of recomputations since the last backward or the last forward outside of a backward.
    If equal inputs lead to equal outputs, ``_inputs`` are the inputs of the last forward, ``_versions`` the versions of
    these inputs and of the watched tensors, and ``_since`` is the time of the first replay with these versions.
    ``_inputs`` is None after a backward, because optimizers may then write parameters without a new version.
    """

    def __init__(self, replay: Any) -> None:
        """Add `copy_outputs`, and the methods that check or note a replay, to the steps of ``replay``."""
        self._record: Record = replay.record
        self._dgrad_time = 0
        self._recomputed: list[int] = []
        self._inputs: list[weakref.ref[torch.Tensor]] | None = None
        self._versions: list[int] = []
        self._since = NEVER
        replay.name = self._record.name
        replay.add("forward check", "require contract", self.check_forward)
        replay.add("forward deliver", "note replay", self.note_forward)
        replay.add("forward deliver", "copy outputs", self.copy_outputs)
        replay.add("backward check", "require contract", self.check_backward)
        replay.add("backward deliver", "note replay", self.note_backward)
        replay.add("wgrad check", "require contract", self.check_wgrad)
        replay.add("wgrad deliver", "note replay", self.note_wgrad)

    def check_forward(self, call: Any) -> None:
        """Raise RuntimeError if the replay would not compute the forward of the eager module.

        Outside of a backward, an FP8 graph that is replayed without an autocast only causes a warning.
        """
        record = self._record
        takes_grads = call.takes_grads
        for slots in record.tensors.of_forward:
            slots.require_same(record.name)
        if takes_grads and record.backward and any(map(_requires_grad, record.tensors.frozen)):
            raise RuntimeError(
                f"{record.name}: a parameter that needed no gradient when this graph was captured needs one now, and "
                "the graph does not compute it. Capture again."
            )
        in_backward = _current_graph_task_id() != -1
        if in_backward:
            self._require_recomputable(
                {storage_of(part) for value in plain_tensors(call.inputs) for part in parts(value)}
            )
        elif record.computes_fp8 and not FP8GlobalStateManager.is_fp8_enabled():
            warn_once(
                f"{record.name}: this FP8 graph is replayed outside te.autocast. It still computes in FP8, unlike its "
                "module, and its scales are not updated. Replay it in the autocast of the capture.",
                "outside te.autocast",
            )
        call.in_backward, call.has_hooks = in_backward, _has_checkpoint_hooks()
        call.in_checkpoint = call.has_hooks or (not takes_grads and _in_autograd_function())

    def note_forward(self, ctx: Any, outputs: Any) -> Any:
        """Note the replay of the forward, and return ``outputs``.

        The table in docs/maintainers/replay-contract.md of te-graph-fixes lists the kinds of forwards.
        """
        call, record, pool = ctx.call, self._record, self._record.pool
        in_backward, takes_grads = call.in_backward, call.takes_grads
        if in_backward and takes_grads:
            # A recomputation for a backward writes the values of an earlier forward again, so no version changes.
            self._inputs, self._since = None, NEVER
        elif self._inputs is None or not self._repeats_last_forward(self._inputs, plain_tensors(call.inputs)):
            # The new version makes autograd raise an error if an eager operation still needs the old values.
            for output in record.written:
                torch.autograd.graph.increment_version(output)
            self._inputs, self._since = None, NEVER
            if record.watched is not None:
                self._note_inputs(plain_tensors(call.inputs))

        is_same_run = record.forward > pool.position
        pool.may_recompute = call.in_checkpoint or in_backward or (pool.may_recompute and is_same_run)
        call.copies_outputs = pool.may_recompute and takes_grads and not call.in_checkpoint
        pool.note_replay(record.forward)
        call.time = pool.now
        if not in_backward:
            self._recomputed.clear()
        elif takes_grads and call.has_hooks:
            self._recomputed.append(pool.now)
        return outputs

    def _note_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note the inputs of a replay, and the versions of these inputs and of the watched tensors.

        Note nothing if an input is an inference tensor, because such a tensor has no version.
        """
        if not any(map(torch.Tensor.is_inference, inputs)):
            self._inputs = [*map(weakref.ref, inputs)]
            self._versions = [*map(_version, (*inputs, *self._record.watched))]
            self._since = self._record.pool.now + 1

    def _repeats_last_forward(self, last: Sequence[weakref.ref[Any]], inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether this replay computes the same values as the last forward, whose inputs were ``last``."""
        return (
            len(inputs) == len(last)
            and all(ref() is value for ref, value in zip(last, inputs, strict=True))
            and self._versions == [*map(_version, (*inputs, *self._record.watched))]
        )

    def copy_outputs(self, ctx: Any, outputs: Any) -> Any:
        """Return the outputs. If a recomputation may overwrite an output, return a copy of it."""
        if not ctx.call.copies_outputs:
            return outputs
        pairs = zip(outputs, self._record.keeps_output, strict=True)
        return tuple(output if output is None or is_kept else output.clone() for output, is_kept in pairs)

    def _require_recomputable(self, inputs: set[int]) -> None:
        """Raise RuntimeError if the forward must not run in a backward. ``inputs`` are the storages of its inputs."""
        record = self._record
        if record.computes_fp8 and not FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                f"{record.name}: a checkpoint recomputes this FP8 graph outside te.autocast. The graph would compute "
                "in FP8, but its module would not. Use te.checkpoint, which enters the autocast again, or run the "
                "backward inside te.autocast."
            )
        if record.outputs.include(inputs):
            raise RuntimeError(
                f"{record.name}: a checkpoint recomputes this graph from its own output, which the graph overwrites. "
                "Capture the module once for each call in a step (`_order`)."
            )
        for other in record.pool.records.values():
            if other is not record and record.pool.time(other.forward):
                self._require_intact_outputs(other, inputs)
                self._require_harmless(other)

    def _require_intact_outputs(self, other: Record, inputs: set[int]) -> None:
        """Raise RuntimeError if outputs of ``other`` that the recomputation may read are no longer intact.

        The recomputation may read outputs that are among its ``inputs``. An eager operation in the checkpoint may read
        referenced outputs whose backward has not run.
        """
        pool = self._record.pool
        ran = pool.time(other.forward)
        backward_is_to_come = other.backward and pool.time(other.backward) < ran
        if other.outputs.include(inputs) or (backward_is_to_come and other.outputs.are_referenced()):
            reader, end = f"forward of {self._record.name}", other.end_of_forward if other.backward else NEVER
            pool.require_untouched(reader, other.forward, ran, end, f"the forward of {other.name}")

    def _require_harmless(self, other: Record) -> None:
        """Raise RuntimeError if the recomputation may overwrite referenced tensors that ``other`` returned.

        These are gradients of the current run of replays, unless their backward was captured before the recomputed
        forward, and outputs of another microbatch, unless the recomputed forward was captured between their forward and
        their backward. Outputs of the same microbatch are computed again, with the same values.
        """
        record, pool = self._record, self._record.pool
        grads_time = pool.time(other.backward)
        if grads_time > pool.time(other.forward):
            kind, returned = "gradient that the backward", other.grads
            is_safe = record.forward > other.backward or grads_time < pool.run_began
        else:
            kind, returned = "output that the forward", other.outputs
            is_safe = record.microbatch == other.microbatch or other.forward < record.forward < other.backward
        if not is_safe and returned.are_referenced():
            raise RuntimeError(
                f"the forward of {record.name} runs in a backward, as in a checkpoint, and may overwrite the {kind} of "
                f"{other.name} returned. Capture the recomputed module separately, so that it shares no memory with "
                "other graphs, or move the checkpoint into the captured module."
            )

    def check_backward(self, ctx: Any) -> None:
        """Raise RuntimeError if the backward would be wrong, for example because the data of its forward is lost."""
        record, pool, call = self._record, self._record.pool, ctx.call
        since = call.time
        if record.fused and not all(compress(ctx.needs_input_grad[-len(record.fused) :], record.fused)):
            raise RuntimeError(
                f"{record.name}: a weight was frozen after this graph was captured, and the graph would still add to "
                "its main_grad. Capture again."
            )
        if call.has_hooks and not call.in_backward and self._recomputed == [pool.time(record.forward)]:
            # A non-reentrant checkpoint recomputed the forward once, so this backward reads the recomputed values.
            since = pool.time(record.forward)
        elif since >= self._since:
            since = pool.time(record.forward)  # later forwards computed the same values
        reader = f"backward of {record.name}"
        pool.require_untouched(reader, record.forward, since, record.end_of_forward, "its forward", record.advice)
        for slots in record.tensors.of_backward:
            slots.require_same(record.name)
        if record.delays_wgrad and self._dgrad_time:
            warn_once(
                f"{record.name}: backward_dw() was not called after the last backward, so its wgrad is lost. Call it "
                "after every backward.",
                "no backward_dw",
            )

    def note_backward(self, ctx: Any, gradients: Any) -> Any:
        """Note the replay of the dgrad, and return ``gradients``, which a later step may copy."""
        record, pool = self._record, self._record.pool
        self._recomputed.clear()
        self._inputs = None
        if pool.may_recompute:
            ctx.call.copied_inputs = record.inputs
        pool.note_replay(record.backward)
        self._dgrad_time = pool.now
        return gradients

    def check_wgrad(self) -> None:
        """Raise RuntimeError if the wgrad lacks a dgrad or its data, or if a ``main_grad`` is at another address."""
        record, since = self._record, self._dgrad_time
        if not since:
            raise RuntimeError(
                f"{record.name}: backward_dw() was called without a backward before it. Call it once after each "
                "backward."
            )
        reader, end = f"backward_dw of {record.name}", record.end_of_backward
        record.pool.require_untouched(reader, record.backward, since, end, "its backward")
        for slots in record.tensors.of_wgrad:
            slots.require_same(record.name)

    def note_wgrad(self) -> None:
        if self._record.wgrad:
            self._record.pool.note_replay(self._record.wgrad)
        self._dgrad_time = 0


def _has_checkpoint_hooks() -> bool:
    """Return whether the saved-tensor hooks of a checkpoint without reentrant autograd are active.

    Other hooks, such as those of activation offloading, may be active inside the checkpoint, so all are inspected.
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
