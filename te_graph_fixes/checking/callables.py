"""What `make_graphed_callables` gives, each callable compared with its `Twin` at every call in the checked steps."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten
from transformer_engine.pytorch import graph

from . import Options
from .findings import Findings, Place, say
from .lifetimes import Lifetimes
from .twin import BACKWARD, FIRST, FORWARD, Run, Twin, Values, named_outputs, originals

SYMPTOMS = {
    ("forward", "output"): "output",
    ("forward", "largest"): "amax",
    ("backward", "gradient"): "dgrad",
    ("backward", ".grad"): "wgrad",
    ("backward", "main_grad"): "main-grad",
    ("backward", "largest"): "amax",
    ("wgrad", ".grad"): "delayed-wgrad",
    ("wgrad", "main_grad"): "delayed-main-grad",
}
"""By phase and first word of a tensor's name what a difference looks like. What is not here is not compared."""
_check: Check | None = None


def start(options: Options) -> None:
    """Check what is graphed from now on."""
    global _check
    if _check is None:
        original = graph.make_graphed_callables

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return _make(original, *args, **kwargs)

        for module in list(sys.modules.values()):  # others may have imported it already
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is original:
                    setattr(module, name, wrapped)
    else:
        _check.finish()
    _check = Check(options)


def finish() -> Findings:
    """End the check, report it, and give what it has found."""
    assert _check is not None
    _check.finish()
    return _check.findings


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _check is None or _check.findings.finished:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
    kept = {module: originals(module) for module in modules if isinstance(module, torch.nn.Module)}
    made = original(*args, **kwargs)
    try:
        return _checked(_check, given, modules, kept, made)
    except Exception as error:
        say(f"what has been graphed now is not compared: {type(error).__name__}: {error}")
        return made


def _checked(check: Check, given: Values, modules: Any, kept: dict[Any, Any], made: Any) -> Any:
    """What has been made of the arguments ``given``, each callable compared."""
    enabled = given.get("enabled") or given.get("fp8_enabled") or False
    enabled = enabled if isinstance(enabled, tuple) else (enabled,) * len(modules)
    recipe = given.get("recipe") or given.get("fp8_recipe")
    twins = [Twin(module, kept[module], fp8, recipe) for module, fp8 in zip(modules, enabled, strict=True)]
    samples, order = given.get("sample_kwargs") or {}, given.get("_order")
    twins = twins if order is None else _owners(twins, order, given.get("_num_layers_per_chunk"))
    calls = []
    for i, (twin, run) in enumerate(zip(twins, made if isinstance(made, tuple) else (made,), strict=True)):
        keys = tuple(samples[i] if isinstance(samples, (tuple, list)) else samples)
        calls.append(check.wrap(twin, keys, run.forward if order is None else run, run.backward_dw))
        if order is None:  # a module, with a forward that replays
            run.forward, run.backward_dw = calls[i], calls[i].backward_dw
    if order is None:
        return made
    return tuple(calls) if isinstance(made, tuple) else calls[0]


def _owners(twins: list[Twin], order: list[float], layers: Any) -> list[Twin]:
    """The twin of each callable: chunks, in them microbatches, in them layers."""
    chunks = int(max(order))
    layers = len(twins) // chunks if layers is None else layers
    layers = [layers] * chunks if isinstance(layers, int) else layers
    microbatches = sum(entry > 0 for entry in order) // chunks
    ends = zip(itertools.accumulate(layers), layers, strict=True)
    return [twin for end, number in ends for twin in twins[end - number : end] * microbatches]


