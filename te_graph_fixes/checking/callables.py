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
from .twin import FIRST, Inputs, Pass, Twin, originals

EAGER, AGAIN = "eager", "eager again"
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


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _check is None or _check.findings.finished:
        return original(*args, **kwargs)
    given = dict(zip(("modules", "sample_args"), args, strict=False)) | kwargs
    modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
    kept = {module: originals(module) for module in modules}
    made = original(*args, **kwargs)
    enabled = next((given[name] for name in ("enabled", "fp8_enabled") if given.get(name) is not None), False)
    enabled = enabled if isinstance(enabled, tuple) else (enabled,) * len(modules)
    recipe = given.get("recipe") or given.get("fp8_recipe")
    twins = [Twin(module, kept[module], fp8, recipe) for module, fp8 in zip(modules, enabled, strict=True)]
    names, order = given.get("sample_kwargs"), given.get("_order")
    if order is None:
        for i, (module, twin) in enumerate(zip(modules, twins, strict=True)):
            keys = names[i] if isinstance(names, (tuple, list)) else names or ()
            run = _check.wrap(twin, tuple(keys), module.forward, module.backward_dw)
            module.forward, module.backward_dw = run, run.backward_dw
        return made
    owners = _owners(twins, order, given.get("_num_layers_per_chunk"))
    return tuple(
        _check.wrap(twin, tuple(names[i]) if names else (), run, run.backward_dw)
        for i, (twin, run) in enumerate(zip(owners, made, strict=True))
    )


def _owners(twins: list[Twin], order: list[float], layers: Any) -> list[Twin]:
    """The twin of each callable: chunks, in them microbatches, in them layers."""
    chunks = int(max(order))
    layers = len(twins) // chunks if layers is None else layers
    layers = [layers] * chunks if isinstance(layers, int) else layers
    microbatches = sum(entry > 0 for entry in order) // chunks
    ends = itertools.accumulate(layers)
    return [twin for end, number in zip(ends, layers, strict=True) for twin in twins[end - number : end] * microbatches]


@dataclass(eq=False)
class Subject:
    """A graphed module: its twin, the steps of its turn, and the step that it is in."""

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
        self._callables = 0
        self._step = 0
        self._optimizer_steps = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def wrap(self, twin: Twin, keys: tuple[str, ...], run: Any, backward_dw: Any) -> Any:
        """A graphed callable as a function that compares it, with all attributes that it has."""
        if twin not in self._subjects:
            turn = len(self._subjects) // self.options.layers if self.options.layers else 0
            kinds = frozenset(type(each).__name__ for each in twin.module.modules())
            self._subjects[twin] = Subject(twin, turn, kinds)
        checked = Checked(self, self._subjects[twin], self._callables, keys, run, backward_dw)
        self._callables += 1
        return checked.function()

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
            self.findings.step_over(self._step)
            self._step = subject.step
        steps = self.options.steps
        last = steps * (1 + max(each.turn for each in self._subjects.values()))
        if self._step > last + 1 or all(each.step > last for each in self._subjects.values()):
            self.finish(last)
        return subject.turn * steps < subject.step <= (subject.turn + 1) * steps

    def finish(self, steps: int | None = None) -> None:
        """Report, and let go of everything."""
        self._hook.remove()
        self.lifetimes.stop()
        self.findings.finish(self._step if steps is None else steps)
        for subject in self._subjects.values():
            subject.twin.release()

    def _count(self, *_: Any) -> None:
        self._optimizer_steps += 1


@dataclass
class Run:
    """One microbatch of a callable, from its forward to its wgrads."""

    inputs: Inputs
    forward: Pass
    first_fp8: bool
    numbers: dict[int, int]
    passes: dict[str, Pass] = field(default_factory=dict)
    main_grads: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def delays(self) -> bool:
        return bool(self.passes[EAGER].delayed())


