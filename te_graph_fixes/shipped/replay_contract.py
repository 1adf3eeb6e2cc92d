"""What a capture of CUDA graphs has fixed, compared at each replay: the order of replays, and where everything is.

Graphs of one memory pool write where they wrote at capture. What graph X leaves for graph Y (a forward for its dgrad, a
dgrad for its wgrad) is untouched by what was captured between the two, since it was in use then, and by nothing else:
what was captured before X may have given up the memory that X got, what was captured after Y may have got what Y
reads. So Y may be replayed if **all that was replayed since X was captured between X and Y**. Nothing is forbidden in
advance: who leaves a backward out, evaluates, drops a step or runs fewer microbatches loses nothing.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, getitem
from time import monotonic
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors that FP8 parameters consist of, but for their transposes, which may be made again."""

LOOKS, RECENT = 64, 0.1
"""After the first 64 looks, one that follows a full look in less than 0.1 seconds is quick: at a sample only."""

_address = torch.Tensor.data_ptr
_needs_grad = attrgetter("requires_grad")
_grad_enabled = torch.is_grad_enabled
_backward_task = torch._C._current_graph_task_id
# A torch older than 2.8 does not say whether a checkpoint is around: there is one, then.
saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
_warned: set[str] = set()
_EMPTY: dict[str, Any] = {}


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Let autograd raise where an eager operation still has to read the old values."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


with contextlib.suppress(RuntimeError, TypeError):  # of a torch that takes one tensor alone
    torch._C._increment_version([])
    mark_written = torch._C._increment_version


class _Pool:
    """What has been replayed of the graphs of one memory pool. Places are counted from 0 in the order of captures.

    A run is a sequence of replays whose places increase; ``place`` is the last of them. The time of a replay is
    ``run + place``: a new run starts at a number above all earlier times. ``last_runs`` has the run of each place's
    last replay, where that is not the ``complete`` run, the last one that went through all places.
    If the next replay is at ``next``, it needs no look: it comes right after the one before, and what its capture reads
    was there. It only counts ``next`` up; `catch_up` enters it later. -1 if there is no such place.
    ``may_recompute``: a checkpoint has run a forward, and may run it again before gradients of earlier backwards are
    read; then outputs of forwards outside of a checkpoint are copied (``keeps_outputs``). ``in_checkpoint``: the last
    forward was in one that runs it again for the same backward.
    """

    def __init__(self) -> None:
        self.last_runs: list[float] = []
        self.complete = -math.inf
        self.names: list[str] = []
        self.run = self.captures = 0
        self.next = self.place = -1
        self.may_recompute = self.keeps_outputs = self.in_checkpoint = False
        self.contracts: list[weakref.ref[Contract]] = []

    def new_place(self) -> int:
        """A place for a graph that is about to be captured."""
        if self.complete >= 0:
            self.last_runs = [max(run, self.complete) for run in self.last_runs]
            self.complete = -math.inf
        self.last_runs.append(-math.inf)
        self.names.append("a graph whose capture failed")
        return len(self.names) - 1

    def last_time(self, place: int) -> float:
        """When the graph at ``place`` was last replayed; less than 0 if never."""
        return max(self.last_runs[place], self.complete) + place

    def catch_up(self, place: int) -> bool:
        """Enter the replays that ``next`` has only counted. True if ``place`` continues the run, else begin one."""
        if self.next > self.place:
            if self.place == 0 and self.next == len(self.last_runs):
                self.complete = self.run
            else:
                self.last_runs[self.place + 1 : self.next] = [self.run] * (self.next - self.place - 1)
            self.place = self.next - 1
        self.next = -1
        goes_on = place > self.place
        if not goes_on:
            self.run += len(self.last_runs)
        return goes_on

    def note_replay(self, place: int, looks: _Looks) -> int:
        """Note that the graph at ``place`` is replayed now, and return when. ``looks`` are those of its capture."""
        self.last_runs[place] = self.run
        self.place = place
        self.next = place + 1 if looks.verified_run == self.run and not self.may_recompute else -1
        return self.run + place


_pools: weakref.WeakValueDictionary[Any, _Pool] = weakref.WeakValueDictionary()


