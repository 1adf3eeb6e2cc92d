"""What a capture of CUDA graphs has fixed, looked at at each replay: who may be replayed when, and what is where.

Graphs of one memory pool write where they wrote at capture. What graph X leaves for graph Y (a forward for its dgrad, a
dgrad for its wgrad) is untouched by what was captured between the two, since it was in use then, and by nothing else:
what was captured before X may have given up the memory that X got, what was captured after Y may have got Y's. So Y may
be replayed if **all that was replayed since X was captured between X and Y**. Nothing is forbidden before: who leaves a
backward out, evaluates, drops a step or runs fewer microbatches loses nothing.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

QUANTIZED = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""The tensors that FP8 parameters consist of, but for their transposes, which may be made again."""

_address = torch.Tensor.data_ptr
_increment_version = torch.autograd.graph.increment_version
_needs_grad = attrgetter("requires_grad")
_grad_enabled = torch.is_grad_enabled
_backward_task = torch._C._current_graph_task_id
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_warned: set[str] = set()


def _are_at(tensors: Sequence[torch.Tensor], addresses: Sequence[int], places: Iterable[int]) -> bool:
    """Whether the tensors at ``places`` are at their addresses; torch for CUDA does this in one call."""
    return [*map(_address, map(tensors.__getitem__, places))] == [*map(addresses.__getitem__, places)]


_are_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _are_at)


class _Pool:
    """What has been replayed of the graphs of one memory pool. Places are counted from 0 in the order of captures.

    ``clock`` counts replays and ``last`` has, for each place, when it was last replayed. Since ``began`` the places
    have only increased, up to ``place``.
    ``may_recompute``: a checkpoint has run a forward, and may run it again before what backwards return is read.
    """

    __slots__ = (
        *("__weakref__", "began", "captures", "clock", "contracts", "last"),
        *("may_recompute", "names", "place", "watched"),
    )

    def __init__(self) -> None:
        self.last: list[int] = []
        self.names: list[str] = []
        self.clock = self.began = self.captures = 0
        self.place = -1
        self.may_recompute = False
        self.contracts: list[weakref.ref[Contract]] = []
        self.watched: weakref.WeakValueDictionary[Any, _Addresses] = weakref.WeakValueDictionary()

    def watch(self, places: Sequence[_Place]) -> _Addresses:
        """What looks at these places, once a run for all microbatches."""
        made = _Addresses(places)
        return self.watched.setdefault(made.key, made)

    def replay(self, place: int) -> int:
        """Note that the graph at ``place`` is replayed now; the result is the time."""
        self.clock = clock = self.clock + 1
        if place <= self.place:
            self.began = clock
        self.place = place
        self.last[place] = clock
        return clock


_pools: weakref.WeakValueDictionary[Any, _Pool] = weakref.WeakValueDictionary()


def note_capture(graph: Any, pool: Any) -> None:
    """Give ``graph``, which is captured now, the next place in its memory pool."""
    state = _pools.get(pool)
    if state is None:
        state = _pools[pool] = _Pool()
    graph.place = state, len(state.last)
    state.last.append(0)
    state.names.append("a graph whose capture failed")


def with_own_inputs(
    samples: Any, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[list[Any], Any], Any]
) -> Any:
    """The samples of a capture, where a tensor that takes a gradient is in them several times each with its own copy.

    What needs no gradient, as masks, has the same values for all in each step. Parameters are not written.
    """
    leaves, spec = flatten(samples)
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        if getattr(leaf, "requires_grad", False) and not isinstance(leaf, torch.nn.Parameter):
            if leaf.data_ptr() in seen:
                leaves[i] = leaf.detach().clone().requires_grad_()
            seen.add(leaf.data_ptr())
    return unflatten(leaves, spec)


