"""The FP8 state of delayed scaling that a graph's forward uses, and what an eager forward does with it.

An eager forward puts the state (``fp8_meta``: scales and amax histories) of each module that it runs into buffers, from
which the end of an autocast makes the next scales; under activation recompute it keeps a copy for the second forward.
No Python of the modules runs in a replay. So they say in the capture which state they use, and `with_fp8_state` does
the rest at each replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

KEYS = ("scaling_fwd", "scaling_bwd")


@dataclass
class UsedState:
    """The state that one graph uses: in the autocast of the capture, in autocasts of the modules' own, in modules.

    In the autocast of the capture there is a recipe with it where it is not that autocast's: attention chooses its own.
    Modules, unlike operations of `te.ops`, keep a copy for a recomputation. ``has_first_module`` says that one of them
    is the first FP8 module of the autocast around it, whose backward updates the scales of all: it is not in an
    autocast of its own.
    """

    in_capture: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    autocasts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    of_modules: list[dict[str, Any]] = field(default_factory=list)
    has_first_module: bool = False


class Capture:
    """The states that modules use between the warmup and the last graph of one capture of TE's own.

    They are noted as long as this object is alive: TE's sign of a capture is set by others too, as Megatron-Core.
    """

    def __init__(self) -> None:
        self.used = UsedState()
        self._before: dict[int, tuple[dict[str, Any], dict[str, tuple[torch.Tensor, torch.Tensor]]]] = {}

    def begin_graph(self) -> UsedState:
        """Begin with the capture of a forward; what it uses will be in the result."""
        self.used = UsedState()
        return self.used

    def keep(self, fp8_meta: dict[str, Any]) -> None:
        """Keep the scales and histories that a module has before its warmup, in host memory."""
        if id(fp8_meta) not in self._before:
            states = {key: fp8_meta[key] for key in KEYS if key in fp8_meta}
            self._before[id(fp8_meta)] = (
                fp8_meta,
                {key: (state.scale.cpu(), state.amax_history.cpu()) for key, state in states.items()},
            )

    def end(self) -> None:
        """Give the scales and histories the values from before the warmup, which has put its own into them."""
        for fp8_meta, states in self._before.values():
            for key, (scale, amax_history) in states.items():
                fp8_meta[key].scale.copy_(scale)
                fp8_meta[key].amax_history.copy_(amax_history)


_current: weakref.ref[Capture] | None = None


def begin_capture() -> Capture:
    """Begin with the warmup of a capture."""
    global _current
    capture = Capture()
    _current = weakref.ref(capture)
    return capture


def use_fp8_state(fp8_meta: dict[str, Any], of_module: bool = True) -> None:
    """Say, in a forward, that it uses this state of delayed scaling.

    An eager forward of an operation puts it into the buffers: TE does so where it makes the state, but not in captures,
    which make it outside of an autocast, without the group of that.
    """
    if not is_graph_capturing():
        if not of_module:
            fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(fp8_meta)
        return
    capture = _current and _current()
    if not capture:
        return
    in_capture = FP8GlobalStateManager.get_autocast_state()[-1]
    if not torch.cuda.is_current_stream_capturing():
        capture.keep(fp8_meta)
        return
    used = capture.used
    if in_capture:
        recipe = fp8_meta["recipe"]
        used.in_capture.append((fp8_meta, recipe if fp8_meta.get("global_recipe", recipe) != recipe else None))
    else:
        recipe, group = FP8GlobalStateManager.get_fp8_recipe(), FP8GlobalStateManager.get_fp8_group()
        used.autocasts[FP8GlobalStateManager.get_unique_autocast_key(recipe, group)] = recipe, group
    if of_module:
        used.of_modules.append(fp8_meta)


def note_first_module() -> None:
    """Say, at the end of a forward in the autocast of a capture, whether its first FP8 module has run."""
    if capture := _current and _current():
        capture.used.has_first_module = not FP8GlobalStateManager.get_autocast_state()[-2]


def has_other_state(module: torch.nn.Module) -> bool:
    """Whether a module or operation holds the state of another recipe than delayed scaling, or an operation none."""
    if getattr(module, "_fp8_metas", {}) is None:
        return True
    metas = [getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()]
    return any(not hasattr(meta[key], "amax_history") for meta in metas if meta for key in KEYS if key in meta)


def with_fp8_state(graphed: Callable[..., Any], used: UsedState) -> Callable[..., Any]:
    """The replay ``graphed`` with what eager forwards do with the state, where there is any of delayed scaling."""
    if not used.in_capture and not used.autocasts:
        return graphed

    def replay(*args: Any, **kwargs: Any) -> Any:
        manager = FP8GlobalStateManager
        if manager.is_fp8_enabled():
            for fp8_meta, own in used.in_capture:
                fp8_meta["recipe"], fp8_meta["fp8_group"] = own or manager.get_fp8_recipe(), manager.get_fp8_group()
                manager.add_fp8_tensors_to_global_buffer(fp8_meta)
        with ExitStack() as stack:
            for recipe, group in used.autocasts.values():
                stack.enter_context(autocast(recipe=recipe, amax_reduction_group=group))
            if distributed.in_fp8_activation_recompute_phase():
                for fp8_meta in used.of_modules:
                    manager.get_old_fp8_meta_tensors_for_recompute(fp8_meta)
                    stack.callback(manager.restore_fp8_meta_tensors, fp8_meta)
            elif distributed.is_fp8_activation_recompute_enabled():
                for fp8_meta in used.of_modules:
                    manager.copy_forward_fp8_meta_tensors_for_recompute(fp8_meta)
            outputs = graphed(*args, **kwargs)
            is_first = manager.get_autocast_state()[-2]
        if used.has_first_module:
            # Leaving an inner autocast has taken back that the first module of the outer one has run.
            *state, _, is_capturing = manager.get_autocast_state()
            manager.set_autocast_state((*state, is_first, is_capturing))
        return outputs

    return replay