class Checked:
    """One graphed callable beside its twin."""

    def __init__(
        self, check: Check, subject: Subject, index: int, keys: tuple[str, ...], run: Any, backward_dw: Any
    ) -> None:
        self._check, self._subject, self._twin, self._index, self._keys = check, subject, subject.twin, index, keys
        self._run, self._backward_dw, self._training = run, backward_dw, subject.twin.module.training
        self._findings, self._lifetimes = check.findings, check.lifetimes
        self._delayed: list[Run] = []

    def function(self) -> Any:
        run, findings = self._run, self._findings

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if findings.finished else self._call(args, kwargs)

        call.backward_dw = self._call_backward_dw  # type: ignore[attr-defined]
        return call

    def _call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        twin, first = self._twin, kwargs.get(FIRST)
        if twin.module.training != self._training or torch.cuda.is_current_stream_capturing():
            return self._run(*args, **kwargs)
        compared = self._check.enter(self._subject, first)
        if self._findings.finished:
            return self._run(*args, **kwargs)
        run = self._attempt(lambda: self._forward(args, kwargs, first)) if compared else None
        self._lifetimes.before_replay()
        result = self._run(*args, **kwargs)
        _wait(kwargs.get("cuda_graph_stream"))
        self._lifetimes.after_replay(self._name("forward"))
        real = tree_flatten(result)[0]
        for i, output in enumerate(real):
            if isinstance(output, torch.Tensor):
                self._lifetimes.returned(output, self._place("forward", f"output {i}"))
        if run is not None:
            self._attempt(lambda: self._compare_forward(run, real))
            self._watch_backward(run, real, kwargs.get("cuda_graph_stream"))
        return result

    def _forward(self, args: Any, kwargs: dict[str, Any], first: bool | None) -> Run:
        inputs = self._twin.inputs(args, {key: kwargs[key] for key in self._keys}, first)
        return Run(inputs, self._twin.forward(inputs), self._twin.first_fp8_module(), {})

    def _compare_forward(self, run: Run, real: list[Any]) -> None:
        for i, (found, wanted) in enumerate(zip(real, run.forward.outputs, strict=True)):
            self._compare("forward", f"output {i}", found, wanted, "output")
        self._compare_amaxes("forward", run.forward, "scaling_fwd", 0)
        for each in self._twin.unregistered() - run.forward.unregistered:
            place = self._place("forward", f"FP8 scales of {self._twin.name(each)}")
            self._findings.wrong(place, "scales-not-updated", "are never updated")
        if not self._twin.module.training:
            self._reproducible("forward", self._twin.forward(run.inputs), run.forward)

    def _reproducible(self, when: str, again: Pass, once: Pass) -> None:
        for i, (a, b) in enumerate(zip(again.outputs, once.outputs, strict=True)):
            if isinstance(a, torch.Tensor):
                self._findings.noise(self._place(when, f"output {i}"), b, a)

    def _watch_backward(self, run: Run, real: list[Any], stream: Any) -> None:
        node = next((x.grad_fn for x in real if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
        if node is None:
            return
        run.numbers = {i: x.output_nr for i, x in enumerate(real) if isinstance(x, torch.Tensor)}
        reference = weakref.ref(node)

        def before(grads: Any) -> None:
            if not self._findings.finished:
                self._attempt(lambda: self._backward(run, grads))
                self._lifetimes.before_replay()

        def after(grads: Any, _: Any) -> None:
            if not self._findings.finished:
                _wait(stream)
                self._lifetimes.after_replay(self._name("backward"))
                if run.passes:
                    self._attempt(lambda: self._compare_backward(run, reference(), grads))

        node.register_prehook(before)
        node.register_hook(after)

    def _backward(self, run: Run, grads: Any) -> None:
        run.main_grads = self._twin.main_grads()
        for slot in (AGAIN, EAGER):
            run.passes[slot] = self._twin.backward(run.inputs, lambda i: grads[run.numbers[i]], slot)
        self._reproducible("forward", run.passes[EAGER], run.forward)

    def _compare_backward(self, run: Run, node: Any, grads: Any) -> None:
        twin, done, again = self._twin, run.passes[EAGER], run.passes[AGAIN]
        count = len(done.input_grads)
        for i, (grad, wanted) in enumerate(zip(grads[:count], done.input_grads, strict=True)):
            if done.inputs[i].requires_grad:
                place = self._place("backward", f"gradient of input {i}")
                self._compare("backward", place.tensor, grad, wanted, "dgrad", again.input_grads[i])
                if grad is not None:
                    self._lifetimes.returned(grad, place)
        returned = {
            id(edge.variable): grad
            for (edge, _), grad in zip(node.next_functions[count:], grads[count:], strict=True)
            if hasattr(edge, "variable")
        }
        for name, parameter in twin.parameters.items():
            key = id(parameter)
            alias, wanted, grad = done.aliases[key], done.grads.get(key), returned.get(key)
            if getattr(alias, "grad_added_to_main_grad", False) or (wanted is None and run.delays):
                continue
            place = self._place("backward", f".grad of {name}")
            self._compare("backward", place.tensor, grad, wanted, "wgrad", again.grads.get(key))
            if grad is not None:
                self._lifetimes.grad(parameter, grad, place)
        self._compare_amaxes("backward", done, "scaling_bwd", -1 if run.first_fp8 else 0)
        self._compare_main_grads("backward", run)
        if run.delays:
            self._delayed.append(run)

    def _call_backward_dw(self) -> None:
        if self._findings.finished or not self._delayed:
            self._backward_dw()
            return
        run = self._delayed.pop(0)
        hooked = [each for each in run.passes[EAGER].delayed() if each.wgrad_accumulation_and_reduce_hooks]
        self._attempt(lambda: self._eager_dw(run))
        before = {id(each): each.grad for each in self._twin.parameters.values()}
        before = {key: None if grad is None else grad.clone() for key, grad in before.items()}
        seen = False

        def compare() -> None:
            nonlocal seen
            if not seen:
                seen = True
                self._lifetimes.after_replay(self._name("wgrad"))
                self._attempt(lambda: self._compare_main_grads("wgrad", run))

        for each in hooked:  # the first hook, before those that hand the gradients on
            each.wgrad_accumulation_and_reduce_hooks.insert(0, compare)
        self._lifetimes.before_replay()
        try:
            self._backward_dw()
        finally:
            for each in hooked:
                each.wgrad_accumulation_and_reduce_hooks.remove(compare)
        if hooked and not seen:
            place = self._place("wgrad", "hooks that run after a wgrad")
            self._findings.wrong(place, "wgrad-hook-missing", "have not run")
        compare()
        self._attempt(lambda: self._compare_delivered(run, before))

    def _eager_dw(self, run: Run) -> None:
        run.main_grads = self._twin.main_grads()
        for slot in (AGAIN, EAGER):
            self._twin.backward_dw(run.passes[slot], run.inputs, slot)

    def _compare_delivered(self, run: Run, before: dict[int, torch.Tensor | None]) -> None:
        for name, parameter in self._twin.parameters.items():
            added, again = (run.passes[slot].grads.get(id(parameter)) for slot in (EAGER, AGAIN))
            now = before[id(parameter)]
            if added is not None and self._subject.step:
                wanted = added if now is None else now + added
                lost = parameter.grad is None or (now is not None and torch.equal(parameter.grad, now))
                symptom = "delayed-wgrad-missing" if lost else "delayed-wgrad"
                self._compare("wgrad", f".grad of {name}", parameter.grad, wanted, symptom)
                if again is not None:
                    self._findings.noise(self._place("wgrad", f".grad of {name}"), added, again)

    def _compare_main_grads(self, when: str, run: Run) -> None:
        symptom = "delayed-wgrad" if when == "wgrad" else "wgrad"
        for name, parameter in self._twin.parameters.items() if run.passes else ():
            key = id(parameter)
            wanted, again = (getattr(run.passes[slot].aliases[key], "main_grad", None) for slot in (EAGER, AGAIN))
            if wanted is not None:
                found, before = parameter.main_grad, run.main_grads[key]
                self._compare(when, f"main_grad of {name}", found, wanted, symptom, again, before)

    def _compare_amaxes(self, when: str, done: Pass, key: str, at: int) -> None:
        real = self._twin.scales()
        for (each, found), (_, history) in done.scales.items():
            if found == key and (each, key) in real and len(history) > -at:
                wanted = history[0]
                now = real[each, key][1][at]
                name = f"largest values ({key} amaxes) of {self._twin.name(each)}"
                self._compare(when, name, torch.where(wanted == 0, wanted, now), wanted, "amax")

    def _compare(
        self, when: str, tensor: str, found: Any, wanted: Any, symptom: str, again: Any = None, before: Any = None
    ) -> None:
        if isinstance(found, torch.Tensor | None) and isinstance(wanted, torch.Tensor | None):
            place = self._place(when, tensor)
            if again is not None and wanted is not None:
                self._findings.noise(place, wanted, again)
            self._findings.compare(place, found, wanted, symptom, before)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Do something of the check's own, which may not end the job."""
        if self._twin.refusal:
            self._findings.leave_out(self._index, type(self._twin.module).__name__, self._twin.refusal)
            return None
        try:
            return work()
        except Exception as error:
            self._twin.refusal = f"run eagerly, it raised {type(error).__name__}: {error}"
            return self._attempt(work)

    def _place(self, when: str, tensor: str) -> Place:
        module = type(self._twin.module).__name__
        kinds, fp8 = self._subject.kinds, self._twin.enabled
        return Place(self._index, module, self._subject.step, when, tensor, kinds, fp8)

    def _name(self, when: str) -> str:
        return f"the {when} of callable {self._index}"


def _wait(stream: Any) -> None:
    """A graph was replayed on a stream of its own: compare what it has computed, not what it is about to."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def findings() -> Findings:
    """Those of the last check."""
    assert _check is not None
    return _check.findings


def finish() -> None:
    """End the check that runs, and report it."""
    if _check is not None:
        _check.finish()
