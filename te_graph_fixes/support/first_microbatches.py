"""Skip flags: tensors that make a graph quantize its FP8 weights (0.0) or reuse the cached weights (1.0).

Before a step, Megatron-Core sets the attribute ``is_first_microbatch`` of modules, called their *mark* here, to True.
The forward of a marked module passes the mark to TransformerEngine (TE) and sets it to False. TE quantizes weights at
the first microbatch and reuses them at the others. Because a replay runs no Python, a graph without
``cache_quantized_params`` reads flags of its own, which are filled from the marks before each replay.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch._C import _current_graph_task_id
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor

from ._te_fp8_state_at_replay import global_state

MARK = "is_first_microbatch"
_listening: tuple[int, Callable[[Any, bool], Any]] | None = None
"""The thread of a warmup or capture, and a function of each called module and its ``is_first_microbatch``, or None."""
_MISSING = object()


class SavedState:
    """A copy of the cached FP8 weights and the marks of modules, from which both can be restored.

    A mark may be an attribute of a module or its class, a property, or a slot.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self.marks = {module: _mark(module) for module in modules}
        classes = {cls for module in self.marks for cls in type(module).__mro__}
        self._attributes = [(owner, vars(owner).get(MARK, _MISSING)) for owner in (*self.marks, *classes)]
        cached = {module: getattr(module, "_fp8_workspaces", None) for module in self.marks}
        self._weights = {module: (weights, {**weights}) for module, weights in cached.items() if weights is not None}

    def restore_weights(self, modules: Collection[Any]) -> None:
        """Restore the cached FP8 weights of ``modules``. Modules that cache no weights are skipped."""
        for module in self._weights.keys() & {*modules}:
            weights, before = self._weights[module]
            weights.clear()
            weights.update(before)

    def restore_marks(self) -> None:
        """Restore each mark in the object that had it, so that no attribute of a module hides the mark of its class."""
        for owner, value in self._attributes:
            if vars(owner).get(MARK, _MISSING) is value:
                continue
            if isinstance(owner, type):
                delattr(owner, MARK) if value is _MISSING else setattr(owner, MARK, value)
            elif value is _MISSING:
                del vars(owner)[MARK]
            else:
                vars(owner)[MARK] = value
        for module, value in self.marks.items():
            if _mark(module) is value:
                continue
            with contextlib.suppress(AttributeError):  # a property without a setter
                delattr(module, MARK) if value is _MISSING else setattr(module, MARK, value)


