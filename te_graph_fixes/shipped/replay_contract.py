"""Replays of CUDA graphs raise where they would not compute what their modules do.

The data that another graph has left for this one must not have been overwritten since (`_te_replay_order`). The
modules, parameters and ``main_grad`` that it uses must be where they were (`_te_module_tensors`).

Where a checkpoint runs a forward again, in a backward,

1. an output that it may read has to be intact: one that is its input, or that somebody holds while its backward is to
   come, as an operation in front of the forward in the checkpoint may do;
2. it must not overwrite what somebody holds: a gradient of this run, unless its backward was captured before the
   forward, or an output of another microbatch, unless the forward was captured between that output's forward and
   backward. (Outputs of its own microbatch are made again, with the same values.)

Eager operations hold outputs and gradients, and cannot be asked what they read. So once a checkpoint is around, what
graphs give out is copied, and only what was given out before is in the way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import gt
from typing import Any

import torch
from torch._C import _current_graph_task_id  # where a torch lacks it, this fix fails, and no other
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ._te_module_tensors import CallableTensors, WarmupRecord, modules_of
from ._te_replay_order import ReplayOrder
from ._te_warn_once import warn_once

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


def note_capture(cuda_graph: Any = None, pool: Any = None, **_: Any) -> None:
    """Give a graph that is about to be captured the next position in its memory pool."""
    if cuda_graph is not None:
        state = _pools.setdefault(pool, _Pool())
        cuda_graph.position = (state, state.new_position())


class Contract:
    """The conditions of the replays of one callable and microbatch.

    ``functions`` are the callables of a capture, each once for each microbatch; this is number ``number``. Its
    ``graphs`` are a forward, a dgrad and a wgrad. It has so many ``inputs``, after which come its ``parameters``.
    """

    def __init__(
        self,
        number: int,
        functions: Sequence[Any],
        graphs: Sequence[Any],
        outputs: Iterable[Any],
        grad_inputs: Sequence[Any] | None,
        inputs: int,
        parameters: Sequence[torch.Tensor],
        delays_wgrad: bool,
        retains_graph: bool,
        warmup: WarmupRecord,
    ) -> None:
        # The memory pool of each graph, and its position there; 0 if it was not captured.
        positions: Iterable[tuple[Any, int]] = (getattr(graph, "position", (None, 0)) for graph in graphs)
        (self.pool, self.forward), (_, self.backward), (wgrad_pool, wgrad) = positions
        # Without an order `wgrad-memory-reuse` captures wgrads after all else, in a pool of their own.
        self._wgrad = wgrad if wgrad_pool is self.pool else 0
        self._end = self._wgrad or self.pool.count + 1
        self._delays_wgrad, self._retains_graph = delays_wgrad, retains_graph
        self._dgrad_time = 0  # of one whose wgrad is to come
        self._microbatch = sum(other is functions[number] for other in functions[:number])
        self.pool.captures += number == 0
        self.name = _name(functions, number, self._microbatch, self.pool.captures)
        kinds = {self.forward: "forward", self.backward: "backward", self._wgrad: "backward_dw"}
        names = {position: f"the {kind} of {self.name}" for position, kind in kinds.items() if position}
        self.pool.names.update(names)
        self.pool.contracts[self.forward] = self
        self._release_positions = weakref.finalize(self, self.pool.release, [*names])

        self._tensors = CallableTensors(functions[number], parameters, warmup.modules.get(number, ()))
        self._frozen = self._tensors.frozen if self.backward else []
        self._is_fused = [parameter in self._tensors.fused for parameter in parameters]
        self._recipe = warmup.recipes.get(number)
        self._recipe_states = [*_recipe_states(functions[number])]
        self._inputs = range(inputs)
        self._outputs = _tensors(outputs)
        self._given_outputs, self._given_grads = _GivenOut(self._outputs), _GivenOut((grad_inputs or ())[:inputs])
        self._recomputed: list[int] = []  # when checkpoints have run the forward again since the last backward

    def release(self) -> None:
        """Let go of what the graphs use, which were reset, and forget its positions."""
        self._tensors = CallableTensors(None, (), ())
        self._outputs, self._frozen = [], []
        self.pool.contracts.pop(self.forward, None)
        self._release_positions()

    def scales(self) -> int:
        """How often the scales that the dgrad reads were given other values, as by an evaluation in another recipe."""
        return sum(getattr(state, "times_taken_over", 0) for state in self._recipe_states)

    def before_forward(self, inputs: Iterable[Any]) -> None:
        """Note the replay of the forward; RuntimeError where the module would compute another result."""
        pool, takes_grads = self.pool, torch.is_grad_enabled()
        self._tensors.members.require_same(self.name)
        self._tensors.read.require_same(self.name)
        for parameter in self._frozen:
            if takes_grads and parameter.requires_grad:
                raise RuntimeError(
                    f"{self.name}: parameters that needed no gradient when this graph was captured need one now, and "
                    "would get none. Capture again"
                )
        in_backward = _current_graph_task_id() != -1
        saves_by_hooks = _saved_tensors_hooks(True) is not None
        if in_backward:
            self._require_recomputable({value.untyped_storage()._cdata for value in _tensors(inputs)})
        elif self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            warn_once(
                f"{self.name}: this graph was captured in FP8 and is replayed outside of an autocast: it computes in "
                "FP8, its module would not, and scales stay as they are. Replay it in the autocast of the capture",
                "outside of an autocast",
            )
        if not (in_backward and takes_grads):
            for output in self._outputs:  # autograd raises where an eager operation still has to read the old values
                torch.autograd.graph.increment_version(output)
        in_checkpoint = saves_by_hooks or not takes_grads
        pool.may_recompute = in_backward or in_checkpoint or (pool.may_recompute and self.forward > pool.position)
        pool.keeps_outputs = pool.may_recompute and not in_checkpoint
        pool.in_checkpoint = saves_by_hooks and not in_backward
        pool.note_replay(self.forward)
        if not in_backward:
            self._recomputed.clear()
        elif takes_grads and saves_by_hooks:
            self._recomputed.append(pool.now)

    def _require_recomputable(self, inputs: set[int]) -> None:
        """RuntimeError where the forward may not be run in a backward; ``inputs`` are the storages of its inputs."""
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
            what, end = f"forward of {self.name}", other.backward or pool.count + 1
            pool.require_untouched(what, other.forward, ran, end, f"the forward of {other.name}")

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
        pool, since, scales = self.pool, ctx.time, ctx.scales
        trained = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(self._is_fused) :]
        if not all(compress(trained, self._is_fused)):
            raise RuntimeError(
                f"{self.name}: a weight was frozen since this graph was captured, and the graph would still add to its "
                "main_grad. Capture again"
            )
        if ctx.in_checkpoint and self._recomputed == [pool.time(self.forward)]:
            # A checkpoint that is not reentrant has run it again.
            since, scales = pool.time(self.forward), self.scales()
        # If a backward retains what its forward has left, it may be replayed again.
        end = self.backward + self._retains_graph
        pool.require_untouched(f"backward of {self.name}", self.forward, since, end, "its forward")
        if scales != self.scales():
            raise RuntimeError(
                f"the backward of {self.name} cannot be replayed: since its forward its modules have run in another "
                "recipe, which drops the scales and cached weights that it reads. Evaluate in the recipe of the "
                "capture, or between two steps"
            )
        self._tensors.read.require_same(self.name)
        if not self._delays_wgrad:
            self._tensors.written.require_same(self.name)
        elif self._dgrad_time:
            warn_once(
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
        self._tensors.written.require_same(self.name)
        if self._wgrad:
            pool.note_replay(self._wgrad)
        self._dgrad_time = 0


class _GivenOut:
    """The memory that a graph gives out, by references that do not own it, so that ``reset()`` frees it."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._storages = [StorageWeakRef(value.untyped_storage()) for value in _tensors(tensors) if value.numel()]
        self._uses_then = self._uses()

    def _uses(self) -> list[int]:
        return [0 if ref.expired() else torch._C._storage_Use_Count(ref.cdata) for ref in self._storages]

    def are_held(self) -> bool:
        """Whether more use something than at the capture."""
        return any(map(gt, self._uses(), self._uses_then))

    def is_among(self, storages: set[int]) -> bool:
        return any(ref.cdata in storages for ref in self._storages)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _name(functions: Sequence[Any], number: int, microbatch: int, capture: int) -> str:
    function = functions[number]
    callables = [*dict.fromkeys(map(id, functions))]
    layer = f", layer {function.layer_number}" if hasattr(function, "layer_number") else ""
    name = f"callable {callables.index(id(function))} ({type(function).__name__}{layer})"
    if sum(other is function for other in functions) > 1:
        name += f" of microbatch {microbatch}"
    return name if capture == 1 else f"{name} of capture {capture} in its memory pool"


def _recipe_states(function: Any) -> Iterator[Any]:
    """The recipe states that hold the FP8 scales of the gradients in a callable."""
    for module in modules_of(function):
        of_operation = (getattr(module, "_fp8_metas", None) or {}).get("backward")
        state = (of_operation or getattr(module, "fp8_meta", {})).get("scaling_bwd")
        if state is not None:
            yield state
