"""What `make_graphed_callables` gives, each callable compared with its `Twin` at every call in the checked steps."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from transformer_engine.pytorch import graph

from . import Options
from .findings import Findings, Lifetimes, Place, say
from .twin import FIRST, Run, Twin, Values, named_outputs

SYMPTOMS = {"output": "output", "largest": "amax", "gradient": "dgrad", ".grad": "wgrad", "main_grad": "main-grad"}
SYMPTOMS |= {"call": "hooks"}
"""By the first word of a tensor's name what a difference looks like; after `backward_dw` it is ``delayed-``."""
current: list[Check] = []  # the check of this process, the last one


@functools.wraps(graph.make_graphed_callables)
def make(*args: Any, **kwargs: Any) -> Any:
    return current[0].make(*args, **kwargs)


def start(options: Options) -> None:
    """Check what is graphed from now on."""
    if current:
        current.pop().finish()
    current.append(Check(options))
    for module in list(sys.modules.values()):  # others may have imported it already
        for name in [name for name, value in getattr(module, "__dict__", {}).items() if value is make.__wrapped__]:
            setattr(module, name, make)


class Check:
    """The check of this process: modules take turns, a number of them in a number of steps."""

    def __init__(self, options: Options) -> None:
        self.findings = Findings(options.strict)
        self.lifetimes = Lifetimes(self.findings)
        self._options, self._step = options, 0
        self._twins: list[Twin] = []
        self._numbers = itertools.count()
        self._seen: dict[Twin, list[int]] = {}
        self._hook = register_optimizer_step_post_hook(lambda *_: self._seen.clear())

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """What TE makes of these arguments, each callable compared."""
        if self.findings.finished:
            if self.findings.new("late"):
                say("what is graphed from now on is not compared: the steps to be checked are over")
            return make.__wrapped__(*args, **kwargs)
        try:
            given = inspect.signature(make).bind(*args, **kwargs).arguments
            owners = self._owners(given)
        except Exception as error:
            say(f"what is graphed now is not compared: {type(error).__name__}: {error}")
            return make.__wrapped__(*args, **kwargs)
        made, samples, calls = make.__wrapped__(*args, **kwargs), given.get("sample_kwargs") or {}, []
        self._twins += dict.fromkeys(owners)
        for i, (twin, run) in enumerate(zip(owners, made if isinstance(made, tuple) else (made,), strict=True)):
            keys = [*(samples[i] if isinstance(samples, (tuple, list)) else samples)]
            replay = run.forward if run is twin.module else run
            calls.append(call := Checked(self, twin, next(self._numbers), keys, replay, run.backward_dw))
            if run is twin.module:
                run.forward, run.backward_dw, calls[i] = call, call.backward_dw, run
        return tuple(calls) if isinstance(made, tuple) else calls[0]

    def _owners(self, given: Values) -> list[Twin]:
        """A twin for each callable that is asked for: chunks, in them microbatches, in them layers."""
        modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
        fp8, recipe = (given.get(name) or given.get(f"fp8_{name}") for name in ("enabled", "recipe"))
        twins = [Twin(each, bool(fp8[i] if isinstance(fp8, tuple) else fp8), recipe) for i, each in enumerate(modules)]
        if given.get("_order") is None:
            return twins
        chunks, microbatches, rest = int(max(given["_order"])), len(given["sample_args"]) // len(twins), iter(twins)
        layers = given.get("_num_layers_per_chunk") or len(twins) // chunks
        chunked = [[*itertools.islice(rest, n)] for n in ([layers] * chunks if isinstance(layers, int) else layers)]
        return [twin for chunk in chunked for twin in chunk * microbatches]

    def enter(self, twin: Twin, first: bool | None) -> bool:
        """Count the steps of ``twin``, of which a callable is called; whether it is to be compared."""
        parameters = [p for p in twin.parameters.values() if first is None and not p.is_inference()]
        now = [2 * each._version + (each.grad is None) for each in parameters]
        seen, self._seen[twin] = self._seen.get(twin), now
        new = first or seen is None or any(map(operator.gt, now, seen))  # written into, or without a gradient again
        twin.step += bool(new or not twin.module.training)
        if twin.step > self._step:
            self.findings.step_over()
            self._step = twin.step
        steps, layers = self._options.steps, self._options.layers or len(self._twins)
        before, last = self._twins.index(twin) // layers * steps, -(-len(self._twins) // layers) * steps
        if self._step > last + 1 or all(each.step > last for each in self._twins):
            self.finish()
        return before < twin.step <= before + steps

    def finish(self) -> Findings:
        """Report, let go of everything, and give what has been found."""
        self._hook.remove()
        self.lifetimes.undo.close()
        self.findings.finish()
        for twin in self._twins:
            twin.own.clear()
        return self.findings


