"""The FP8 state of delayed scaling in a graph's forward, and the work of an eager forward on this state.

An eager forward registers the state (``fp8_meta``: scales and amax histories) of each module in buffers. The end of an
autocast computes the next scales from these buffers. Under activation recompute, the forward also copies the state for
the second forward. A replay runs no Python of the modules. Therefore, modules note their state during the capture, and
the steps of `UsedState` do this work at each replay.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _current_graph_task_id
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

STATES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
_HAS_STATE = hasattr(FP8GlobalStateManager, "quantization_state")  # true from TE 2.15 on
_DEPTH, _FIRST_MODULE = (
    ("autocast_depth", "is_first_fp8_module") if _HAS_STATE else ("AUTOCAST_DEPTH", "IS_FIRST_FP8_MODULE")
)
_POSITION = "global_fp8_buffer_pos_fwd_recompute"
_UPDATED_INSIDE = (
    "A captured module runs an FP8 module twice, each time in an autocast of its own with delayed scaling. Eager "
    "training updates the scales in between, but a graph cannot update them. Enter one autocast around both calls, or "
    "capture the two calls separately."
)
_NO_COPY = (
    "A graph in delayed scaling is recomputed by te.checkpoint, but its first forward ran without this checkpoint, so "
    "its scales were not copied. Run both forwards in the same te.checkpoint."
)
_MIXED_COPIES = (
    "A captured module has a checkpoint inside a te.checkpoint, in delayed scaling. TransformerEngine then recomputes "
    "with the scales of an earlier forward, which a graph does not have. Remove one of the two checkpoints, use "
    "another recipe, or do not capture the module."
)


@dataclass
class UsedState:
    """The FP8 state of one graph.

    In an autocast, the backward of the first FP8 module updates the scales of all backwards. TE finds this module by a
    flag, which the first FP8 module with a backward clears (takes). Operations of `te.ops` take the flag even if they
    do not compute in FP8. The end of an autocast restores the flag of the surrounding autocast.
    """

    in_fp8: bool = False
    """True if the autocast of the capture enables FP8."""
    modules_in_fp8: dict[Any, bool] = field(default_factory=dict)
    """The attribute ``fp8`` of each module after the forward."""
    in_capture: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """The delayed-scaling states in the autocast of the capture, each with its own recipe (as in attention) or None."""
    of_modules: list[dict[str, Any]] = field(default_factory=list)
    """The states that are copied for a recomputation. Operations of `te.ops` copy no state."""
    owners: dict[Any, None] = field(default_factory=dict)
    """The modules and operations that compute in FP8, in any recipe."""
    in_autocast: dict[Any, bool] = field(default_factory=dict)
    """For each owner in the autocast of the capture, whether it has a recipe of its own, as in attention."""
    fusers: list[Any] = field(default_factory=list)
    """The `OperationFuser`s of `te.ops` that compute in FP8."""
    has_first_module: bool = False
    """True if a module in the autocast of the capture took the flag."""
    has_own_backward: bool = False
    """True if a module in an autocast inside the captured module took the flag."""
    of_checkpoints: list[bool] = field(default_factory=list)
    """The flag at the start of each `te.checkpoint`. A recomputation restores it."""
    updates_scales: bool = False
    """True if a replay outside of autocasts must update scales, because an autocast ends inside the captured module."""
    updated_inside: bool = False
    """True if a state is used before and after the end of an autocast inside the captured module."""
    updated_in_backward: bool = False
    """True if eager training updates scales between two backwards of one module."""

    def add_to(self, replay: Any) -> None:
        """Add steps to the replays of the graph that do the work of an eager forward on this state."""
        if self.updated_inside or self.updated_in_backward:
            replay.add("forward check", "refuse own autocasts", self.require_no_update_inside)
        if self.in_capture:
            replay.add("forward prepare", "register states of capture", self.register)
        if self.of_modules:
            replay.add("forward check", "require copied scales", self.require_copies)
            replay.add("forward prepare", "use copied scales", self.use_copies)
        if self.updates_scales:
            replay.add("forward deliver", "update scales", self.update_scales)

    def require_no_update_inside(self, call: Any) -> None:
        """Raise RuntimeError if eager training would update scales between two uses of a state."""
        is_outermost = not autocast_depth()
        if call.takes_grads and (
            (self.updated_inside and is_outermost) or (self.updated_in_backward and (is_outermost or is_first_module()))
        ):
            raise RuntimeError(_UPDATED_INSIDE)

    def register(self, _call: Any) -> None:
        """Register the states for scale updates, with their own recipe or the recipe of the current autocast."""
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled():
            for fp8_meta, own in self.in_capture:
                fp8_meta["recipe"], fp8_meta["fp8_group"] = own or manager.get_fp8_recipe(), manager.get_fp8_group()
                manager.add_fp8_tensors_to_global_buffer(fp8_meta)

    def require_copies(self, _call: Any) -> None:
        """Raise RuntimeError if a recomputation lacks the copies of its first forward."""
        if distributed.in_fp8_activation_recompute_phase():
            copies = _copies_for_recomputations()
            positions = [fp8_meta.get(_POSITION, len(copies)) for fp8_meta in self.of_modules]
            if any(position >= len(copies) or len(copies[position]) < n for position, n in Counter(positions).items()):
                raise RuntimeError(_NO_COPY)

    def use_copies(self, _call: Any) -> Callable[[], None] | None:
        """In a checkpoint, copy the states for its recomputation. In the recomputation, use the copies.

        Return a function that restores the newer states after the recomputation, or None outside of a recomputation.
        """
        manager = FP8GlobalStateManager
        if distributed.in_fp8_activation_recompute_phase():
            for number, fp8_meta in enumerate(self.of_modules):
                if any(fp8_meta is earlier for earlier in self.of_modules[:number]):
                    manager.restore_fp8_meta_tensors(fp8_meta)
                manager.get_old_fp8_meta_tensors_for_recompute(fp8_meta)
            return self._restore_newer_states
        # From TE 2.19 on, a checkpoint also copies the states of modules that enter an FP8 autocast inside it.
        in_checkpoint = getattr(distributed, "_IN_ACTIVATION_RECOMPUTE_REGION", False)
        if in_checkpoint or distributed.is_fp8_activation_recompute_enabled():
            for fp8_meta in self.of_modules:
                manager.copy_forward_fp8_meta_tensors_for_recompute(fp8_meta)
        return None

    def _restore_newer_states(self) -> None:
        for fp8_meta in self.of_modules:
            FP8GlobalStateManager.restore_fp8_meta_tensors(fp8_meta)

    def update_scales(self, ctx: Any, outputs: Any) -> Any:
        """Update scales, as the end of an autocast inside the captured module does, and return ``outputs``."""
        if ctx.call.takes_grads and not autocast_depth():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        return outputs


class _Queue(list[Any]):
    """A queue of values from captured forwards for their recomputations. ``taken`` counts the removed entries.

    TE assumes that backwards run in the order of their forwards, but the backwards of two graphs of the same module may
    run in another order.
    """

    taken = 0

    def __init__(self, capture: "Capture", entries: Iterable[Any] = ()) -> None:
        super().__init__((capture.used, entry) for entry in entries)
        self._capture = capture

    def append(self, entry: Any) -> None:
        super().append((self._capture.used, entry))

    def pop(self, index: Any = 0) -> Any:
        self.taken += 1
        return super().pop(index)[1]

    popleft = pop

    def bring_forward(self, used: UsedState) -> None:
        """Move the entries of the graph with the state ``used`` to the front, so that its backward takes them first."""
        self.sort(key=lambda pair: pair[0] is not used)


class Capture:
    """The FP8 states of modules, from the warmup to the last graph of one capture by TE.

    States are noted only while this object exists. TE's capture flag is not enough, because other packages, such as
    Megatron-Core, set it too.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.used = UsedState()
        self._is_warmup = True
        self._depth = autocast_depth()
        self._before: dict[int, tuple[dict[str, Any], dict[str, tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._was_first_module = is_first_module()
        self._copies = [*_copies_for_recomputations()]
        self._flags = activation_recompute_forward._is_first_fp8_module
        self._empty_queues()

    def _empty_queues(self) -> None:
        copies = _copies_for_recomputations()
        copies[:] = [_Queue(self) for _ in copies]
        activation_recompute_forward._is_first_fp8_module = _Queue(self)

    def begin_forward(self, replay: Any) -> None:
        """Begin the capture of a forward, whose FP8 state is recorded in ``replay``."""
        if self._is_warmup:
            self._is_warmup = False
            # A captured backward must not use a copy from the warmup, because this copy is not in graph memory.
            self._empty_queues()
        self.used = replay.fp8_state = UsedState()
        # The ids of the states that were used in an autocast inside the module, and of the states whose autocast has
        # ended since. In eager training, the end of the autocast updates their scales.
        self._used_inside, self._updated_inside = set[int](), set[int]()
        # The ids of the states whose use has a backward, and of the states that were used before the first FP8 module
        # of a later autocast. In eager training, the backward of this first module updates their scales.
        self._used_with_backward, self._updated_in_backward = set[int](), set[int]()
        set_first_module(True)

    def begin_warmup(self, replay: Any) -> None:
        """Begin a forward of a callable in the warmup."""
        self.used = replay.fp8_state = UsedState()

    def begin_backward(self, replay: Any) -> None:
        """Begin the backward of a callable, in the warmup or in the capture.

        A recomputation then takes the values of its own forward. TE ignores the autocast of a recomputation if the
        module's ``fp8`` is True. Another callable's forward may have set ``fp8``, so this callable's value is restored.
        """
        used = replay.fp8_state
        for queue in (*_copies_for_recomputations(), activation_recompute_forward._is_first_fp8_module):
            if isinstance(queue, _Queue):
                queue.bring_forward(used)
        for module, in_fp8 in used.modules_in_fp8.items():
            module.fp8 = in_fp8

    def use(self, owners: list[Any], fp8_metas: list[dict[str, Any]], needs_backward: bool, of_module: bool) -> None:
        """In the warmup, save the values of delayed-scaling states. In the capture, note the states and the ``owners``.

        ``needs_backward`` is True if the forward has a backward. ``of_module`` is False for operations of `te.ops`.
        """
        delayed = [fp8_meta for fp8_meta in fp8_metas if _delayed_states(fp8_meta)]
        if not torch.cuda.is_current_stream_capturing():
            for fp8_meta in delayed:
                self._save(fp8_meta)
            return
        used, states = self.used, {*map(id, delayed)}
        used.owners |= dict.fromkeys(owners)
        if FP8GlobalStateManager.get_autocast_state()[-1]:
            used.in_capture += [(fp8_meta, _own_recipe(fp8_meta)) for fp8_meta in delayed]
            used.in_autocast |= dict.fromkeys(owners, any(map(_own_recipe, fp8_metas)))
        else:
            used.updated_inside |= not states.isdisjoint(self._updated_inside)
            self._used_inside |= states
        if needs_backward and delayed:
            if is_first_module():
                self._updated_in_backward |= self._used_with_backward
            used.updated_in_backward |= not states.isdisjoint(self._updated_in_backward)
            self._used_with_backward |= states
        if of_module:
            used.of_modules += delayed

    def _save(self, fp8_meta: dict[str, Any]) -> None:
        """Save the scales and histories from before the warmup, in host memory."""
        if id(fp8_meta) not in self._before:
            states = _delayed_states(fp8_meta).items()
            values = {key: (state.scale.cpu(), state.amax_history.cpu()) for key, state in states}
            self._before[id(fp8_meta)] = fp8_meta, values

    def end_autocast(self, enabled: bool) -> None:
        """Note the end of an autocast inside a captured forward."""
        if enabled and torch.is_grad_enabled() and autocast_depth() == self._depth + 1:
            self._updated_inside |= self._used_inside
            self.used.updates_scales = True

    def end_forward(self, module: Any) -> None:
        """Note whether the capture's autocast enables FP8, which modules run in FP8, and the flags of checkpoints."""
        self.used.in_fp8 = FP8GlobalStateManager.is_fp8_enabled()
        flags = activation_recompute_forward._is_first_fp8_module
        self.used.of_checkpoints = [flag for used, flag in flags if used is self.used]
        modules = (*module.modules(), *self.used.owners)
        self.used.modules_in_fp8 |= {inner: inner.fp8 for inner in modules if "fp8" in vars(inner)}
        copies = _copies_for_recomputations()
        copies[:] = [queue if isinstance(queue, _Queue) else _Queue(self, queue) for queue in copies]

    def take_first_module(self) -> None:
        """Note that a module of the current forward took the flag of the first FP8 module."""
        if autocast_depth() == self._depth + 1:
            self.used.has_first_module = True
        else:
            self.used.has_own_backward = True

    def end(self, replays: Sequence[Any], is_training: bool) -> None:
        """End the capture of all graphs, and add the steps for FP8 states to their replays.

        Raise RuntimeError if the graphs cannot compute the numbers of eager training.
        """
        mixed = [queue for queue in _copies_for_recomputations() if queue and getattr(queue, "taken", 0)]
        self.restore()
        if is_training and mixed:
            raise RuntimeError(_MIXED_COPIES)
        for replay in replays:
            used = replay.fp8_state
            if is_training and (used.updated_inside or used.updated_in_backward) and not used.in_fp8:
                raise RuntimeError(_UPDATED_INSIDE)
            used.add_to(replay)

    def restore(self) -> None:
        """Restore the scales, amax histories, copies for recomputations and the flag for the first FP8 module.

        Modules registered during the capture get no copies.
        """
        copies = _copies_for_recomputations()
        copies[:] = [*self._copies, *(deque() for _ in copies[len(self._copies) :])]
        activation_recompute_forward._is_first_fp8_module = self._flags
        set_first_module(self._was_first_module)
        for fp8_meta, states in self._before.values():
            for key, (scale, amax_history) in states.items():
                fp8_meta[key].scale.copy_(scale)
                fp8_meta[key].amax_history.copy_(amax_history)


def begin_capture() -> Capture:
    """Begin the warmup of a capture in this thread, and return the `Capture`."""
    capture = Capture()
    FP8GlobalStateManager.fp8_capture = weakref.ref(capture, _forget)
    return capture


def _forget(capture: weakref.ref[Capture]) -> None:
    """Forget a finished capture, so that eager forwards do not look for it."""
    if getattr(FP8GlobalStateManager, "fp8_capture", None) is capture:
        del FP8GlobalStateManager.fp8_capture


def restore_after_failure() -> None:
    """After a failed capture in this thread, restore the state from before its warmup, and forget the capture."""
    if capture := current_capture():
        del FP8GlobalStateManager.fp8_capture
        capture.restore()


def current_capture() -> Capture | None:
    """Return the capture of this thread, or None."""
    reference = getattr(FP8GlobalStateManager, "fp8_capture", None)
    capture = reference() if reference else None
    return capture if capture and capture.thread == threading.get_ident() else None


def _capture_of_forward() -> Capture | None:
    """Return the capture whose forward runs in this thread, or None. A recomputed forward does not count."""
    return current_capture() if is_graph_capturing() and _current_graph_task_id() == -1 else None


def use_fp8_state(module: torch.nn.Module, inp: torch.Tensor) -> None:
    """Note the FP8 state of a module during its forward with the input ``inp``."""
    if module.fp8 and (capture := _capture_of_forward()):
        needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (inp, *module.parameters()))
        capture.use([module], [module.fp8_meta], needs_backward, of_module=True)


def use_fp8_state_of_operations(fuser: Any) -> None:
    """Note the FP8 states of the operations in ``fuser`` during their forward.

    TE registers the state of an operation when it creates the state, but not in a capture. Therefore, operations that
    have been captured register their states in every eager forward, as modules do.
    """
    metas = [
        op._fp8_metas[mode] for op in fuser._basic_ops for mode in ("forward", "backward") if op.num_quantizers(mode)
    ]
    if capture := _capture_of_forward():
        fuser.was_captured = True
        needs_backward = fuser.first_op_requiring_backward < len(fuser._basic_ops)
        capture.used.fusers.append(fuser)
        capture.use(fuser._basic_ops, metas, needs_backward, of_module=False)
    elif not is_graph_capturing():
        for fp8_meta in metas:
            fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(fp8_meta)


def end_autocast(enabled: bool) -> None:
    """Note the end of an autocast that a captured module entered itself."""
    if torch.cuda.is_current_stream_capturing() and (capture := _capture_of_forward()):
        capture.end_autocast(enabled)


def end_captured_forward(module: torch.nn.Module) -> None:
    """Note the end of a captured forward of a module, before the autocast of the capture ends."""
    if capture := _capture_of_forward():
        capture.end_forward(module)


def take_first_module() -> None:
    """Note that a module took the flag of the first FP8 module of an autocast."""
    if torch.cuda.is_current_stream_capturing() and (capture := _capture_of_forward()):
        capture.take_first_module()


def has_other_state(module: torch.nn.Module, *saved: Any) -> bool:
    """Return whether TE cannot save or restore a module's state in this capture.

    TE saves and restores only the state of delayed scaling. Before the restoration of an operation, ``saved`` is its
    saved state. If this is None, TE cannot restore the operation. Return False outside of a capture.
    """
    if not current_capture():
        return False
    if getattr(module, "_fp8_metas", {}) is None or None in saved:
        return True
    metas = [getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()]
    return any(not is_delayed(meta[key]) for meta in metas if meta for key in STATES.values() if key in meta)


def is_delayed(state: Any) -> bool:
    """Return whether a recipe state contains scales and amax histories of delayed scaling."""
    return getattr(state, "amax_history", None) is not None


def _delayed_states(fp8_meta: dict[str, Any]) -> dict[str, Any]:
    """Return the delayed-scaling states in ``fp8_meta`` by their key, or {} if there are none."""
    return {key: state for key in STATES.values() if is_delayed(state := fp8_meta.get(key))}


def _own_recipe(fp8_meta: dict[str, Any]) -> Any:
    """Return a state's own recipe, as in attention, or None if the state has the recipe of the autocast."""
    recipe = fp8_meta["recipe"]
    return recipe if fp8_meta.get("global_recipe", recipe) != recipe else None


def autocast_depth() -> int:
    """Return the number of autocasts around the current code."""
    return getattr(global_state(), _DEPTH)  # type: ignore[no-any-return]


def is_first_module() -> bool:
    """Return the flag of the first FP8 module, which is True until a module of the current autocast takes it."""
    return getattr(global_state(), _FIRST_MODULE)  # type: ignore[no-any-return]


def set_first_module(is_first: bool) -> None:
    """Set the flag of the first FP8 module."""
    setattr(global_state(), _FIRST_MODULE, is_first)


def _copies_for_recomputations() -> list[Any]:
    return global_state().fp8_tensors_recompute_buffer  # type: ignore[no-any-return]


def global_state() -> Any:
    """Return the object with TE's global FP8 state: ``quantization_state`` from TE 2.15 on, before that the manager."""
    return FP8GlobalStateManager.quantization_state if _HAS_STATE else FP8GlobalStateManager
