"""The scales and amax histories of a graph. The graph owns them, and assigns them to its modules before replays.

An evaluation without FP8 removes the recipe state of operations of ``te.ops``. An evaluation in another recipe removes
the recipe state of modules too. The next forward creates a new state, but the graph still uses the state of its
capture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from transformer_engine.pytorch.quantization import RecipeState

STATES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class RecipeStates:
    """The recipe states of the modules and operations that a graph uses.

    In delayed scaling, ``used`` is the record of the capture (`UsedState`). Other recipes have no values to own, and
    the record does not contain them. Their states are those of all ``modules`` that last ran in FP8, and only serve to
    refuse a replay in another recipe.
    """

    def __init__(self, modules: Iterable[Any], used: Any) -> None:
        modules = [*dict.fromkeys((*modules, *used.owners))]
        self._in_autocast = {*used.in_autocast}
        self._is_operation = hasattr(modules[0], "fuser_forward")
        self._held: dict[Any, list[_State]] = {}
        self._in_bf16_last: list[Any] = []  # a forward in FP8 was followed by one without, as in a tied layer
        self._fusers: list[Any] = []
        for module in modules:
            states = [_State(module, mode) for mode in STATES if STATES[mode] in _meta(vars(module), mode)]
            if states and (module in used.owners if states[0].is_delayed else vars(module).get("fp8", True)):
                self._held[module] = states
                if not vars(module).get("fp8", True):
                    self._in_bf16_last.append(module)
            groups = getattr(module, "_module_groups", None) or ()
            self._fusers += [group for group in groups if hasattr(group, "recipe_type")]

    def resume(self, known: Collection[Any], manager: Any) -> None:
        """Do the work of an eager forward on the FP8 state of the modules, with the graph's tensors.

        ``manager`` is TE's `FP8GlobalStateManager`. ``known`` are the modules seen by TE's forward hooks. Raise
        RuntimeError if their recipe, or the recipe of operations, differs from the recipe of the capture. Modules run
        by ``module.forward(x)``, and attention without FP8, are resumed only in the recipe of the capture.
        """
        recipe = manager.get_fp8_recipe()
        compared: list[Any] = [recipe]
        resumed = []
        for module, states in self._held.items():
            is_outside = hasattr(module, "unfused_attention") and not (recipe.fp8_dpa or recipe.fp8_mha)
            is_known = self._is_operation or module in self._in_autocast or (module in known and not is_outside)
            is_resumed = is_known or _equals(states[0].recipe, compared)
            if is_resumed and not (self._follows(module, compared) and all(map(_State.is_current, states))):
                resumed.append((module, states))
                for state in states:
                    state.require_kind_in(recipe)
        for module, states in resumed:
            self._resume(module, states, manager, compared)
        for module in self._in_bf16_last:
            module.fp8 = False

    def _follows(self, module: Any, compared: list[Any]) -> bool:
        """Return whether an eager forward of the module would not look at its recipe again."""
        is_module = "fp8_meta" in vars(module)
        runs_in_fp8 = not is_module or module.fp8 or module in self._in_bf16_last
        return runs_in_fp8 and (not is_module or _equals(module.fp8_meta["recipe"], compared))

    def _resume(self, module: Any, states: Sequence[_State], manager: Any, compared: list[Any]) -> None:
        recipe = manager.get_fp8_recipe()
        is_module = "fp8_meta" in vars(module)
        if self._follows(module, compared) and all(map(_State.is_current, states)):
            return
        if is_module:
            module.init_fp8_metadata(num_gemms=module.fp8_meta["num_gemms"])
        else:
            module.reset_recipe_state(recipe=recipe)
            for fuser in self._fusers:
                fuser.recipe_type = None  # the next eager forward has to compare recipes again
        if not all(map(_State.is_current, states)):
            for state in states:
                state.take_over(getattr(manager, "quantization_state", manager))


class _State:
    """The recipe state of a module or operation, forward or backward, and the tensors whose addresses a graph uses."""

    def __init__(self, module: Any, mode: str) -> None:
        self._module, self._attributes, self._mode = module, vars(module), mode
        meta = _meta(self._attributes, mode)
        self._state: Any = meta[STATES[mode]]
        self._kind = _kind(self._state)
        self.recipe: Any = meta["recipe"]
        self._quantizers = list(_quantizers(module, mode))
        parameters = module.parameters(recurse=False) if mode == "forward" else ()
        self._of_parameters = [(own, own._quantizer) for own in parameters if hasattr(own, "update_quantizer")]
        self.is_delayed = "amax_history" in vars(self._state)
        if self.is_delayed:
            self._scale, self._history = self._state.scale, self._state.amax_history

    def is_current(self) -> bool:
        state: Any = _meta(self._attributes, self._mode).get(STATES[self._mode])
        if type(state) is not type(self._state):
            return False
        return not self.is_delayed or (state.scale is self._scale and state.amax_history is self._history)

    def require_kind_in(self, recipe: Any) -> None:
        """Raise RuntimeError if a forward in ``recipe`` would create a state of another kind than the graph's.

        Attention chooses its own recipe, so its state is compared only after the forward's work.
        """
        if not hasattr(self._module, "unfused_attention"):
            self._require_kind(RecipeState.create(recipe, mode=self._mode))

    def _require_kind(self, state: Any) -> None:
        if _kind(state) != self._kind:
            raise RuntimeError(
                f"a graph of {type(self._module).__name__} was captured with a {self._kind} and is replayed with a "
                f"{_kind(state)}. Replay it in an autocast with the recipe of the capture."
            )

    def take_over(self, buffers: Any) -> None:
        """Copy the current values of the module to the graph's state, and make it the state of the module again."""
        meta = _meta(self._attributes, self._mode)
        state: Any = meta.get(STATES[self._mode])
        self._require_kind(state)
        if not self.is_delayed:
            return
        if state.scale is not self._scale:
            self._scale.copy_(state.scale)
        if state.amax_history is not self._history:
            self._history.copy_(state.amax_history)
        self._exchange(state, buffers)
        self._state.times_taken_over = getattr(self._state, "times_taken_over", 0) + 1  # for `_te_replay_contract`
        self._state.scale, self._state.amax_history = self._scale, self._history
        meta[STATES[self._mode]] = self._state
        _quantizers(self._module, self._mode)[:] = self._quantizers
        for parameter, quantizer in self._of_parameters:
            parameter.update_quantizer(quantizer)

    def _exchange(self, state: Any, buffers: Any) -> None:
        """Exchange the tensors of a state with the graph's tensors in TE's buffers for scale updates.

        After a forward in another recipe, TE still updates the old state of a module, and never the new state. To match
        eager training, a replay must then not update the state of the graph either.
        """
        for key, scales in buffers.global_scale_buffer.items():
            for index, scale in enumerate(scales):
                if scale is state.scale:
                    scales[index], history = self._scale, self._history
                elif scale is self._scale:
                    scales[index], history = state.scale, state.amax_history
                else:
                    continue
                buffers.global_amax_buffer[key][index] = history[0]
                buffers.global_amax_history_buffer[key][index] = history


def _equals(recipe: Any, compared: list[Any]) -> bool:
    """Return whether ``recipe`` equals the first of the ``compared`` recipes, by value as in TE.

    The other ``compared`` recipes are known to be equal. A new recipe object in each step is compared once, because all
    modules have the object of the last step.
    """
    if recipe is compared[0] or recipe is compared[-1]:
        return True
    is_equal = bool(recipe == compared[0])
    if is_equal:
        compared.append(recipe)
    return is_equal


def _meta(attributes: dict[str, Any], mode: str) -> dict[str, Any]:
    if "fp8_meta" in attributes:
        return attributes["fp8_meta"]  # type: ignore[no-any-return]
    return (attributes.get("_fp8_metas") or {}).get(mode) or {}


def _kind(state: Any) -> str:
    history = getattr(state, "amax_history", None)
    return type(state).__name__ + ("" if history is None else f" of {len(history)} entries of amax history")


def _quantizers(module: Any, mode: str) -> list[Any]:
    if "fp8_meta" in vars(module):
        return module.quantizers[STATES[mode]]  # type: ignore[no-any-return]
    return module._quantizers[mode]  # type: ignore[no-any-return]
