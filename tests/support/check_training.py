"""Train under ``te_graph_fixes.check`` on the simulator, and print one line of JSON for each training.

    python -m tests.simulator tests/support/check_training.py [--without FIX,FIX] TRAINING ...

A TRAINING is one of these:

- the options of a `Program` as JSON, or the name of a case of `verify`
- a text that begins with a member of `SETS`, such as ``held by a``: all trainings below whose names begin with the text
- ``others``: all trainings below whose names begin differently

``--without`` disables the named fixes, and ``--without all`` disables every fix. The trainings below exist because
`Program` cannot describe them. Each line contains the mismatches with their likely causes, the reasons for modules that
were left out, the check's totals, whether it ended by itself, and whether training without it is bit-identical.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils._pytree import tree_leaves
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes

if sys.argv[1:2] == ["--without"]:
    te_graph_fixes.activate(
        only=[] if sys.argv[2] == "all" else None, disable=sys.argv[2].split(",") * (sys.argv[2] != "all")
    )
    del sys.argv[1:3]

from te_graph_fixes.checking import callables
from tests.verify.cases import CASES
from tests.verify.driver import events, setting
from tests.verify.driver.comparison import error
from tests.verify.driver.program import Program

COMPUTED = ("outputs", "dgrads", "wgrads", "parameters", "FP8 state", "RNG state")
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
OTHERS: dict[str, Callable[[], Iterator[Any]]] = {}


def other(training: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    OTHERS[training.__name__.replace("_", " ")] = training
    return training


def rand(*shape: int, grad: bool = True) -> Any:
    return torch.randn(*(shape or (32, 32)), dtype=torch.bfloat16, device="cuda", requires_grad=grad)


class Module(torch.nn.Module):
    """A module of two layers, with the ``forward`` that its creator passes."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = (te.Linear(32, 32, **OPTIONS) for _ in range(2))
        self.function = forward
        self.calls: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def update(module: Any) -> list[Any]:
    """Update each parameter by its gradient, set its ``.grad`` to None, and return the list of gradients."""
    grads = [parameter.grad for parameter in module.parameters()]
    with torch.no_grad():
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            if grad is not None:
                parameter -= 0.1 * grad
            parameter.grad = None
    return grads


@other
def arguments_and_outputs_of_every_kind() -> Iterator[Any]:
    """Pass tensors by position and keyword, one of them empty. Run the backward of only one output."""

    def forward(module: Any, x: Any, empty: Any, *, scale: Any, shift: Any) -> Any:
        return {"b": module.a(x) * scale + shift, "a": (empty * 2, module.b(x), None)}

    module = Module(forward)
    given = {"shift": rand(), "scale": rand(grad=False)}
    graphed = te.make_graphed_callables(module, (rand(), rand(0, 32)), 3, True, given)
    for _ in range(4):
        x, empty, shift = rand(), rand(0, 32), rand()
        out = graphed(x, empty, scale=rand(grad=False), shift=shift)
        out["b"].sum().backward()
        yield out, x.grad, shift.grad, update(module)


@other
def parameters_without_versions() -> Iterator[Any]:
    with torch.inference_mode():
        graphed = te.make_graphed_callables(te.Linear(32, 32, **OPTIONS).eval(), (rand(grad=False),))
        for _ in range(4):
            yield graphed(rand(grad=False))


@other
def evaluation_in_between() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    for _ in range(4):
        with torch.no_grad():
            yield graphed(rand(grad=False))
            module.eval()
            yield graphed(rand(grad=False))
            module.train()
        yield graphed(rand())  # the backward of this output is never called
        x = rand()
        graphed(x).sum().backward()
        yield x.grad, update(module)


@other
def weights_said_to_be_old() -> Iterator[Any]:
    recipe = recipes.DelayedScaling()
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),), enabled=True, recipe=recipe, cache_quantized_params=True)
    module.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([module.bias], lr=0.1)
    for microbatch in range(8):
        x = rand()
        with te.autocast(enabled=True, recipe=recipe):
            out = graphed(x, is_first_microbatch=microbatch == 0)
        out.sum().backward()
        yield x.grad, module.bias.grad
        if microbatch % 2:
            optimizer.step()
            optimizer.zero_grad()


@other
def parameters_changed_by_their_data() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    for _ in range(4):
        for _ in range(2):
            graphed(rand()).sum().backward()
        yield module.weight.grad
        for parameter in module.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None


