"""What a capture of CUDA graphs has fixed, required at each replay: the order of replays, and where tensors are.

ORDER. What one graph has left for another may not have been overwritten since (`_te_replay_order`).

ADDRESSES. A graph reads and writes where its module's tensors were. So each forward looks whether its module has the
same modules and parameters, and each replay whether what it reads or adds to is where it was (`_te_module_tensors`).

RECOMPUTATION. A checkpoint runs a forward again, in a backward. Then

1. an output that it may read has to be intact: one that is its input, or that somebody holds while its backward is to
   come, as an operation in front of the forward in the checkpoint may do;
2. it must not overwrite what somebody holds: a gradient of this run, unless its backward was captured before the
   forward, or an output of another microbatch, unless the forward was captured between that output's forward and
   backward. (Outputs of its own microbatch are made again, with the same values.)

Eager operations hold outputs and gradients, and cannot be asked what they read. So once a checkpoint is around, what
graphs give out is copied, and only what was given out before is in the way.

Nothing is forbidden in advance: who leaves a backward out, evaluates, or runs fewer microbatches loses nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ._te_module_tensors import CallableTensors, WarmupRecord, is_tensor, modules_of
from ._te_replay_order import ReplayOrder

# A torch older than 2.8 does not say whether a checkpoint is around: there is one, then.
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())


class _Pool(ReplayOrder):
    """The graphs of one memory pool, and what checkpoints do with them.

    ``may_recompute``: in this run a checkpoint has run a forward, and may run it again before what earlier replays have
    given out is read. Then outputs of forwards outside of checkpoints (``keeps_outputs``) and gradients are copied.
    ``in_checkpoint``: the last forward was in one that is not reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self.contracts: weakref.WeakValueDictionary[int, Contract] = weakref.WeakValueDictionary()
        self.may_recompute = self.keeps_outputs = self.in_checkpoint = False


# They belong to captures, and outlive another text of this module.
_pools: weakref.WeakValueDictionary[Any, _Pool] = globals().get("_pools", weakref.WeakValueDictionary())
_warned: set[str] = globals().get("_warned", set())


def note_capture(cuda_graph: Any = None, pool: Any = None, **_: Any) -> None:
    """Give a graph that is about to be captured the next place in its memory pool; ``_`` are `torch.cuda.graph`'s."""
    if cuda_graph is not None:
        state = _pools.get(pool)
        if state is None:
            state = _pools[pool] = _Pool()
        cuda_graph.place = (state, state.new_place())


class Capture(NamedTuple):
    """A capture of ``functions``: its callables, each once for each microbatch. All else is by the same numbers."""

    functions: Sequence[Any]
    graphs: Sequence[tuple[Any, Any, Any]]
    """For each its forward, its dgrad and its wgrad."""
    outputs: Sequence[Sequence[Any]]
    grad_inputs: Sequence[Sequence[Any] | None]
    inputs: Sequence[int]
    """How many each has, without parameters."""
    parameters: Sequence[Sequence[torch.Tensor]]
    delays_wgrad: Mapping[int, bool]
    warmup: WarmupRecord
    retains_graph: bool


def make_contracts(*of_capture: Any) -> list[Contract]:
    """What each graph of a `Capture` asks for."""
    capture = Capture(*of_capture)
    tensors: dict[int, CallableTensors] = {}  # microbatches of a callable have them in common
    for number, function in enumerate(capture.functions):
        if id(function) not in tensors:
            ran = capture.warmup.modules.get(number, set())
            tensors[id(function)] = CallableTensors(function, capture.parameters[number], ran)
    return [Contract(capture, number, tensors[id(each)]) for number, each in enumerate(capture.functions)]


