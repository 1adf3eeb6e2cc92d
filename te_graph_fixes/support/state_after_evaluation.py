"""The scales and amax histories of a graph. The graph owns them, and assigns them to its modules before replays."""

import weakref
from typing import Any, ClassVar

from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

from ._te_fp8_state_at_replay import STATES, global_state, is_delayed


class RecipeStates:
    """The recipe states of the modules and operations that a graph uses.

    The capture records their owners (``replay.fp8_state``). Only states of delayed scaling have tensors that
    the graph must own. The other states only serve to refuse a replay in another recipe.
    """

    def __init__(self, replay: Any) -> None:
        """Add steps to ``replay`` if the capture used any state. Raise RuntimeError if its forward removed a state."""
        used = replay.fp8_state
        self._name, self._replacements_before = replay.name, 0
        self._in_autocast, self._fusers = used.in_autocast, used.fusers
        self._held: dict[Any, list[_State]] = {}
        for module in used.owners:
            if vars(module).get("_fp8_metas", {}) is None:
                raise RuntimeError(
                    f"An operation of te.ops ({type(module).__name__}) runs with FP8, and later without FP8, in one "
                    "captured forward, which removes its FP8 state. Capture the two calls separately."
                )
            if states := [_State(module, mode) for mode in STATES if STATES[mode] in _meta(vars(module), mode)]:
                self._held[module] = states
        # Modules whose last run in the capture was without FP8, as in a tied layer.
        self._in_bf16_last = {module for module in self._held if not used.modules_in_fp8.get(module, True)}
        if self._held:
            replay.add("forward check", "require recipe", self.check)
            replay.add("forward prepare", "resume recipe states", self.resume)
            replay.add("backward check", "require recipe states", self.check_backward)

    def check(self, call: Any) -> None:
        """Set ``call.resumed`` to modules whose FP8 state an eager forward would initialize again, with their states.

        Raise RuntimeError if they would get another kind of state than in the capture. Modules in autocasts of their
        own, and attention without FP8, are included only if the recipe is the recipe of the capture.
        """
        if not FP8GlobalStateManager.is_fp8_enabled():
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        resumed = []
        for module, states in self._held.items():
            is_attention_in_bf16 = self._in_autocast.get(module) and not (recipe.fp8_dpa or recipe.fp8_mha)
            is_initialized = module in self._in_autocast and not is_attention_in_bf16
            is_resumed = is_initialized or states[0].recipe == recipe
            if is_resumed and not (self._follows(module, recipe) and all(map(_State.is_current, states))):
                resumed.append((module, states))
                for state in states:
                    state.require_kind_in(recipe)
        call.resumed = resumed

    def resume(self, call: Any) -> None:
        """Update the FP8 state of the modules as an eager forward does, with the tensors of the graph."""
        for module, states in call.resumed:
            if "fp8_meta" in vars(module):
                module.init_fp8_metadata(num_gemms=module.fp8_meta["num_gemms"])
            else:
                module.reset_recipe_state(recipe=FP8GlobalStateManager.get_fp8_recipe())
                for fuser in self._fusers:
                    fuser.recipe_type = None  # the next eager forward has to compare recipes again
            if not all(map(_State.is_current, states)):
                for state in states:
                    state.take_over()
        if self._in_bf16_last and FP8GlobalStateManager.is_fp8_enabled():
            for module in self._in_bf16_last:
                module.fp8 = module.fp8_initialized = module.fp8_meta["fp8_checkpoint"] = False
        self._replacements_before = _State.replacements

    def check_backward(self, _ctx: Any) -> None:
        """Raise RuntimeError if a scale that the backward reads was replaced after the last forward of the graph."""
        before = self._replacements_before
        if before != _State.replacements and any(
            state.last_replacement() > before for states in self._held.values() for state in states
        ):
            raise RuntimeError(
                f"the backward of {self._name} cannot be replayed: after its forward, its modules ran in another "
                "recipe, which dropped the scales and cached weights that the backward reads. Evaluate in the recipe "
                "of the capture, or between two steps."
            )

    def _follows(self, module: Any, recipe: Any) -> bool:
        """Return whether an eager forward of the module would keep its FP8 state, because the recipe is unchanged."""
        if "fp8_meta" not in vars(module):
            return True
        before = module.fp8_meta["recipe"]
        return (module.fp8 or module in self._in_bf16_last) and (before is recipe or before == recipe)


