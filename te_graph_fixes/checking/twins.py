"""The callables of `make_graphed_callables`, each compared with its module, which is run eagerly at every call.

The eager side is no copy of the module, which would leave closures and process groups behind. While it runs, the
``__dict__`` of the module and of all its submodules is exchanged for one with parameters that share the memory of the
real ones, and with buffers, containers, cached FP8 weights, stores of delayed wgrads and hooks of its own. FP8 scales
and random states are set to those of the microbatch, and put back.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import queue
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper, wraps
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformer_engine.pytorch import autocast, graph
from transformer_engine.pytorch.distributed import get_all_rng_states, in_fp8_activation_recompute_phase
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

from . import Options
from .findings import Check, Subject, say
from .isolation import MARK, Isolation, JobState, NotIsolatedError

FIRST = "is_first_microbatch"
DELAYED_HOOKS = "wgrad_accumulation_and_reduce_hooks"
RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"  # in the FP8 state of modules that a checkpoint runs again
CLIENTS = ("megatron.core.transformer.cuda_graphs", "megatron.core.extensions.te_cuda_graphs")
"""Where Megatron-Core says in a `FLAG` whether its layers are being captured: the old module and the new one."""
FLAG = "_IS_GRAPH_CAPTURING"
REPLACED = ("forward", "backward_dw", "reset")  # in the dictionary of a module that TE graphs without an order
Values = dict[str, Any]
"""Tensors by names for people: ``output 0``, ``gradient of input 0``, ``.grad of weight``, ``main_grad of weight``."""
State = list[tuple[Callable[[Any], Any], Any]]
"""Values, such as those of FP8 scales and of random generators, each with what puts it back."""
current: list[Check] = []  # the check of this process, the last one


def start(options: Options) -> None:
    """Check the graphs that are captured after this call."""
    if current:
        current.pop().finish()
    current.append(Check(options))
    for module in list(sys.modules.values()):  # others may have imported it already
        for name in [name for name, value in getattr(module, "__dict__", {}).items() if value is make.__wrapped__]:
            setattr(module, name, make)


@wraps(graph.make_graphed_callables)
def make(*args: Any, **kwargs: Any) -> Any:
    check, capture = current[0], partial(make.__wrapped__, *args, **kwargs)
    if check.finished:
        if check.new("late"):
            say("graphs that are captured from here on are not compared: the checked steps are over")
        return capture()
    try:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        twins = _twins(given)
    except Exception as error:
        say(f"the graphs of this capture are not compared: its arguments gave {type(error).__name__}: {error}")
        return capture()
    made = capture()
    check.twins += dict.fromkeys(twins)
    graphs = made if isinstance(made, tuple) else (made,)
    samples: Any = given.get("sample_kwargs") or ({},) * len(graphs)
    samples = (samples,) if isinstance(samples, dict) else samples
    calls = tuple(Checked(check, *parts) for parts in zip(twins, graphs, samples, strict=True))
    if graphs[0] is not twins[0].module:
        return calls if isinstance(made, tuple) else calls[0]
    for module, call in zip(graphs, calls, strict=True):
        module.forward, module.backward_dw = call, call.backward_dw
    return made


def _twins(given: Values) -> list[Twin]:
    """A twin for each callable that is asked for: chunks, in them microbatches, in them layers."""
    modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
    fp8, recipe = (given.get(name) or given.get(f"fp8_{name}") for name in ("enabled", "recipe"))
    retain = bool(given.get("retain_graph_in_backward"))
    enabled = [bool(fp8[i] if isinstance(fp8, tuple) else fp8) for i in range(len(modules))]
    twins = [Twin(module, used, recipe, retain) for module, used in zip(modules, enabled, strict=True)]
    if given.get("_order") is None:
        return twins
    chunks, microbatches, rest = int(max(given["_order"])), len(given["sample_args"]) // len(twins), iter(twins)
    layers = given.get("_num_layers_per_chunk") or len(twins) // chunks
    sizes = [layers] * chunks if isinstance(layers, int) else layers
    return [twin for size in sizes for twin in [*itertools.islice(rest, size)] * microbatches]


class Checked:
    """One graphed callable beside its twin."""

    def __init__(self, check: Check, twin: Twin, graphed: Any, sample: Values) -> None:
        self._replay = graphed.forward if graphed is twin.module else graphed
        update_wrapper(self, self._replay).__dict__.pop("backward_dw", None)
        self._check, self._twin, self._keys, self._index = check, twin, [*sample, *twin.takes], next(check.numbers)
        self._replay_wgrads, self._training = graphed.backward_dw, twin.module.training
        self._delayed: Microbatch | None = None

    def __deepcopy__(self, memo: object) -> Checked:
        return self  # as a function is: programs copy modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._delayed, first = None, kwargs.get(FIRST)
        over = self._check.finished or self._twin.module.training != self._training
        if over or torch.cuda.is_current_stream_capturing() or not self._check.enter(self._twin, first):
            return self._replay(*args, **kwargs)
        given = {key: kwargs[key] for key in self._keys if key in kwargs}  # in the order of the graph
        run = self._attempt(Microbatch, self._twin, args, given, first)
        self._attempt(self._before, run, "forward")
        result = self._replay(*args, **kwargs)
        self._twin.keeps_marks |= any(self._twin.marks().values())
        self._attempt(self._after_forward, run, tree_leaves(result), kwargs.get("cuda_graph_stream"))
        return result

    def backward_dw(self) -> None:
        run, self._delayed = self._delayed, None
        if run is None or self._check.finished:
            self._replay_wgrads()
            return
        self._attempt(self._before, run, "wgrad")
        compare = partial(self._attempt, self._after, run, "wgrad", {})
        followed = [hooks for module in run.delayed if (hooks := module.wgrad_accumulation_and_reduce_hooks)]
        with ExitStack() as stack:
            for hooks in followed:
                hooks.insert(0, compare)  # before those that hand the gradients on
                stack.callback(hooks.remove, compare)
            self._replay_wgrads()
        if run.eager and followed:
            self._check.compare(self._subject("wgrad", "call of the hooks that follow"), None, True, True)
        compare()

    def _after_forward(self, run: Microbatch, tensors: list[Any], stream: Any) -> None:
        self._after(run, "forward", _outputs(tensors), stream)
        node = next((tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn), None)
        if node is None:
            return
        if node.name() == "CloneBackward0":  # replay-contract copies outputs where a checkpoint may run a graph again
            node = node.next_functions[0][0]
        parameters = {parameter: f".grad of {name}" for name, parameter in self._twin.parameters.items()}
        leaves = [getattr(edge, "variable", None) for edge, _ in node.next_functions]
        names = [parameters.get(leaf, f"gradient of input {i}") for i, leaf in enumerate(leaves)]

        def after(grads: Any) -> None:
            self._after(run, "backward", dict(zip(names, grads, strict=True)), stream)
            self._delayed = run if run.delayed else None

        node.register_prehook(lambda grads: self._attempt(self._before, run, "backward", grads))
        node.register_hook(lambda grads, _: self._attempt(after, grads))

    def _before(self, run: Microbatch, when: str, grads: Any = None) -> None:
        """A replay is about to begin, of a backward with the ``grads`` of outputs: see what eager computes."""
        if grads:
            run.backward = _copied(grads), self._twin.state()
        try:
            run.eager = [self._twin.compute(run, when) for _ in range(2)]
        finally:
            self._check.note_changes(self._index, self._twin)
        self._check.lifetimes.before_replay()

    def _after(self, run: Microbatch, when: str, returned: Values, stream: Any = None) -> None:
        """A replay is over and has ``returned`` tensors in graph memory: compare them, and what else it has written."""
        if stream is not None:  # compare what the graph has computed, not what it is about to
            torch.cuda.current_stream().wait_stream(stream)
        self._check.lifetimes.after_replay(f"the {when} of callable {self._index}")
        kept = {tensor.data_ptr(): self._subject(when, name) for name, tensor in returned.items() if tensor is not None}
        self._check.lifetimes.returned |= kept
        if not run.eager:  # it has been compared
            return
        values = self._twin.amaxes(when)
        for name, parameter in self._twin.parameters.items():
            values[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
            values[f".grad of {name}"] = parameter.grad if when == "wgrad" else None
            values[f"mark {MARK} of {name}"] = bool(getattr(parameter, MARK, False))
        values |= returned
        (eager, again), run.eager = run.eager, []  # somebody may keep the output, and with it this
        for name, wanted in eager.items():
            if name in values:
                self._check.compare(self._subject(when, name), values[name], wanted, again[name])

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something of the check's own, which may not end the job."""
        if self._check.finished:
            return None
        if not self._twin.refusal:
            try:
                return work(*args)
            except NotIsolatedError as error:
                self._twin.refusal = str(error)
            except Exception as error:
                self._twin.refusal = f"it raised in its eager run: {type(error).__name__}: {error}"
        return self._check.leave_out(self._index, self._twin.name, self._twin.refusal)

    def _subject(self, when: str, tensor: str) -> Subject:
        return Subject(self._check.step, self._index, f"({self._twin.name}), {when}: {tensor}", self._twin)


