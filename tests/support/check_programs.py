"""Programs of many kinds under ``te_graph_fixes.check``, on the simulator: a line of JSON for each.

    python -m tests.simulator tests/support/check_programs.py [NAME ...]

A line has the name, whether the program computed the same as without the check, bit for bit, what was found and left
out, and how many steps and tensors were compared.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.checking import twins

OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
OP_OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
Program = Callable[[], Iterator[Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def rand(*shape: int, grad: bool = True) -> Any:
    return torch.randn(*(shape or (32, 32)), dtype=torch.bfloat16, device="cuda", requires_grad=grad)


class Module(torch.nn.Module):
    """Two layers, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = (te.Linear(32, 32, **OPTIONS) for _ in range(2))
        self.function, self.calls = forward, []  # type: ignore[var-annotated]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def train(
    module: Any, *samples: Any, run: Any = None, loss: Any = None, steps: int = 4, microbatches: int = 2, **options: Any
) -> Iterator[Any]:
    """Graph ``module`` as one and train it: what each microbatch and step computed. ``run`` calls what is graphed."""
    samples = samples or (rand(),)
    kwargs = options.get("sample_kwargs") or {}
    graphed = te.make_graphed_callables(module, samples, allow_unused_input=True, **options)
    for _ in range(steps):
        for _ in range(microbatches):
            args, given = tree_map(lambda x: rand(*x.shape, grad=x.requires_grad), (samples, kwargs))
            out = run(graphed, *args, **given) if run else graphed(*args, **given)
            used = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor) and x.requires_grad]
            (loss(out) if loss else sum(x.float().square().mean() for x in used)).backward()
            yield out, [x.grad for x in (*args, *given.values())]
        yield update(module)


def update(module: Any) -> list[Any]:
    """Change each parameter by its gradient, and give the gradients."""
    grads = [parameter.grad for parameter in module.parameters()]
    with torch.no_grad():
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            if grad is not None:
                parameter -= 0.1 * grad
            parameter.grad = None
    return grads


def in_fp8(recipe: Any) -> Callable[..., Any]:
    def run(graphed: Any, *args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=True, recipe=recipe):
            return graphed(*args, **kwargs)

    return run


@program
def keyword_arguments() -> Iterator[Any]:
    def forward(module: Any, x: Any, *, scale: Any, shift: Any) -> Any:
        return module.a(x) * scale + shift

    return train(Module(forward), sample_kwargs={"shift": rand(), "scale": rand(grad=False)})


@program
def samples_by_position() -> Iterator[Any]:
    module = Module(lambda module, x, *, scale: module.a(x) * scale)
    graphed = te.make_graphed_callables(module, (rand(),), 3, True, {"scale": rand()})
    for _ in range(4):
        x, scale = rand(), rand()
        out = graphed(x, scale=scale)
        out.sum().backward()
        yield out, x.grad, scale.grad, update(module)


@program
def outputs_in_a_dictionary() -> Iterator[Any]:
    return train(Module(lambda module, x: {"b": module.a(x), "a": (x * 2, module.b(x), None)}))


@program
def an_output_that_nobody_uses() -> Iterator[Any]:
    return train(Module(lambda module, x: (module.a(x), module.b(x))), loss=lambda out: out[0].float().sum())


@program
def inputs_without_gradients() -> Iterator[Any]:
    return train(Module(lambda module, x, y: module.a(x) * y), rand(grad=False), rand(32, 1, grad=False))


@program
def no_elements() -> Iterator[Any]:
    return train(Module(lambda module, x, empty: (module.a(x), empty * 2)), rand(), rand(0, 32))


@program
def frozen_parameters() -> Iterator[Any]:
    module = te.LayerNormLinear(32, 32, **OPTIONS)
    module.weight.requires_grad_(False)
    return train(module)


def infer(mode: Any) -> Iterator[Any]:
    """Make, graph and replay a module without gradients."""
    with mode:
        graphed = te.make_graphed_callables(te.Linear(32, 32, **OPTIONS).eval(), (rand(grad=False),))
        for _ in range(4):
            yield graphed(rand(grad=False))


@program
def inference() -> Iterator[Any]:
    return infer(torch.no_grad())


@program
def parameters_without_versions() -> Iterator[Any]:
    return infer(torch.inference_mode())


@program
def evaluation_in_between() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    for _ in range(4):
        with torch.no_grad():
            yield graphed(rand(grad=False))
            module.eval()
            yield graphed(rand(grad=False))
            module.train()
        yield graphed(rand())  # nobody calls its backward
        x = rand()
        graphed(x).sum().backward()
        yield x.grad, update(module)


@program
def captured_again() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    for _ in range(3):
        graphed = te.make_graphed_callables(
            (module,), [(rand(),), (rand(),)], sample_kwargs=[{}, {}], _order=[1, -1, 1, -1], _num_layers_per_chunk=[1]
        )
        for _ in range(2):
            for each in graphed:
                x = rand()
                each(x).sum().backward()
                yield x.grad
            yield update(module)
        for each in graphed:
            each.reset()


@program
def a_reentrant_checkpoint_around() -> Iterator[Any]:
    return train(te.Linear(32, 32, **OPTIONS), run=lambda run, x: checkpoint(run, x, use_reentrant=True))


