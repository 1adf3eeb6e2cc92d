"""A module run eagerly beside its graphs, and training none the wiser: the *twin*.

A twin is no copy of the module, which would leave closures and process groups behind. While it runs, the ``__dict__``
of the module and of all its submodules is exchanged for one with parameters that share the memory of the real ones,
and with buffers, FP8 state, stores of delayed wgrads and hooks of its own.
"""

from __future__ import annotations

import copy
import inspect
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_map_only
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.ops.op import BasicOperation
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.quantization import get_default_fp8_recipe

FIRST = "is_first_microbatch"
REPLACED = ("forward", "backward_dw", "reset")
"""What TE puts into the dictionary of a module that it graphs without an order."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
         "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")  # fmt: skip
SCALING = ("scaling_fwd", "scaling_bwd")
State = dict[tuple[Module, str], tuple[torch.Tensor, torch.Tensor]]


def originals(module: Module) -> dict[Module, dict[str, Any]]:
    """Of all submodules, what a capture replaces in their dictionaries, as it is before."""
    kept = {}
    for each in module.modules():
        kept[each] = {name: vars(each).get(name) for name in REPLACED}
        kept[each] |= {name: copy.copy(vars(each)[name]) for name in HOOKS if name in vars(each)}
        if "cuda_graphs" in vars(each):  # Megatron-Core: a layer that has graphs replays them
            kept[each]["cuda_graphs"] = []
    return kept


@dataclass
class Inputs:
    """What a forward needs to be run again: arguments, buffers, FP8 scales and random states, all of them copies."""

    args: Any
    kwargs: dict[str, Any]
    first: bool | None
    buffers: dict[Module, dict[str, Any]]
    scales: State
    random: list[Any]


@dataclass
class Pass:
    """One eager run of a microbatch. Aliases and gradients go by the id of the parameter."""

    aliases: dict[int, Any]
    stores: dict[Module, Any]
    outputs: list[Any] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    grads: dict[int, torch.Tensor | None] = field(default_factory=dict)
    scales: State = field(default_factory=dict)
    unregistered: set[Module] = field(default_factory=set)

    def delayed(self) -> list[Module]:
        """The modules with a wgrad still to be computed; not all parts of a module need be in its graphs."""
        return [each for each, store in self.stores.items() if store.delay_wgrad_compute() and store.context.qsize()]


class Twin:
    """The eager side of a graphed module. ``enabled`` and ``recipe`` are those of the capture."""

    _shared: ClassVar[dict[Any, torch.Tensor]] = {}

    def __init__(self, module: Module, kept: dict[Module, dict[str, Any]], enabled: bool, recipe: Any) -> None:
        self.module, self.enabled = module, enabled
        self.recipe = get_default_fp8_recipe() if enabled and recipe is None else recipe
        self.parameters = dict(module.named_parameters())
        self.refusal = _refusal(module)
        self._takes_first = FIRST in inspect.signature(kept[module]["forward"] or type(module).forward).parameters
        self._torch_autocast = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        self._own = kept
        for each, own in kept.items():
            if isinstance(each, TransformerEngineBaseModule):
                meta = {name: each.fp8_meta[name] for name in ("fp8_checkpoint", "fp8_group") if name in each.fp8_meta}
                own |= {
                    "fp8_meta": meta,
                    "fp8_initialized": False,
                    "fp8_meta_tensors_initialized": False,
                    "quantizers": {key: type(value)() for key, value in each.quantizers.items()},
                    "_fp8_workspaces": {},
                    "wgrad_accumulation_and_reduce_hooks": [],
                }
            # operations keep their FP8 state, and the parameters that they were fused with
            own |= {name: None for name in ("_fp8_metas", "_quantizers", "_module_groups") if name in vars(each)}

    def inputs(self, args: Any, kwargs: dict[str, Any], first: bool | None) -> Inputs:
        """Copies of all that the forward which is about to be replayed starts from."""
        args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
        buffers = {each: dict(each._buffers) for each in self._own}
        return Inputs(
            args, kwargs, first, tree_map_only(torch.Tensor, torch.clone, buffers), self.scales(), random_states()
        )

    def forward(self, inputs: Inputs) -> Pass:
        """Run the forward. Of what it computes, the values of the outputs are kept."""
        done = self._new_pass()
        with self._running(done, inputs):
            done.outputs = _detached(self._forward(inputs)[0])
            done.scales, done.unregistered = self.scales(), self.unregistered()
        return done

    def backward(self, inputs: Inputs, grad_of: Callable[[int], torch.Tensor | None], slot: str) -> Pass:
        """Run the forward again, and its backward from ``grad_of`` each output, with the random states of now."""
        done, random, scales = self._new_pass(), random_states(), self.scales()
        parameters = [each for each in self.parameters.values() if each.requires_grad]
        self._give_main_grads(done, slot)
        with self._running(done, inputs), torch.enable_grad():
            outputs, tensors = self._forward(inputs)
            done.outputs = _detached(outputs)
            put_random_states(random)
            self._take_scales(scales, "scaling_bwd")
            used = [(i, x) for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
            given = [grad_of(i) for i, _ in used]
            given = [torch.zeros_like(x) if g is None else g.clone() for (_, x), g in zip(used, given, strict=True)]
            done.inputs = [x for x in tensors if isinstance(x, torch.Tensor)]
            leaves = [x for x in done.inputs if x.requires_grad]
            wanted = leaves + [done.aliases[id(each)] for each in parameters]
            got = torch.autograd.grad([x for _, x in used], wanted, given, allow_unused=True)
            done.scales = self.scales()
        grads = dict(zip(map(id, [*leaves, *parameters]), got, strict=True))
        done.input_grads = [grads.get(id(x)) for x in done.inputs]
        done.grads = {id(each): grads[id(each)] for each in parameters}
        return done

    def backward_dw(self, done: Pass, inputs: Inputs, slot: str) -> None:
        """Compute the delayed wgrads of a pass; ``grads`` then has what they add to each ``.grad``."""
        self._give_main_grads(done, slot)
        with self._running(done, inputs):
            for each in done.delayed():
                each.backward_dw()
        for key, alias in done.aliases.items():
            done.grads[key], alias.grad = alias.grad, None

    def main_grads(self) -> dict[int, torch.Tensor]:
        """Copies of ``main_grad``, in half the bytes: to tell what is added to it."""
        return {
            id(each): self._buffer((index, "before"), each.main_grad, torch.bfloat16)
            for index, each in enumerate(self.parameters.values())
            if getattr(each, "main_grad", None) is not None
        }

    def first_fp8_module(self) -> bool:
        """Whether the next module is the first in its autocast: the end of its backward updates the scales."""
        return self.enabled and bool(Manager.get_autocast_state()[4])

    def name(self, module: Module) -> str:
        """Where a module is in this one."""
        return next(name for name, each in self.module.named_modules() if each is module) or type(module).__name__

    def scales(self) -> State:
        """The scales and amaxes of delayed scaling that the modules have now, copied."""
        states = {
            (each, key): meta[key] for each in self._own for meta in _metas(each) for key in SCALING if key in meta
        }
        return {
            where: (state.scale.clone(), state.amax_history.clone())
            for where, state in states.items()
            if hasattr(state, "amax_history")
        }

    def unregistered(self) -> set[Module]:
        """The modules whose scales are not among those that TE updates."""
        info = Manager.get_buffer_info()
        return {each for each, _ in self.scales() if not any(info in meta for meta in _metas(each))}

    def release(self) -> None:
        """Let go of all memory."""
        self._own, self.parameters = {}, {}
        self._shared.clear()

    def _new_pass(self) -> Pass:
        aliases = {}
        for parameter in self.parameters.values():
            alias: Any = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for name, value in vars(parameter).items():
                if name not in ("main_grad", "get_main_grad"):
                    alias.__dict__.setdefault(name, value)
            aliases[id(parameter)] = alias
        stores = {}
        for each in self._own:
            store = getattr(each, "wgrad_store", None)
            if store is not None:
                stores[each] = copy.copy(store)
                stores[each].context = queue.Queue()
        return Pass(aliases, stores)

    def _give_main_grads(self, done: Pass, slot: str) -> None:
        """Give the aliases the values of ``main_grad``, in buffers that all twins share."""
        for index, parameter in enumerate(self.parameters.values()):
            if getattr(parameter, "main_grad", None) is not None:
                alias = done.aliases[id(parameter)]
                alias.main_grad = self._buffer((index, slot), parameter.main_grad, parameter.main_grad.dtype)
                alias.grad_added_to_main_grad = False

    def _buffer(self, key: tuple[int, str], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key_ = (*key, like.shape, dtype)
        if key_ not in self._shared:
            self._shared[key_] = torch.empty_like(like, dtype=dtype)
        return self._shared[key_].copy_(like)

    def _forward(self, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        args, kwargs = tree_map_only(torch.Tensor, copied, (inputs.args, inputs.kwargs))
        tensors = tree_flatten((args, list(kwargs.values())))[0]
        if inputs.first is not None and self._takes_first:
            kwargs = {**kwargs, FIRST: inputs.first}
        return tree_flatten(self.module(*args, **kwargs))[0], tensors

    def _take_scales(self, scales: State, *keys: str) -> None:
        for (each, key), values in scales.items():
            for meta in _metas(each):
                if key in keys and key in meta:
                    for own, value in zip((meta[key].scale, meta[key].amax_history), values, strict=True):
                        own.copy_(value)

    @contextmanager
    def _running(self, done: Pass, inputs: Inputs) -> Iterator[None]:
        """Be the module, as it was when ``inputs`` were taken, and leave no trace of it."""
        real, random = {each: vars(each) for each in self._own}, random_states()
        for each, own in self._own.items():
            merged = {name: value for name, value in real[each].items() if name not in REPLACED}
            merged |= {name: value for name, value in own.items() if value is not None or name not in REPLACED}
            merged["_buffers"] = tree_map_only(torch.Tensor, torch.clone, inputs.buffers[each])
            merged["_parameters"] = {
                name: p if p is None else done.aliases[id(p)] for name, p in each._parameters.items()
            }
            if each in done.stores:
                merged["wgrad_store"] = done.stores[each]
            if FIRST in merged:
                merged[FIRST] = inputs.first
            object.__setattr__(each, "__dict__", merged)
        try:
            with _fp8(self.enabled, self.recipe), _as_in_capture(), self._autocast():
                for each in self._own if self.enabled else ():
                    if isinstance(each, BasicOperation):
                        each.reset_recipe_state(recipe=Manager.get_fp8_recipe())
                    elif "num_gemms" in real[each].get("fp8_meta", ()):
                        each.init_fp8_metadata(num_gemms=real[each]["fp8_meta"]["num_gemms"])
                self._take_scales(inputs.scales, *SCALING)
                put_random_states(inputs.random)
                yield
        finally:
            put_random_states(random)
            for each, values in real.items():
                left = vars(each)
                object.__setattr__(each, "__dict__", values)
                self._own[each].update(
                    (name, left[name]) for name in self._own[each] if name in left and name not in REPLACED
                )

    def _autocast(self) -> Any:
        enabled, dtype = self._torch_autocast
        if enabled == torch.is_autocast_enabled():
            return nullcontext()
        return torch.autocast("cuda", dtype, enabled, cache_enabled=False)


def _detached(values: list[Any]) -> list[Any]:
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in values]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _metas(module: Module) -> list[dict[str, Any]]:
    """The FP8 state of a module or operation."""
    if isinstance(module, BasicOperation):
        return [meta for meta in (module._fp8_metas or {}).values() if meta]
    return [module.fp8_meta] if isinstance(module, TransformerEngineBaseModule) else []


def _refusal(module: Module) -> str:
    """Why a module cannot be run beside its graphs, "" if it can."""
    if any(type(each).__name__ == "DTensor" for each in module.parameters()) or any(
        getattr(each, "fsdp_wrapped", False) or "FSDPModule" in {kind.__name__ for kind in type(each).__mro__}
        for each in module.modules()
    ):
        return "its parameters are sharded (FSDP), and eager would have to gather them"
    if any(
        name.startswith("ub_overlap") and value is True
        for each in module.modules()
        for name, value in vars(each).items()
    ):
        return "it overlaps communication in buffers (userbuffers) that its graphs use as well"
    return ""


def random_states() -> list[Any]:
    """The states of all generators that a module may draw from."""
    trackers = {name: s.get_state() if hasattr(s, "get_state") else s for name, s in get_all_rng_states().items()}
    return [torch.get_rng_state(), torch.cuda.get_rng_state(), trackers]


def put_random_states(states: list[Any]) -> None:
    cpu, cuda, trackers = states
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(cuda)
    now = get_all_rng_states()
    for name, state in trackers.items():
        if hasattr(now[name], "set_state"):
            now[name].set_state(state)
        else:
            now[name] = state


@contextmanager
def _as_in_capture() -> Iterator[None]:
    """Megatron-Core: what a layer runs in a capture may be a part of it."""
    graphs: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
    before = getattr(graphs, "_IS_GRAPH_CAPTURING", None)
    if before is None:
        yield
        return
    graphs._IS_GRAPH_CAPTURING = True
    try:
        yield
    finally:
        graphs._IS_GRAPH_CAPTURING = before


@contextmanager
def _fp8(enabled: bool, recipe: Any) -> Iterator[None]:
    """The recipe of the capture, within an autocast that is not the outermost; TE's global state is put back."""
    owner: Any = Manager
    if hasattr(Manager, "quantization_state"):
        saved = {"quantization_state": Manager.quantization_state}
        owner = Manager.quantization_state = copy.copy(Manager.quantization_state)
        depth = "autocast_depth"
    else:
        kinds = (classmethod, staticmethod)
        saved = {k: v for k, v in vars(Manager).items() if not k.startswith("__") and not isinstance(v, kinds)}
        depth = "AUTOCAST_DEPTH"
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        setattr(owner, name, {})
    owner.fp8_tensors_recompute_buffer = []
    owner.autocast_arguments = dict(owner.autocast_arguments)
    owner.skip_fp8_weight_update_tensor = None
    setattr(owner, depth, getattr(owner, depth) + 1)
    group = Manager.get_autocast_state()[3]
    Manager.set_autocast_state((enabled, False, recipe, group, False, False))
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(Manager, name, value)