def copy_without_graphs(module: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` gives for a module with graphs: these read the original's parameters, so a copy has none."""
    names = ("forward", "backward_dw", "reset", "__deepcopy__")
    given = {name: vars(module).pop(name) for name in names if name in vars(module)}
    try:
        return copy.deepcopy(module, memo)
    finally:
        vars(module).update(given)


class Run:
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

    ``functions`` are those of all callables and microbatches of a capture, of which this is number ``number``, and
    ``graphs`` its forward, dgrad and wgrad. ``returned`` are its outputs and the gradients of its ``inputs`` inputs.
    """

    def __init__(
        self,
        number: int,
        functions: Sequence[Any],
        graphs: Sequence[Any],
        returned: Sequence[Iterable[Any]],
        inputs: int,
        parameters: Iterable[torch.Tensor],
        run: Run,
        retains_graph: bool,
        delays_wgrad: bool,
    ) -> None:
        (self._pool, self._forward), (_, self._backward), (self._wgrad_pool, self._wgrad) = map(_place, graphs)
        self._microbatch = sum(other is functions[number] for other in functions[:number])
        self.name = _name(number, functions, self._microbatch)
        if not number:
            self._pool.captures += 1
        if self._pool.captures > 1:
            self.name += f" of capture {self._pool.captures} in its memory pool"
        for kind, graph in zip(("forward", "backward", "backward_dw"), graphs, strict=True):
            if hasattr(graph, "place"):
                graph.place[0].names[graph.place[1]] = f"the {kind} of {self.name}"
        # Without an order wgrads are captured behind all else, in a pool of their own.
        self._end = self._wgrad if self._wgrad_pool is self._pool else len(self._pool.last)
        self._retains_graph, self._delays_wgrad = retains_graph, delays_wgrad
        self._dgrad_time: int | None = None
        self._inputs = range(inputs)
        self._outputs = [tensor for tensor in returned[0] if isinstance(tensor, torch.Tensor)]
        self._returned = [[(s, _uses(s)) for s in map(_storage, tensors) if s] for tensors in returned]
        self._pool.contracts.append(weakref.ref(self))
        self.time = 0
        """When the forward was last replayed."""
        self._recipe = run.recipes.get(number)
        self._recomputed = False
        self._renewed = 0
        self._keeps_outputs = False
        for state in _recipe_states(functions[number]):
            vars(state).setdefault("contracts", weakref.WeakSet()).add(self)
        modules = run.modules.get(number, set())
        own = [parameter for parameter in _own_parameters(modules) if parameter.numel()]
        self._frozen = list({id(parameter): parameter for parameter in own if not parameter.requires_grad}.values())
        self._read = self._pool.watch(
            [*_submodules(functions[number]), *_owners(functions[number], [*parameters, *own])]
        )
        self._written = self._pool.watch(_fused(modules))
        if self._backward < 0:
            self._frozen = []

    def release(self) -> None:
        """Let the parameters go."""
        self._frozen, self._read, self._written = [], _Addresses([]), _Addresses([])
        self._outputs = []

    def note_other_scales(self) -> None:
        """Note that the scales of the graphs have other values now: an evaluation in another recipe took the old."""
        self._renewed = self._pool.clock

    def before_forward(self, inputs: Iterable[Any]) -> None:
        """RuntimeError where the forward, which is replayed next, would not compute what the module does now."""
        pool, place = self._pool, self._forward
        grad_enabled = _grad_enabled()
        begins = place <= pool.place
        read = self._read
        if begins or read.looked != pool.began or _address(read.first) != read.first_address:
            read.check(self.name)
        if grad_enabled and self._backward >= 0:
            if self._frozen and any(map(_needs_grad, self._frozen)):
                raise RuntimeError(
                    f"{self.name}: parameters that needed no gradient when this graph was captured need one now, and "
                    "would get none. Capture again"
                )
            if self._recipe and self._recipe.delayed() and not FP8GlobalStateManager.is_fp8_enabled():
                _warn_once(
                    f"{self.name}: this graph was captured in FP8 with delayed scaling and is replayed outside of an "
                    "autocast: it computes in FP8, and its scales stay as they are. Replay it in the autocast of the "
                    "capture",
                    "outside of an autocast",
                )
        self._recomputed = recomputes = _backward_task() != -1
        if recomputes:
            self._recompute(inputs)
        checkpointed = not grad_enabled or _saved_tensors_hooks(True) is not None
        if not recomputes:
            for tensor in self._outputs:
                _increment_version(tensor)  # autograd raises where an eager operation still has to read the old values
        if begins and not recomputes:
            pool.may_recompute = checkpointed
        elif checkpointed:
            pool.may_recompute = True
        self._keeps_outputs = pool.may_recompute and not checkpointed
        self.time = pool.replay(place)
        read.looked = pool.began

    def with_kept_outputs(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The ``forward`` of a graph with copies of its outputs where a checkpoint may overwrite these."""

        def forward_with_kept_outputs(ctx: Any, *args: Any) -> Any:
            outputs = forward(ctx, *args)
            if not self._keeps_outputs:
                return outputs
            return tuple(output.clone() if isinstance(output, torch.Tensor) else output for output in outputs)

        return forward_with_kept_outputs

    def _recompute(self, inputs: Iterable[Any]) -> None:
        """RuntimeError where a checkpoint runs the forward again without FP8, or over what others have given out."""
        if self._recipe and not FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again outside of the autocast of its capture: the graph "
                "would compute in FP8, its module would not. Use te.checkpoint, which enters the autocast again, or "
                "run the backward in the autocast"
            )
        outputs = {tensor.data_ptr() for tensor in self._outputs if tensor.numel()}
        if any(isinstance(each, torch.Tensor) and each.data_ptr() in outputs for each in inputs):
            raise RuntimeError(
                f"{self.name}: a checkpoint runs this graph again with its own output, which is overwritten. Capture "
                "the module once for each time that a step calls it (`_order`)"
            )
        pool, place = self._pool, self._forward
        last = pool.last
        for reference in pool.contracts:
            other = reference()
            if other is None or other is self or not last[other._forward]:
                continue
            outputs, grads = other._returned
            if other._backward >= 0 and last[other._backward] > last[other._forward]:
                # Its backward has run: a forward captured before that may write where its grads are.
                risk, given_out = place < other._backward and last[other._backward] >= pool.began, grads
            else:
                # Its backward is to come: only graphs captured in between leave its outputs alone.
                is_other = other._microbatch != self._microbatch
                risk, given_out = is_other and not other._forward <= place < other._backward, outputs
            if risk and any(_uses(storage) > before for storage, before in given_out):
                what = "gradient that the backward" if given_out is grads else "output that the forward"
                raise RuntimeError(
                    f"the forward of {self.name} is run again by a checkpoint and may overwrite the {what} of "
                    f"{other.name} has given out. Capture what a checkpoint is around by itself, so that it shares its "
                    "memory with no other graph, or put the checkpoint into the module that is captured"
                )

    def before_backward(self, ctx: Any) -> None:
        """RuntimeError where what its forward, at ``ctx.replayed``, has left for it is not there any more."""
        pool, place, since = self._pool, self._backward, ctx.replayed
        if since < pool.began or place <= pool.place:
            if self._recomputed:
                since = self.time  # torch.utils.checkpoint has run it again, with the same inputs
            self._require(since, self._forward, place, self._retains_graph)
        if since <= self._renewed:
            raise RuntimeError(
                f"the backward of {self.name} cannot be replayed: since its forward its modules have run in another "
                "recipe, which drops the scales and cached weights that it reads. Evaluate in the recipe of the "
                "capture, or between two steps"
            )
        if _address(self._read.first) != self._read.first_address:
            self._read.check(self.name)
        if self._dgrad_time is not None:
            _warn_once(
                f"{self.name}: the last backward has had no backward_dw(), and its wgrad is lost: call it after each",
                "no backward_dw",
            )
        time = pool.replay(place)
        self._recomputed = False
        if not self._delays_wgrad:
            self._look_backward()
        if pool.may_recompute:
            ctx.copied_inputs = self._inputs
        if self._delays_wgrad:
            self._dgrad_time = time

    def before_wgrad(self) -> None:
        """RuntimeError where there is no dgrad whose wgrad this is, or what it has left is not there any more."""
        since, pool = self._dgrad_time, self._pool
        if since is None:
            raise RuntimeError(
                f"{self.name}: backward_dw() without a backward before it that it belongs to. Call it once after each "
                "backward"
            )
        if since < pool.began or self._end <= pool.place:
            self._require(since, self._backward, self._end, False)
        self._dgrad_time = None
        if self._wgrad_pool is pool:
            pool.replay(self._wgrad)
        self._look_backward()

    def _look_backward(self) -> None:
        written, began = self._written, self._pool.began
        if written.looked != began or written.is_elsewhere():
            written.check(self.name)
            written.looked = began

    def _require(self, since: int, first: int, end: int, again: bool) -> None:
        """RuntimeError unless all that was replayed after ``since`` is between ``first`` and ``end``."""
        last = self._pool.last
        outside = last[: first + 1] + [0] * (end - first - 1) + last[end:]
        if again:
            outside[end] = 0
        if max(outside) > since:
            other = self._pool.names[outside.index(max(outside))]
            kind, before = ("backward", "forward") if end == self._backward else ("backward_dw", "backward")
            raise RuntimeError(
                f"the {kind} of {self.name} cannot be replayed: {other} was replayed since its {before}, and may have "
                "overwritten what it reads. Graphs that share memory are replayed in the sequence of their capture "
                "(`_order`), each once before its backward. If a step has more microbatches than at the capture, or "
                "another schedule, capture again for it; for several backwards of one forward capture with "
                "retain_graph_in_backward=True"
            )


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


_Place = tuple[Mapping[str, Any], str, str]
"""A dictionary, the name in it that a tensor has, and what to call it."""


def _submodules(function: Any) -> list[_Place]:
    """Where the modules inside a callable are found."""
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    children = ((module._modules, name) for module in modules for name, child in module._modules.items() if child)
    return [(modules, name, "a module") for modules, name in children]


def _owners(function: Any, parameters: Iterable[torch.Tensor]) -> list[_Place]:
    """Where the ``parameters`` of a callable are found, and the tensors of those in FP8."""
    wanted = {id(parameter) for parameter in parameters if parameter.numel()}
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    found: dict[int, _Place] = {}
    inner: dict[int, list[_Place]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(parameter) in wanted:
                found.setdefault(id(parameter), (module._parameters, name, "a parameter"))
                names = [each for each in QUANTIZED if isinstance(vars(parameter).get(each), torch.Tensor)]
                inner[id(parameter)] = [(vars(parameter), each, f"the {each} of a parameter") for each in names]
    return [*found.values(), *(each for places in inner.values() for each in places)]


def _fused(modules: Iterable[torch.nn.Module]) -> list[_Place]:
    """Where the ``main_grad``s are found into which a backward adds its wgrads: those of weights."""
    fused = [
        module
        for module in modules
        if getattr(module, "fuse_wgrad_accumulation", False) or getattr(module, "_accumulate_into_main_grad", False)
    ]
    parameters = {id(p): p for p in _own_parameters(fused) if p.requires_grad and p.dim() > 1}.values()
    has_one = [p for p in parameters if isinstance(vars(p).get("main_grad"), torch.Tensor) and p.main_grad.numel()]
    return [(vars(parameter), "main_grad", "the main_grad of a parameter") for parameter in has_one]


class _Addresses:
    """Where tensors were at the capture: the same objects, if they are parameters or modules, at the same addresses.

    ``first`` was at ``first_address``; it is looked at at each replay, the others once a run.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        self.looked = -1
        found = [dictionary[name] for dictionary, name, _ in places]
        # main_grads and the like are not held: their memory may be given up while no graph is replayed.
        held = [each if isinstance(each, (torch.nn.Parameter, torch.nn.Module)) else None for each in found]
        addresses: list[Any] = [
            each.data_ptr() if type(each) in (torch.nn.Parameter, torch.Tensor) else None for each in found
        ]
        self._was = list(zip(places, held, addresses, strict=True))
        self._owners = list(_by_owner(place for place, same, _ in self._was if same is not None))
        placed = [each for each in self._was if each[2] is not None]
        placed.sort(key=lambda each: each[1] is None)
        self._parameters = [same for _, same, _ in placed if same is not None]
        others = [place for place, same, _ in placed if same is None]
        self._dictionaries, self._names = [each[0] for each in others], [each[1] for each in others]
        self._addresses = [address for _, _, address in placed]
        self._all = list(range(len(placed)))
        self.first = next(iter(self._parameters), torch.empty(0))
        self.first_address = self.first.data_ptr()
        # Another capture in the pool may have found other tensors at these places.
        self.key = tuple((id(d), name, id(d[name]), address) for (d, name, _), _, address in self._was)

    def is_elsewhere(self) -> bool:
        """Whether the first of those that are not held is not where it was."""
        if not self._names:
            return False
        tensor = self._dictionaries[0].get(self._names[0])
        return tensor is None or _address(tensor) != self._addresses[len(self._parameters)]

    def check(self, name: str) -> None:
        """RuntimeError where one is not there, or elsewhere."""
        if not self._was:
            return
        try:
            tensors = self._parameters
            if self._names:
                tensors = [*tensors, *map(getitem, self._dictionaries, self._names)]
            if self._are_same() and _are_at(tensors, self._addresses, self._all):
                return
        except (KeyError, RuntimeError, TypeError):
            pass
        raise RuntimeError(
            f"{name}: {self._moved()} is not where it was when this graph was captured (its data was replaced, "
            "moved or resized), and the graph would go on with the old memory. Write into it in place, or capture "
            "again"
        )

    def _are_same(self) -> bool:
        for owner, named, same in self._owners:  # noqa: SIM110 (a generator would take longer than all the rest)
            if not all(map(is_, named(owner), same)):
                return False
        return True

    def _moved(self) -> str:
        for (dictionary, name, kind), same, address in self._was:
            now: Any = dictionary.get(name)
            missing = now is not same if same is not None else not isinstance(now, torch.Tensor)
            if missing or (address is not None and now.data_ptr() != address):
                return f"{kind} ({name})" if kind in ("a parameter", "a module") else kind
        return "a parameter"


def _by_owner(places: Iterable[_Place]) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    """The dictionaries of modules, each with what gets its parameters in one call, and who these are."""
    for _, group in groupby(places, lambda place: id(place[0])):
        found = [*group]
        owner, names = found[0][0], [name for _, name, _ in found]
        get = itemgetter(names[0], *names)  # one name alone would not give a tuple
        yield owner, get, get(owner)


def _warn_once(text: str, about: str) -> None:
    """Warn, once a process for each of what the warnings are ``about``."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, stacklevel=2)