@program
def a_checkpoint_around() -> Iterator[Any]:
    def run(graphed: Any, x: Any) -> Any:
        return checkpoint(lambda y: graphed(y.sin()), x, use_reentrant=False)

    return train(te.Linear(32, 32, **OPTIONS), run=run)


@program
def checkpoint_of_te_around_current_scaling() -> Iterator[Any]:
    return in_checkpoint_of_te(recipes.Float8CurrentScaling())


@program
def checkpoint_of_te_around_delayed_scaling() -> Iterator[Any]:
    return in_checkpoint_of_te(recipes.DelayedScaling())


def in_checkpoint_of_te(recipe: Any) -> Iterator[Any]:
    def run(graphed: Any, x: Any) -> Any:
        with te.autocast(enabled=True, recipe=recipe):
            return te.checkpoint(graphed, x)

    return train(te.LayerNormMLP(32, 64, **OPTIONS), run=run, enabled=True, recipe=recipe)


@program
def a_recomputation_behind_another_graph() -> Iterator[Any]:
    recipe = recipes.DelayedScaling()
    layers = torch.nn.ModuleList([te.Linear(32, 32, **OPTIONS), Module(lambda module, x: te.checkpoint(module.a, x))])
    samples = (rand(),), (rand(),)
    run, recompute = te.make_graphed_callables(tuple(layers), samples, enabled=True, recipe=recipe)
    for _ in range(4):
        x = rand()
        out = in_fp8(recipe)(lambda x: recompute(run(x)), x)
        out.float().square().mean().backward()
        yield out, x.grad, update(layers)


@program
def operations_in_fp8() -> Iterator[Any]:
    recipe = recipes.DelayedScaling()
    module = te.ops.Sequential(te.ops.LayerNorm(32, **OP_OPTIONS), te.ops.Linear(32, 32, **OP_OPTIONS))
    return train(module, run=in_fp8(recipe), enabled=True, recipe=recipe)


@program
def weights_said_to_be_old() -> Iterator[Any]:
    recipe = recipes.DelayedScaling()
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),), enabled=True, recipe=recipe, cache_quantized_params=True)
    module.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([module.bias], lr=0.1)
    for microbatch in range(8):
        x = rand()
        in_fp8(recipe)(graphed, x, is_first_microbatch=microbatch == 0).sum().backward()
        yield x.grad, module.bias.grad
        if microbatch % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
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


@program
def gradients_kept_and_clipped() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(3):
            graphed(rand()).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        yield module.weight.grad, module.bias.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@program
def backward_twice() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),), retain_graph_in_backward=True)
    for _ in range(4):
        x = rand()
        out = graphed(x)
        out.sum().backward(retain_graph=True)
        yield torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        yield update(module)


@program
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
                    raise ValueError("its wgrads are never computed")
                graphed.backward_dw()
                yield out, x.grad
            except (ValueError, RuntimeError):
                continue
        yield update(module)


@program
def a_module_that_keeps_things() -> Iterator[Any]:
    def forward(module: Any, x: Any) -> Any:
        module.calls.append(1)
        return module.a(x)

    module = Module(forward)
    yield from train(module)
    yield torch.tensor(len(module.calls))


@program
def a_module_that_is_copied() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    yield from train(module)
    yield list(copy.deepcopy(module).parameters())


@program
def a_parameter_added_afterwards() -> Iterator[Any]:
    module = Module(lambda module, x: module.b(module.a(x)))
    graphed = te.make_graphed_callables(module, (rand(),))
    module.b.extra = torch.nn.Parameter(rand().detach())
    for _ in range(4):
        x = rand()
        graphed(x).sum().backward()
        yield x.grad, update(module)


@program
def hooks_added_afterwards() -> Iterator[Any]:
    module = te.Linear(32, 32, **OPTIONS)
    graphed = te.make_graphed_callables(module, (rand(),))
    graphed.register_forward_hook(lambda module, inputs, out: out * 2)
    graphed.weight.register_hook(lambda grad: grad * 3)
    for _ in range(4):
        out = graphed(rand())
        out.sum().backward()
        yield out, update(module)


def values(name: str) -> list[torch.Tensor] | str:
    FP8GlobalStateManager.reset()
    torch.manual_seed(7)
    try:
        found = [
            x.detach().clone()
            for computed in PROGRAMS[name]()
            for x in tree_flatten(computed)[0]
            if isinstance(x, torch.Tensor)
        ]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [*found, torch.get_rng_state()]


def main(names: list[str]) -> None:
    for name in names or PROGRAMS:
        without = values(name)
        te_graph_fixes.check(2)
        checked = values(name)
        before_the_end = twins.current[0].finished
        found = twins.current[0].finish()
        both = isinstance(without, list) and isinstance(checked, list)
        line = {
            "name": name,
            "same": both and len(without) == len(checked) and all(map(alike, without, checked)),
            "raised": [each for each in (without, checked) if isinstance(each, str)],
            "found": found.mismatches,
            "ended": before_the_end,
            **found.totals,
        }
        print(json.dumps(line), flush=True)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


if __name__ == "__main__":
    main(sys.argv[1:])
