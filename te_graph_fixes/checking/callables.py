"""What `make_graphed_callables` gives, each callable compared with its `Twin` at every call in the checked steps."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten
from transformer_engine.pytorch import graph

from . import Options
from .findings import Findings, Place
from .lifetimes import Lifetimes
from .twin import BACKWARD, FIRST, FORWARD, Inputs, Pass, Twin, Values, named_outputs, originals

SYMPTOMS = {
    ("forward", "output"): ("output",),
    ("forward", "largest"): ("amax",),
    ("backward", "gradient"): ("dgrad",),
    ("backward", ".grad"): ("wgrad",),
    ("backward", "main_grad"): ("wgrad", "wgrad-replaced"),
    ("backward", "largest"): ("amax",),
    ("wgrad", ".grad"): ("delayed-wgrad", "delayed-wgrad-missing"),
    ("wgrad", "main_grad"): ("delayed-wgrad", "wgrad-replaced"),
}
"""By phase and first word of a tensor's name what a difference looks like, and where something is left out of it."""
_check: Check | None = None


def start(options: Options) -> None:
    """Check what is graphed from now on."""
    global _check
    if _check is None:
        original = graph.make_graphed_callables
        wrapped = functools.wraps(original)(functools.partial(_make, original))
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
    given = dict(zip(("modules", "sample_args"), args, strict=False)) | kwargs
    modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
    kept = {module: originals(module) for module in modules}
    made = original(*args, **kwargs)
    enabled = given.get("enabled", given.get("fp8_enabled")) or False
    enabled = enabled if isinstance(enabled, tuple) else (enabled,) * len(modules)
    recipe = given.get("recipe") or given.get("fp8_recipe")
    twins = [Twin(module, kept[module], fp8, recipe) for module, fp8 in zip(modules, enabled, strict=True)]
    samples, order = given.get("sample_kwargs") or {}, given.get("_order")
    owners = twins if order is None else _owners(twins, order, given.get("_num_layers_per_chunk"))
    keys = [tuple(samples[i] if isinstance(samples, (tuple, list)) else samples) for i in range(len(owners))]
    if order is not None:
        runs = zip(owners, keys, made if isinstance(made, tuple) else (made,), strict=True)
        checked = tuple(_check.wrap(twin, names, run, run.backward_dw) for twin, names, run in runs)
        return checked if isinstance(made, tuple) else checked[0]
    for twin, names in zip(twins, keys, strict=True):
        module: Any = twin.module
        module.forward = _check.wrap(twin, names, module.forward, module.backward_dw)
        module.backward_dw = module.forward.backward_dw
    return made


def _owners(twins: list[Twin], order: list[float], layers: Any) -> list[Twin]:
    """The twin of each callable: chunks, in them microbatches, in them layers."""
    chunks = int(max(order))
    layers = len(twins) // chunks if layers is None else layers
    layers = [layers] * chunks if isinstance(layers, int) else layers
    microbatches = sum(entry > 0 for entry in order) // chunks
    ends = zip(itertools.accumulate(layers), layers, strict=True)
    return [twin for end, number in ends for twin in twins[end - number : end] * microbatches]


@dataclass(eq=False)
class Subject:
    """A graphed module: its twin, its turn, and the step that it is in."""

    twin: Twin
    turn: int
    kinds: frozenset[str]
    step: int = 0
    seen: Any = None


