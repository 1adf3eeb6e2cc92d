"""Graphed callables of `make_graphed_callables` that compare each call with an eager run."""

import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, update_wrapper, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformer_engine.pytorch import graph

from . import Options
from .findings import Check, print_line
from .isolation import MARK, NotIsolatedError
from .lifetimes import Subject
from .reference import FIRST, EagerReference, Microbatch, Values, copied, named_outputs

current: list[Check] = []
"""The latest check of this process; [] if there is none."""


def start(options: Options) -> None:
    """End the previous check, if any, and check the graphs captured after this call."""
    if current:
        current.pop().finish()
    current.append(Check(options))
    original = make_checked_graphed_callables.__wrapped__
    for module in list(sys.modules.values()):  # other modules may have imported TE's function already
        for name in [name for name, value in getattr(module, "__dict__", {}).items() if value is original]:
            setattr(module, name, make_checked_graphed_callables)


@wraps(graph.make_graphed_callables)
def make_checked_graphed_callables(*args: Any, **kwargs: Any) -> Any:
    make = make_checked_graphed_callables.__wrapped__
    check, capture = current[0], partial(make, *args, **kwargs)
    if check.finished:
        if check.is_new("late"):
            print_line("graphs captured from now on are not compared, because the checked steps are over")
        return capture()
    try:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        references = _references(given)
    except Exception as error:
        reason = f"the check cannot read its arguments ({type(error).__name__}: {error})"
        print_line(f"the graphs of this capture are not compared, because {reason}")
        return capture()
    made = capture()
    check.references += dict.fromkeys(references)
    graphs = made if isinstance(made, tuple) else (made,)
    samples: Any = given.get("sample_kwargs") or ({},) * len(graphs)
    samples = (samples,) if isinstance(samples, dict) else samples
    checked = tuple(CheckedCallable(check, *parts) for parts in zip(references, graphs, samples, strict=True))
    if graphs[0] is not references[0].module:
        return checked if isinstance(made, tuple) else checked[0]
    for module, call in zip(graphs, checked, strict=True):
        module.forward, module.backward_dw = call, call.backward_dw
    return made


def _references(given: Values) -> list[EagerReference]:
    """Return the eager reference of each callable, in TE's order: sorted by chunk, then microbatch, then layer."""
    modules = given["modules"] if isinstance(given["modules"], tuple) else (given["modules"],)
    fp8, recipe = (given.get(name) or given.get(f"fp8_{name}") for name in ("enabled", "recipe"))
    enabled = fp8 if isinstance(fp8, tuple) else (fp8,) * len(modules)
    options = recipe, bool(given.get("retain_graph_in_backward"))
    references = [EagerReference(module, bool(on), *options) for module, on in zip(modules, enabled, strict=True)]
    if given.get("_order") is None:
        return references
    chunks, microbatches = int(max(given["_order"])), len(given["sample_args"]) // len(references)
    layers = given.get("_num_layers_per_chunk") or len(references) // chunks
    sizes = [layers] * chunks if isinstance(layers, int) else layers
    rest = iter(references)
    return [reference for size in sizes for reference in [*itertools.islice(rest, size)] * microbatches]