def note_capture(cuda_graph: Any = None, pool: Any = None, **_: Any) -> None:
    """Give a graph that is about to be captured the next place in its memory pool; ``_`` are `torch.cuda.graph`'s."""
    if cuda_graph is None:
        return
    state = _pools.get(pool)
    if state is None:
        state = _pools[pool] = _Pool()
    cuda_graph.place = (state, state.new_place())


def with_own_inputs(
    sample_args: Sequence[Any],
    sample_kwargs: Sequence[Any],
    are_handed_on: bool,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> tuple[list[Any], list[Any]]:
    """The samples of a capture, where a tensor that takes a gradient has a copy for each input that it is given as.

    Inputs of several callables stay one tensor where they ``are_handed_on``. What needs no gradient, as masks, has the
    same values for all in each step. Parameters are not written.
    """
    seen: set[int] = set()
    samples = []
    for sample in zip(sample_args, sample_kwargs, strict=True):
        if are_handed_on:
            seen.clear()
        leaves, spec = flatten(sample)
        for i, leaf in enumerate(leaves):
            if getattr(leaf, "requires_grad", False) and not isinstance(leaf, torch.nn.Parameter):
                if leaf.data_ptr() in seen:
                    leaves[i] = leaf.detach().clone().requires_grad_()
                seen.add(leaf.data_ptr())
        samples.append(unflatten(leaves, spec))
    return [args for args, _ in samples], [kwargs for _, kwargs in samples]


def copy_without_graphs(module: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` gives for a module with graphs: these read the original's parameters, so a copy has none."""
    names = ("forward", "backward_dw", "reset", "__deepcopy__")
    given = {name: vars(module).pop(name) for name in names if name in vars(module)}
    try:
        return copy.deepcopy(module, memo)
    finally:
        vars(module).update(given)


class _OfState(weakref.WeakSet[Any]):
    """The contracts that a recipe state belongs to; a copy of the state, by `copy.deepcopy` or pickle, has none."""

    def __reduce__(self) -> Any:
        return weakref.WeakSet, ()


class WarmupRecord:
    """What the warmup has run: modules by the number of their callable, and recipes of callables in FP8."""

    def __init__(self) -> None:
        self.modules: dict[int, set[torch.nn.Module]] = {}
        self.recipes: dict[int, Any] = {}

    def note(self, number: int, module: torch.nn.Module) -> None:
        """Note that a callable has run ``module``, in the autocast of the capture or in one of its own."""
        self.modules.setdefault(number, set()).add(module)
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled() and manager.fp8_graph_capturing():
            recipe = manager.get_fp8_recipe()
            of_operations = (getattr(each, "_fp8_metas", None) for each in module.modules())
            quantizes = hasattr(module, "fp8_meta") or any(of_operations)
            if quantizes and (recipe.fp8_dpa or not hasattr(module, "unfused_attention")):
                self.recipes[number] = recipe


class Contract:
    """What the graphs of one callable and microbatch ask for at their replays.

    ``functions`` are those of all callables and microbatches of a capture, of which this is number ``number``. What
    follows is for each of them: forward, dgrad and wgrad, outputs, gradients of inputs, how many inputs, parameters,
    and whether its wgrad is delayed.
    """

    def __init__(
        self,
        number: int,
        functions: Sequence[Any],
        graphs: Sequence[Sequence[Any]],
        outputs: Sequence[Sequence[Any]],
        grad_inputs: Sequence[Any],
        inputs: Sequence[int],
        parameters: Sequence[Iterable[torch.Tensor]],
        delays_wgrad: Mapping[int, bool],
        warmup: WarmupRecord,
        retains_graph: bool,
    ) -> None:
        (self.pool, self.forward), (_, self.backward), (self._wgrad_pool, self._wgrad) = map(_place, graphs[number])
        self.outputs = [tensor for tensor in outputs[number] if isinstance(tensor, torch.Tensor)]
        self._delays_wgrad, self._retains_graph = delays_wgrad.get(number, False), retains_graph
        self.microbatch = sum(other is functions[number] for other in functions[:number])
        self.name = _name(number, functions, self.microbatch)
        if not number:
            self.pool.captures += 1
        if self.pool.captures > 1:
            self.name += f" of capture {self.pool.captures} in its memory pool"
        for kind, graph in zip(("forward", "backward", "backward_dw"), graphs[number], strict=True):
            if hasattr(graph, "place"):
                graph.place[0].names[graph.place[1]] = f"the {kind} of {self.name}"
        # Without an order wgrads are captured behind all else, in a pool of their own.
        self._end = self._wgrad if self._wgrad_pool is self.pool else len(self.pool.last_runs)
        self._dgrad_time: int | None = None
        self._inputs = range(inputs[number])
        returned = self.outputs, (grad_inputs[number] or ())[: inputs[number]]
        self._returned = [[(s, _uses(s)) for s in map(_storage, tensors) if s] for tensors in returned]
        self.pool.contracts.append(weakref.ref(self))
        self._recipe = warmup.recipes.get(number)
        self._is_first_in_fp8 = bool(self._recipe) and not warmup.recipes.get(number - 1)
        # When checkpoints have run the forward again since the last backward.
        self._recomputed: list[float] = []
        self._renewed = 0
        for state in _recipe_states(functions[number]):
            vars(state).setdefault("contracts", _OfState()).add(self)
        modules = warmup.modules.get(number, set())
        own = [parameter for parameter in _own_parameters(modules) if parameter.numel()]
        slots = [*_submodules(functions[number]), *_owners(functions[number], [*parameters[number], *own])]
        self.read = _Addresses(slots, _registries(functions[number]))
        weights = _fused(modules)
        self.written = _Addresses([(vars(weight), "main_grad", "the main_grad of a parameter") for weight in weights])
        frozen = {id(parameter): parameter for parameter in own if not parameter.requires_grad}
        self._frozen = [*frozen.values()] if self.backward >= 0 else []
        fused = set(map(id, weights))
        self._is_fused = [id(parameter) in fused for parameter in parameters[number]]
        self._needs_grad: tuple[bool, ...] = ()

    def join(self, looks: _Looks) -> None:
        """Take part in the ``looks`` of the capture."""
        self._looks = looks
        # Their places, where they need no look if they come next; else None.
        self.quick_forward: int | None = None
        self.quick_backward: int | None = self.backward
        self._quick_wgrad = self._wgrad if self._wgrad_pool is self.pool else None

    def all_addresses(self) -> _Addresses:
        """All that the graphs of the callable read and write."""
        return _Addresses([*self.read.slots, *self.written.slots], self.read.registries)

    def release(self) -> None:
        """Let the parameters go, and end the looks of the whole capture."""
        self.outputs, self._frozen = [], []
        self.read, self.written = _Addresses([]), _Addresses([])
        self._looks.end()

    def note_other_scales(self) -> None:
        """Note that the scales of the graphs have other values now: an evaluation in another recipe took the old."""
        self.pool.catch_up(0)
        self._renewed = self.pool.run

    def look_forward(self, inputs: Iterable[Any], is_first_microbatch: bool | None = None) -> None:
        """Note the replay of the forward; RuntimeError where the module would compute another result.

        A replay that comes right behind the one before, at ``quick_forward``, needs no such look.
        ``is_first_microbatch`` is what the caller says of it, if anything.
        """
        pool, grad_enabled, run_before = self.pool, _grad_enabled(), self.pool.run
        goes_on = pool.catch_up(self.forward)
        looks, is_first = self._looks, self.forward in self._looks.first_backwards
        if not is_first and self.forward != pool.place + 1:
            looks.verified_run = -1  # what was left out would have looked
        if not (is_first and grad_enabled and looks.begin(pool.run, self.forward, is_first_microbatch)):
            self.read.check(self.name)
        if grad_enabled and any(map(_needs_grad, self._frozen)):
            raise RuntimeError(
                f"{self.name}: parameters that needed no gradient when this graph was captured need one now, and "
                "would get none. Capture again"
            )
        in_backward, saves_by_hooks = _backward_task() != -1, saved_tensors_hooks(True) is not None
        if in_backward:
            self._check_recomputation(inputs, run_before)
        if self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            _warn_once(
                f"{self.name}: this graph was captured in FP8 and is replayed outside of an autocast: it computes in "
                "FP8, its module would not, and scales stay as they are. Replay it in the autocast of the capture",
                "outside of an autocast",
            )
        if not (in_backward and grad_enabled):
            mark_written(self.outputs)
        checkpointed = not grad_enabled or saves_by_hooks
        pool.may_recompute = in_backward or checkpointed or (pool.may_recompute and goes_on)
        pool.keeps_outputs = pool.may_recompute and not checkpointed
        time = pool.note_replay(self.forward, looks)
        if not in_backward:
            self._recomputed.clear()
        elif grad_enabled and saves_by_hooks:
            self._recomputed.append(time)
        pool.in_checkpoint = saves_by_hooks and not in_backward
        is_never_quick = is_first or self._is_first_in_fp8 or self._frozen or pool.may_recompute
        self.quick_forward = None if is_never_quick else self.forward

    def _check_recomputation(self, inputs: Iterable[Any], run_before: int) -> None:
        """RuntimeError where a checkpoint runs the forward again without FP8, or over what others have given out.

        ``run_before`` is the run that was under way until this replay.
        """
        if self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again outside of the autocast of its capture: the graph "
                "would compute in FP8, its module would not. Use te.checkpoint, which enters the autocast again, or "
                "run the backward in the autocast"
            )
        of_inputs = {each.untyped_storage()._cdata for each in inputs if isinstance(each, torch.Tensor)}
        if any(storage.cdata in of_inputs for storage, _ in self._returned[0]):
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again with its own output, which is overwritten. Capture "
                "the module once for each time that a step calls it (`_order`)"
            )
        last_time, place = self.pool.last_time, self.forward
        for reference in self.pool.contracts:
            other = reference()
            if other is None or other is self or last_time(other.forward) < 0:
                continue
            outputs, grads = other._returned
            is_open = other.backward >= 0 and last_time(other.backward) < last_time(other.forward)
            # An operation before this forward in the checkpoint runs again too, and may read an output that is held.
            if any(storage.cdata in of_inputs or (is_open and _uses(storage) > before) for storage, before in outputs):
                end = other.backward if other.backward >= 0 else len(self.pool.last_runs)
                since = last_time(other.forward)
                self._require_untouched("forward", f"the forward of {other.name}", since, other.forward, end)
            if other.backward >= 0 and last_time(other.backward) > last_time(other.forward):
                # Its backward has run: a forward captured before that may write where its grads are.
                risk, given_out = place < other.backward and last_time(other.backward) >= run_before, grads
            else:
                # Its backward is to come: only graphs captured in between leave its outputs alone.
                is_other = other.microbatch != self.microbatch
                risk, given_out = is_other and not other.forward <= place < other.backward, outputs
            if risk and any(_uses(storage) > before for storage, before in given_out):
                what = "gradient that the backward" if given_out is grads else "output that the forward"
                raise RuntimeError(
                    f"the forward of {self.name} is run in a backward, as by a checkpoint, and may overwrite the "
                    f"{what} of {other.name} has given out. Capture what is run there by itself, so that it shares its "
                    "memory with no other graph, or put the checkpoint into the module that is captured"
                )

    def before_backward(self, ctx: Any) -> None:
        """Note the replay of the dgrad; RuntimeError where what its forward, in ``ctx.run``, has left is gone."""
        pool = self.pool
        is_next = pool.next == self.quick_backward and ctx.run == pool.run
        if is_next and ctx.needs_input_grad == self._needs_grad:
            pool.next += 1
        else:
            self._look_backward(ctx)
        if self._delays_wgrad:
            self._note_dgrad()

    def _look_backward(self, ctx: Any) -> None:
        pool, since = self.pool, ctx.run + self.forward
        pool.catch_up(self.backward)
        self._require_trained(ctx.needs_input_grad)
        if since < pool.run:
            if ctx.in_checkpoint and self._recomputed == [pool.last_time(self.forward)]:
                since = self._recomputed[0]  # a checkpoint that is not reentrant has run it again
            end = self.backward + 1 if self._retains_graph else self.backward
            self._require_untouched("backward", "its forward", since, self.forward, end)
        if since < self._renewed:
            raise RuntimeError(
                f"the backward of {self.name} cannot be replayed: since its forward its modules have run in another "
                "recipe, which drops the scales and cached weights that it reads. Evaluate in the recipe of the "
                "capture, or between two steps"
            )
        if not (self._looks.is_due and self._looks.look_again(pool.run)):
            self.read.check(self.name)
            if not self._delays_wgrad:
                self.written.check(self.name)
        self._recomputed.clear()
        if pool.may_recompute:
            ctx.inputs_with_copied_grads = self._inputs
        pool.note_replay(self.backward, self._looks)

    def _require_trained(self, needs_grad: tuple[bool, ...]) -> None:
        """RuntimeError where a fused weight is frozen; ``needs_grad`` is about all inputs, weights last."""
        of_parameters = needs_grad[len(needs_grad) - len(self._is_fused) :]
        if any(fused and not needs for fused, needs in zip(self._is_fused, of_parameters, strict=True)):
            raise RuntimeError(
                f"{self.name}: a weight was frozen since this graph was captured, and the graph would still add to its "
                "main_grad. Capture again"
            )
        self._needs_grad = needs_grad

    def _note_dgrad(self) -> None:
        if self._dgrad_time is not None:
            _warn_once(
                f"{self.name}: the last backward has had no backward_dw(), and its wgrad is lost: call it after each",
                "no backward_dw",
            )
        self._dgrad_time = self.pool.run + self.backward

    def before_wgrad(self) -> None:
        """Note the replay of the wgrad; RuntimeError where there was no dgrad before it, or what that left is gone."""
        pool, since = self.pool, self._dgrad_time
        if since is None:
            raise RuntimeError(
                f"{self.name}: backward_dw() without a backward before it that it belongs to. Call it once after each "
                "backward"
            )
        if pool.next == self._quick_wgrad and since >= pool.run:
            pool.next += 1
        else:
            pool.catch_up(self._end)
            if since < pool.run:
                self._require_untouched("backward_dw", "its backward", since, self.backward, self._end)
            self.written.check(self.name)
            if self._wgrad_pool is pool:
                pool.note_replay(self._wgrad, self._looks)
        self._dgrad_time = None

    def _require_untouched(self, kind: str, before: str, since: float, first: int, end: int) -> None:
        """RuntimeError unless all that was replayed after ``since`` is between ``first`` and ``end``."""
        pool = self.pool
        latest = max((*range(first + 1), *range(end, len(pool.last_runs))), key=pool.last_time)
        if pool.last_time(latest) > since:
            other = pool.names[latest]
            raise RuntimeError(
                f"the {kind} of {self.name} cannot be replayed: {other} was replayed since {before}, and may have "
                "overwritten what it reads. Graphs that share memory are replayed in the sequence of their capture "
                "(`_order`), each once before its backward. If a step has more microbatches than at the capture, or "
                "another schedule, capture again for it; for several backwards of one forward capture with "
                "retain_graph_in_backward=True"
            )


def make_contracts(functions: Sequence[Any], *of_capture: Any) -> list[Contract]:
    """The contracts of a capture, of which `Contract` says what it takes."""
    contracts = [Contract(number, functions, *of_capture) for number in range(len(functions))]
    looks = _Looks(contracts)
    for contract in contracts:
        contract.join(looks)
    return contracts


class _Looks:
    """The looks at what the graphs of a capture use.

    A full look checks all callables. It comes before each forward that is captured while no backward is pending, and
    again before the next backward (``is_due``): once a run in the order of a pipeline, else for each microbatch. In the
    first ``LOOKS`` all that a program does in each of its steps has shown. Later, looks that follow a full one within
    ``RECENT`` seconds are quick: at a sample, and not repeated. Callables are sampled in turn, so what moves all
    weights is seen at once. ``verified_run`` is the run whose look found no change.
    """

    def __init__(self, contracts: Sequence[Contract]) -> None:
        self.verified_run, self.is_due = -1, False
        self._count, self._last_full_look = 0, -math.inf
        self.first_backwards = _first_backwards(contracts)
        used = [each.all_addresses() for each in contracts if not each.microbatch]
        self._callables = [each for each in used if each.slots]
        self._samples = _samples(self._callables)

    def begin(self, run: int, place: int, is_first_microbatch: bool | None) -> bool:
        """Look before the forward at ``place``; False where each graph has to look at its own.

        With ``is_first_microbatch=False`` a caller says that the weights have not changed; quick looks trust it.
        """
        now = monotonic()
        is_quick = self._count >= LOOKS and now - self._last_full_look < RECENT
        self.is_due = not is_quick
        if first_backward := self.first_backwards[place]():
            first_backward.quick_backward = first_backward.backward if is_quick else None
        if is_quick and is_first_microbatch is False:
            self.verified_run = run
            return True
        self._count += 1
        if is_quick:
            return self._look(run, [self._samples[self._count % len(self._samples)]])
        self._last_full_look = now
        return self._look(run, self._callables)

    def look_again(self, run: int) -> bool:
        """Look at all again before the first backward; True if all is still where it was."""
        self.is_due = False
        return self.verified_run == run and self._look(run, self._callables)

    def _look(self, run: int, callables: Sequence[_Addresses]) -> bool:
        are_there = bool(callables) and all(map(_Addresses.are_there, callables))
        self.verified_run = run if are_there else -1
        if not are_there:
            self._last_full_look = -math.inf
        return are_there

    def end(self) -> None:
        """Look no more: each callable looks at its own."""
        self._callables, self._samples = [], []
        self._look(-1, [])


def _first_backwards(contracts: Iterable[Contract]) -> dict[int, weakref.ref[Contract]]:
    """By the places of forwards that are captured while no backward is pending: the contract whose backward is next."""
    ends = {contract: contract.backward if contract.backward >= 0 else math.inf for contract in contracts}
    stretches: list[list[Contract]] = []
    end = -1.0
    for contract in sorted(ends, key=attrgetter("forward")):
        if contract.forward > end:
            stretches.append([])
        stretches[-1].append(contract)
        end = max(end, ends[contract])
    return {stretch[0].forward: weakref.ref(min(stretch, key=ends.__getitem__)) for stretch in stretches}


def _samples(callables: Iterable[_Addresses]) -> list[_Addresses]:
    """Of each kind of tensor the largest one of a callable; in the next sample that of another callable."""
    kinds: dict[str, list[_Slot]] = {}
    for each in callables:
        tensors = [slot for slot in each.slots if isinstance(slot[0][slot[1]], torch.Tensor)]
        largest = {slot[2]: slot for slot in sorted(tensors, key=lambda slot: slot[0][slot[1]].numel())}
        for kind, slot in largest.items():
            kinds.setdefault(kind, []).append(slot)
    number = max(map(len, kinds.values()), default=1)
    return [_Addresses(slots[i % len(slots)] for slots in kinds.values()) for i in range(number)]


def _name(number: int, functions: Sequence[Any], microbatch: int) -> str:
    function = functions[number]
    first = next(i for i, other in enumerate(functions) if other is function)
    callables = len({id(other) for other in functions[:first]})
    layer = getattr(function, "layer_number", None)
    name = f"callable {callables} ({type(function).__name__}{f', layer {layer}' if layer is not None else ''})"
    several = sum(other is function for other in functions) > 1
    return f"{name} of microbatch {microbatch}" if several else name


def _place(graph: Any) -> tuple[Any, int]:
    """The memory pool of a graph and its place there; -1 if it was not captured."""
    place: tuple[Any, int] = getattr(graph, "place", (None, -1))
    return place


def _storage(tensor: Any) -> Any:
    """A reference that does not own the memory, so that a graph's ``reset()`` lets it go."""
    return StorageWeakRef(tensor.untyped_storage()) if isinstance(tensor, torch.Tensor) and tensor.numel() else None


def _uses(storage: Any) -> int:
    return 0 if storage.expired() else torch._C._storage_Use_Count(storage.cdata)


def _recipe_states(function: Any) -> Iterator[Any]:
    """What holds the FP8 scales of the gradients in a callable."""
    for module in function.modules() if isinstance(function, torch.nn.Module) else ():
        of_operation = (getattr(module, "_fp8_metas", None) or {}).get("backward")
        state = (of_operation or getattr(module, "fp8_meta", {})).get("scaling_bwd")
        if state is not None:
            yield state


def _own_parameters(modules: Iterable[torch.nn.Module]) -> Iterable[torch.nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


_Slot = tuple[Mapping[str, Any], str, str]
"""A dictionary, the name in it that a tensor has, and what to call it."""
_Registry = tuple[Mapping[str, Any], bool]
"""A dictionary of modules or parameters, some of which may be None, and whether others may be added to it."""


def _submodules(function: Any) -> list[_Slot]:
    """Where the modules inside a callable are found."""
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    children = (
        (module._modules, name) for module in modules for name, child in module._modules.items() if child is not None
    )
    return [(modules, name, "a module") for modules, name in children]


def _owners(function: Any, parameters: Iterable[torch.Tensor]) -> list[_Slot]:
    """Where the ``parameters`` of a callable are found, and the tensors of those in FP8."""
    wanted = {id(parameter) for parameter in parameters if parameter.numel()}
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    found: list[_Slot] = []
    inner: dict[int, list[_Slot]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(parameter) in wanted:
                found.append((module._parameters, name, "a parameter"))
                names = [each for each in QUANTIZED if isinstance(vars(parameter).get(each), torch.Tensor)]
                inner[id(parameter)] = [(vars(parameter), each, f"the {each} of a parameter") for each in names]
    return [*found, *(each for places in inner.values() for each in places)]


def _registries(function: Any) -> list[_Registry]:
    """The dictionaries of modules and parameters inside a callable. No graph reads a parameter under a new name."""
    modules = [*function.modules()] if isinstance(function, torch.nn.Module) else []
    of_parameters = [(module._parameters, True) for module in modules if module._parameters]
    return [*((module._modules, False) for module in modules), *of_parameters]


def _fused(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The weights into whose ``main_grad`` a backward adds its wgrads."""
    fused = [
        module
        for module in modules
        if getattr(module, "fuse_wgrad_accumulation", False) or getattr(module, "_accumulate_into_main_grad", False)
    ]
    parameters = {id(p): p for p in _own_parameters(fused) if p.requires_grad and p.dim() > 1}.values()
    return [p for p in parameters if isinstance(vars(p).get("main_grad"), torch.Tensor) and p.main_grad.numel()]


class _Addresses:
    """Where tensors were at the capture: the same objects, if they are parameters or modules, at the same addresses.

    Besides, ``registries`` of modules and parameters.
    """

    def __init__(self, slots: Iterable[_Slot], registries: Iterable[_Registry] = ()) -> None:
        self.slots, self.registries = [*slots], [*registries]
        self._were = [dict(each) or _EMPTY for each, _ in self.registries]
        self._dictionaries = [each for each, _ in self.registries]
        found = [owner[name] for owner, name, _ in self.slots]
        # main_grads and the like are not held: their memory may be given up between two replays.
        self._held = [each if isinstance(each, (torch.nn.Parameter, torch.nn.Module)) else None for each in found]
        # A tensor that consists of others, as one in FP8, has no address.
        self._addresses = [_address(each) if isinstance(each, torch.Tensor) else 0 for each in found]
        if any(isinstance(each, torch.Tensor) and each.numel() == 1 for each in self._held):
            self._dictionaries = []  # never equal: one number may be equal to another, so each is looked at
        placed = [number for number, address in enumerate(self._addresses) if address]
        placed.sort(key=lambda number: self._held[number] is None)
        self._parameters = [self._held[number] for number in placed if self._held[number] is not None]
        others = [self.slots[number] for number in placed if self._held[number] is None]
        self._owners, self._names = [owner for owner, _, _ in others], [name for _, name, _ in others]
        self._known = [self._addresses[number] for number in placed]

    def check(self, name: str) -> None:
        """RuntimeError where one is not there, or there are others."""
        if not self.are_there():
            raise RuntimeError(f"{name}: {self._change()}")

    def are_there(self) -> bool:
        """Whether nothing has changed. The quick comparison can confirm it; if it does not, `_change` decides."""
        try:
            # Other modules are unequal, and comparing other parameters raises.
            if self._dictionaries == self._were:
                tensors = [*self._parameters, *map(getitem, self._owners, self._names)]
                if [*map(_address, tensors)] == self._known:
                    return True
        except (KeyError, RuntimeError, TypeError):
            pass
        return not self._change()

    def _change(self) -> str:
        """What is not as it was, and what to do, or ""."""
        for (owner, name, kind), held, address in zip(self.slots, self._held, self._addresses, strict=True):
            now: Any = owner.get(name)
            is_same = isinstance(now, torch.Tensor) if held is None else now is held
            if not is_same or (address and _address(now) != address):
                what = f"{kind} ({name})" if kind in ("a parameter", "a module") else kind
                return (
                    f"{what} is not where it was when this graph was captured (its data was replaced, moved or "
                    "resized), and the graph would go on with the old memory. Write into it in place, or capture again"
                )
        for (registry, grows), were in zip(self.registries, self._were, strict=True):
            filled = any(value is None and registry.get(name) is not None for name, value in were.items())
            has_others = not grows and len(registry) != len(were)
            if filled or has_others:
                return (
                    "modules or parameters were added inside since this graph was captured, and it would run without "
                    "them. Capture again"
                )
        return ""


def _warn_once(text: str, about: str) -> None:
    """Warn, once a process for each of what the warnings are ``about``."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, stacklevel=2)
