"""Skip flags: tensors that make a graph quantize its FP8 weights (0.0) or reuse the cached weights (1.0).

Before a step, Megatron-Core sets the attribute ``is_first_microbatch`` of modules, called their *mark* here, to True.
The forward of a marked module passes the mark to TransformerEngine (TE) and sets it to False. TE quantizes weights at
the first microbatch and reuses them at the others. Because a replay runs no Python, a graph without
``cache_quantized_params`` reads flags of its own, which are filled from the marks before each replay.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor

_thread = threading.local()
"""``listener`` receives ``is_first_microbatch`` of each call while this thread warms up or captures a forward.

``as_first`` notes the calls with ``is_first_microbatch=True`` while this thread captures.
"""


MARK = "is_first_microbatch"
_MISSING = object()


class SavedState:
    """The cached FP8 weights of modules, and their marks: attributes of a module or its class, properties, or slots."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self._values = {module: getattr(module, MARK, _MISSING) for module in modules}
        classes = {cls for module in self._values for cls in type(module).__mro__}
        self._attributes = [(owner, vars(owner).get(MARK, _MISSING)) for owner in (*self._values, *classes)]
        cached = {module: getattr(module, "_fp8_workspaces", None) for module in self._values}
        self._weights = {module: (weights, {**weights}) for module, weights in cached.items() if weights is not None}

    def restore_weights(self, modules: Collection[Any]) -> None:
        """Restore the cached FP8 weights of ``modules``. Modules that cache no weights are skipped."""
        for module in self._weights.keys() & {*modules}:
            weights, before = self._weights[module]
            weights.clear()
            weights.update(before)

    def restore_marks(self) -> None:
        """Restore each mark in its own object, so that no module gets an attribute that hides the mark of its class."""
        for owner, value in self._attributes:
            if vars(owner).get(MARK, _MISSING) is value:
                continue
            if isinstance(owner, type):
                delattr(owner, MARK) if value is _MISSING else setattr(owner, MARK, value)
            elif value is _MISSING:
                del vars(owner)[MARK]
            else:
                vars(owner)[MARK] = value
        for module, value in self._values.items():
            if getattr(module, MARK, _MISSING) is value:
                continue
            with contextlib.suppress(AttributeError):  # a property without a setter
                delattr(module, MARK) if value is _MISSING else setattr(module, MARK, value)


class FirstMicrobatches:
    """The marks of all modules in one call of `make_graphed_callables`, and the marks that its warmup passed to TE."""

    def __init__(self, callables: Iterable[Any], caches_weights: bool) -> None:
        modules = [module for function in callables for module in _modules(function)]
        self._saved = SavedState(modules)
        self.marks = {module: module.is_first_microbatch for module in modules if hasattr(module, MARK)}
        # Map each module to the innermost marked module that contains it, because `marks` lists outer modules first.
        self._owners = {inner: owner for owner in self.marks for inner in owner.modules()}
        self.told_first: set[Any] = set()
        self._told_later: set[Any] = set()
        self.marked_by_class: set[Any] = set()
        self.kept: set[Any] = set()
        """The modules whose forward does not clear a mark that is True."""
        self._caches_weights = caches_weights
        self._needs_flags = True
        self._flags: dict[Any, GraphFlags] = {}

    def restore(self) -> None:
        """Restore the marks that the warmup has cleared, and note which marks are plain attributes of a class.

        If the warmup passed only False to a module outside of all marked modules, also restore the weights that the
        module had cached before the warmup. If it had cached none, its first replay quantizes the current weights, as
        an eager forward would.
        """
        self.marked_by_class = {
            module
            for module in self.marks
            if MARK not in vars(module) and not hasattr(inspect.getattr_static(type(module), MARK, None), "__set__")
        }
        self._saved.restore_marks()
        if not self._caches_weights:
            self._saved.restore_weights(self._told_later - self.told_first - self._owners.keys())

    @contextlib.contextmanager
    def during_warmup(self, state: Any) -> Iterator[None]:
        """While active, record the ``is_first_microbatch`` that each call of the warmup passes, through `flag_of`."""
        self._needs_flags = False
        with self._without_shared_flag(state, self):
            yield

    @contextlib.contextmanager
    def during_forward(self, state: Any, replay: Any, function: Any) -> Iterator[None]:
        """While active, make the captured graph of ``function`` read its own flags, which ``replay`` fills."""
        owners = [module for module in _modules(function) if module in self.marks]
        flags = None
        if self._needs_flags and not self._caches_weights:
            flags = self._flags[replay] = GraphFlags(owners, self)
            replay.add("forward prepare", "fill flags of modules", flags.fill)
        elif not self._caches_weights and _takes_marks(function):
            replay.add("forward check", "require first microbatch", _refuse_reuse)
        with self._without_shared_flag(state, flags) as as_first:
            yield
        if as_first:
            replay.add("forward check", "require first microbatch", as_first.check)
        self.kept.update(owner for owner in owners if owner.is_first_microbatch)

    @contextlib.contextmanager
    def during_backward(self, state: Any, replay: Any) -> Iterator[None]:
        """While active, make a recomputation reuse the weights of its forward.

        A call with ``is_first_microbatch=True`` reads the flags of the graph, which the forward has filled.
        """
        with self._without_shared_flag(state, self._flags.get(replay), in_backward=True) as as_first:
            yield
        if as_first:
            replay.add("backward check", "require first microbatch", as_first.check)

    @contextlib.contextmanager
    def _without_shared_flag(self, state: Any, listener: Any, in_backward: bool = False) -> Iterator[_AsFirst]:
        """Hide TE's shared flag in ``state`` from a capture without cached weights.

        Yield a record of the calls with ``is_first_microbatch=True``.
        """
        shared = state.skip_fp8_weight_update_tensor
        _thread.as_first = _AsFirst(self._owners, in_backward)
        if not self._caches_weights:
            state.skip_fp8_weight_update_tensor = None
            _thread.listener = listener
        try:
            yield _thread.as_first
        finally:
            state.skip_fp8_weight_update_tensor = shared
            _thread.listener = _thread.as_first = None

    def flag_of(self, module: Any, is_first: bool | None) -> None:
        """Record the ``is_first_microbatch`` of one call of a module in the warmup."""
        self._needs_flags |= is_first is not None
        if is_first is not None:
            (self.told_first if is_first else self._told_later).add(module)