class FirstMicrobatches:
    """The marks of all modules in one call of `make_graphed_callables`, and the marks that its warmup passed to TE."""

    def __init__(self, callables: Iterable[Any], caches_weights: bool) -> None:
        modules = [module for function in callables for module in _modules(function)]
        self._saved = SavedState(modules)
        self._marks = {module: mark for module, mark in self._saved.marks.items() if mark is not _MISSING}
        self._told_first: set[Any] = set()
        self._told_later: set[Any] = set()
        self._caches_weights = caches_weights

    def restore(self) -> None:
        """After the capture, restore the marks (``is_first_microbatch`` of modules) from before the warmup.

        If the warmup passed only False to a module outside of all marked modules, also restore the weights that the
        module had cached before the warmup. If it had cached none, the first replay of the module quantizes the current
        weights, as an eager forward would.
        """
        self._saved.restore_marks()
        if not self._caches_weights:
            marked = {module for owner in self._marks for module in owner.modules()}
            self._saved.restore_weights(self._told_later - self._told_first - marked)

    def during_warmup(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that records the ``is_first_microbatch`` of FP8 calls, unless the capture caches weights."""
        return self._listen(self._note_warmup)

    def _note_warmup(self, module: Any, is_first: bool) -> None:
        if not self._caches_weights and FP8GlobalStateManager.is_fp8_enabled():
            (self._told_first if is_first else self._told_later).add(module)

    @contextlib.contextmanager
    def during_forward(self, replay: Any, function: Any) -> Iterator[None]:
        """While active, make the captured graph of ``function`` read its own flags, which ``replay`` fills."""
        has_flags = not self._caches_weights and bool(self._told_first or self._told_later)
        owners = [module for module in _modules(function) if module in self._marks]
        flags, as_first = GraphFlags(owners, has_flags), _AsFirst()
        replay.skip_flags = flags
        if has_flags:
            replay.add("forward prepare", "fill flags of modules", flags.fill)
        elif not self._caches_weights and _takes_marks(function):
            replay.add("forward check", "require first microbatch", _refuse_reuse)
        with self._listen(partial(self._flag_of, flags, as_first)):
            yield
        flags.note_kept_marks()
        if as_first.always or as_first.in_training:
            replay.add("forward check", "require first microbatch", as_first.check_forward)

    @contextlib.contextmanager
    def during_backward(self, replay: Any) -> Iterator[None]:
        """While active, make recomputed calls with ``is_first_microbatch=False`` reuse the weights of their forward.

        If a recomputed call with True reads a flag (`_flag_of`), the forward has filled this flag.
        """
        flags, as_first = replay.skip_flags, _AsFirst()

        def flag_of(module: Any, is_first: bool) -> torch.Tensor | None:
            return self._flag_of(flags, as_first, module, is_first) if is_first else None

        with self._listen(flag_of):
            yield
        if as_first.always or as_first.in_training:
            replay.add("backward check", "require first microbatch", as_first.check_backward)

    @contextlib.contextmanager
    def _listen(self, listener: Callable[[Any, bool], Any]) -> Iterator[None]:
        """While active, pass module calls to ``listener``. Hide TE's shared flag if the capture caches no weights."""
        global _listening
        state = global_state()
        shared = state.skip_fp8_weight_update_tensor
        if not self._caches_weights:
            state.skip_fp8_weight_update_tensor = None
        _listening = threading.get_ident(), listener
        try:
            yield
        finally:
            state.skip_fp8_weight_update_tensor = shared
            _listening = None

    def _flag_of(self, flags: "GraphFlags", as_first: "_AsFirst", module: Any, is_first: bool) -> torch.Tensor | None:
        """Return the flag that a call of ``module`` reads, or None if each replay repeats the call unchanged.

        ``is_first`` is the ``is_first_microbatch`` of the call, and the mark is the module's attribute of this name. A
        module that is called with False each time gets a flag only if its mark was False before the warmup. Without a
        flag, its graph reuses the weights of an earlier call. A module without a mark that the warmup also called with
        True gets the constant flag, so its graph quantizes the weights at each replay. A module that fuses wgrads gets
        no flag while its mark is True, because a flag would keep the graph from overwriting ``main_grad``. If a call
        with True gets no flag, each replay of the call treats its microbatch as the first.
        """
        owner = flags.owners.get(module)
        is_marked = owner is not None and owner.is_first_microbatch
        overwrites = torch.is_grad_enabled() and _fuses_wgrads(module)
        if is_first:
            may_change = is_marked and not overwrites
        else:
            may_change = module in self._told_first or (owner is not None and not self._marks[owner])
        flag = None
        if may_change and flags.by_owner and FP8GlobalStateManager.is_fp8_enabled():
            flag = flags.by_owner[owner]
            flags.reuses[owner] = False
        if is_first and is_marked:
            if overwrites:
                as_first.in_training.add(owner)
            if flag is None and _scales_are_delayed() and _quantizes_weights(module):
                as_first.always.add(owner)
        return flag


class _AsFirst:
    """The marked modules for which each replay acts as in a first microbatch, even if their marks are False by then.

    The capture called them with ``is_first_microbatch=True``. ``in_training`` are modules whose ``main_grad`` each
    replay in training overwrites. ``always`` are modules whose weights each replay quantizes with the newest scales.
    """

    def __init__(self) -> None:
        self.always: set[Any] = set()
        self.in_training: set[Any] = set()

    def check_forward(self, call: Any) -> None:
        """Raise RuntimeError if a forward is replayed for another microbatch than the first."""
        self._require_first(self.always | self.in_training if call.takes_grads else self.always)

    def check_backward(self, _ctx: Any) -> None:
        """Raise RuntimeError if a backward with a recomputation is replayed for another microbatch than the first."""
        self._require_first(self.always | self.in_training)

    def _require_first(self, owners: set[Any]) -> None:
        if not all(owner.is_first_microbatch for owner in owners):
            raise RuntimeError(
                "A graph was captured with is_first_microbatch=True and is replayed with False. Each replay would "
                "overwrite main_grad, or quantize FP8 weights with newer scales, unlike a later microbatch of eager "
                "training. Set is_first_microbatch=False before the capture, and zero main_grad before each step."
            )


class GraphFlags:
    """The flags of one graph: one for each marked module, and a constant 0.0 for modules without a mark."""

    def __init__(self, marked: list[Any], has_flags: bool) -> None:
        # `marked` lists outer modules first, so the owner of each module is the innermost marked module around it.
        self.owners = {module: owner for owner in marked for module in owner.modules()}
        self.by_owner: dict[Any, torch.Tensor] = {}
        if has_flags:
            with torch.inference_mode(False):
                flags = torch.zeros(len(marked) + 1, device="cuda").split(1)
            self.by_owner = dict(zip([*marked, None], flags, strict=True))
        self.reuses: dict[Any, bool] = {}
        """The last value of each flag that the graph reads."""
        self._marked = marked
        self._kept: set[Any] = set()
        """The modules and classes with a mark that the forward does not clear."""

    def note_kept_marks(self) -> None:
        """Note the marks that the captured forward has not cleared: marks of classes, and marks that are still True."""
        places = {owner: _place_of_mark(owner) for owner in self._marked}
        self._kept = {place for owner, place in places.items() if place is not owner or owner.is_first_microbatch}

    def fill(self, call: Any) -> None:
        """Fill the flags for the next replay, clear the marks, and note whether the replay reuses all weights.

        A mark remains if it is an attribute of a class, or if the forward of its module does not clear it.
        """
        for owner, reused in self.reuses.items():
            if owner is None:
                continue
            reuses = not owner.is_first_microbatch
            if _place_of_mark(owner) not in self._kept:
                with contextlib.suppress(AttributeError):  # a property without a setter
                    owner.is_first_microbatch = False
            if reuses != reused:
                self.by_owner[owner].fill_(reuses)
                self.reuses[owner] = reuses
        call.reuses_weights = all(self.reuses.values())


def _mark(module: Any) -> Any:
    """Return the mark of a module, or `_MISSING` if there is none, or if it is a property that raises an error."""
    try:
        return getattr(module, MARK, _MISSING)
    except Exception:
        return _MISSING


def _place_of_mark(module: Any) -> Any:
    """Return the class of a module if the mark is a plain attribute of the class, else the module."""
    is_own = MARK in vars(module) or hasattr(inspect.getattr_static(type(module), MARK, None), "__set__")
    return module if is_own else type(module)


def _fuses_wgrads(module: Any) -> bool:
    """Return whether a backward of a module adds the wgrads of its weights to ``main_grad``."""
    weights = (weight for weight in module.parameters(recurse=False) if weight.dim() > 1)
    return getattr(module, "fuse_wgrad_accumulation", False) and any(weight.requires_grad for weight in weights)


def _scales_are_delayed() -> bool:
    return FP8GlobalStateManager.is_fp8_enabled() and bool(FP8GlobalStateManager.get_fp8_recipe().delayed())


def _quantizes_weights(module: Any) -> bool:
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    return not all(isinstance(weight, QuantizedTensor) for weight in weights)


def _takes_marks(function: Any) -> bool:
    """Return whether ``function`` takes ``is_first_microbatch`` and contains a module that quantizes weights."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return False
    return MARK in parameters and any(map(_quantizes_weights, _modules(function)))


def _refuse_reuse(call: Any) -> None:
    """Raise ValueError if a replay would quantize FP8 weights with newer scales than the first microbatch used."""
    if call.keywords.get(MARK) is False and _scales_are_delayed():
        raise ValueError(
            "A graph got is_first_microbatch=False, but was captured without cached weights. In delayed scaling, it "
            "would quantize its weights with newer scales than the first microbatch. Capture it with "
            "cache_quantized_params=True."
        )


def flag_of_capture(module: Any, is_first: bool) -> torch.Tensor | None:
    """Return the flag for a call of ``module`` in a warmup or capture, or None if the call needs none.

    Calls in other threads get no flag, except the recomputations of a captured backward in autograd's own thread.
    """
    if _listening is None:
        return None
    thread, listener = _listening
    is_recomputed = _current_graph_task_id() != -1 and torch.cuda.is_current_stream_capturing()
    flag: torch.Tensor | None = None
    if threading.get_ident() == thread or is_recomputed:
        flag = listener(module, is_first)
    return flag


def note_fill(value: bool) -> None:
    """Note that TE's shared flag was just filled with ``value``."""
    flag = global_state().skip_fp8_weight_update_tensor
    flag._te_filled = None if flag.is_inference() else (value, flag._version)  # type: ignore[attr-defined,unused-ignore]


def needs_fill(value: bool) -> bool:
    """Return whether a graph with cached weights must fill TE's shared flag with ``value`` before its replay.

    The result is False if `note_fill` noted this value and no code has written the flag since.
    """
    flag = global_state().skip_fp8_weight_update_tensor
    filled = getattr(flag, "_te_filled", None)
    return flag is None or bool(filled != (value, flag._version))


def _modules(function: Any) -> Iterable[Any]:
    modules: Iterable[Any] = getattr(function, "modules", tuple)()
    return modules
