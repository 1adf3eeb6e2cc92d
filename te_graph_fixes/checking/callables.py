"""What `make_graphed_callables` gives, each callable compared with its `Twin` at every call in the checked steps."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from transformer_engine.pytorch import graph

from . import Options
from .findings import Findings, Place, say
from .lifetimes import Lifetimes
from .twin import FIRST, SCALES, Run, Twin, Values, named_outputs

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
"""By phase and first word of a tensor's name what a difference looks like."""
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
        self._step = 0
        self._seen: dict[Twin, tuple[int, bool]] = {}
        self._hook = register_optimizer_step_post_hook(lambda *_: self._seen.clear())

    def make(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``original`` makes of its arguments, each callable compared."""
        if self.findings.finished:
            self.findings.say_once("what is graphed from now on is not compared: the steps to be checked are over")
            return original(*args, **kwargs)
        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            owners = self._owners(given)
        except Exception as error:
            say(f"what is graphed now is not compared: {type(error).__name__}: {error}")
            return original(*args, **kwargs)
        made, order = original(*args, **kwargs), given.get("_order")
        samples, calls = given.get("sample_kwargs") or {}, []
        self._twins += dict.fromkeys(owners)
        for i, (twin, run) in enumerate(zip(owners, made if isinstance(made, tuple) else (made,), strict=True)):
            keys = tuple(samples[i] if isinstance(samples, (tuple, list)) else samples)
            replay = run.forward if order is None else run
            calls.append(Checked(self, twin, next(self._numbers), keys, replay, run.backward_dw).function())
            if order is None:  # a module, with a forward that replays
                run.forward, run.backward_dw = calls[i], calls[i].backward_dw
        return made if order is None else tuple(calls) if isinstance(made, tuple) else calls[0]

    def _owners(self, given: Values) -> list[Twin]:
        """A twin for each callable that is asked for: chunks, in them microbatches, in them layers."""
        modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
        fp8 = given.get("enabled") or given.get("fp8_enabled") or False
        fp8 = fp8 if isinstance(fp8, tuple) else (fp8,) * len(modules)
        recipe = given.get("recipe") or given.get("fp8_recipe")
        twins = [Twin(module, each, recipe) for module, each in zip(modules, fp8, strict=True)]
        if given.get("_order") is None:
            return twins
        chunks, microbatches = int(max(given["_order"])), len(given["sample_args"]) // len(twins)
        layers = given.get("_num_layers_per_chunk") or len(twins) // chunks
        rest = iter(twins)
        chunked = [[*itertools.islice(rest, n)] for n in ([layers] * chunks if isinstance(layers, int) else layers)]
        return [twin for chunk in chunked for twin in chunk * microbatches]

    def enter(self, twin: Twin, first: bool | None) -> bool:
        """A callable of ``twin`` is called: count steps; whether it is to be compared.

        A step begins where the caller says that weights are new, after an optimizer's step, and unless the caller
        says anything after a change of a parameter or where gradients have been dropped. Version counters alone do
        not do: fused optimizers leave them as they are.
        """
        parameters = [each for each in twin.parameters.values() if first is None and not each.is_inference()]
        seen = self._seen.get(twin)
        versions, graded = sum(each._version for each in parameters), any(each.grad is not None for each in parameters)
        self._seen[twin] = versions, graded
        new = seen is None or seen[0] != versions or (seen[1] and not graded)
        twin.step += bool(first or new or not twin.module.training)
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
            twin.own.clear()
            twin.parameters.clear()


class Checked:
    """One graphed callable beside its twin."""

    def __init__(self, check: Check, twin: Twin, index: int, keys: tuple[str, ...], replay: Any, wgrads: Any) -> None:
        self._check, self._twin, self._index, self._keys = check, twin, index, keys
        self._replay, self._replay_wgrads, self._training = replay, wgrads, twin.module.training
        self._findings, self._lifetimes = check.findings, check.lifetimes
        self._delayed: Run | None = None

    def function(self) -> Any:
        """It as a function, with all its attributes: programs copy modules, and not what belongs to a function."""

        @functools.wraps(self._replay)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (self._replay if self._findings.finished else self._call)(*args, **kwargs)

        call.backward_dw = lambda: self._backward_dw()  # type: ignore[attr-defined]
        return call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._twin.module.training != self._training or torch.cuda.is_current_stream_capturing():
            return self._replay(*args, **kwargs)
        self._delayed = None
        compared = self._check.enter(self._twin, kwargs.get(FIRST))
        given = {key: kwargs[key] for key in self._keys if key in kwargs}
        self._attempt(self._lifetimes.before_replay)
        run = self._attempt(Run, self._twin, args, given, kwargs.get(FIRST)) if compared else None
        result = self._replay(*args, **kwargs)
        self._attempt(self._after_forward, run, tree_leaves(result), kwargs.get("cuda_graph_stream"))
        return result

    def _backward_dw(self) -> None:
        run, self._delayed = self._delayed, None
        if run is None or self._findings.finished:
            self._replay_wgrads()
            return
        self._attempt(self._before, run, "wgrad")

        def compare() -> None:
            if run.eager:
                self._attempt(self._after, run, "wgrad", {})

        with ExitStack() as stack:
            for module in run.delayed:
                if hooks := module.wgrad_accumulation_and_reduce_hooks:
                    hooks.insert(0, compare)  # before those that hand the gradients on
                    stack.callback(hooks.remove, compare)
            self._replay_wgrads()
            if run.eager and any(module.wgrad_accumulation_and_reduce_hooks for module in run.delayed):
                place = self._place("wgrad", "hooks that follow a wgrad", "wgrad-hook-missing", "have not run")
                self._findings.add(place, True)
        compare()

    def _after_forward(self, run: Run | None, tensors: list[Any], stream: Any) -> None:
        self._after(run, "forward", named_outputs(tensors), stream)
        numbers = {i: each.output_nr for i, each in enumerate(tensors) if isinstance(each, torch.Tensor)}
        node = next((tensors[i].grad_fn for i in numbers if tensors[i].grad_fn is not None), None)
        if run is None or node is None:
            return
        parameters = {id(each): f".grad of {name}" for name, each in self._twin.parameters.items()}
        leaves = [id(getattr(edge, "variable", None)) for edge, _ in node.next_functions]
        names = [parameters.get(leaf, f"gradient of input {i}") for i, leaf in enumerate(leaves)]

        def before(grads: Any) -> None:
            given = {i: None if grads[n] is None else grads[n].clone() for i, n in numbers.items()}
            run.backward = given, self._twin.state()
            self._before(run, "backward")

        def after(grads: Any) -> None:
            self._after(run, "backward", dict(zip(names, grads, strict=True)), stream)
            self._delayed = run if run.delayed else None

        node.register_prehook(lambda grads: self._attempt(before, grads))
        node.register_hook(lambda grads, _: self._attempt(after, grads))

    def _before(self, run: Run, when: str) -> None:
        run.eager = [self._twin.compute(run, when) for _ in range(2)]
        self._lifetimes.before_replay()

    def _after(self, run: Run | None, when: str, returned: Values, stream: Any = None) -> None:
        """A replay is over and has ``returned`` tensors in graph memory: compare them, and what else it has written."""
        if stream is not None:  # compare what the graph has computed, not what it is about to
            torch.cuda.current_stream().wait_stream(stream)
        self._lifetimes.after_replay(f"the {when} of callable {self._index}")
        real = self._twin.parameters
        for name, tensor in returned.items():
            if tensor is not None:
                self._lifetimes.returned(tensor, self._place(when, name), real.get(name.removeprefix(".grad of ")))
        if run is None:
            return
        found = {f"main_grad of {name}": getattr(each, "main_grad", None) for name, each in real.items()}
        found |= {f".grad of {name}": each.grad for name, each in real.items()} if when == "wgrad" else returned
        found |= self._twin.amaxes(when) if when in SCALES else {}
        eager, again = run.eager or [self._twin.compute(run, when) for _ in range(2)]
        run.eager = []  # somebody may keep the output, and with it this
        for name, wanted in eager.items():
            word = name.split(" ")[0]
            if name in found or word != "largest":
                place = self._place(when, name, SYMPTOMS[when, word])
                self._findings.compare(place, found.get(name), wanted, again[name])

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

    def _place(self, when: str, tensor: str, symptom: str = "", text: str = "") -> Place:
        twin, module = self._twin, type(self._twin.module).__name__
        return Place(self._index, module, twin.kinds, twin.enabled, twin.step, when, tensor, symptom, text)
