"""A module run eagerly beside its graphs, and training none the wiser: its *twin*.

A twin is no copy of the module, which would leave closures and process groups behind. While it runs, the ``__dict__``
of the module and of all its submodules is exchanged for one with parameters that share the memory of the real ones,
and with buffers, containers, FP8 state, stores of delayed wgrads and hooks of its own.
"""

from __future__ import annotations

import copy
import inspect
import queue
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only
from transformer_engine.pytorch import autocast
from transformer_engine.pytorch.distributed import get_all_rng_states, in_fp8_activation_recompute_phase
from transformer_engine.pytorch.ops.op import BasicOperation
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

FIRST = "is_first_microbatch"
RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"  # in the FP8 state of modules that a checkpoint runs again
REPLACED = ("forward", "backward_dw", "reset")  # in the dictionary of a module that TE graphs without an order
Values = dict[str, Any]
"""Tensors by names for people: ``output 0``, ``gradient of input 0``, ``.grad of weight``, ``main_grad of weight``."""
State = tuple[list[tuple[torch.Generator, torch.Tensor]], dict[str, tuple[torch.Tensor, torch.Tensor]]]
"""Of each random generator its state, and of each part of delayed scaling the scales and the amax history."""


class Run:
    """One microbatch: what eager starts from, all of it copies."""

    backward: tuple[dict[int, torch.Tensor | None], State]
    """The gradient of each output, and the state in which the backward begins."""

    def __init__(self, twin: Twin, args: Any, kwargs: Values, first: bool | None) -> None:
        self.inputs, self.first, self.state = _copied((args, kwargs)), first, twin.state()
        self.buffers = {each: _copied(each._buffers) for each in twin.own}
        self.updates = twin.enabled and bool(Manager.get_autocast_state()[4])  # FP8 scales, in its backward
        self.delayed: list[Any] = []  # modules that leave wgrads for later
        self.eager: list[Values] = []  # what two runs have computed, until it is compared
        if self.state[1] and in_fp8_activation_recompute_phase():
            twin.refusal = "a checkpoint of TE runs it again, with FP8 scales that are not the present ones"
        if any(each is not twin.parameters.get(name) for name, each in twin.module.named_parameters()):
            twin.refusal = "it has parameters that it did not have in its capture"


