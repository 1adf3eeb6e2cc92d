"""The eager reference of a graphed module: the same module, run eagerly in the state of a microbatch.

The module is not copied, because a copy would not include closures and process groups. Instead, the ``__dict__`` of the
module and of each submodule is replaced while the reference runs. The replacement contains copies of buffers and
containers, and the reference's own cached FP8 weights, delayed wgrads and hooks. FP8 scales and random states are set
to their values before the microbatch, and restored afterwards. `isolation` protects the gradients of parameters.
"""

import copy
import inspect
import queue
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformer_engine.pytorch import autocast
from transformer_engine.pytorch.distributed import get_all_rng_states, in_fp8_activation_recompute_phase
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

from .difference import relative_error
from .isolation import MARK, IsolatedParameters, NotIsolatedError, State, Writes

FIRST = "is_first_microbatch"
RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"  # a key in the FP8 state of modules that a checkpoint runs again
REGISTER = "add_fp8_tensors_to_global_buffer"  # called on TE's manager by modules with delayed scaling
NO_CACHES: dict[str, Any] = {
    "_fp8_workspaces": {},
    "_module_groups": None,
    "cuda_graphs": [],
    "wgrad_accumulation_and_reduce_hooks": [],
}
GRAPHED = ("forward", "backward_dw", "reset")  # TE sets these on a module that is graphed without a schedule
CLIENTS = ("megatron.core.transformer.cuda_graphs", "megatron.core.extensions.te_cuda_graphs")
"""The modules of older and of newer versions of Megatron-Core whose `FLAG` is true during a capture."""
FLAG = "_IS_GRAPH_CAPTURING"
Values = dict[str, Any]
"""Tensors by readable names: ``output 0``, ``gradient of input 0``, ``.grad of weight``, ``main_grad of weight``."""


class Microbatch:
    """Copies of a microbatch's inputs and of the state before it, and its eager results."""

    backward: tuple[list[torch.Tensor | None], State]  # the gradient of each output, and the state before the backward

    def __init__(self, reference: "EagerReference", args: Any, kwargs: Values, first: bool | None) -> None:
        reference.refusal = reference.why_not_checked()
        self.inputs, self.state = copied((args, kwargs)), reference.state()
        passed = first is not None or reference.graph_leaves_marks
        self.first = dict.fromkeys(reference.own, first) if passed else reference.first_microbatch_marks()
        self.buffers = {module: copied(module._buffers) for module in reference.own}
        self.updates_scales = bool(Manager.get_autocast_state()[4])  # The autocast's first FP8 module updates scales.
        self.delayed: list[Any] = []  # modules with delayed wgrads
        self.eager: list[Values] = []  # the results of two runs, until they are compared