@other
def batches_that_fail() -> Iterator[Any]:
    module = te.Linear(32, 32, delay_wgrad_compute=True, **OPTIONS)
    order: dict[str, Any] = {"_order": [1, -1, -1.5], "_num_layers_per_chunk": [1], "allow_unused_input": True}
    graphed = te.make_graphed_callables((module,), [(rand(),)], sample_kwargs=[{}], **order)[0]
    for step in range(4):
        for microbatch in range(2):
            try:
                x = rand(16 if (step, microbatch) == (0, 0) else 32, 32)
                out = graphed(x)
                out.sum().backward()
                if microbatch == 0:
                    raise ValueError("a simulated error before the delayed wgrads of a microbatch")
                graphed.backward_dw()
                yield out, x.grad
            except (ValueError, RuntimeError):
                continue
        yield update(module)


@other
def a_module_that_keeps_things() -> Iterator[Any]:
    def forward(module: Any, x: Any) -> Any:
        module.calls.append(1)
        return module.a(x)

    module = Module(forward)
    graphed = te.make_graphed_callables(module, (rand(),), allow_unused_input=True)
    for _ in range(4):
        graphed(rand()).sum().backward()
        yield update(module), torch.tensor(len(module.calls))


@other
def left_out_a_parameter_added_afterwards() -> Iterator[Any]:
    module = Module(lambda module, x: module.b(module.a(x)))
    graphed = te.make_graphed_callables(module, (rand(),))
    module.b.extra = torch.nn.Parameter(rand().detach())
    for _ in range(4):
        x = rand()
        graphed(x).sum().backward()
        yield x.grad, update(module)


@other
def hooks_added_afterwards() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    graphed.register_forward_hook(lambda module, inputs, out: out * 2)
    graphed.weight.register_hook(lambda grad: grad * 3)
    for _ in range(4):
        out = graphed(rand())
        out.sum().backward()
        yield out, update(module)


class Scaled(torch.nn.Module):
    """A module of two layers that applies a function to their output. ``hold`` returns this function for the module."""

    def __init__(self, hold: Callable[[Any], Callable[[Any], Any]], checkpoint: Callable[..., Any] | None) -> None:
        super().__init__()
        self.linear = te.Linear(32, 32, fuse_wgrad_accumulation=True, **OPTIONS)
        self.square = te.Linear(32, 32, bias=False, **OPTIONS)
        self.scale = torch.nn.Parameter(torch.ones(32, device="cuda"))
        self.register_buffer("count", torch.zeros(1, device="cuda"))
        self.function = hold(self)
        self.checkpoint = checkpoint

    def forward(self, x: Any) -> Any:
        x = self.square(self.linear(x))
        return (self.checkpoint(self.function, x) if self.checkpoint else self.function(x)).to(x.dtype)


def a_closure(module: Any) -> Any:
    return lambda x: x * module.scale


def a_view(module: Any) -> Any:
    view = module.scale.view(2, 16).T.T.view(32)
    return lambda x: x * view


def a_copy_in_another_type(module: Any) -> Any:
    copy = module.scale.to(torch.bfloat16)
    return lambda x: x * copy


def another_submodule(module: Any) -> Any:
    """Return a function that calls a new submodule, which shares a parameter with ``module``."""
    module.other = Module(lambda other, x: other.b(x) * other.scale)
    module.other.scale = module.scale
    return lambda x: module.other(x)


def a_module_in_a_list(module: Any) -> Any:
    """Return a function that calls a frozen module in a list."""
    module.held = [te.Linear(32, 32, **OPTIONS).requires_grad_(False)]
    return lambda x: module.held[0](x) * module.scale


def a_buffer(module: Any) -> Any:
    count = module.count

    def use(x: Any) -> Any:
        count.add_(1)
        return x * 2

    return use


class AddToMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, main_grad: Any) -> Any:
        ctx.main_grad = main_grad
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.main_grad.add_(grad.float().sum(0))
        return grad * 2, None


def a_main_grad_in_a_closure(module: Any) -> Any:
    main_grad = module.scale.main_grad = torch.zeros(32, device="cuda")
    return lambda x: AddToMainGrad.apply(x, main_grad)


def a_fused_module_in_a_list(module: Any) -> Any:
    held = [te.Linear(32, 32, fuse_wgrad_accumulation=True, bias=False, **OPTIONS)]
    held[0].weight.main_grad = torch.zeros(32, 32, device="cuda")
    return lambda x: held[0](x)


def an_fp8_module_in_a_list(module: Any) -> Any:
    held = [te.Linear(32, 32, **OPTIONS).requires_grad_(False)]

    def use(x: Any) -> Any:
        with te.autocast(enabled=True, recipe=recipes.DelayedScaling()):
            return held[0](x)

    return use


SUMS: dict[str, Any] = {}


def a_global_sum(module: Any) -> Any:
    """Return a function that adds to a global tensor, as Megatron-Core's tracker of auxiliary losses does."""
    SUMS["loss"] = torch.zeros(2, 3, device="cuda")

    def use(x: Any) -> Any:
        SUMS["loss"][1] += x.detach().float().square().mean()
        SUMS["loss"][:, 1].add_(1)
        return x * module.scale + SUMS["loss"].mean()

    return use