class Twin:
    """The eager side of a module, made before it is graphed; ``enabled`` and ``recipe`` are those of its graphs."""

    def __init__(self, module: Module, enabled: bool, recipe: Any) -> None:
        self.module, self.name, self.enabled, self._recipe = module, type(module).__name__, enabled, recipe
        self.parameters: dict[str, Any] = dict(module.named_parameters())
        kinds = {kind.__name__ for each in module.modules() for kind in type(each).__mro__}
        self.kinds = frozenset(kinds | {"fp8"} if enabled else kinds)
        self.step, self.refusal = 0, ""
        self.own: dict[Module, Values] = {}
        self._takes_first = FIRST in inspect.signature(module.forward).parameters
        self._torch_autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        for each in module.modules():
            present = vars(each)
            own = {name: copy.copy(value) for name, value in present.items() if name in REPLACED or "_hooks" in name}
            if meta := present.get("fp8_meta"):
                own["fp8_meta"] = {name: meta[name] for name in ("fp8_checkpoint", "fp8_group")}
                own["quantizers"] = {key: type(value)() for key, value in present["quantizers"].items()}
                own |= {"_fp8_workspaces": {}, "fp8_initialized": False, "fp8_meta_tensors_initialized": False}
            self.own[each] = own
            if any(value is True and name.startswith("ub_") for name, value in present.items()):
                self.refusal = "it overlaps communication in buffers (userbuffers) that its graphs use as well"
        if any(type(each).__name__ == "DTensor" for each in self.parameters.values()):
            self.refusal = "its parameters are sharded (DTensor), and what eager gathers would change their gradients"

    def compute(self, run: Run, until: str) -> Values:
        """Run a microbatch until the end of its ``forward``, ``backward`` or ``wgrad``: what is new then."""
        with self._running(run) as aliases, torch.set_grad_enabled(until != "forward" or torch.is_grad_enabled()):
            args, kwargs = _copied(run.inputs)
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            kwargs |= {FIRST: run.first} if run.first is not None and self._takes_first else {}
            outputs = tree_leaves(self.module(*args, **kwargs))
            run.updates |= any(RECOMPUTED in vars(each).get("fp8_meta", ()) for each in self.own)
            if until == "forward":
                return named_outputs(outputs) | self.amaxes(until)
            given, state = run.backward
            self._take(state)
            used = {i: x for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad}
            grads = [torch.zeros_like(x) if (g := given[i]) is None else g.clone() for i, x in used.items()]
            torch.autograd.backward([*used.values()], grads)
            run.delayed = [each for each in self.own if (s := vars(each).get("wgrad_store")) and s.context.qsize()]
            if until == "backward":
                values = {} if run.updates else self.amaxes(until)
                values |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
            else:
                values = {}
                for parameter, alias in aliases.items():
                    alias.grad = None
                    if hasattr(alias, "main_grad"):
                        alias.main_grad.copy_(parameter.main_grad)
                for each in run.delayed:
                    each.backward_dw()
        for name, parameter in self.parameters.items():
            alias = aliases[parameter]
            if hasattr(alias, "main_grad"):
                values[f"main_grad of {name}"] = alias.main_grad
            fused = getattr(alias, "grad_added_to_main_grad", False)  # `.grad` is a dummy
            if alias.requires_grad and not fused and not (run.delayed and alias.grad is None):
                before = parameter.grad if until == "wgrad" else None
                values[f".grad of {name}"] = alias.grad if before is None else before + alias.grad
        return values

    def state(self) -> State:
        """All random states, and the FP8 state of delayed scaling, as they are now."""
        trackers = [each for each in get_all_rng_states().values() if isinstance(each, torch.Generator)]
        generators = [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()], *trackers]
        return [(each, each.get_state()) for each in generators], _copied(self._scaling())

    def amaxes(self, when: str) -> Values:
        """By module, the largest values that FP8 has seen in this microbatch: the first row of the histories."""
        part = "scaling_fwd" if when == "forward" else "scaling_bwd"
        found = {name: history for name, (_, history) in self._scaling().items() if name.startswith(part)}
        return {f"largest values in FP8 ({name})": history[0].clone() for name, history in found.items()}

    def _scaling(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for name, each in self.module.named_modules():
            for meta in (vars(each).get("fp8_meta"), *(vars(each).get("_fp8_metas") or {}).values()):
                for key, state in (meta or {}).items():
                    if hasattr(state, "amax_history"):
                        found[f"{key} of {name or self.name}"] = state.scale, state.amax_history
        return found

    def _take(self, state: State) -> None:
        for generator, random in state[0]:
            generator.set_state(random)
        for name, tensors in self._scaling().items():
            for tensor, value in zip(tensors, state[1].get(name, tensors), strict=True):
                tensor.copy_(value)

    def _dictionary(self, each: Module, run: Run, aliases: dict[torch.Tensor, Any]) -> Values:
        """What takes the place of the ``__dict__`` of a submodule."""
        merged = {name: value for name, value in vars(each).items() if name not in REPLACED}
        merged |= {name: copy.copy(value) for name, value in merged.items() if type(value) in (list, dict, set)}
        merged |= self.own[each]
        changed: Values = dict.fromkeys(("_module_groups", "_fp8_metas", "_quantizers"))  # of `te.ops`
        changed |= {"cuda_graphs": [], "wgrad_accumulation_and_reduce_hooks": [], FIRST: run.first}
        changed["_parameters"] = {name: p if p is None else aliases[p] for name, p in each._parameters.items()}
        changed["_buffers"] = _copied(run.buffers[each])
        merged |= {name: value for name, value in changed.items() if name in merged}
        if store := copy.copy(merged.get("wgrad_store")):
            merged["wgrad_store"], store.context = store, queue.Queue()
        return merged

    @contextmanager
    def _running(self, run: Run) -> Iterator[dict[torch.Tensor, Any]]:
        """Be the module, as it was at the beginning of ``run``, and leave no trace of it. Gives its parameters."""
        aliases = {each: _alias(each) for each in self.parameters.values()}
        with ExitStack() as stack:
            stack.callback(self._take, (self.state()[0], {}))
            group, methods = Manager.get_fp8_group(), (classmethod, staticmethod)
            for name, value in list(vars(Manager).items()):
                if not name.startswith("__") and not isinstance(value, methods):
                    stack.callback(setattr, Manager, name, value)
            Manager.reset()
            stack.enter_context(autocast(enabled=False))
            Manager.is_first_fp8_module()  # the first one updates scales: none of the module's is
            stack.enter_context(autocast(enabled=self.enabled, recipe=self._recipe, amax_reduction_group=group))
            stack.enter_context(torch.autocast("cuda", *self._torch_autocast, cache_enabled=False))
            megatron: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
            if hasattr(megatron, "_IS_GRAPH_CAPTURING"):  # what a layer runs in a capture may be a part of it
                stack.callback(setattr, megatron, "_IS_GRAPH_CAPTURING", megatron._IS_GRAPH_CAPTURING)
                megatron._IS_GRAPH_CAPTURING = True
            hooks: Any = torch._C._autograd  # of a checkpoint around, which counts what is saved
            while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
                hooks._pop_saved_tensors_default_hooks()
                stack.callback(hooks._push_saved_tensors_default_hooks, *pair)
            for each in self.own:
                gemms = vars(each).get("fp8_meta", {}).get("num_gemms")
                stack.callback(object.__setattr__, each, "__dict__", vars(each))
                object.__setattr__(each, "__dict__", self._dictionary(each, run, aliases))
                if self.enabled and isinstance(each, BasicOperation):
                    each.reset_recipe_state(recipe=Manager.get_fp8_recipe())
                elif self.enabled and gemms:
                    each.init_fp8_metadata(num_gemms=gemms)
                    each.fp8_meta.pop(RECOMPUTED, None)
            self._take(run.state)
            yield aliases
            for each, own in self.own.items():
                own.update((name, vars(each)[name]) for name in own)


def named_outputs(outputs: list[Any]) -> Values:
    return {f"output {i}": each.detach() for i, each in enumerate(outputs) if isinstance(each, torch.Tensor)}


def _alias(parameter: Any) -> Any:
    """A parameter that shares the memory of another, and has a copy of its ``main_grad``."""
    alias: Any = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    others = {name: value for name, value in vars(parameter).items() if not name.endswith("main_grad")}
    vars(alias).update(others | vars(alias))
    if getattr(parameter, "main_grad", None) is not None:
        alias.main_grad, alias.grad_added_to_main_grad = parameter.main_grad.clone(), False
    return alias


def _copied(tree: Any) -> Any:
    """The same with copies of all tensors, which are leaves."""
    return tree_map_only(torch.Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad), tree)