class EagerReference:
    """The eager reference of a module, created before the capture."""

    def __init__(self, module: Module, enabled: bool, recipe: Any, retain_graph: bool) -> None:
        """Create the reference of ``module``. The other arguments are options of the capture."""
        self.module, self.name, self.refusal = module, type(module).__name__, ""
        self.changes: list[tuple[str, torch.Tensor]] = []  # names of the job's tensors, and their changes by eager runs
        self.callables: list[int] = []  # the numbers of the callables that have this reference
        self.graph_leaves_marks = False  # true after a replay that has not cleared `FIRST`, unlike an eager forward
        self.parameters: dict[str, Any] = dict(module.named_parameters())
        classes = {kind for submodule in module.modules() for kind in type(submodule).__mro__}
        self.kinds = frozenset({kind.__name__ for kind in classes} | ({"fp8"} if enabled else set()))
        self.is_of_megatron = any(kind.__module__.startswith("megatron.core.") for kind in classes)
        self.takes = {FIRST} & inspect.signature(module.forward).parameters.keys()
        self._retain_graph = retain_graph
        self._autocast = partial(autocast, enabled=enabled, recipe=recipe)
        of_torch = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        self._torch_autocast = torch.autocast("cuda", *of_torch, cache_enabled=False)
        self.own: dict[Module, Values] = {}  # by submodule, the reference's own entries of its `__dict__`
        for submodule in module.modules():
            own = {name: copy.copy(x) for name, x in vars(submodule).items() if name in GRAPHED or "_hooks" in name}
            self.own[submodule] = own | copy.deepcopy(NO_CACHES)

    def first_microbatch_marks(self) -> dict[Module, bool | None]:
        """Return the ``is_first_microbatch`` of each submodule (set by Megatron-Core), or None if it has none."""
        return {module: vars(module).get(FIRST) for module in self.own}

    def why_not_checked(self) -> str:
        """Return the reason why this module cannot be compared, or an empty string."""
        names = {name for module in self.own for name, value in vars(module).items() if value is True}
        parameters = self.parameters.values()
        if any(name.startswith("ub_") for name in names):
            return "it shares communication buffers (userbuffers) with its graph"
        if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
            return "its parameters are sharded (DTensor), and an eager run would change their gradients"
        if any(hasattr(x, "__fsdp_param__") or getattr(x, "is_distributed_weight", False) for x in parameters):
            return "its parameters accumulate gradients themselves (Megatron-FSDP, distributed weights)"
        if any(parameter is not self.parameters.get(name) for name, parameter in self.module.named_parameters()):
            return "parameters were added to it after its capture"
        if self.is_of_megatron and not _megatron_flags():
            return f"an eager run may differ from the capture: Megatron-Core has {FLAG} in none of {', '.join(CLIENTS)}"
        if self.scaling() and in_fp8_activation_recompute_phase():
            return "te.checkpoint runs it a second time, with the FP8 scales of an earlier step"
        return ""

    def compute(self, run: Microbatch, until: str) -> list[Values]:
        """Run a microbatch twice up to the end of its forward, backward or wgrad (``until``). Return both results."""
        tensors = self._tensors_of_job(with_gradients=until != "forward")
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        results = []
        try:
            for _ in range(2):
                with Writes(tensors.values()) as writes:  # reverts the writes to other tensors of the job
                    results.append(writes.unshared(self._compute(run, until)))
        finally:
            self.changes += [(name, relative_error(tensor, before[name])) for name, tensor in tensors.items()]
            for name, tensor in tensors.items():
                tensor.data.copy_(before[name])  # `.data` does not change the version, which a backward may check.
        return results

    def _compute(self, run: Microbatch, until: str) -> Values:
        with self._restored(run) as isolated, torch.set_grad_enabled(until != "forward" or torch.is_grad_enabled()):
            args, kwargs = copied(run.inputs)
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            outputs = tree_leaves(self.module(*args, **kwargs))
            run.updates_scales |= any(RECOMPUTED in vars(module).get("fp8_meta", ()) for module in self.own)
            if until == "forward":
                return named_outputs(outputs) | self.amaxes(until)
            self._backward(run, outputs)
            if until == "wgrad":
                self._wgrads(run, isolated)
                return self._gradients(until, isolated)
            values = {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
            amaxes = {} if run.updates_scales else self.amaxes(until)
            return values | self._gradients(until, isolated) | amaxes

    def _backward(self, run: Microbatch, outputs: list[Any]) -> None:
        grads, state = run.backward
        _restore(state)
        used = [(x, g) for x, g in zip(outputs, copied(grads), strict=False) if getattr(x, "requires_grad", False)]
        torch.autograd.backward([x for x, _ in used], [torch.zeros_like(x) if g is None else g for x, g in used])
        stores = {module: vars(module).get("wgrad_store") for module in self.own}
        run.delayed = [module for module, store in stores.items() if store and store.context.qsize()]

    def _wgrads(self, run: Microbatch, isolated: IsolatedParameters) -> None:
        """Compute the delayed wgrads, starting from the job's current ``.grad`` and ``main_grad``."""
        for parameter, main_grad in isolated.main_grads.items():
            grad = isolated.grads[parameter]
            parameter.grad = None if grad is None else grad.clone()
            if main_grad is not None:
                parameter.main_grad.copy_(main_grad)
        for module in run.delayed:
            module.backward_dw()

    def _gradients(self, until: str, isolated: IsolatedParameters) -> Values:
        """Return the gradients and marks of the parameters after an eager run."""
        values: Values = {}
        for name, parameter in self.parameters.items():
            values[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
            marked = bool(getattr(parameter, MARK, False))
            if until == "backward":
                values[f"mark {MARK} of {name}"] = isolated.marks[parameter] or marked
            if parameter.requires_grad and not marked:
                values[f".grad of {name}"] = parameter.grad
        return values

    def amaxes(self, when: str) -> Values:
        """Return the amaxes of this microbatch by module: the first row of each delayed-scaling history."""
        parts = self.scaling("scaling_fwd" if when == "forward" else "scaling_bwd")
        return {f"amaxes of {name}": part.amax_history[0].clone() for name, part in parts.items()}

    def scaling(self, of: str = "scaling") -> Values:
        """Return the delayed-scaling states whose keys begin with ``of``, by a readable name, or {} if none exist."""
        parts = {}
        for name, module in self.module.named_modules():
            for meta in (vars(module).get("fp8_meta"), *(vars(module).get("_fp8_metas") or {}).values()):
                for key, part in (meta or {}).items():
                    if key.startswith(of) and hasattr(part, "amax_history"):
                        parts[f"{key} of {name or self.name}"] = part
        return parts

    def _tensors_of_job(self, with_gradients: bool) -> Values:
        """Return the job's tensors that an eager run must not change, by a readable name."""
        tensors: Values = {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        for name, parameter in self.parameters.items():
            tensors[f"parameter {name}"] = None if hasattr(parameter, "_quantizer") else parameter
            if with_gradients:
                tensors[f".grad of {name}"] = parameter.grad
                tensors[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
        for name, part in self.scaling().items():
            tensors |= {f"scale of {name}": part.scale, f"amax_history of {name}": part.amax_history}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}

    def state(self) -> State:
        """Return the random states of torch, TE's trackers, Python and NumPy, and the state of delayed scaling."""
        trackers = [state for state in get_all_rng_states().values() if isinstance(state, torch.Generator)]
        generators = [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()], *trackers]
        states: State = [(generator.set_state, generator.get_state()) for generator in generators]
        states.append((random.setstate, random.getstate()))
        if numpy := sys.modules.get("numpy"):
            states.append((numpy.random.set_state, numpy.random.get_state()))
        tensors = [tensor for part in self.scaling().values() for tensor in (part.scale, part.amax_history)]
        return states + [(tensor.copy_, tensor.clone()) for tensor in tensors]

    @contextmanager
    def _restored(self, run: Microbatch) -> Iterator[IsolatedParameters]:
        """Set the module to its state before ``run``, yield its isolated parameters, then restore the job's state."""
        with ExitStack() as stack:
            stack.callback(_restore, self._all_that_changes())
            for module in self.own:
                object.__setattr__(module, "__dict__", self._dictionary(module, run))
            self._enter_autocasts(stack)
            for client in _megatron_flags():  # In a capture, layers of Megatron-Core run only a part of their code.
                stack.callback(setattr, client, FLAG, getattr(client, FLAG))
                setattr(client, FLAG, True)
            hooks: Any = torch._C._autograd  # The hooks of a surrounding checkpoint would count our saved tensors.
            while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
                hooks._pop_saved_tensors_default_hooks()
                stack.callback(hooks._push_saved_tensors_default_hooks, *pair)
            _restore(run.state)
            setattr(Manager, REGISTER, partial(self._register, getattr(Manager, REGISTER)))
            isolated = IsolatedParameters(self.parameters.values(), self._retain_graph)
            stack.callback(isolated.restore)
            yield isolated

    def _all_that_changes(self) -> State:
        """Return all state that a run may change: the modules' attributes, TE's global FP8 state, and `state`."""
        modules: State = [(partial(object.__setattr__, module, "__dict__"), vars(module)) for module in self.own]
        attributes = [(name, value) for name, value in vars(Manager).items() if not name.startswith("__")]
        manager: State = [(partial(setattr, Manager, name), value) for name, value in attributes]
        parts: State = [(part.__dict__.update, dict(part.__dict__)) for part in self.scaling().values()]
        return modules + manager + parts + self.state()

    def _register(self, register: Any, fp8_meta: Values) -> None:
        """Register a submodule's FP8 state with TE. Raise `NotIsolatedError` for others, as they are not restored."""
        own = {id(part) for part in self.scaling().values()}
        if own.isdisjoint(map(id, fp8_meta.values())):
            raise NotIsolatedError("it runs a module in delayed scaling that is not one of its submodules")
        register(fp8_meta)

    def _enter_autocasts(self, stack: ExitStack) -> None:
        """Enter the autocasts of the capture inside a disabled autocast.

        In an autocast, the first FP8 module updates scales. The outer autocast has already had its first module, so the
        modules of the reference update no scales.
        """
        group = Manager.get_fp8_group()
        Manager.reset()
        stack.enter_context(autocast(enabled=False))
        Manager.is_first_fp8_module()
        stack.enter_context(self._autocast(amax_reduction_group=group))
        stack.enter_context(self._torch_autocast)

    def _dictionary(self, module: Module, run: Microbatch) -> Values:
        """Return the replacement for a submodule's ``__dict__``, with copies of its containers."""
        result: Values = tree_map(lambda leaf: leaf, {k: v for k, v in vars(module).items() if k not in GRAPHED})
        result |= self.own[module] | {"_buffers": copied(run.buffers[module]), FIRST: run.first[module]}
        result.get("fp8_meta", {}).pop(RECOMPUTED, None)
        if store := result.get("wgrad_store"):
            result["wgrad_store"] = copy.copy(store)
            result["wgrad_store"].context = queue.Queue()
        return result


def named_outputs(outputs: list[Any]) -> Values:
    """Return the tensors among ``outputs``, detached and named by their positions, or {} if there is none."""
    return {f"output {i}": value.detach() for i, value in enumerate(outputs) if isinstance(value, torch.Tensor)}


def copied(tree: Any) -> Any:
    """Return a copy of a tree in which every tensor is a new leaf. Other objects are not copied."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def _megatron_flags() -> list[Any]:
    """Return the imported modules of Megatron-Core that define `FLAG`, or [] without Megatron-Core."""
    return [sys.modules[name] for name in CLIENTS if hasattr(sys.modules.get(name), FLAG)]


def _restore(state: State) -> None:
    for restore, value in state:
        restore(value)