class _State:
    """The recipe state of a module or operation, forward or backward, and the tensors whose addresses a graph uses.

    ``replacements`` counts the replacements of states by all graphs, because several graphs may use the same state.
    """

    replacements = 0
    _last_replacements: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()

    def __init__(self, module: Any, mode: str) -> None:
        self._module, self._attributes, self._mode = module, vars(module), mode
        meta = _meta(self._attributes, mode)
        self._state: Any = meta[STATES[mode]]
        self._kind = _kind(self._state)
        self.recipe: Any = meta["recipe"]
        self._quantizers = list(_quantizers(module, mode))
        parameters = module.parameters(recurse=False) if mode == "forward" else ()
        self._of_parameters = [(own, own._quantizer) for own in parameters if hasattr(own, "update_quantizer")]
        self.is_delayed = is_delayed(self._state)
        if self.is_delayed:
            self._scale, self._history = self._state.scale, self._state.amax_history

    def is_current(self) -> bool:
        state: Any = _meta(self._attributes, self._mode).get(STATES[self._mode])
        if type(state) is not type(self._state):
            return False
        return not self.is_delayed or (state.scale is self._scale and state.amax_history is self._history)

    def last_replacement(self) -> int:
        """Return the number of the last replacement of this state's values, or 0 if they were never replaced."""
        return self._last_replacements.get(self._state, 0)

    def require_kind_in(self, recipe: Any) -> None:
        """Raise RuntimeError if a forward in ``recipe`` would create a state of another kind than the graph's."""
        state = self._state_of_attention() if hasattr(self._module, "unfused_attention") else None
        kind = _kind(state or RecipeState.create(recipe, mode=self._mode))
        if kind != self._kind:
            raise RuntimeError(
                f"a graph of {type(self._module).__name__} was captured with a {self._kind} and is replayed with a "
                f"{kind}. Replay it in an autocast with the recipe of the capture."
            )

    def _state_of_attention(self) -> Any:
        """Return the state that an eager forward of attention would create. Attention chooses the recipe itself."""
        module = self._module
        copy = object.__new__(type(module))
        new = {"fp8_meta": {}, "quantizers": {}, "fp8_initialized": False, "fp8_meta_tensors_initialized": False}
        vars(copy).update(vars(module) | new)
        registered, before = global_state().autocast_arguments, {*global_state().autocast_arguments}
        copy.init_fp8_metadata(num_gemms=module.fp8_meta["num_gemms"])
        for key in registered.keys() - before:
            del registered[key]
        return copy.fp8_meta[STATES[self._mode]]

    def take_over(self) -> None:
        """Copy the module's current values to the graph's state, and assign the graph's state to the module again."""
        if not self.is_delayed:
            return
        meta = _meta(self._attributes, self._mode)
        state: Any = meta.get(STATES[self._mode])
        if state.scale is not self._scale:
            self._scale.copy_(state.scale)
        if state.amax_history is not self._history:
            self._history.copy_(state.amax_history)
        self._exchange(state)
        _State.replacements += 1
        self._last_replacements[self._state] = _State.replacements
        self._state.scale, self._state.amax_history = self._scale, self._history
        meta[STATES[self._mode]] = self._state
        _quantizers(self._module, self._mode)[:] = self._quantizers
        for parameter, quantizer in self._of_parameters:
            parameter.update_quantizer(quantizer)

    def _exchange(self, state: Any) -> None:
        """Exchange the tensors of a state with the graph's tensors in TE's buffers for scale updates.

        After a forward in another recipe, TE still updates the old state of a module, and never the new state. To match
        eager training, a replay must then not update the state of the graph either.
        """
        buffers = global_state()
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


def _meta(attributes: dict[str, Any], mode: str) -> dict[str, Any]:
    if "fp8_meta" in attributes:
        return attributes["fp8_meta"]  # type: ignore[no-any-return]
    return (attributes.get("_fp8_metas") or {}).get(mode) or {}


def _kind(state: Any) -> str:
    name = type(state).__name__
    return f"{name} of {len(state.amax_history)} entries of amax history" if is_delayed(state) else name


def _quantizers(module: Any, mode: str) -> list[Any]:
    if "fp8_meta" in vars(module):
        return module.quantizers[STATES[mode]]  # type: ignore[no-any-return]
    return module._quantizers[mode]  # type: ignore[no-any-return]