class Contract:
    """What the graphs of one callable and microbatch, number ``number`` of a capture, ask for at their replays."""

    def __init__(self, capture: Capture, number: int, tensors: CallableTensors) -> None:
        function = capture.functions[number]
        (self.pool, self.forward), (_, self.backward), (wgrad_pool, wgrad) = map(_place, capture.graphs[number])
        # Without an order wgrads are captured after all else, in a pool of their own.
        self._wgrad = wgrad if wgrad_pool is self.pool else 0
        self._end = self._wgrad or self.pool.places + 1
        self._microbatch = sum(other is function for other in capture.functions[:number])
        self.pool.captures += not number
        self.name = _name(capture.functions, number, self._microbatch)
        if self.pool.captures > 1:
            self.name += f" of capture {self.pool.captures} in its memory pool"
        kinds = {self.forward: "forward", self.backward: "backward", self._wgrad: "backward_dw"}
        places = {place: f"the {kind} of {self.name}" for place, kind in kinds.items() if place}
        self.pool.names.update(places)
        self.pool.contracts[self.forward] = self
        self._release_places = weakref.finalize(self, self.pool.release, [*places])

        self._tensors = tensors
        self._frozen = tensors.frozen if self.backward else []
        self._is_fused = [parameter in tensors.fused for parameter in capture.parameters[number]]
        self._delays_wgrad = capture.delays_wgrad.get(number, False)
        self._dgrad_time = 0  # of one whose wgrad is to come
        self._retains_graph = capture.retains_graph
        self._recipe = capture.warmup.recipes.get(number)
        self._other_scales_since = 0
        for state in _recipe_states(function):
            vars(state).setdefault("contracts", _OfState()).add(self)

        self._inputs = range(capture.inputs[number])
        self._outputs = [*filter(is_tensor, capture.outputs[number])]
        self._given_outputs = _GivenOut(self._outputs)
        self._given_grads = _GivenOut((capture.grad_inputs[number] or ())[: capture.inputs[number]])
        self._recomputed: list[int] = []
        """When checkpoints have run the forward again since the last backward."""

    def release(self) -> None:
        """Let go of what the graphs use, which were reset, and of their places."""
        self._tensors = CallableTensors(None, (), ())
        self._outputs, self._frozen = [], []
        self.pool.contracts.pop(self.forward, None)
        self._release_places()

    def note_other_scales(self) -> None:
        """Note that the scales of the graphs have other values now: an evaluation in another recipe took the old."""
        self._other_scales_since = self.pool.now

    def before_forward(self, inputs: Iterable[Any]) -> None:
        """Note the replay of the forward; RuntimeError where the module would compute another result."""
        pool, takes_grads = self.pool, torch.is_grad_enabled()
        self._tensors.require_members(self.name)
        self._tensors.require_read(self.name)
        for parameter in self._frozen:
            if takes_grads and parameter.requires_grad:
                raise RuntimeError(
                    f"{self.name}: parameters that needed no gradient when this graph was captured need one now, and "
                    "would get none. Capture again"
                )
        in_backward = torch._C._current_graph_task_id() != -1
        saves_by_hooks = _saved_tensors_hooks(True) is not None
        if in_backward:
            self._require_recomputable({each.untyped_storage()._cdata for each in inputs if is_tensor(each)})
        elif self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            _warn_once(
                f"{self.name}: this graph was captured in FP8 and is replayed outside of an autocast: it computes in "
                "FP8, its module would not, and scales stay as they are. Replay it in the autocast of the capture",
                "outside of an autocast",
            )
        if not (in_backward and takes_grads):
            for output in self._outputs:  # autograd raises where an eager operation still has to read the old values
                torch.autograd.graph.increment_version(output)
        in_checkpoint = saves_by_hooks or not takes_grads
        pool.may_recompute = in_backward or in_checkpoint or (pool.may_recompute and self.forward > pool.place)
        pool.keeps_outputs = pool.may_recompute and not in_checkpoint
        pool.in_checkpoint = saves_by_hooks and not in_backward
        pool.note_replay(self.forward)
        if not in_backward:
            self._recomputed.clear()
        elif takes_grads and saves_by_hooks:
            self._recomputed.append(pool.now)

    def _require_recomputable(self, inputs: set[int]) -> None:
        """RuntimeError where the forward, run in a backward, computes or overwrites what it must not.

        ``inputs`` are the storages of its inputs.
        """
        if self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again outside of the autocast of its capture: the graph "
                "would compute in FP8, its module would not. Use te.checkpoint, which enters the autocast again, or "
                "run the backward in the autocast"
            )
        if self._given_outputs.is_among(inputs):
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again with its own output, which is overwritten. Capture "
                "the module once for each time that a step calls it (`_order`)"
            )
        for other in self.pool.contracts.values():
            if other is not self and self.pool.time(other.forward):
                self._require_intact_outputs(other, inputs)
                self._require_harmless(other)

    def _require_intact_outputs(self, other: Contract, inputs: set[int]) -> None:
        """Rule 1 of recomputation, for the outputs of another contract."""
        pool, outputs = self.pool, other._given_outputs
        ran = pool.time(other.forward)
        backward_is_to_come = other.backward and pool.time(other.backward) < ran
        if outputs.is_among(inputs) or (backward_is_to_come and outputs.are_held()):
            end = other.backward or pool.places + 1
            what, before = f"forward of {self.name}", f"the forward of {other.name}"
            pool.require_untouched(what, other.forward, ran, end, before)

    def _require_harmless(self, other: Contract) -> None:
        """Rule 2 of recomputation, for what another contract has given out last: gradients, or outputs."""
        pool = self.pool
        gave_grads = pool.time(other.backward)
        if gave_grads > pool.time(other.forward):
            what, given = "gradient that the backward", other._given_grads
            is_safe = self.forward > other.backward or gave_grads < pool.run_began
        else:
            what, given = "output that the forward", other._given_outputs
            is_safe = self._microbatch == other._microbatch or other.forward < self.forward < other.backward
        if not is_safe and given.are_held():
            raise RuntimeError(
                f"the forward of {self.name} is run in a backward, as by a checkpoint, and may overwrite the {what} of "
                f"{other.name} has given out. Capture what is run there by itself, so that it shares its memory with "
                "no other graph, or put the checkpoint into the module that is captured"
            )

    def before_backward(self, ctx: Any) -> None:
        """Note the replay of the dgrad; RuntimeError where what its forward, at ``ctx.time``, has left is gone."""
        pool, since = self.pool, ctx.time
        trained = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(self._is_fused) :]
        if not all(compress(trained, self._is_fused)):
            raise RuntimeError(
                f"{self.name}: a weight was frozen since this graph was captured, and the graph would still add to its "
                "main_grad. Capture again"
            )
        if ctx.in_checkpoint and self._recomputed == [pool.time(self.forward)]:
            since = pool.time(self.forward)  # a checkpoint that is not reentrant has run it again
        end = self.backward + self._retains_graph
        pool.require_untouched(f"backward of {self.name}", self.forward, since, end, "its forward")
        if since <= self._other_scales_since:
            raise RuntimeError(
                f"the backward of {self.name} cannot be replayed: since its forward its modules have run in another "
                "recipe, which drops the scales and cached weights that it reads. Evaluate in the recipe of the "
                "capture, or between two steps"
            )
        self._tensors.require_read(self.name)
        if not self._delays_wgrad:
            self._tensors.require_written(self.name)
        elif self._dgrad_time:
            _warn_once(
                f"{self.name}: the last backward has had no backward_dw(), and its wgrad is lost: call it after each",
                "no backward_dw",
            )
        self._recomputed.clear()
        if pool.may_recompute:
            ctx.inputs_with_copied_grads = self._inputs
        pool.note_replay(self.backward)
        self._dgrad_time = pool.now

    def before_wgrad(self) -> None:
        """Note the replay of the wgrad; RuntimeError where there was no dgrad before it, or what that left is gone."""
        pool, since = self.pool, self._dgrad_time
        if not since:
            raise RuntimeError(
                f"{self.name}: backward_dw() without a backward before it that it belongs to. Call it once after each "
                "backward"
            )
        pool.require_untouched(f"backward_dw of {self.name}", self.backward, since, self._end, "its backward")
        self._tensors.require_written(self.name)
        if self._wgrad:
            pool.note_replay(self._wgrad)
        self._dgrad_time = 0