class Microbatch:
    """The inputs and the state from which eager starts, all of it copies, and its results."""

    backward: tuple[list[torch.Tensor | None], State]  # the gradient of each output, and the state that it begins in

    def __init__(self, twin: Twin, args: Any, kwargs: Values, first: bool | None) -> None:
        twin.refusal = twin.why_left_out()
        self.inputs, self.state = _copied((args, kwargs)), twin.state()
        self.first = dict.fromkeys(twin.own, first) if first is not None or twin.keeps_marks else twin.marks()
        self.buffers = {module: _copied(module._buffers) for module in twin.own}
        self.updates = bool(Manager.get_autocast_state()[4])  # TE moves FP8 scales on in its backward
        self.delayed: list[Any] = []  # modules that leave wgrads for later
        self.eager: list[Values] = []  # what two runs have computed, until it is compared


class Twin:
    """The eager side of a module, made before it is graphed; ``enabled`` and ``recipe`` are those of its graphs."""

    def __init__(self, module: Module, enabled: bool, recipe: Any, retain_graph: bool) -> None:
        self.module, self.name, self.refusal = module, type(module).__name__, ""
        self.changes: list[tuple[str, Any]] = []  # of the job, by the eager runs since the last `Check.note_changes`
        self._retain_graph = retain_graph
        self.keeps_marks = False  # a replay has left a mark of a first microbatch, which an eager forward clears
        self.parameters: dict[str, Any] = dict(module.named_parameters())
        classes = {kind for submodule in module.modules() for kind in type(submodule).__mro__}
        self.kinds = frozenset({kind.__name__ for kind in classes} | ({"fp8"} if enabled else set()))
        self.is_of_megatron = any(kind.__module__.startswith("megatron.core.") for kind in classes)
        self.takes = {FIRST} & inspect.signature(module.forward).parameters.keys()
        self._autocast = partial(autocast, enabled=enabled, recipe=recipe)
        of_torch = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        self._torch_autocast = torch.autocast("cuda", *of_torch, cache_enabled=False)
        self.own: dict[Module, Values] = {}  # what the eager side has for itself in the dictionary of a submodule
        for submodule in module.modules():
            own = {name: copy.copy(x) for name, x in vars(submodule).items() if name in REPLACED or "_hooks" in name}
            empty: Values = {"_fp8_workspaces": {}, "_module_groups": None, "cuda_graphs": [], DELAYED_HOOKS: []}
            self.own[submodule] = own | empty

    def marks(self) -> dict[Module, bool | None]:
        """Whether the next microbatch is a first one, where submodules say so themselves, as Megatron-Core's do."""
        return {module: vars(module).get(FIRST) for module in self.own}

    def why_left_out(self) -> str:
        """Why it cannot be compared; empty if it can."""
        names = {name for module in self.own for name, value in vars(module).items() if value is True}
        if any(name.startswith("ub_") for name in names):
            return "it shares communication buffers (userbuffers) with its graph"
        if any(type(parameter).__name__ == "DTensor" for parameter in self.parameters.values()):
            return "its parameters are sharded (DTensor), and an eager run would change their gradients"
        if any(hasattr(parameter, "__fsdp_param__") for parameter in self.parameters.values()):
            return "Megatron-FSDP holds its gradients, and an eager run would change them"
        if any(parameter is not self.parameters.get(name) for name, parameter in self.module.named_parameters()):
            return "it has got new parameters since its capture"
        if self.is_of_megatron and not _megatron_flags():
            return f"an eager run may differ from the capture: Megatron-Core has {FLAG} in none of {', '.join(CLIENTS)}"
        if self.scaling() and in_fp8_activation_recompute_phase():
            return "te.checkpoint runs it a second time, with the FP8 scales of an earlier step"
        return ""

    def compute(self, run: Microbatch, until: str) -> Values:
        """Run a microbatch until the end of its ``forward``, ``backward`` or ``wgrad``: what is new then."""
        job = JobState(self._tensors_of_job(with_gradients=until != "forward"), self.random_states)
        isolation = Isolation(self.own, self.parameters.values(), self._retain_graph)
        try:
            with self._as_it_was(run), isolation:
                return self._compute(run, until, isolation)
        finally:
            self.changes += job.restore()

    def _compute(self, run: Microbatch, until: str, isolation: Isolation) -> Values:
        with torch.set_grad_enabled(until != "forward" or torch.is_grad_enabled()):
            args, kwargs = _copied(run.inputs)
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            outputs = tree_leaves(self.module(*args, **kwargs))
            run.updates |= any(RECOMPUTED in vars(module).get("fp8_meta", ()) for module in self.own)
            if until == "forward":
                return _outputs(outputs) | self.amaxes(until)
            self._backward(run, outputs)
            if until == "wgrad":
                self._wgrads(run, isolation)
                return self._gradients(run, until, isolation)
            values = {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
            return values | self._gradients(run, until, isolation) | ({} if run.updates else self.amaxes(until))

    def _backward(self, run: Microbatch, outputs: list[Any]) -> None:
        grads, state = run.backward
        _put(state)
        used = [(x, g) for x, g in zip(outputs, _copied(grads), strict=False) if getattr(x, "requires_grad", False)]
        torch.autograd.backward([x for x, _ in used], [torch.zeros_like(x) if g is None else g for x, g in used])
        stores = {module: vars(module).get("wgrad_store") for module in self.own}
        run.delayed = [module for module, store in stores.items() if store and store.context.qsize()]

    def _wgrads(self, run: Microbatch, isolation: Isolation) -> None:
        """Compute the delayed wgrads, which add to the ``main_grad`` that the parameters have now."""
        for parameter in self.parameters.values():
            parameter.grad = None
            if (main_grad := isolation.main_grads[parameter]) is not None:
                parameter.main_grad.copy_(main_grad)
        for module in run.delayed:
            module.backward_dw()

    def _gradients(self, run: Microbatch, until: str, isolation: Isolation) -> Values:
        """Those of the parameters that the eager run has computed."""
        values: Values = {}
        for name, parameter in self.parameters.items():
            values[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
            marked = getattr(parameter, MARK, False)
            if until == "backward":
                values[f"mark {MARK} of {name}"] = isolation.marks[parameter] or bool(marked)
            later = run.delayed and parameter.grad is None
            if parameter.requires_grad and not marked and not later:
                before = isolation.grads[parameter] if until == "wgrad" else None
                values[f".grad of {name}"] = parameter.grad if before is None else before + parameter.grad
        return values

    def amaxes(self, when: str) -> Values:
        """By module, the largest values that FP8 has seen in this microbatch: the first row of the histories."""
        parts = self.scaling("scaling_fwd" if when == "forward" else "scaling_bwd")
        return {f"largest values in FP8 ({name})": part.amax_history[0].clone() for name, part in parts.items()}

    def scaling(self, of: str = "scaling") -> Values:
        """The parts of delayed scaling, by names for people."""
        parts = {}
        for name, module in self.module.named_modules():
            for meta in (vars(module).get("fp8_meta"), *(vars(module).get("_fp8_metas") or {}).values()):
                for key, part in (meta or {}).items():
                    if key.startswith(of) and hasattr(part, "amax_history"):
                        parts[f"{key} of {name or self.name}"] = part
        return parts

    def _tensors_of_job(self, with_gradients: bool) -> Values:
        """List, by names for people, the tensors that an eager run may not change."""
        tensors: Values = {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        for name, parameter in self.parameters.items():
            tensors[f"parameter {name}"] = None if hasattr(parameter, "_quantizer") else parameter
            if with_gradients:
                tensors[f".grad of {name}"] = parameter.grad
                tensors[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
        for name, part in self.scaling().items():
            tensors |= {f"scale of {name}": part.scale, f"amax_history of {name}": part.amax_history}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def state(self) -> State:
        """All random states, and the FP8 state of delayed scaling, as they are now."""
        tensors = [tensor for part in self.scaling().values() for tensor in (part.scale, part.amax_history)]
        return self.random_states() + [(x.copy_, x.clone()) for x in tensors]

    def random_states(self) -> State:
        trackers = [state for state in get_all_rng_states().values() if isinstance(state, torch.Generator)]
        generators = [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()], *trackers]
        states: State = [(x.set_state, x.get_state()) for x in generators]
        states.append((random.setstate, random.getstate()))
        if numpy := sys.modules.get("numpy"):
            states.append((numpy.random.set_state, numpy.random.get_state()))
        return states

    @contextmanager
    def _as_it_was(self, run: Microbatch) -> Iterator[None]:
        """Have the module as it was at the beginning of ``run``, then put all back."""
        with ExitStack() as stack:
            stack.callback(_put, self._all_that_changes())
            for module in self.own:
                object.__setattr__(module, "__dict__", self._dictionary(module, run))
            self._enter_autocasts(stack)
            for client in _megatron_flags():  # whose layers run less in a capture than in eager training
                stack.callback(setattr, client, FLAG, getattr(client, FLAG))
                setattr(client, FLAG, True)
            hooks: Any = torch._C._autograd  # those of a checkpoint around count what is saved
            while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
                hooks._pop_saved_tensors_default_hooks()
                stack.callback(hooks._push_saved_tensors_default_hooks, *pair)
            _put(run.state)
            yield

    def _all_that_changes(self) -> State:
        """Attributes, TE's own state, and the `state`: another recipe has amax histories of another length."""
        modules: State = [(partial(object.__setattr__, module, "__dict__"), vars(module)) for module in self.own]
        attributes = [(name, value) for name, value in vars(Manager).items() if not name.startswith("__")]
        manager: State = [(partial(setattr, Manager, name), value) for name, value in attributes]
        parts: State = [(part.__dict__.update, dict(part.__dict__)) for part in self.scaling().values()]
        return modules + manager + parts + self.state()

    def _enter_autocasts(self, stack: ExitStack) -> None:
        """Those of the graphs, in an outer one: its first module would update scales, and is none of these."""
        group = Manager.get_fp8_group()
        Manager.reset()
        stack.enter_context(autocast(enabled=False))
        Manager.is_first_fp8_module()
        stack.enter_context(self._autocast(amax_reduction_group=group))
        stack.enter_context(self._torch_autocast)

    def _dictionary(self, module: Module, run: Microbatch) -> Values:
        """The replacement for the ``__dict__`` of a submodule, with containers of its own."""
        present = {name: value for name, value in vars(module).items() if name not in REPLACED}
        result: Values = tree_map(lambda leaf: leaf, present)
        result |= self.own[module] | {"_buffers": _copied(run.buffers[module]), FIRST: run.first[module]}
        result.get("fp8_meta", {}).pop(RECOMPUTED, None)
        if store := present.get("wgrad_store"):
            result["wgrad_store"] = copy.copy(store)
            result["wgrad_store"].context = queue.Queue()
        return result


def _megatron_flags() -> list[Any]:
    """The modules of Megatron-Core that have its `FLAG`."""
    return [sys.modules[name] for name in CLIENTS if hasattr(sys.modules.get(name), FLAG)]


def _put(state: State) -> None:
    for put, value in state:
        put(value)


def _outputs(outputs: list[Any]) -> Values:
    return {f"output {i}": value.detach() for i, value in enumerate(outputs) if isinstance(value, torch.Tensor)}


def _copied(tree: Any) -> Any:
    """The same with copies of all tensors, which are leaves."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)
