"""A module run eagerly beside its graphs, and training none the wiser: the *twin*.

A twin is no copy of the module, which would leave closures and process groups behind. While it runs, the ``__dict__``
of the module and of all its submodules is exchanged for one with parameters that share the memory of the real ones,
and with buffers, containers, FP8 state, stores of delayed wgrads and hooks of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import queue
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_map_only
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.distributed import get_all_rng_states, in_fp8_activation_recompute_phase
from transformer_engine.pytorch.ops.op import BasicOperation
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

FIRST = "is_first_microbatch"
REPLACED = ("forward", "backward_dw", "reset")
"""What TE puts into the dictionary of a module that it graphs without an order."""
HOOKS = re.compile(r"_(forward|backward)_(pre_)?hooks")
FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
Scales = dict[tuple[Module, str], tuple[torch.Tensor, torch.Tensor]]
Values = dict[str, Any]
"""Tensors by names for people: ``output 0``, ``gradient of input 0``, ``.grad of weight``, ``main_grad of weight``."""


def originals(module: Module) -> dict[Module, Values]:
    """Of all submodules, what a capture replaces in their dictionaries, and hooks, as they are before."""
    kept: dict[Module, Values] = {}
    for each in module.modules():
        kept[each] = {name: vars(each)[name] for name in REPLACED if name in vars(each)}
        kept[each] |= {name: copy.copy(value) for name, value in vars(each).items() if HOOKS.match(name)}
    return kept


class Run:
    """One microbatch, from its forward to its wgrads: what eager starts from, all of it copies, and has computed.

    ``updates``: the end of its backward updates the FP8 scales. Of two ``passes`` the first is the reference.
    """

    def __init__(self, twin: Twin, args: Any, kwargs: Values, first: bool | None) -> None:
        self.args, self.kwargs = tree_map_only(torch.Tensor, _copied, (args, kwargs))
        self.first = first
        self.updates = twin.enabled and bool(Manager.get_autocast_state()[4])  # the first module of an autocast does
        buffers = {each: dict(each._buffers) for each in twin.module.modules()}
        self.buffers = tree_map_only(torch.Tensor, torch.clone, buffers)
        self.scales = twin.scales()
        self.random = [each.get_state() for each in _generators()]
        self.forward: Values = {}
        self.passes: list[Pass] = []
        if self.scales and in_fp8_activation_recompute_phase():
            twin.refusal = "a checkpoint of TE runs it again, with FP8 scales that are not the present ones"
        if any(each is not twin.parameters.get(name) for name, each in twin.module.named_parameters()):
            twin.refusal = "it has parameters that it did not have in its capture"


class Pass:
    """One eager run of a microbatch, with parameters and stores of delayed wgrads of its own."""

    def __init__(self, modules: dict[Module, Values], parameters: dict[str, Any]) -> None:
        self.values: Values = {}
        self.aliases: dict[torch.Tensor, Any] = {}
        for parameter in parameters.values():
            self.aliases[parameter] = alias = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
            for name, value in vars(parameter).items():
                if name not in ("main_grad", "get_main_grad"):
                    vars(alias).setdefault(name, value)
        self.stores = {each: copy.copy(store) for each in modules if (store := vars(each).get("wgrad_store"))}
        for store in self.stores.values():
            store.context = queue.Queue()

    def delayed(self) -> list[Any]:
        """The modules with a wgrad still to be computed; not all parts of a module need be in its graphs."""
        return [each for each, store in self.stores.items() if store.context.qsize()]


class Twin:
    """The eager side of a graphed module. ``enabled`` and ``recipe`` are those of the capture.

    `Check` counts in it: the step that it is in, and what a new step is told by.
    """

    def __init__(self, module: Module, kept: dict[Module, Values], enabled: bool, recipe: Any) -> None:
        self.module, self.enabled = module, enabled
        self.recipe = quantization.get_default_fp8_recipe() if enabled and recipe is None else recipe
        self.parameters: dict[str, Any] = dict(module.named_parameters())
        self.refusal = ""
        self.kinds = frozenset(type(each).__name__ for each in module.modules())
        self.step = 0
        self.seen: Any = None
        self.graded = False
        self._own = kept
        self._names = {each: name or type(module).__name__ for name, each in module.named_modules()}
        forward = kept[module].get("forward") or type(module).forward
        self._takes_first = FIRST in inspect.signature(forward).parameters
        self._torch_autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        for each, own in kept.items():
            if "fp8_meta" in vars(each):
                names = ("fp8_checkpoint", "fp8_group", "num_gemms")
                meta = {name: each.fp8_meta[name] for name in names if name in each.fp8_meta}
                quantizers = {key: type(value)() for key, value in each.quantizers.items()}
                own |= {"fp8_meta": meta, "quantizers": quantizers, "_fp8_workspaces": {}, "fp8_initialized": False}
                own |= {"fp8_meta_tensors_initialized": False, "wgrad_accumulation_and_reduce_hooks": []}
            own |= {name: None for name in ("_fp8_metas", "_quantizers") if name in vars(each)}
            if any(value is True and name.startswith("ub_") for name, value in vars(each).items()):
                self.refusal = "it overlaps communication in buffers (userbuffers) that its graphs use as well"
        if any(type(each).__name__ == "DTensor" for each in self.parameters.values()):
            self.refusal = "its parameters are sharded (DTensor), and what eager gathers would change their gradients"

    def forward(self, run: Run) -> Values:
        """Run the forward: outputs and amaxes."""
        with self._running(Pass(self._own, self.parameters), run):
            return named_outputs(self._forward(run)[0]) | self.amaxes(FORWARD)

    def backward(self, run: Run, grad_of: Callable[[int], torch.Tensor | None], slot: int) -> Pass:
        """Run the forward again, and its backward from ``grad_of`` each output, with the random states of now."""
        done, scales = Pass(self._own, self.parameters), self.scales()
        random = [each.get_state() for each in _generators()]
        main_grads = self._copy_main_grads(done, slot)
        with self._running(done, run), torch.enable_grad():
            outputs, leaves = self._forward(run)
            _set_states(random)
            self._take_scales(scales, BACKWARD)
            used = {i: x for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad}
            given = [torch.zeros_like(x) if (g := grad_of(i)) is None else g.clone() for i, x in used.items()]
            torch.autograd.backward([*used.values()], given)
            done.values = named_outputs(outputs) | self.amaxes(BACKWARD) | main_grads
        done.values |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad}
        for name, parameter in self.parameters.items():
            alias = done.aliases[parameter]
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
            added = done.aliases[parameter].grad
            if added is not None:
                done.values[f".grad of {name}"] = added if parameter.grad is None else parameter.grad + added

    def scales(self) -> Scales:
        """The scales and amax histories of delayed scaling that the modules have now, copied."""
        return {key: (each.scale.clone(), each.amax_history.clone()) for key, each in self._states().items()}

    def amaxes(self, key: str) -> Values:
        """By module, the largest values that FP8 has seen in this microbatch: the first row of the histories."""
        found = {self._names[each]: state for (each, which), state in self._states().items() if which == key}
        return {f"largest values in FP8 ({key} of {name})": x.amax_history[0].clone() for name, x in found.items()}

    def release(self) -> None:
        """Let go of all memory."""
        self._own, self.parameters = {}, {}
        _memory.cache_clear()

    def _copy_main_grads(self, done: Pass, slot: int) -> Values:
        """Let a pass add to copies of every ``main_grad``, in memory that all twins share."""
        copies: Values = {}
        for index, (name, each) in enumerate(self.parameters.items()):
            real = getattr(each, "main_grad", None)
            if real is not None:
                memory = _memory(index, slot, real.shape, real.dtype, real.device)
                done.aliases[each].main_grad = copies[f"main_grad of {name}"] = memory.copy_(real)
                done.aliases[each].grad_added_to_main_grad = False
        return copies

    def _forward(self, run: Run) -> tuple[list[Any], list[Any]]:
        args, kwargs = tree_map_only(torch.Tensor, _copied, (run.args, run.kwargs))
        tensors = [x for x in tree_flatten((args, list(kwargs.values())))[0] if isinstance(x, torch.Tensor)]
        if run.first is not None and self._takes_first:
            kwargs = {**kwargs, FIRST: run.first}
        return tree_flatten(self.module(*args, **kwargs))[0], tensors

    def _states(self) -> dict[tuple[Module, str], Any]:
        """The states of delayed scaling that the modules and operations have now."""
        found: dict[tuple[Module, str], Any] = {}
        for each in self._own:
            for meta in (vars(each).get("fp8_meta"), *(vars(each).get("_fp8_metas") or {}).values()):
                found |= {(each, key): state for key, state in (meta or {}).items() if hasattr(state, "amax_history")}
        return found

    def _take_scales(self, scales: Scales, *keys: str) -> None:
        for where, state in self._states().items():
            if where in scales and where[1] in keys:
                state.scale.copy_(scales[where][0])
                state.amax_history.copy_(scales[where][1])

    def _dictionary(self, each: Module, done: Pass, run: Run) -> Values:
        """What takes the place of the ``__dict__`` of a submodule."""
        merged = {name: value for name, value in vars(each).items() if name not in REPLACED}
        merged |= {name: copy.copy(value) for name, value in merged.items() if type(value) in (list, dict, set)}
        merged |= self._own[each]
        merged["_buffers"] = tree_map_only(torch.Tensor, torch.clone, run.buffers[each])
        merged["_parameters"] = {n: p if p is None else done.aliases[p] for n, p in each._parameters.items()}
        changed = {FIRST: run.first, "wgrad_store": done.stores.get(each)}
        changed["_module_groups"] = None  # where `te.ops.Sequential` keeps parameters
        changed["cuda_graphs"] = []  # Megatron-Core: a layer that has graphs replays them
        return merged | {name: value for name, value in changed.items() if name in merged}

    @contextmanager
    def _running(self, done: Pass, run: Run) -> Iterator[None]:
        """Be the module, as it was at the beginning of ``run``, and leave no trace of it."""
        dictionaries = {each: self._dictionary(each, done, run) for each in self._own}
        with ExitStack() as stack:
            stack.callback(_set_states, [each.get_state() for each in _generators()])
            self._enter_autocast(stack)
            hooks: Any = torch._C._autograd  # of a checkpoint around, which counts what is saved
            while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
                hooks._pop_saved_tensors_default_hooks()
                stack.callback(hooks._push_saved_tensors_default_hooks, *pair)
            for each, dictionary in dictionaries.items():
                stack.callback(object.__setattr__, each, "__dict__", vars(each))
                object.__setattr__(each, "__dict__", dictionary)
            for each in self._own if self.enabled else ():
                if isinstance(each, BasicOperation):
                    each.reset_recipe_state(recipe=self.recipe)
                elif "num_gemms" in vars(each).get("fp8_meta", ()):
                    each.init_fp8_metadata(num_gemms=each.fp8_meta["num_gemms"])
                    each.fp8_meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
            self._take_scales(run.scales, FORWARD, BACKWARD)
            _set_states(run.random)
            yield
        for each, own in self._own.items():
            own.update((name, dictionaries[each][name]) for name in own)

    def _enter_autocast(self, stack: ExitStack) -> None:
        """The recipe of the capture, within an autocast that is not the outermost."""
        group, methods = Manager.get_autocast_state()[3], (classmethod, staticmethod)
        for name, value in list(vars(Manager).items()):
            if not name.startswith("__") and not isinstance(value, methods):
                stack.callback(setattr, Manager, name, value)
        Manager.reset()
        state: Any = getattr(Manager, "quantization_state", Manager)  # since TE 2.15 an object
        state.skip_fp8_weight_update_tensor = None
        setattr(state, "AUTOCAST_DEPTH" if state is Manager else "autocast_depth", 1)
        Manager.set_autocast_state((self.enabled, False, self.recipe, group, False, False))
        stack.enter_context(torch.autocast("cuda", *self._torch_autocast, cache_enabled=False))
        megatron: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
        if hasattr(megatron, "_IS_GRAPH_CAPTURING"):  # what a layer runs in a capture may be a part of it
            stack.callback(setattr, megatron, "_IS_GRAPH_CAPTURING", megatron._IS_GRAPH_CAPTURING)
            megatron._IS_GRAPH_CAPTURING = True


def named_outputs(outputs: list[Any]) -> Values:
    return {f"output {i}": each.detach() for i, each in enumerate(outputs) if isinstance(each, torch.Tensor)}


@functools.cache
def _memory(index: int, slot: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _generators() -> list[torch.Generator]:
    """All that a module may draw random numbers from."""
    device = torch.cuda.default_generators[torch.cuda.current_device()]
    trackers = [each for each in get_all_rng_states().values() if isinstance(each, torch.Generator)]
    return [torch.default_generator, device, *trackers]


def _set_states(states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)
