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
        def make(*args: Any, **kwargs: Any) -> Any:
            assert _check is not None
            return _check.make(original, *args, **kwargs)

        for module in list(sys.modules.values()):  # others may have imported it already
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is original:
                    setattr(module, name, make)
    else:
        _check.finish()
    _check = Check(options)


def finish() -> Findings:
    """End the check, report it, and give what it has found."""
    assert _check is not None
    _check.finish()
    return _check.findings


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

    def make(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``original`` makes of its arguments, each callable compared."""
        if self.findings.finished:
            self.findings.say_once("what is graphed from now on is not compared: the steps to be checked are over")
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
        kept = {module: originals(module) for module in modules if isinstance(module, torch.nn.Module)}
        made = original(*args, **kwargs)
        try:
            fp8 = given.get("enabled") or given.get("fp8_enabled") or False
            fp8 = fp8 if isinstance(fp8, tuple) else (fp8,) * len(modules)
            recipe = given.get("recipe") or given.get("fp8_recipe")
            twins = [Twin(module, kept[module], each, recipe) for module, each in zip(modules, fp8, strict=True)]
            return self._checked(twins, given, made)
        except Exception as error:
            say(f"what has been graphed now is not compared: {type(error).__name__}: {error}")
            return made

    def _checked(self, twins: list[Twin], given: Values, made: Any) -> Any:
        """What was made of ``twins`` and the arguments ``given``: chunks, in them microbatches, in them layers."""
        self._twins += twins
        samples, order = given.get("sample_kwargs") or {}, given.get("_order")
        runs = made if isinstance(made, tuple) else (made,)
        chunks, layers = int(max(order or [1])), given.get("_num_layers_per_chunk") or 0
        layers = layers if isinstance(layers, (list, tuple)) else [layers or len(twins) // chunks] * chunks
        ends = zip(itertools.accumulate(layers), layers, strict=True)
        owners = [twin for end, n in ends for twin in twins[end - n : end] * (len(runs) // len(twins))]
        calls = []
        for i, (twin, run) in enumerate(zip(owners, runs, strict=True)):
            keys = tuple(samples[i] if isinstance(samples, (tuple, list)) else samples)
            calls.append(self._wrap(twin, keys, run.forward if order is None else run, run.backward_dw))
            if order is None:  # a module, with a forward that replays
                run.forward, run.backward_dw = calls[i], calls[i].backward_dw
        if order is None:
            return made
        return tuple(calls) if isinstance(made, tuple) else calls[0]

    def _wrap(self, twin: Twin, keys: tuple[str, ...], run: Any, backward_dw: Any) -> Any:
        """A graphed callable as a function that compares it, with all attributes that it has."""
        checked = Checked(self, twin, next(self._numbers), keys, run, backward_dw)

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if self.findings.finished else checked.call(args, kwargs)

        # Functions both: programs copy modules, and not what belongs to a function.
        call.backward_dw = lambda: checked.backward_dw()  # type: ignore[attr-defined]
        return call

    def enter(self, twin: Twin, first: bool | None) -> bool:
        """A callable of ``twin`` is called: count steps; whether it is to be compared.

        A step begins where the caller says that weights are new, after an optimizer's step, and unless the caller
        says anything after a change of a parameter or where gradients have been dropped. Version counters alone do
        not do: fused optimizers leave them as they are.
        """
        parameters = [each for each in twin.parameters.values() if first is None and not each.is_inference()]
        seen, twin.seen = twin.seen, (self._optimizer_steps, sum(each._version for each in parameters))
        graded, twin.graded = twin.graded, any(each.grad is not None for each in parameters)
        new = first or seen != twin.seen or (graded and not twin.graded) or not twin.module.training
        twin.step += bool(new)
        if twin.step > self._step:
            self.findings.step_over()
            self._step = twin.step
        steps, layers = self.options.steps, self.options.layers or len(self._twins)
        turn, last_turn = self._twins.index(twin) // layers, (len(self._twins) - 1) // layers
        last = steps * (1 + last_turn)
        if self._step > last + 1 or all(each.step > last for each in self._twins):
            self.finish()
        return turn * steps < twin.step <= (turn + 1) * steps

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

    def backward_dw(self) -> None:
        run, self._delayed = self._delayed, None
        if run is None or self._findings.finished:
            self._backward_dw()
            return
        hooks = [each.wgrad_accumulation_and_reduce_hooks for each in run.passes[0].delayed()]
        hooks = [each for each in hooks if each]
        self._attempt(self._before_wgrads, run)

        @functools.cache  # the first hook, before those that hand the gradients on
        def compare() -> None:
            self._attempt(self._after_wgrads, run)

        for each in hooks:
            each.insert(0, compare)
        try:
            self._backward_dw()
        finally:
            for each in hooks:
                each.remove(compare)
        if hooks and not compare.cache_info().currsize:
            place = self._place("wgrad", "hooks that follow a wgrad", "wgrad-hook-missing", "have not run")
            self._findings.add(place, True)
        compare()

    def _before_forward(self, compared: bool, args: Any, kwargs: Values) -> Run | None:
        self._lifetimes.before_replay()
        if not compared:
            return None
        given = {key: kwargs[key] for key in self._keys if key in kwargs}
        return Run(self._twin, args, given, kwargs.get(FIRST))

    def _after_forward(self, run: Run | None, tensors: list[Any], stream: Any) -> None:
        self._after_replay("forward", stream)
        outputs = named_outputs(tensors)
        for name, output in outputs.items():
            self._lifetimes.returned(output, self._place("forward", name))
        if run is None:
            return
        outputs |= self._twin.amaxes(FORWARD)
        run.forward = self._twin.forward(run)
        nodes = {i: each.output_nr for i, each in enumerate(tensors) if isinstance(each, torch.Tensor)}
        node = next((tensors[i].grad_fn for i in nodes if tensors[i].grad_fn is not None), None)
        self._compare("forward", outputs, run.forward, self._twin.forward(run) if node is None else {})
        if node is not None:
            parameters = {id(each): f".grad of {name}" for name, each in self._twin.parameters.items()}
            leaves = [id(getattr(edge, "variable", None)) for edge, _ in node.next_functions]
            names = [parameters.get(leaf, f"gradient of input {i}") for i, leaf in enumerate(leaves)]
            node.register_prehook(lambda grads: self._attempt(self._before_backward, run, nodes, grads))
            node.register_hook(lambda grads, _: self._attempt(self._after_backward, run, names, grads, stream))

    def _before_backward(self, run: Run, numbers: dict[int, int], grads: Any) -> None:
        given = {i: grads[number] for i, number in numbers.items()}
        run.passes = [self._twin.backward(run, given.get, slot) for slot in range(2)]
        for name, value in run.forward.items():
            self._findings.compare(self._place("forward", name), run.passes[0].values.get(name), value)
        self._lifetimes.before_replay()

    def _after_backward(self, run: Run, names: list[str], grads: Any, stream: Any) -> None:
        self._after_replay("backward", stream)
        found = self._real("main_grad") | ({} if run.updates else self._twin.amaxes(BACKWARD))
        found |= dict(zip(names, grads, strict=True))
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                parameter = self._twin.parameters.get(name.removeprefix(".grad of "))
                self._lifetimes.returned(grad, self._place("backward", name), parameter)
        self._compare("backward", found, *(each.values for each in run.passes))
        self._delayed = run if run.passes[0].delayed() else None
        for each in run.passes:
            each.values = {}  # somebody may keep the output, and with it this

    def _before_wgrads(self, run: Run) -> None:
        for slot, done in enumerate(run.passes):
            self._twin.backward_dw(run, done, slot)
        self._lifetimes.before_replay()

    def _after_wgrads(self, run: Run) -> None:
        self._after_replay("wgrad", None)
        self._compare("wgrad", self._real(".grad") | self._real("main_grad"), *(each.values for each in run.passes))

    def _real(self, kind: str) -> Values:
        real = {name: getattr(each, kind.lstrip("."), None) for name, each in self._twin.parameters.items()}
        return {f"{kind} of {name}": each for name, each in real.items()}

    def _compare(self, when: str, found: Values, eager: Values, again: Values) -> None:
        for name, value in eager.items():
            word = name.split(" ")[0]
            if (when, word) in SYMPTOMS and (name in found or word != "largest"):
                self._findings.compare(self._place(when, name), again.get(name), value)
                self._findings.compare(self._place(when, name, SYMPTOMS[when, word]), found.get(name), value)

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something of the check's own, which may not end the job."""
        if self._findings.finished:
            return None
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
