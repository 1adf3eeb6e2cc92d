"""Updates of FP8 scales that are omitted in warmup and capture, because the replays perform them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._C import _current_graph_task_id
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ._te_fp8_state_at_replay import autocast_depth, global_state, is_first_module, set_first_module


class ScaleUpdates:
    """The ``kinds`` of updates (``forward``, ``backward``) that occurred in a warmup or capture on this stream."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream()

    def leave_to_replays(self, kind: str) -> bool:
        """Return whether an update of scales belongs to the capture, and note the ``kind`` of the update if it does.

        An update in another thread belongs to the capture only if autograd runs the capture's backward there.
        """
        is_of_capture = threading.get_ident() == self._thread or (
            _current_graph_task_id() != -1 and bool(torch.cuda.current_stream() == self._stream)
        )
        if is_of_capture:
            self.kinds.add(kind)
        return is_of_capture


@contextlib.contextmanager
def updates_left_to_replays(replay: Any = None) -> Iterator[None]:
    """Omit the updates of scales in a warmup or in the capture of a backward, and add them to steps of ``replay``."""
    flag = global_state().skip_fp8_weight_update_tensor  # A recomputation reads this flag.
    updates = FP8GlobalStateManager.updates_of_capture = ScaleUpdates()
    try:
        yield
    finally:
        del FP8GlobalStateManager.updates_of_capture
    if replay is not None and updates.kinds:
        steps = _Steps(updates.kinds, flag, replay.fp8_state.of_checkpoints)
        replay.add("forward prepare", "note first module", steps.note_first_module)
        replay.add("backward prepare", "fill skip flag", steps.fill_flag)
        replay.add("backward prepare", "take scale updates", steps.take_update)
        replay.add("backward deliver", "update scales", steps.update)


class _Steps:
    """The steps of a backward with a recomputation.

    ``kinds`` are the updates that the capture omitted. ``flag`` is the skip flag. ``first_modules`` are the values of
    the flag of the first FP8 module at the checkpoints of the graph.

    A recomputation enters an autocast. If the backward runs inside an autocast of the program, as in a loop over
    microbatches, the end of the recomputation's autocast updates no scales, and its start does not set the flag of the
    first FP8 module.
    """

    def __init__(self, kinds: set[str], flag: Any, first_modules: list[bool]) -> None:
        self._kinds, self._flag, self._first_modules = kinds, flag, first_modules

    def note_first_module(self, call: Any) -> None:
        """Note the flag of the first FP8 module before the forward."""
        call.was_first_module = is_first_module()

    def fill_flag(self, ctx: Any) -> None:
        """Fill the skip flag for the recomputation, because another graph may have changed it since the forward."""
        if isinstance(ctx.call.skip_update, bool):
            self._flag.fill_(ctx.call.skip_update)

    def take_update(self, ctx: Any) -> Callable[[], None]:
        """Prevent TE's update of the backward's scales, because the forward's scales must be updated first.

        Return a function that sets ``ctx.is_first_module`` to whether `update` updates the backward's scales.
        """
        has_first_module = not autocast_depth() or (ctx.call.was_first_module and any(self._first_modules))
        ctx.call.updates_backward = updates = ctx.is_first_module or (has_first_module and "backward" in self._kinds)
        ctx.is_first_module = False
        return partial(setattr, ctx, "is_first_module", updates)

    def update(self, ctx: Any, gradients: Any) -> Any:
        """Update the forward's scales before the backward's, as in eager training. Return ``gradients``."""
        if "forward" in self._kinds and not autocast_depth():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        if ctx.call.updates_backward:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        if self._first_modules:
            set_first_module(ctx.call.was_first_module and self._first_modules[0])
        return gradients