class _AsFirst:
    """The captured calls with ``is_first_microbatch=True``, which a replay repeats, whatever the marks are by then.

    Such a call overwrites ``main_grad``, and in delayed scaling it quantizes its weights with the newest scale.
    """

    def __init__(self, owners: dict[Any, Any], in_backward: bool) -> None:
        self._owners, self.in_backward = owners, in_backward
        self._training: set[Any] = set()
        self._always: set[Any] = set()

    def note(self, module: Any, flag: Any) -> None:
        """Note a call of ``module`` with ``is_first_microbatch=True``. Without a ``flag``, it quantizes weights."""
        owner = self._owners.get(module)
        if owner is None or not owner.is_first_microbatch:
            return
        if flag is None and _scales_are_delayed() and _quantizes_weights(module):
            self._always.add(owner)
        if torch.is_grad_enabled() and _fuses_wgrads(module):
            (self._always if self.in_backward else self._training).add(owner)

    def __bool__(self) -> bool:
        """Return whether a replay depends on marks."""
        return bool(self._training or self._always)

    def check(self, _: Any) -> None:
        """Raise RuntimeError if a replay would repeat these calls for a later microbatch."""
        owners = self._always | self._training if torch.is_grad_enabled() else self._always
        if not all(owner.is_first_microbatch for owner in owners):
            raise RuntimeError(
                "A graph was captured with is_first_microbatch=True and is replayed with False. Each replay would "
                "overwrite main_grad, or quantize FP8 weights with newer scales, unlike a later microbatch of eager "
                "training. Set is_first_microbatch=False before the capture, and zero main_grad before each step."
            )


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


class GraphFlags:
    """The flags of one graph: one for each marked module, and a constant 0.0 for modules without a mark."""

    def __init__(self, owners: list[Any], found: FirstMicrobatches) -> None:
        self._found = found
        with torch.inference_mode(False):
            flags = torch.zeros(len(owners) + 1, device="cuda").split(1)
        self._flags = dict(zip([*owners, None], flags, strict=True))
        self._reuses: dict[Any, bool] = {}

    def flag_of(self, module: Any, is_first: bool | None) -> torch.Tensor | None:
        """Return the flag that a call of ``module`` reads, or None if the call does the same in each replay.

        A module that is called with False each time gets no flag, and its graph reuses the weights of an earlier call.
        A module without a mark that the warmup also called with True gets the constant flag, so its graph quantizes the
        weights at each replay. A module that fuses wgrads gets no flag while its mark is True, because a flag would
        keep the graph from overwriting ``main_grad``.
        """
        if is_first is None:
            return None
        owner = next((owner for owner in reversed(self._flags) if owner and module in owner.modules()), None)
        if is_first:
            has_mark = owner is not None and owner.is_first_microbatch
            may_be_first = has_mark and not (torch.is_grad_enabled() and _fuses_wgrads(module))
        else:
            may_be_first = module in self._found.told_first or (owner is not None and not self._found.marks[owner])
        if not may_be_first:
            return None
        self._reuses[owner] = False
        return self._flags[owner]

    def fill(self, call: Any) -> None:
        """Fill the flags for the next replay, clear the marks, and note whether the replay reuses all weights.

        A mark remains if it is an attribute of a class, or if the forward of its module does not clear it.
        """
        for owner, reused in self._reuses.items():
            if owner is None:
                continue
            reuses = not owner.is_first_microbatch
            if owner not in self._found.kept and (owner not in self._found.marked_by_class or MARK in vars(owner)):
                with contextlib.suppress(AttributeError):  # a property without a setter
                    owner.is_first_microbatch = False
            if reuses != reused:
                self._flags[owner].fill_(reuses)
                self._reuses[owner] = reuses
        call.reuses_weights = all(self._reuses.values())


def flag_of_capture(module: Any, is_first: bool | None) -> torch.Tensor | None:
    """Return the flag for a call of ``module`` in a forward that this thread runs, or None if the call needs none."""
    listener = getattr(_thread, "listener", None)
    as_first = getattr(_thread, "as_first", None)
    flag: torch.Tensor | None = None
    reuses_weights = as_first is not None and as_first.in_backward and not is_first
    if listener is not None and not reuses_weights and FP8GlobalStateManager.is_fp8_enabled():
        flag = listener.flag_of(module, is_first)
    if is_first and as_first is not None:
        as_first.note(module, flag)
    return flag


def note_fill(flag: torch.Tensor, value: bool) -> None:
    """Note that ``flag`` was just filled with ``value``."""
    flag._te_filled = None if flag.is_inference() else (value, flag._version)  # type: ignore[attr-defined,unused-ignore]


def needs_fill(flag: torch.Tensor | None, value: bool) -> bool:
    """Return whether a graph with cached weights must fill the shared flag with ``value`` before its replay.

    The result is False if `note_fill` noted this value and no code has written the flag since.
    """
    filled = getattr(flag, "_te_filled", None)
    return flag is None or bool(filled != (value, flag._version))


def _modules(function: Any) -> Iterable[Any]:
    modules: Iterable[Any] = getattr(function, "modules", tuple)()
    return modules