def a_sum_in_the_backward(module: Any) -> Any:
    """Return a function that registers a hook. In the backward, the hook adds to a global tensor."""
    SUMS["grad"] = torch.zeros(32, device="cuda")

    def add(grad: Any) -> None:
        SUMS["grad"].add_(grad.float().sum(0))

    def use(x: Any) -> Any:
        x = x * module.scale
        if x.requires_grad:  # In the first forward of a checkpoint, x needs no gradient.
            x.register_hook(add)
        return x

    return use


HELD = (a_closure, a_view, a_copy_in_another_type, another_submodule, a_module_in_a_list)
"""The values of ``hold`` whose functions refer to the module or its parameter in different ways."""
WRITTEN = (a_global_sum, a_sum_in_the_backward)
"""The values of ``hold`` whose functions, or hooks of these functions, write to global tensors."""
LEFT_OUT = (a_buffer, a_main_grad_in_a_closure, a_fused_module_in_a_list, an_fp8_module_in_a_list)
"""The values of ``hold`` with which the check leaves out the module."""
CHECKPOINTS: dict[str, Callable[..., Any] | None] = {
    "": None,
    " in a checkpoint of TE": te.checkpoint,
    " in a reentrant checkpoint": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}


def train_scaled(hold: Callable[[Any], Any], checkpoint: Callable[..., Any] | None) -> Iterator[Any]:
    """Train with hooks that add each ``.grad`` to ``main_grad``, as Megatron does. The calls of hooks are counted."""
    SUMS.clear()
    module, calls = Scaled(hold, checkpoint), collections.Counter[str]()
    graphed: list[bool] = []
    nodes = []
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])

        def add(*_: Any, parameter: Any = parameter, name: str = name) -> None:
            calls[f"node of {name}"] += 1
            if graphed and parameter.grad is not None:
                if not parameter.grad_added_to_main_grad:
                    parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

        nodes[-1].register_hook(add)
        nodes[-1].register_prehook(lambda *_, name=name: calls.update([f"prehook of {name}"]))
        parameter.register_hook(lambda grad, name=name: calls.update([f"tensor {name}"]))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: calls.update([f"after {name}"]))
    callable_ = te.make_graphed_callables(module, (rand(),))
    graphed.append(True)
    calls.clear()
    for _ in range(4):
        for parameter in module.parameters():
            parameter.main_grad.zero_()
        for _ in range(2):
            x = rand()
            callable_(x).float().square().mean().backward()
            yield x.grad, [torch.tensor(number) for _, number in sorted(calls.items())], module.count
        yield [parameter.main_grad for parameter in module.parameters()], [*SUMS.values()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.main_grad


for at, checkpoint in CHECKPOINTS.items():
    for kind, ways in {"held by": HELD, "written": WRITTEN, "left out": LEFT_OUT if not at else ()}.items():
        for hold in ways:
            OTHERS[f"{kind} {hold.__name__.replace('_', ' ')}{at}"] = partial(train_scaled, hold, checkpoint)


def run_program(options: dict[str, Any]) -> Iterator[Any]:
    setting.use(Program(**options))
    seen = events.train(graphed=True)
    yield [values for name, values in seen.items() if name.partition(": ")[2] in COMPUTED]


def values(training: Callable[[], Iterator[Any]]) -> list[torch.Tensor | None]:
    FP8GlobalStateManager.reset()
    torch.manual_seed(7)
    leaves = [leaf for computed in training() for leaf in tree_leaves(computed)]
    tensors = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [*tensors, torch.get_rng_state()]


def measure(name: str, training: Callable[[], Iterator[Any]]) -> dict[str, Any]:
    without = values(training)
    te_graph_fixes.check(2)
    checked = values(training)
    check = callables.current[0]
    ended = check.finished
    check.finish()
    looks = [text.partition("; likely cause: ")[2] for text in check.mismatches]
    return {
        "name": name,
        "same": error(checked, without) == 0.0,
        "found": check.mismatches,
        "hints": sorted({fix for look in looks if look for fix in look.split(" or ")}),
        "ended": ended,
        "refusals": sorted({reference.refusal for reference in check.references} - {""}),
        **check.totals,
    }


SETS = ("held by ", "written ", "left out ")
for argument in sys.argv[1:]:
    if argument == "others":
        trainings = {name: OTHERS[name] for name in OTHERS if not name.startswith(SETS)}
    elif argument.startswith(SETS):
        trainings = {name: training for name, training in OTHERS.items() if name.startswith(argument)}
    else:
        options = json.loads(argument) if argument.startswith("{") else dict(CASES[argument].options)
        trainings = {argument: partial(run_program, options)}
    for name, training in trainings.items():
        print(json.dumps(measure(name, training)), flush=True)