class _GivenOut:
    """The memory that a graph gives out, by references that do not own it, so that ``reset()`` frees it."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        tensors = [each for each in tensors if is_tensor(each) and each.numel()]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._uses = [*map(_uses, self._storages)]

    def are_held(self) -> bool:
        """Whether something is used by more than at the capture."""
        return any(_uses(each) > before for each, before in zip(self._storages, self._uses, strict=True))

    def is_among(self, storages: set[int]) -> bool:
        return any(each.cdata in storages for each in self._storages)


def _uses(storage: Any) -> int:
    return 0 if storage.expired() else torch._C._storage_Use_Count(storage.cdata)


def _place(graph: Any) -> tuple[Any, int]:
    """The memory pool of a graph and its place there; 0 if it was not captured."""
    place: tuple[Any, int] = getattr(graph, "place", (None, 0))
    return place


def _name(functions: Sequence[Any], number: int, microbatch: int) -> str:
    function = functions[number]
    callables = [*dict.fromkeys(map(id, functions))]
    layer = getattr(function, "layer_number", None)
    kind = type(function).__name__ + (f", layer {layer}" if layer is not None else "")
    name = f"callable {callables.index(id(function))} ({kind})"
    is_captured_again = sum(other is function for other in functions) > 1
    return f"{name} of microbatch {microbatch}" if is_captured_again else name


class _OfState(weakref.WeakSet[Any]):
    """The contracts that a recipe state belongs to; a copy of the state, by `copy.deepcopy` or pickle, has none."""

    def __reduce__(self) -> Any:
        return weakref.WeakSet, ()


def _recipe_states(function: Any) -> Iterator[Any]:
    """What holds the FP8 scales of the gradients in a callable."""
    for module in modules_of(function):
        of_operation = (getattr(module, "_fp8_metas", None) or {}).get("backward")
        state = (of_operation or getattr(module, "fp8_meta", {})).get("scaling_bwd")
        if state is not None:
            yield state


def _warn_once(text: str, about: str) -> None:
    """Warn, once a process for each of what the warnings are ``about``."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, stacklevel=2)
