"""A module run eagerly beside its graphs, and training none the wiser: the *twin*.

A twin is no copy of the module, which would leave closures and process groups behind. While it runs, the ``__dict__``
of the module and of all its submodules is exchanged for one with parameters that share the memory of the real ones,
and with buffers, containers, FP8 state, stores of delayed wgrads and hooks of its own.
"""

from __future__ import annotations

import copy
import inspect
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_map_only
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.distributed import get_all_rng_states, in_fp8_activation_recompute_phase
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.ops.op import BasicOperation
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

FIRST = "is_first_microbatch"
REPLACED = ("forward", "backward_dw", "reset")
"""What TE puts into the dictionary of a module that it graphs without an order."""
FUSED = "_module_groups"
"""Where `te.ops.Sequential` keeps the parameters that it has fused its operations with."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
         "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")  # fmt: skip
FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
Scales = dict[tuple[Module, str], tuple[torch.Tensor, torch.Tensor]]
Values = dict[str, Any]
"""Tensors by names for people: ``output 0``, ``gradient of input 0``, ``.grad of weight``, ``main_grad of weight``."""


def originals(module: Module) -> dict[Module, Values]:
    """Of all submodules, what a capture replaces in their dictionaries, as it is before."""
    kept = {}
    for each in module.modules():
        kept[each] = {name: vars(each).get(name) for name in REPLACED}
        kept[each] |= {name: copy.copy(vars(each)[name]) for name in HOOKS if name in vars(each)}
        if "cuda_graphs" in vars(each):  # Megatron-Core: a layer that has graphs replays them
            kept[each]["cuda_graphs"] = []
    return kept


@dataclass
class Run:
    """One microbatch, from its forward to its wgrads: what eager starts from, all of it copies, and has computed.

    ``updates``: the end of its backward updates the FP8 scales. Of two ``passes`` the first is the reference.
    """

    args: Any
    kwargs: Values
    first: bool | None
    updates: bool
    buffers: dict[Module, Values]
    scales: Scales
    random: list[Any]
    forward: Values = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)


class Pass:
    """One eager run of a microbatch, with parameters and stores of delayed wgrads of its own."""

    def __init__(self, modules: dict[Module, Values], parameters: dict[str, Any]) -> None:
        self.values: Values = {}
        self.aliases: dict[int, Any] = {}
        for parameter in parameters.values():
            alias: Any = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for name, value in vars(parameter).items():
                if name not in ("main_grad", "get_main_grad"):
                    alias.__dict__.setdefault(name, value)
            self.aliases[id(parameter)] = alias
        stores = {each: copy.copy(vars(each).get("wgrad_store")) for each in modules}
        self.stores = {each: store for each, store in stores.items() if store is not None}
        for store in self.stores.values():
            store.context = queue.Queue()

    def delayed(self) -> list[Any]:
        """The modules with a wgrad still to be computed; not all parts of a module need be in its graphs."""
        return [each for each, store in self.stores.items() if store.delay_wgrad_compute() and store.context.qsize()]


class Twin:
    """The eager side of a graphed module. ``enabled`` and ``recipe`` are those of the capture.

    `Check` counts in it: its turn, the step that it is in, and what a new step is told by.
    """

    _shared: ClassVar[dict[Any, torch.Tensor]] = {}

    def __init__(self, module: Module, kept: dict[Module, Values], enabled: bool, recipe: Any) -> None:
        self.module, self.enabled = module, enabled
        self.recipe = quantization.get_default_fp8_recipe() if enabled and recipe is None else recipe
        self.parameters: dict[str, Any] = dict(module.named_parameters())
        self.refusal = _refusal(module)
        self.kinds = frozenset(type(each).__name__ for each in module.modules())
        self.turn = self.step = 0
        self.seen: Any = None
        self.graded = False
        self._names = {each: f"{name or type(module).__name__}" for name, each in module.named_modules()}
        self._takes_first = FIRST in inspect.signature(kept[module]["forward"] or type(module).forward).parameters
        self._torch_autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        self._own = kept
        for each, own in kept.items():
            if isinstance(each, TransformerEngineBaseModule):
                meta = {name: each.fp8_meta[name] for name in ("fp8_checkpoint", "fp8_group") if name in each.fp8_meta}
                quantizers = {key: type(value)() for key, value in each.quantizers.items()}
                own |= {"fp8_meta": meta, "quantizers": quantizers, "_fp8_workspaces": {}, "fp8_initialized": False}
                own |= {"fp8_meta_tensors_initialized": False, "wgrad_accumulation_and_reduce_hooks": []}
            own |= {name: None for name in ("_fp8_metas", "_quantizers", FUSED) if name in vars(each)}

    def begin(self, args: Any, kwargs: Values, first: bool | None) -> Run:
        """Copies of all that the forward which is about to be replayed starts from."""
        args, kwargs = tree_map_only(torch.Tensor, _copied, (args, kwargs))
        updates = self.enabled and bool(Manager.get_autocast_state()[4])  # the first module of an autocast does
        buffers = tree_map_only(torch.Tensor, torch.clone, {each: dict(each._buffers) for each in self._own})
        scales = self.scales()
        if scales and in_fp8_activation_recompute_phase():
            self.refusal = "a checkpoint of TE runs it again, with FP8 scales that are not the present ones"
        if any(each is not self.parameters.get(name) for name, each in self.module.named_parameters()):
            self.refusal = "it has parameters that it did not have in its capture"
        return Run(args, kwargs, first, updates, buffers, scales, _random_states())

    def forward(self, run: Run) -> Values:
        """Run the forward: outputs and amaxes."""
        with self._running(Pass(self._own, self.parameters), run):
            return named_outputs(self._forward(run)[0]) | self.amaxes(FORWARD)

    def backward(self, run: Run, grad_of: Callable[[int], torch.Tensor | None], slot: int) -> Pass:
        """Run the forward again, and its backward from ``grad_of`` each output, with the random states of now."""
        done, random, scales = Pass(self._own, self.parameters), _random_states(), self.scales()
        main_grads = self._copy_main_grads(done, slot)
        with self._running(done, run), torch.enable_grad():
            outputs, leaves = self._forward(run)
            _put_random_states(random)
            self._take_scales(scales, BACKWARD)
            used = {i: x for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad}
            given = [torch.zeros_like(x) if (g := grad_of(i)) is None else g.clone() for i, x in used.items()]
            torch.autograd.backward([*used.values()], given)
            done.values = named_outputs(outputs) | self.amaxes(BACKWARD) | main_grads
        done.values |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad}
        for name, parameter in self.parameters.items():
            alias = done.aliases[id(parameter)]
            fused = getattr(alias, "grad_added_to_main_grad", False)  # `.grad` is a dummy
            if alias.requires_grad and not fused and not (done.delayed() and alias.grad is None):
                done.values[f".grad of {name}"] = alias.grad
            alias.grad = None
        return done

    def backward_dw(self, run: Run, done: Pass, slot: int) -> None:
        """Compute the delayed wgrads of a pass, and add them to copies of the real gradients."""
        done.values = self._copy_main_grads(done, slot)
        with self._running(done, run):
            for each in done.delayed():
                each.backward_dw()
        for name, parameter in self.parameters.items():
            added = done.aliases[id(parameter)].grad
            if added is not None:
                done.values[f".grad of {name}"] = added if parameter.grad is None else parameter.grad + added

    def scales(self) -> Scales:
        """The scales and amax histories of delayed scaling that the modules have now, copied."""
        states = {(each, key): meta[key] for each in self._own for meta in _metas(each) for key in meta}
        delayed = {where: state for where, state in states.items() if hasattr(state, "amax_history")}
        return {where: (state.scale.clone(), state.amax_history.clone()) for where, state in delayed.items()}

    def amaxes(self, key: str) -> Values:
        """By module, the largest values that FP8 has seen in this microbatch: the first row of the histories."""
        found = {self._names[each]: history for (each, which), (_, history) in self.scales().items() if which == key}
        return {f"largest values in FP8 ({key} of {name})": history[0] for name, history in found.items()}

    def release(self) -> None:
        """Let go of all memory."""
        self._own, self.parameters = {}, {}
        self._shared.clear()

    def _copy_main_grads(self, done: Pass, slot: int) -> Values:
        """Let a pass add to copies of every ``main_grad``, in memory that all twins share."""
        copies: Values = {}
        for index, (name, each) in enumerate(self.parameters.items()):
            real = getattr(each, "main_grad", None)
            if real is not None:
                key = index, slot, real.shape, real.dtype
                if key not in self._shared:
                    self._shared[key] = torch.empty_like(real)
                alias = done.aliases[id(each)]
                alias.main_grad = copies[f"main_grad of {name}"] = self._shared[key].copy_(real)
                alias.grad_added_to_main_grad = False
        return copies

    def _forward(self, run: Run) -> tuple[list[Any], list[Any]]:
        args, kwargs = tree_map_only(torch.Tensor, _copied, (run.args, run.kwargs))
        tensors = [x for x in tree_flatten((args, list(kwargs.values())))[0] if isinstance(x, torch.Tensor)]
        if run.first is not None and self._takes_first:
            kwargs = {**kwargs, FIRST: run.first}
        return tree_flatten(self.module(*args, **kwargs))[0], tensors

    def _take_scales(self, scales: Scales, *keys: str) -> None:
        for (each, key), values in scales.items():
            for meta in _metas(each):
                if key in keys and key in meta:
                    meta[key].scale.copy_(values[0])
                    meta[key].amax_history.copy_(values[1])

    def _dictionary(self, each: Module, done: Pass, run: Run) -> Values:
        """What takes the place of the ``__dict__`` of a submodule."""
        own = {name: value for name, value in self._own[each].items() if value is not None or name not in REPLACED}
        merged = {name: value for name, value in vars(each).items() if name not in REPLACED}
        merged |= {name: copy.copy(value) for name, value in merged.items() if type(value) in (list, dict, set)} | own
        merged["_buffers"] = tree_map_only(torch.Tensor, torch.clone, run.buffers[each])
        merged["_parameters"] = {n: p if p is None else done.aliases[id(p)] for n, p in each._parameters.items()}
        if each in done.stores:
            merged["wgrad_store"] = done.stores[each]
        if FIRST in merged:
            merged[FIRST] = run.first
        return merged

    @contextmanager
    def _running(self, done: Pass, run: Run) -> Iterator[None]:
        """Be the module, as it was at the beginning of ``run``, and leave no trace of it."""
        real = {each: vars(each) for each in self._own}
        for each, merged in {each: self._dictionary(each, done, run) for each in self._own}.items():
            object.__setattr__(each, "__dict__", merged)
        try:
            with (
                _as_captured(self.enabled, self.recipe),
                torch.autocast("cuda", *self._torch_autocast, cache_enabled=False),
                _without_saved_tensors_hooks(),
            ):
                for each in self._own if self.enabled else ():
                    if isinstance(each, BasicOperation):
                        each.reset_recipe_state(recipe=self.recipe)
                    elif "num_gemms" in real[each].get("fp8_meta", ()):
                        each.init_fp8_metadata(num_gemms=real[each]["fp8_meta"]["num_gemms"])
                        each.fp8_meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
                self._take_scales(run.scales, FORWARD, BACKWARD)
                _put_random_states(run.random)
                yield
        finally:
            for each, own in self._own.items():
                left = vars(each)
                object.__setattr__(each, "__dict__", real[each])
                own.update((name, left[name]) for name in own if name in left and name not in (*REPLACED, FUSED))


def named_outputs(outputs: list[Any]) -> Values:
    return {f"output {i}": each.detach() for i, each in enumerate(outputs) if isinstance(each, torch.Tensor)}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _metas(module: Module) -> list[Values]:
    """The FP8 state of a module or operation."""
    if isinstance(module, BasicOperation):
        return [meta for meta in (module._fp8_metas or {}).values() if meta]
    return [module.fp8_meta] if isinstance(module, TransformerEngineBaseModule) else []


def _refusal(module: Module) -> str:
    """Why a module cannot be run beside its graphs, "" if it can."""
    if any(type(each).__name__ == "DTensor" for each in module.parameters()):
        return "its parameters are sharded (DTensor), and what eager gathers would change their gradients"
    if any(value is True and name.startswith("ub_") for each in module.modules() for name, value in vars(each).items()):
        return "it overlaps communication in buffers (userbuffers) that its graphs use as well"
    return ""


def _random_states() -> list[Any]:
    """The states of all generators that a module may draw from."""
    trackers = {name: s.get_state() if hasattr(s, "get_state") else s for name, s in get_all_rng_states().items()}
    return [torch.get_rng_state(), torch.cuda.get_rng_state(), trackers]


def _put_random_states(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    for name, state in get_all_rng_states().items():
        if hasattr(state, "set_state") and name in states[2]:
            state.set_state(states[2][name])


@contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Save tensors as they are: a checkpoint around counts what is saved."""
    stack: Any = torch._C._autograd
    hooks = []
    while (pair := stack._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        stack._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            stack._push_saved_tensors_default_hooks(*pair)


@contextmanager
def _as_captured(enabled: bool, recipe: Any) -> Iterator[None]:
    """The recipe of the capture, within an autocast that is not the outermost. All global state is put back."""
    random = _random_states()
    owner: Any = Manager
    if hasattr(Manager, "quantization_state"):
        kept = {"quantization_state": Manager.quantization_state}
        owner = Manager.quantization_state = copy.copy(Manager.quantization_state)
        depth = "autocast_depth"
    else:
        methods = (classmethod, staticmethod)
        kept = {k: v for k, v in vars(Manager).items() if not k.startswith("__") and not isinstance(v, methods)}
        depth = "AUTOCAST_DEPTH"
    saved = [(Manager, name, value) for name, value in kept.items()]
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        setattr(owner, name, {})
    owner.fp8_tensors_recompute_buffer = []
    owner.autocast_arguments = dict(owner.autocast_arguments)
    owner.skip_fp8_weight_update_tensor = None
    setattr(owner, depth, getattr(owner, depth) + 1)
    Manager.set_autocast_state((enabled, False, recipe, Manager.get_autocast_state()[3], False, False))
    megatron: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if hasattr(megatron, "_IS_GRAPH_CAPTURING"):  # what a layer runs in a capture may be a part of it
        saved.append((megatron, "_IS_GRAPH_CAPTURING", megatron._IS_GRAPH_CAPTURING))
        megatron._IS_GRAPH_CAPTURING = True
    try:
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)
        _put_random_states(random)