class CheckedCallable:
    """A graphed callable, compared with its eager reference."""

    def __init__(self, check: Check, reference: EagerReference, graphed: Any, sample: Values) -> None:
        self._replay = graphed.forward if graphed is reference.module else graphed
        update_wrapper(self, self._replay).__dict__.pop("backward_dw", None)
        self._check, self._reference, self._index = check, reference, next(check.numbers)
        reference.callables.append(self._index)
        self._keys = [*sample, *reference.takes]
        self._replay_wgrads, self._training = graphed.backward_dw, reference.module.training
        self._delayed: Microbatch | None = None

    def __deepcopy__(self, memo: object) -> "CheckedCallable":
        return self  # Copies of a module share this callable, as they would share a function.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._delayed, first = None, kwargs.get(FIRST)
        is_over = self._check.finished or self._reference.module.training != self._training
        if is_over or torch.cuda.is_current_stream_capturing() or not self._check.enter(self._reference, first):
            return self._replay(*args, **kwargs)
        given = {key: kwargs[key] for key in self._keys if key in kwargs}  # The graph numbers its inputs in this order.
        run = self._attempt(Microbatch, self._reference, args, given, first)
        self._attempt(self._before_replay, run, "forward")
        result = self._replay(*args, **kwargs)
        self._reference.graph_leaves_marks |= any(self._reference.first_microbatch_marks().values())
        self._attempt(self._after_forward, run, tree_leaves(result), kwargs.get("cuda_graph_stream"))
        return result

    def backward_dw(self) -> None:
        run, self._delayed = self._delayed, None
        if run is None or self._check.finished:
            self._replay_wgrads()
            return
        self._attempt(self._before_replay, run, "wgrad")
        compare = partial(self._attempt, self._after_replay, run, "wgrad", {})
        followed = [hooks for module in run.delayed if (hooks := module.wgrad_accumulation_and_reduce_hooks)]
        with ExitStack() as stack:
            for hooks in followed:
                hooks.insert(0, compare)  # The hooks that follow may move the gradients.
                stack.callback(hooks.remove, compare)
            self._replay_wgrads()
        if run.eager and followed:
            self._check.compare(self._subject("wgrad", "call of the hooks that follow"), None, True, True)
        compare()

    def _after_forward(self, run: Microbatch, tensors: list[Any], stream: Any) -> None:
        self._after_replay(run, "forward", named_outputs(tensors), stream)
        node = next((tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn), None)
        if node is None:
            return
        if node.name() == "CloneBackward0":  # added by replay-contract if a checkpoint may rerun a graph
            node = node.next_functions[0][0]
        parameters = {parameter: f".grad of {name}" for name, parameter in self._reference.parameters.items()}
        leaves = [getattr(edge, "variable", None) for edge, _ in node.next_functions]
        names = [parameters.get(leaf, f"gradient of input {i}") for i, leaf in enumerate(leaves)]

        def after(grads: Any) -> None:
            self._after_replay(run, "backward", dict(zip(names, grads, strict=True)), stream)
            self._delayed = run if run.delayed else None

        node.register_prehook(lambda grads: self._attempt(self._before_replay, run, "backward", grads))
        node.register_hook(lambda grads, _: self._attempt(after, grads))

    def _before_replay(self, run: Microbatch, when: str, grads: Any = None) -> None:
        """Run the reference before a replay. Before a backward, ``grads`` are the gradients of the outputs."""
        if grads:
            run.backward = copied(grads), self._reference.state()
        run.eager = self._reference.compute(run, when)
        self._check.lifetimes.before_replay()

    def _after_replay(self, run: Microbatch, when: str, returned: Values, stream: Any = None) -> None:
        """Compare all that a replay has written: the ``returned`` tensors, gradients, amaxes and marks (`MARK`)."""
        if stream is not None:  # Wait until the graph has written the tensors.
            torch.cuda.current_stream().wait_stream(stream)
        self._check.lifetimes.after_replay(f"the {when} of callable {self._index}")
        subjects = {x.data_ptr(): self._subject(when, name) for name, x in returned.items() if x is not None}
        self._check.lifetimes.returned |= subjects
        if not run.eager:  # The results have already been compared.
            return
        values = self._reference.amaxes(when)
        for name, parameter in self._reference.parameters.items():
            values[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
            values[f".grad of {name}"] = parameter.grad if when == "wgrad" else None
            values[f"mark {MARK} of {name}"] = bool(getattr(parameter, MARK, False))
        values |= returned
        (eager, again), run.eager = run.eager, []  # An output in use keeps ``run`` alive, so drop the results.
        for name, expected in eager.items():
            is_delayed = run.delayed and when == "backward" and name.startswith(".grad of ")
            if is_delayed and (values[name] is None or expected is None):
                continue  # Until `backward_dw` computes the gradient, eager TE may return uninitialized memory.
            if name in values:
                self._check.compare(self._subject(when, name), values[name], expected, again[name])

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return ``work(*args)``, or None if the check has ended or leaves out the callable, as after an error."""
        reference = self._reference
        if self._check.finished:
            return None
        if not reference.refusal:
            try:
                return work(*args)
            except NotIsolatedError as error:
                reference.refusal = str(error)
            except Exception as error:
                reference.refusal = f"its eager run raised {type(error).__name__}: {error}"
        return self._check.leave_out(self._index, reference)

    def _subject(self, when: str, tensor: str) -> Subject:
        kind = f"({self._reference.name}), {when}: {tensor}"
        return Subject(self._check.step, self._index, kind, self._reference)