class Checked:
    """One graphed callable beside its twin."""

    def __init__(self, check: Check, twin: Twin, index: int, keys: list[str], replay: Any, replay_wgrads: Any) -> None:
        functools.update_wrapper(self, replay).__dict__.pop("backward_dw", None)
        self._check, self._twin, self._index, self._keys = check, twin, index, keys
        self._replay, self._replay_wgrads, self._training = replay, replay_wgrads, twin.module.training
        self._findings, self._lifetimes = check.findings, check.lifetimes
        self._delayed: Run | None = None

    def __deepcopy__(self, memo: object) -> Checked:
        return self  # as a function is: programs copy modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        over = self._findings.finished or self._twin.module.training != self._training
        if over or torch.cuda.is_current_stream_capturing():
            return self._replay(*args, **kwargs)
        self._delayed, first, stream = None, kwargs.get(FIRST), kwargs.get("cuda_graph_stream")
        given = {key: kwargs[key] for key in self._keys if key in kwargs}
        run = self._attempt(Run, self._twin, args, given, first) if self._check.enter(self._twin, first) else None
        self._attempt(self._before, run, "forward")
        result = self._replay(*args, **kwargs)
        self._attempt(self._after_forward, run, tree_leaves(result), stream)
        return result

    def backward_dw(self) -> None:
        run, self._delayed = self._delayed, None
        if run is None or self._findings.finished:
            self._replay_wgrads()
            return
        self._attempt(self._before, run, "wgrad")
        compare = functools.partial(self._attempt, self._after, run, "wgrad", {})
        followed = [hooks for each in run.delayed if (hooks := each.wgrad_accumulation_and_reduce_hooks)]
        with ExitStack() as stack:
            for hooks in followed:
                hooks.insert(0, compare)  # before those that hand the gradients on
                stack.callback(hooks.remove, compare)
            self._replay_wgrads()
        if run.eager and followed:
            self._findings.compare(self._place("wgrad", "call of the hooks that follow"), None, True, True)
        compare()

    def _after_forward(self, run: Run | None, tensors: list[Any], stream: Any) -> None:
        self._after(run, "forward", named_outputs(tensors), stream)
        numbers = {i: each.output_nr for i, each in enumerate(tensors) if isinstance(each, torch.Tensor)}
        node = next((tensors[i].grad_fn for i in numbers if tensors[i].grad_fn is not None), None)
        if run is None or node is None:
            return
        parameters = {each: f".grad of {name}" for name, each in self._twin.parameters.items()}
        leaves = [getattr(edge, "variable", None) for edge, _ in node.next_functions]
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

    def _before(self, run: Run | None, when: str) -> None:
        if run is not None:
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
                parameter = real.get(name.removeprefix(".grad of "))
                self._lifetimes.returned[tensor.data_ptr()] = self._place(when, name), parameter
        if run is None or not run.eager:  # it raised, or has been compared
            return
        found = {f"main_grad of {name}": getattr(each, "main_grad", None) for name, each in real.items()}
        found |= {f".grad of {name}": each.grad for name, each in real.items()} if when == "wgrad" else returned
        found |= self._twin.amaxes(when)
        (eager, again), run.eager = run.eager, []  # somebody may keep the output, and with it this
        for name, wanted in eager.items():
            if name in found or not name.startswith("largest"):
                self._findings.compare(self._place(when, name), found.get(name), wanted, again[name])

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something of the check's own, which may not end the job."""
        if self._findings.finished:
            return None
        if not self._twin.refusal:
            try:
                return work(*args)
            except Exception as error:
                self._twin.refusal = f"run eagerly, it raised {type(error).__name__}: {error}"
        return self._findings.leave_out(self._index, self._twin.name, self._twin.refusal)

    def _place(self, when: str, tensor: str) -> Place:
        twin, symptom = self._twin, "delayed-" * (when == "wgrad") + SYMPTOMS[tensor.split(" ")[0]]
        return Place(twin.name, when, tensor, symptom, self._index, twin.step, twin.kinds)