class Check:
    """The check of this process: modules take turns, a number of them in a number of steps."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.findings = Findings(options.strict)
        self.lifetimes = Lifetimes(self.findings)
        self._twins: list[Twin] = []
        self._numbers = itertools.count()
        self._step = self._optimizer_steps = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def wrap(self, twin: Twin, keys: tuple[str, ...], run: Any, backward_dw: Any) -> Any:
        """A graphed callable as a function that compares it, with all attributes that it has."""
        if twin not in self._twins:
            twin.turn = len(self._twins) // self.options.layers if self.options.layers else 0
            self._twins.append(twin)
        checked = Checked(self, twin, next(self._numbers), keys, run, backward_dw)

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if self.findings.finished else checked.call(args, kwargs)

        def wgrads() -> None:  # functions both: programs copy modules, and not what belongs to a function
            checked.backward_dw()

        call.backward_dw = wgrads  # type: ignore[attr-defined]
        return call

    def enter(self, twin: Twin, first: bool | None) -> bool:
        """A callable of ``twin`` is called: count steps; whether it is to be compared.

        A step begins where the caller says that weights are new, after an optimizer's step, and unless the caller
        says anything after a change of a parameter or where gradients have been dropped. Version counters alone do
        not do: fused optimizers leave them as they are.
        """
        parameters = [each for each in twin.parameters.values() if first is None and not each.is_inference()]
        seen, graded = (self._optimizer_steps, sum(each._version for each in parameters)), twin.graded
        twin.graded = any(each.grad is not None for each in parameters)
        new = seen != twin.seen or bool(first) or (graded and not twin.graded)
        twin.seen, twin.step = seen, twin.step + (new or not twin.module.training)
        if twin.step > self._step:
            self.findings.step_over()
            self._step = twin.step
        steps = self.options.steps
        last = steps * (1 + max(each.turn for each in self._twins))
        if self._step > last + 1 or all(each.step > last for each in self._twins):
            self.finish()
        return twin.turn * steps < twin.step <= (twin.turn + 1) * steps and not self.findings.finished

    def finish(self) -> None:
        """Report, and let go of everything."""
        self._hook.remove()
        self.lifetimes.stop()
        self.findings.finish()
        for twin in self._twins:
            twin.release()

    def _count(self, *_: Any) -> None:
        self._optimizer_steps += 1


class Checked:
    """One graphed callable beside its twin."""

    def __init__(self, check: Check, twin: Twin, index: int, keys: tuple[str, ...], run: Any, backward_dw: Any) -> None:
        self._check, self._twin, self._index, self._keys = check, twin, index, keys
        self._run, self._backward_dw, self._training = run, backward_dw, twin.module.training
        self._findings, self._lifetimes = check.findings, check.lifetimes
        self._delayed: Run | None = None

    def call(self, args: Any, kwargs: Values) -> Any:
        if self._twin.module.training != self._training or torch.cuda.is_current_stream_capturing():
            return self._run(*args, **kwargs)
        self._delayed = None
        compared = self._check.enter(self._twin, kwargs.get(FIRST))
        run = self._attempt(self._before_forward, compared, args, kwargs)
        result = self._run(*args, **kwargs)
        self._attempt(self._after_forward, run, tree_flatten(result)[0], kwargs.get("cuda_graph_stream"))
        return result

    def _before_forward(self, compared: bool, args: Any, kwargs: Values) -> Run | None:
        self._lifetimes.before_replay()
        if not compared:
            return None
        return self._twin.begin(args, {key: kwargs[key] for key in self._keys if key in kwargs}, kwargs.get(FIRST))

    def _after_forward(self, run: Run | None, tensors: list[Any], stream: Any) -> None:
        self._after_replay("forward", stream)
        outputs = named_outputs(tensors)
        for name, output in outputs.items():
            self._lifetimes.returned(output, self._place("forward", name))
        if run is None:
            return
        outputs |= self._twin.amaxes(FORWARD)
        run.forward = self._twin.forward(run)
        node = next((x.grad_fn for x in tensors if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
        self._compare("forward", outputs, run.forward, self._twin.forward(run) if node is None else {})
        if node is not None:
            numbers = {i: x.output_nr for i, x in enumerate(tensors) if isinstance(x, torch.Tensor)}
            self._watch_backward(run, node, numbers, stream)

    def _watch_backward(self, run: Run, node: Any, numbers: dict[int, int], stream: Any) -> None:
        leaves = {id(getattr(edge, "variable", None)): i for i, (edge, _) in enumerate(node.next_functions)}

        def before(grads: Any) -> None:
            if not self._findings.finished:
                self._attempt(self._before_backward, run, {i: grads[number] for i, number in numbers.items()})

        def after(grads: Any, _: Any) -> None:
            if not self._findings.finished:
                self._attempt(self._after_backward, run, grads, leaves, stream)

        node.register_prehook(before)
        node.register_hook(after)

    def _before_backward(self, run: Run, grads: dict[int, Any]) -> None:
        run.passes = [self._twin.backward(run, grads.get, slot) for slot in range(2)]
        for name, value in run.forward.items():
            self._findings.compare(self._place("forward", name), run.passes[0].values.get(name), value)
        self._lifetimes.before_replay()

    def _after_backward(self, run: Run, grads: Any, leaves: dict[int, int], stream: Any) -> None:
        self._after_replay("backward", stream)
        found = self._real_grads() | ({} if run.updates else self._twin.amaxes(BACKWARD))
        for name, parameter in self._twin.parameters.items():
            grad = grads[leaves[id(parameter)]] if id(parameter) in leaves else None
            found[f".grad of {name}"] = grad
            if grad is not None:
                self._lifetimes.grad(parameter, grad, self._place("backward", f".grad of {name}"))
        inputs = tree_flatten((run.args, list(run.kwargs.values())))[0]
        for i in range(sum(isinstance(each, torch.Tensor) for each in inputs)):
            found[f"gradient of input {i}"] = grads[i]
            if grads[i] is not None:
                self._lifetimes.returned(grads[i], self._place("backward", f"gradient of input {i}"))
        self._compare("backward", found, *(each.values for each in run.passes))
        self._delayed = run if run.passes[0].delayed() else None
        for each in run.passes:
            each.values = {}  # somebody may keep the output, and with it this

    def backward_dw(self) -> None:
        run = self._delayed
        if run is None or self._findings.finished:
            self._backward_dw()
            return
        hooked = [each for each in run.passes[0].delayed() if each.wgrad_accumulation_and_reduce_hooks]
        self._attempt(self._before_wgrads, run)

        def compare() -> None:
            if self._delayed is run:
                self._delayed = None
                self._attempt(self._after_wgrads, run)

        for each in hooked:  # the first hook, before those that hand the gradients on
            each.wgrad_accumulation_and_reduce_hooks.insert(0, compare)
        try:
            self._backward_dw()
        finally:
            for each in hooked:
                each.wgrad_accumulation_and_reduce_hooks.remove(compare)
        if hooked and self._delayed is run:
            place = self._place("wgrad", "hooks that follow a wgrad", "wgrad-hook-missing", "have not run")
            self._findings.wrong(place)
        compare()

    def _before_wgrads(self, run: Run) -> None:
        for slot, done in enumerate(run.passes):
            self._twin.backward_dw(run, done, slot)
        self._lifetimes.before_replay()

    def _after_wgrads(self, run: Run) -> None:
        self._after_replay("wgrad", None)
        self._compare("wgrad", self._real_grads(), *(each.values for each in run.passes))

    def _real_grads(self) -> Values:
        grads = {f".grad of {name}": each.grad for name, each in self._twin.parameters.items()}
        main_grads = {name: getattr(each, "main_grad", None) for name, each in self._twin.parameters.items()}
        return grads | {f"main_grad of {name}": each for name, each in main_grads.items()}

    def _compare(self, when: str, found: Values, eager: Values, again: Values) -> None:
        for name, value in eager.items():
            word = name.split(" ")[0]
            if (when, word) in SYMPTOMS and (name in found or word != "largest"):
                self._findings.compare(self._place(when, name), again.get(name), value)
                self._findings.compare(self._place(when, name, SYMPTOMS[when, word]), found.get(name), value)

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something of the check's own, which may not end the job."""
        if not self._twin.refusal:
            try:
                return work(*args)
            except Exception as error:
                self._twin.refusal = f"run eagerly, it raised {type(error).__name__}: {error}"
        self._findings.leave_out(self._index, type(self._twin.module).__name__, self._twin.refusal)
        return None

    def _after_replay(self, when: str, stream: Any) -> None:
        if stream is not None:  # compare what the graph has computed, not what it is about to
            torch.cuda.current_stream().wait_stream(stream)
        self._lifetimes.after_replay(f"the {when} of callable {self._index}")

    def _place(self, when: str, tensor: str, symptom: str = "", text: str = "") -> Place:
        twin, module = self._twin, type(self._twin.module).__name__
        return Place(self._index, module, twin.kinds, twin.enabled, twin.step, when, tensor, symptom, text)