class Check:
    """The check of this process: modules take turns, a number of them in a number of steps."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.findings = Findings(options)
        self.lifetimes = Lifetimes(self.findings)
        self._subjects: dict[Twin, Subject] = {}
        self._numbers = itertools.count()
        self._step = self._optimizer_steps = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def wrap(self, twin: Twin, keys: tuple[str, ...], run: Any, backward_dw: Any) -> Any:
        """A graphed callable as a function that compares it, with all attributes that it has."""
        if twin not in self._subjects:
            turn = len(self._subjects) // self.options.layers if self.options.layers else 0
            kinds = frozenset(type(each).__name__ for each in twin.module.modules())
            self._subjects[twin] = Subject(twin, turn, kinds)
        checked = Checked(self, self._subjects[twin], next(self._numbers), keys, run, backward_dw)
        findings = self.findings

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if findings.finished else checked.call(args, kwargs)

        call.backward_dw = checked.backward_dw  # type: ignore[attr-defined]
        return call

    def enter(self, subject: Subject, first: bool | None) -> bool:
        """A callable of ``subject`` is called: count steps; whether it is to be compared.

        A step begins where the caller says that weights are new, else after an optimizer's step or a change of a
        parameter. Version counters alone do not do: fused optimizers leave them as they are.
        """
        if not subject.twin.module.training:
            subject.step += 1
        elif first is not None:
            subject.step += first or not subject.step
        else:
            versions = sum(each._version for each in subject.twin.parameters.values())
            seen, subject.seen = subject.seen, (self._optimizer_steps, versions)
            subject.step += seen != subject.seen
        if subject.step > self._step:
            self.findings.step_over()
            self._step = subject.step
        steps = self.options.steps
        last = steps * (1 + max(each.turn for each in self._subjects.values()))
        if self._step > last + 1 or all(each.step > last for each in self._subjects.values()):
            self.finish()
        return subject.turn * steps < subject.step <= (subject.turn + 1) * steps

    def finish(self) -> None:
        """Report, and let go of everything."""
        self._hook.remove()
        self.lifetimes.stop()
        self.findings.finish()
        for subject in self._subjects.values():
            subject.twin.release()

    def _count(self, *_: Any) -> None:
        self._optimizer_steps += 1


@dataclass
class Run:
    """One microbatch of a callable, from its forward to its wgrads. Of two eager passes the first is the reference."""

    inputs: Inputs
    forward: Pass
    first_fp8: bool
    passes: list[Pass] = field(default_factory=list)
    less: Values = field(default_factory=dict)


class Checked:
    """One graphed callable beside its twin."""

    def __init__(
        self, check: Check, subject: Subject, index: int, keys: tuple[str, ...], run: Any, backward_dw: Any
    ) -> None:
        self._check, self._subject, self._twin, self._index, self._keys = check, subject, subject.twin, index, keys
        self._run, self._backward_dw, self._training = run, backward_dw, subject.twin.module.training
        self._findings, self._lifetimes = check.findings, check.lifetimes
        self._delayed: list[Run] = []

    def call(self, args: Any, kwargs: Values) -> Any:
        if self._twin.module.training != self._training or torch.cuda.is_current_stream_capturing():
            return self._run(*args, **kwargs)
        compared = self._check.enter(self._subject, kwargs.get(FIRST))
        if self._findings.finished:
            return self._run(*args, **kwargs)
        run = self._attempt(lambda: self._forward(args, kwargs)) if compared else None
        self._lifetimes.before_replay()
        result = self._run(*args, **kwargs)
        self._after_replay("forward", kwargs)
        tensors = tree_flatten(result)[0]
        outputs = named_outputs(tensors)
        for name, output in outputs.items():
            self._lifetimes.returned(output, self._place("forward", name))
        if run is not None:
            self._attempt(lambda: self._compare_forward(run, outputs))
            self._watch_backward(run, tensors, kwargs)
        return result

    def _forward(self, args: Any, kwargs: Values) -> Run:
        inputs = self._twin.inputs(args, {key: kwargs[key] for key in self._keys}, kwargs.get(FIRST))
        return Run(inputs, self._twin.forward(inputs), self._twin.first_fp8_module())

    def _compare_forward(self, run: Run, outputs: Values) -> None:
        again = {} if self._training else self._twin.forward(run.inputs).values
        self._compare("forward", outputs | self._twin.amaxes(FORWARD), run.forward.values, again, {})

    def _watch_backward(self, run: Run, tensors: list[Any], kwargs: Values) -> None:
        node = next((x.grad_fn for x in tensors if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
        if node is None:
            return
        numbers = {i: x.output_nr for i, x in enumerate(tensors) if isinstance(x, torch.Tensor)}
        reference = weakref.ref(node)

        def before(grads: Any) -> None:
            if not self._findings.finished:
                self._attempt(lambda: self._backward(run, lambda i: grads[numbers[i]]))
                self._lifetimes.before_replay()

        def after(grads: Any, _: Any) -> None:
            if not self._findings.finished:
                self._after_replay("backward", kwargs)
                if run.passes:
                    self._attempt(lambda: self._compare_backward(run, reference(), grads))

        node.register_prehook(before)
        node.register_hook(after)

    def _backward(self, run: Run, grad_of: Callable[[int], torch.Tensor | None]) -> None:
        run.less = self._twin.main_grads()
        run.passes = [self._twin.backward(run.inputs, grad_of, slot) for slot in ("eager", "again")]
        for name, value in run.forward.values.items():
            self._findings.noise(self._place("forward", name), value, run.passes[0].values.get(name))

    def _compare_backward(self, run: Run, node: Any, grads: Any) -> None:
        eager, again = (each.values for each in run.passes)
        inputs = len([x for x in tree_flatten((run.inputs.args, run.inputs.kwargs))[0] if isinstance(x, torch.Tensor)])
        found: Values = {f"gradient of input {i}": grad for i, grad in enumerate(grads[:inputs])}
        for name, grad in found.items():
            if grad is not None:
                self._lifetimes.returned(grad, self._place("backward", name))
        edges = zip(node.next_functions[inputs:], grads[inputs:], strict=True)
        returned = {id(edge.variable): grad for (edge, _), grad in edges if hasattr(edge, "variable")}
        for name, parameter in self._twin.parameters.items():
            name, grad = f".grad of {name}", returned.get(id(parameter))
            found[name] = grad
            if grad is not None and name in eager:
                self._lifetimes.grad(parameter, grad, self._place("backward", name))
        found = self._real_grads() | found | ({} if run.first_fp8 else self._twin.amaxes(BACKWARD))
        self._compare("backward", found, eager, again, run.less)
        if run.passes[0].delayed():
            self._delayed.append(run)

    def backward_dw(self) -> None:
        if self._findings.finished or not self._delayed:
            self._backward_dw()
            return
        run = self._delayed.pop(0)
        hooked = [each for each in run.passes[0].delayed() if each.wgrad_accumulation_and_reduce_hooks]
        self._attempt(lambda: self._eager_dw(run))
        seen = False

        def compare() -> None:
            nonlocal seen
            if not seen:
                seen = True
                self._after_replay("wgrad", {})
                eager, again = (each.values for each in run.passes)
                self._attempt(lambda: self._compare("wgrad", self._real_grads(), eager, again, run.less))

        for each in hooked:  # the first hook, before those that hand the gradients on
            each.wgrad_accumulation_and_reduce_hooks.insert(0, compare)
        self._lifetimes.before_replay()
        try:
            self._backward_dw()
        finally:
            for each in hooked:
                each.wgrad_accumulation_and_reduce_hooks.remove(compare)
        if hooked and not seen:
            self._findings.wrong(
                self._place("wgrad", "hooks that follow a wgrad"), "wgrad-hook-missing", "have not run"
            )
        compare()

    def _eager_dw(self, run: Run) -> None:
        run.less = self._twin.main_grads()
        now = {f".grad of {name}": each.grad for name, each in self._twin.parameters.items()}
        for done, slot in zip(run.passes, ("eager", "again"), strict=True):
            added = self._twin.backward_dw(done, run.inputs, slot)
            done.values |= {name: grad if now[name] is None else now[name] + grad for name, grad in added.items()}
            run.less |= added

    def _real_grads(self) -> Values:
        grads = {f".grad of {name}": each.grad for name, each in self._twin.parameters.items()}
        main_grads = {name: getattr(each, "main_grad", None) for name, each in self._twin.parameters.items()}
        return grads | {f"main_grad of {name}": each for name, each in main_grads.items()}

    def _compare(self, when: str, found: Values, eager: Values, again: Values, less: Values) -> None:
        for name, value in eager.items():
            word = name.split(" ")[0]
            if (when, word) in SYMPTOMS and (name in found or word != "largest"):
                place = self._place(when, name)
                self._findings.noise(place, value, again.get(name))
                self._findings.compare(place, found.get(name), value, less.get(name), SYMPTOMS[when, word])

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Do something of the check's own, which may not end the job."""
        if not self._twin.refusal:
            try:
                return work()
            except Exception as error:
                self._twin.refusal = f"run eagerly, it raised {type(error).__name__}: {error}"
        self._findings.leave_out(self._index, type(self._twin.module).__name__, self._twin.refusal)
        return None

    def _after_replay(self, when: str, kwargs: Values) -> None:
        stream = kwargs.get("cuda_graph_stream")
        if stream is not None:  # compare what the graph has computed, not what it is about to
            torch.cuda.current_stream().wait_stream(stream)
        self._lifetimes.after_replay(f"the {when} of callable {self._index}")

    def _place(self, when: str, tensor: str) -> Place:
        subject, module = self._subject, type(self._twin.module).__name__
        return Place(self._index, module, subject.step, when, tensor, subject.kinds, self._twin.enabled)
