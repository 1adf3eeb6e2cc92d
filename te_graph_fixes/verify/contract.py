"""Programs that break what a capture has fixed: a replay has to give the numbers of eager training, or to raise.

A program trains modules of its own, graphed or not, and gives tensors to compare. One that raises what the fix raises
counts as right (``refused``).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint

from .driver.comparison import error
from .driver.setting import HIDDEN, TOKENS, plain_recipe

OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}

Program = Callable[[bool], "Iterable[torch.Tensor]"]
"""Trains, by graphs if the flag says so, and gives what is to be compared."""

REFUSED = r"callable \d|captured with|modified by an inplace operation"
"""What refusals say: those of the fix, and those of autograd, which it tells that a replay has written an output."""
BROKEN: dict[str, Program] = {}
"""Programs that have to raise, by name."""
RIGHT: dict[str, Program] = {}
"""Programs that have to compute what eager training does."""


def broken(function: Program) -> Program:
    """Enter a function into the programs that have to raise."""
    BROKEN[function.__name__.replace("_", "-")] = function
    return function


def right(function: Program) -> Program:
    """Enter a function into the programs that have to be right."""
    RIGHT[function.__name__.replace("_", "-")] = function
    return function


def compare(name: str) -> dict[str, Any]:
    """Run a program eagerly and through graphs: the largest error, 0.0 where it raises what it has to raise."""
    program = BROKEN.get(name) or RIGHT[name]
    wanted = [tensor.clone() for tensor in program(False)]
    try:
        found = list(program(True))
    except RuntimeError as refusal:
        if name in RIGHT or not re.search(REFUSED, str(refusal)):
            raise
        return {"errors": {"refused": [0.0]}, "message": str(refusal)}
    return {"errors": {"numbers": [error(found, wanted)]}}


def warned(name: str) -> dict[str, Any]:
    """Run a program of `WARNED` twice: an error of 1.0 unless it warns exactly once."""
    program, words = WARNED[name]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program(True)
        program(True)
    texts = [str(warning.message) for warning in found if words in str(warning.message)]
    return {"errors": {"warned": [float(len(texts) != 1)]}, "messages": texts}


def mlp(seed: int = 0, **options: Any) -> Any:
    """A block with activations that its graphs keep in their memory."""
    torch.manual_seed(seed)
    return te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **OPTIONS, **options)


def fused(**options: Any) -> Any:
    """A projection whose wgrad is fused into ``main_grad``."""
    torch.manual_seed(0)
    module = te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, **OPTIONS, **options)
    module.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device="cuda")
    module.weight.grad_added_to_main_grad = False
    return module


def sample() -> tuple[torch.Tensor]:
    """A sample that needs a gradient."""
    return (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True),)


def data(number: int, seed: int = 7) -> list[torch.Tensor]:
    """Inputs, or gradients of outputs, the same for the same seed."""
    torch.manual_seed(seed)
    return [torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(number)]


def grads(*modules: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The gradients of all parameters, zeros for None."""
    for module in modules:
        for parameter in module.parameters():
            yield torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def in_order(order: Sequence[int], replayed: Sequence[int], graphed: bool) -> Iterator[torch.Tensor]:
    """Train one chunk captured in ``order`` in another one; microbatch k runs by the graph of k modulo their number."""
    module, number = mlp(), order.count(1)
    runs = [module]
    if graphed:
        samples = [sample() for _ in range(number)]
        options = {"_num_layers_per_chunk": [1], "_reuse_graph_input_output_buffers": True}
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        runs = list(te.make_graphed_callables((module,), samples, sample_kwargs=kwargs, _order=list(order), **options))
    xs, output_grads = data(replayed.count(1)), data(replayed.count(1), 8)
    under_way = {}
    forwards = backwards = 0
    for entry in replayed:
        if entry > 0:
            under_way[forwards] = runs[forwards % len(runs)](xs[forwards].clone().requires_grad_())
            forwards += 1
        else:
            under_way.pop(backwards).backward(output_grads[backwards])
            backwards += 1
    return grads(module)


@broken
def more_microbatches(graphed: bool) -> Iterator[torch.Tensor]:
    """Captured for two microbatches, run with four, three of which are under way at a time."""
    return in_order((1, 1, -1, -1), (1, 1, 1, -1, 1, -1, -1, -1), graphed)


@right
def fewer_microbatches(graphed: bool) -> Iterator[torch.Tensor]:
    """Captured for four microbatches, run with two."""
    return in_order((1, 1, 1, -1, 1, -1, -1, -1), (1, 1, -1, -1), graphed)


@broken
def other_recipe_under_way(graphed: bool) -> Iterator[torch.Tensor]:
    """An evaluation in another recipe between the forwards of two microbatches in delayed scaling."""
    module, recipe = mlp(), plain_recipe("delayed")
    runs = [module] * 2
    if graphed:
        options = {"enabled": True, "recipe": recipe, "_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
        samples = [sample() for _ in runs]
        runs = list(te.make_graphed_callables((module,), samples, sample_kwargs=[{}, {}], **options))
    for step in range(3):
        outputs = []
        for run, x in zip(runs, data(2), strict=True):
            with te.autocast(enabled=True, recipe=recipe):
                outputs.append(run(x.clone().requires_grad_()))
            if step == 2:
                module.eval()
                with torch.no_grad(), te.autocast(enabled=True, recipe=plain_recipe("current")):
                    module(x)
                module.train()
        for output, grad in zip(outputs, data(2, 8), strict=True):
            output.backward(grad)
    return grads(module)


@broken
def graph_twice_before_its_backward(graphed: bool) -> Iterator[torch.Tensor]:
    """Two forwards of one graph, then two backwards."""
    module = mlp()
    if graphed:
        te.make_graphed_callables(module, sample())
    outputs = [module(x.clone().requires_grad_()) for x in data(2)]
    for output, grad in zip(outputs, data(2, 8), strict=True):
        output.backward(grad)
    return grads(module)


@broken
def module_twice_in_a_tuple(graphed: bool) -> Iterator[torch.Tensor]:
    """A module that is captured twice and called twice replays its second graph both times."""
    module, (x,), (grad,) = mlp(), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables((module, module), (sample(), sample()))
    module(module(x.clone().requires_grad_())).backward(grad)
    return grads(module)


@broken
def captures_nested_in_a_pool(graphed: bool) -> Iterator[torch.Tensor]:
    """Two captures share a pool; what was captured second runs within what was captured first."""
    first, second, (x,), (grad,) = mlp(0), mlp(1), data(1), data(1, 8)
    if graphed:
        pool = te.graph.graph_pool_handle()
        te.make_graphed_callables(first, sample(), pool=pool)
        te.make_graphed_callables(second, sample(), pool=pool)
    second(first(x.clone().requires_grad_())).backward(grad)
    return grads(first, second)


@right
def captures_after_each_other_in_a_pool(graphed: bool) -> Iterator[torch.Tensor]:
    """Two captures share a pool and run one after the other, in any sequence."""
    first, second, xs, output_grads = mlp(0), mlp(1), data(3), data(3, 8)
    if graphed:
        pool = te.graph.graph_pool_handle()
        te.make_graphed_callables(first, sample(), pool=pool)
        te.make_graphed_callables(second, sample(), pool=pool)
    for module, x, grad in zip((first, second, first), xs, output_grads, strict=True):
        module(x.clone().requires_grad_()).backward(grad)
    return grads(first, second)


@broken
def backward_twice(graphed: bool) -> Iterator[torch.Tensor]:
    """Two backwards of a forward, of a graph that was not captured for it."""
    layers = [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN)]
    torch.manual_seed(0)
    module = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    for number, parameter in enumerate(module.parameters()):
        torch.manual_seed(number)
        torch.nn.init.normal_(parameter, std=0.1)
    if graphed:
        te.make_graphed_callables(module, sample())
    (x,), (grad,) = data(1), data(1, 8)
    output = module(x.clone().requires_grad_())
    output.backward(grad, retain_graph=True)
    output.backward(grad)
    return grads(module)


def around_the_first(run: Callable[..., Any], graphed: bool) -> Iterator[torch.Tensor]:
    """A checkpoint around the first of two blocks that are captured together."""
    first, second = mlp(0), mlp(1)
    if graphed:
        te.make_graphed_callables((first, second), (sample(), sample()))
    for x, grad in zip(data(2), data(2, 8), strict=True):
        second(run(first, x.clone().requires_grad_())).backward(grad)
    return grads(first, second)


@right
def checkpoint_of_te(graphed: bool) -> Iterator[torch.Tensor]:
    """`te.checkpoint` around a graph: its forward runs again while the gradient of the next one is to be read."""
    return around_the_first(te.checkpoint, graphed)


@right
def output_behind_a_checkpoint(graphed: bool) -> Iterator[torch.Tensor]:
    """The output of the second of two blocks is read after the backward, in which the first has run again."""
    first, second, (x,), (grad,) = mlp(0), mlp(1), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables((first, second), (sample(), sample()))
    output = second(te.checkpoint(first, x.clone().requires_grad_()))
    output.backward(grad)
    yield output.detach()


@right
def one_sample_for_all(graphed: bool) -> Iterator[torch.Tensor]:
    """Blocks that are captured with the same tensor as their sample."""
    first, second, (x,), (grad,) = mlp(0), mlp(1), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables((first, second), (sample(),) * 2)
    second(first(x.clone().requires_grad_())).backward(grad)
    return grads(first, second)


@right
def deep_copy(graphed: bool) -> Iterator[torch.Tensor]:
    """A copy of a block with graphs, as an average of weights is made, and trained."""
    module, (x,), (grad,) = mlp(), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables(module, sample())
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.fc1_weight.mul_(2)
    copied(x.clone().requires_grad_()).backward(grad)
    return grads(copied)


@broken
def replaced_module(graphed: bool) -> Iterator[torch.Tensor]:
    """A module inside a captured one is replaced, as adapters do."""
    block, (x,), (grad,) = torch.nn.Sequential(mlp(0), mlp(1)), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables(block, sample())
    block[1] = mlp(2)
    block(x.clone().requires_grad_()).backward(grad)
    return grads(block)


@broken
def moved_before_the_backward(graphed: bool) -> Iterator[torch.Tensor]:
    """Weights are elsewhere between a forward and its backward, as where they are gathered for each."""
    module, (x,), (grad,) = mlp(), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables(module, sample())
    inputs = x.clone().requires_grad_()
    output = module(inputs)
    kept = [parameter.data for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    for tensor in kept:
        tensor.zero_()
    output.backward(grad)
    return (inputs.grad for _ in range(1))


@right
def checkpoint_of_torch(graphed: bool) -> Iterator[torch.Tensor]:
    """The reentrant checkpoint of torch around a graph and operations that are not in it."""

    def run(module: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: torch.sin(module(torch.sin(x))), x, use_reentrant=True)

    return around_the_first(run, graphed)


@right
def checkpoint_without_reentry(graphed: bool) -> Iterator[torch.Tensor]:
    """The other checkpoint of torch, whose forward runs again for the operations around the graph."""

    def run(module: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: torch.sin(module(torch.sin(x))), x, use_reentrant=False)

    return around_the_first(run, graphed)


@right
def checkpoints_in_delayed_scaling(graphed: bool) -> Iterator[torch.Tensor]:
    """`te.checkpoint` around each of two graphs in FP8 with delayed scaling."""
    first, second, recipe = mlp(0), mlp(1), plain_recipe("delayed")
    if graphed:
        te.make_graphed_callables((first, second), (sample(), sample()), enabled=True, recipe=recipe)
    for x, grad in zip(data(3), data(3, 8), strict=True):
        with te.autocast(enabled=True, recipe=recipe):
            output = te.checkpoint(second, te.checkpoint(first, x.clone().requires_grad_()))
        output.backward(grad)
    return grads(first, second)


@broken
def checkpoints_in_flight(graphed: bool) -> Iterator[torch.Tensor]:
    """A checkpoint around the first layer of a chunk, two microbatches of which are under way."""
    first, second = mlp(0), mlp(1)
    runs = [first, second] * 2
    if graphed:
        samples = [sample() for _ in runs]
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [2]}
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        runs = list(te.make_graphed_callables((first, second), samples, sample_kwargs=kwargs, **options))
    inputs = [x.clone().requires_grad_() for x in data(2)]
    pairs = zip(runs[::2], runs[1::2], inputs, strict=True)
    outputs = [after(checkpoint(before, x, use_reentrant=True)) for before, after, x in pairs]
    for output, grad in zip(outputs, data(2, 8), strict=True):
        output.backward(grad)
    return grads(first, second)


def around_both(replayed: Sequence[Sequence[int]], graphed: bool) -> Iterator[torch.Tensor]:
    """Checkpoints around both layers of a chunk: forwards of some microbatches, then their backwards, and so on."""
    first, second = mlp(0), mlp(1)
    runs = [first, second] * 2
    if graphed:
        samples = [sample() for _ in runs]
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [2], "_reuse_graph_input_output_buffers": True}
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        runs = list(te.make_graphed_callables((first, second), samples, sample_kwargs=kwargs, **options))
    for numbers in replayed:
        inputs = [x.clone().requires_grad_() for x in data(len(numbers))]
        steps = zip(numbers, inputs, strict=True)
        outputs = [te.checkpoint(runs[2 * k + 1], te.checkpoint(runs[2 * k], x)) for k, x in steps]
        for output, grad in zip(outputs, data(len(numbers), 8), strict=True):
            output.backward(grad)
    return grads(first, second)


@right
def checkpoints_of_a_chunk(graphed: bool) -> Iterator[torch.Tensor]:
    """Checkpoints around both layers of a chunk, one microbatch after the other."""
    return around_both(((0,), (1,)), graphed)


@broken
def checkpoints_in_another_order(graphed: bool) -> Iterator[torch.Tensor]:
    """The same, where the first microbatch's forward overwrites what the second one's checkpoint has kept."""
    return around_both(((1, 0),), graphed)


@broken
def checkpoint_outside_of_the_autocast(graphed: bool) -> Iterator[torch.Tensor]:
    """A checkpoint of torch enters no autocast again: a module in FP8 is recomputed without it, a graph in FP8."""
    module, recipe, (x,), (grad,) = mlp(), plain_recipe("current"), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables(module, sample(), enabled=True, recipe=recipe)
    with te.autocast(enabled=True, recipe=recipe):
        output = checkpoint(module, x.clone().requires_grad_(), use_reentrant=True)
    output.backward(grad)
    return grads(module)


@right
def checkpoint_inside_of_the_autocast(graphed: bool) -> Iterator[torch.Tensor]:
    """The same, with the backward in the autocast."""
    module, recipe = mlp(), plain_recipe("delayed")
    if graphed:
        te.make_graphed_callables(module, sample(), enabled=True, recipe=recipe)
    for x, grad in zip(data(3), data(3, 8), strict=True):
        with te.autocast(enabled=True, recipe=recipe):
            checkpoint(module, x.clone().requires_grad_(), use_reentrant=True).backward(grad)
    return grads(module)


@broken
def checkpoints_of_two_microbatches(graphed: bool) -> Iterator[torch.Tensor]:
    """Checkpoints around two graphs of their own memory: the second's input is the first's output, written again."""
    first, second = mlp(0), mlp(1)
    for module in (first, second) if graphed else ():
        te.make_graphed_callables(module, sample())
    outputs = [te.checkpoint(second, te.checkpoint(first, x.clone().requires_grad_())) for x in data(2)]
    for output, grad in zip(outputs, data(2, 8), strict=True):
        output.backward(grad)
    return grads(first, second)


@broken
def checkpoints_of_one_module(graphed: bool) -> Iterator[torch.Tensor]:
    """Checkpoints around two calls of one module, as where layers share their weights."""
    module, (x,), (grad,) = mlp(), data(1), data(1, 8)
    if graphed:
        te.make_graphed_callables(module, sample())
    te.checkpoint(module, te.checkpoint(module, x.clone().requires_grad_())).backward(grad)
    return grads(module)


@broken
def recomputed_for_another_microbatch(graphed: bool) -> Iterator[torch.Tensor]:
    """A forward is run again for the second microbatch, and then the backward of the first one comes."""
    module = mlp()
    if graphed:
        te.make_graphed_callables(module, sample(), retain_graph_in_backward=True)
    first, second = (x.clone().requires_grad_() for x in data(2))
    outputs = [module(first), checkpoint(lambda x: torch.sin(module(x)), second, use_reentrant=False)]
    for output, grad in zip(reversed(outputs), data(2, 8), strict=True):
        output.backward(grad)
    return grads(module)


@broken
def targets_of_two_microbatches(graphed: bool) -> Iterator[torch.Tensor]:
    """A frozen teacher gives targets for two microbatches, whose losses have one backward."""
    teacher, student = mlp(0).requires_grad_(False), mlp(1)
    if graphed:
        te.make_graphed_callables(teacher, (sample()[0].detach(),))
    torch.stack([(teacher(x) * student(x)).sum() for x in data(2)]).sum().backward()
    return grads(student)


def delayed(events: Sequence[str], graphed: bool) -> list[torch.Tensor]:
    """A delayed wgrad; eager ones are computed with the dgrads, since all that differs is when."""
    module = fused(delay_wgrad_compute=graphed)
    if graphed:
        te.make_graphed_callables(module, sample(), allow_unused_input=True)
    inputs, outputs = iter(data(2)), []
    output_grads = iter(data(2, 8))
    for event in events:
        if event == "forward":
            outputs.append(module(next(inputs).clone().requires_grad_()))
        elif event == "backward":
            outputs.pop(0).backward(next(output_grads))
        elif graphed:
            module.backward_dw()
    return [module.weight.main_grad]


@broken
def wgrad_after_the_next_forward(graphed: bool) -> list[torch.Tensor]:
    """`backward_dw` after the forward of the next microbatch, which has overwritten what it reads."""
    return delayed(("forward", "backward", "forward", "wgrad"), graphed)


@broken
def wgrad_before_the_backward(graphed: bool) -> list[torch.Tensor]:
    """`backward_dw` before the backward of its microbatch."""
    return delayed(("forward", "wgrad", "backward"), graphed)


def changed(module: Any, change: Callable[[Any], None], graphed: bool, **options: Any) -> Iterator[torch.Tensor]:
    """Change a module after a first microbatch, and run a second one."""
    if graphed:
        te.make_graphed_callables(module, sample(), **options)
    for number, (x, grad) in enumerate(zip(data(2), data(2, 8), strict=True)):
        if number:
            change(module)
        output = module(x.clone().requires_grad_())
        output.backward(grad)
        yield output.detach().clone()
    if module.fuse_wgrad_accumulation:
        yield from (parameter.main_grad for parameter in module.parameters())
    else:
        yield from grads(module)


@broken
def data_of_a_parameter(graphed: bool) -> Iterator[torch.Tensor]:
    """The ``.data`` of one parameter is replaced."""

    def change(module: Any) -> None:
        module.fc2_weight.data = module.fc2_weight.data * 2

    return changed(mlp(), change, graphed)


@broken
def offloaded_weights(graphed: bool) -> Iterator[torch.Tensor]:
    """Weights go to the CPU and come back elsewhere, as RL frameworks do between stages, and are trained on."""

    def change(module: Any) -> None:
        kept = [torch.empty_like(parameter) for parameter in module.parameters()]
        for parameter, other in zip(module.parameters(), kept, strict=True):
            parameter.data = other.copy_(parameter.data.cpu()).mul_(2)

    return changed(mlp(), change, graphed)


@broken
def loaded_weights(graphed: bool) -> Iterator[torch.Tensor]:
    """``load_state_dict(assign=True)`` makes other parameters."""

    def change(module: Any) -> None:
        state = {name: 2 * value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        module.load_state_dict(state, strict=False, assign=True)

    return changed(mlp(), change, graphed)


@broken
def loaded_under_way(graphed: bool) -> Iterator[torch.Tensor]:
    """``load_state_dict(assign=True)`` between the forwards of two microbatches, in the second step."""
    module, output_grads = mlp(), data(2, 8)
    runs = [module] * 2
    if graphed:
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
        samples = [sample() for _ in runs]
        runs = list(te.make_graphed_callables((module,), samples, sample_kwargs=[{}, {}], **options))
    for step in range(2):
        outputs = []
        for run, x in zip(runs, data(2), strict=True):
            outputs.append(run(x.clone().requires_grad_()))
            if step:
                other = {"fc2_bias": torch.ones_like(module.fc2_bias)}
                module.load_state_dict(other, strict=False, assign=True)
        for output, grad in zip(outputs, output_grads, strict=True):
            output.backward(grad)
    return (output.detach() for output in outputs)


@broken
def other_main_grad(graphed: bool) -> Iterator[torch.Tensor]:
    """The ``main_grad`` of a parameter is another tensor."""

    def change(module: Any) -> None:
        module.weight.main_grad = torch.zeros_like(module.weight.main_grad)

    return changed(fused(), change, graphed)


@broken
def other_main_grad_under_way(graphed: bool) -> list[torch.Tensor]:
    """The ``main_grad`` of a parameter is another tensor for the second backward of a step."""
    module = fused()
    runs = [module] * 2
    if graphed:
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
        samples = [sample() for _ in runs]
        runs = list(te.make_graphed_callables((module,), samples, sample_kwargs=[{}, {}], **options))
    outputs = [run(x.clone().requires_grad_()) for run, x in zip(runs, data(2), strict=True)]
    for output, grad in zip(outputs, data(2, 8), strict=True):
        output.backward(grad)
        module.weight.main_grad = module.weight.main_grad.clone()
    return [module.weight.main_grad]


@broken
def data_of_an_fp8_parameter(graphed: bool) -> Iterator[torch.Tensor]:
    """The quantized data of an FP8 parameter are replaced."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=plain_recipe("current")):
        module = te.Linear(HIDDEN, HIDDEN, **OPTIONS)

    def change(module: Any) -> None:
        module.weight._data = torch.full_like(module.weight._data, 56)  # 1.0

    def run() -> Iterator[torch.Tensor]:
        with te.autocast(enabled=True, recipe=plain_recipe("current")):
            yield from changed(module, change, graphed, enabled=True, recipe=plain_recipe("current"))

    return run()


@right
def written_in_place(graphed: bool) -> Iterator[torch.Tensor]:
    """Parameters and ``main_grad`` are written in place."""

    def change(module: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)
        module.weight.main_grad.zero_()

    return changed(fused(), change, graphed)


@broken
def unfrozen_parameters(graphed: bool) -> Iterator[torch.Tensor]:
    """A weight that needed no gradient when it was captured is trained later."""
    module = mlp()
    module.fc1_weight.requires_grad_(False)
    return changed(module, lambda module: module.fc1_weight.requires_grad_(True), graphed)


@right
def gathered_input_grads(graphed: bool) -> Iterator[torch.Tensor]:
    """An input gathers the gradients of three replays, another keeps that of the first."""
    module, xs, output_grads = mlp(), [x.requires_grad_() for x in data(2)], data(4, 8)
    if graphed:
        te.make_graphed_callables(module, sample())
    for x, grad in zip((xs[0], xs[1], xs[1], xs[1]), output_grads, strict=True):
        module(x).backward(grad)
    return (x.grad for x in xs if x.grad is not None)


class Hidden(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A module without parameters of its own, which come as inputs."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = [inner]
        self.names = [name for name, _ in inner.named_parameters()]

    def forward(self, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return torch.func.functional_call(self.inner[0], dict(zip(self.names, parameters, strict=True)), (x,))


@right
def parameters_as_inputs(graphed: bool) -> Iterator[torch.Tensor]:
    """Parameters that are passed as inputs, as NeMo Automodel does."""
    torch.manual_seed(0)
    inner = torch.nn.Linear(HIDDEN, HIDDEN).to("cuda", torch.bfloat16)
    with torch.no_grad():
        inner.weight.copy_(data(1, 3)[0][:1].expand(HIDDEN, -1) / HIDDEN)
        inner.bias.zero_()
    parameters = list(inner.parameters())
    run: Any = Hidden(inner)
    if graphed:
        samples = ((*sample(), *parameters),)
        (run,) = te.make_graphed_callables((run,), samples, enabled=(False,), retain_graph_in_backward=True)
    for x, grad in zip(data(3), data(3, 8), strict=True):
        run(x.clone().requires_grad_(), *parameters).backward(grad)
    return grads(inner)


def cast_input(graphed: bool) -> None:
    """An fp32 input for a bf16 graph."""
    module = te.Linear(HIDDEN, HIDDEN, **OPTIONS)
    te.make_graphed_callables(module, sample())
    module(torch.randn(TOKENS, HIDDEN, device="cuda"))


def outside_of_the_autocast(graphed: bool) -> None:
    """A graph of delayed scaling that is trained outside of an autocast."""
    module = te.Linear(HIDDEN, HIDDEN, **OPTIONS)
    te.make_graphed_callables(module, sample(), enabled=True, recipe=plain_recipe("delayed"))
    module(data(1)[0].requires_grad_()).backward(data(1, 8)[0])


WARNED: dict[str, tuple[Callable[[bool], None], str]] = {
    "cast-input": (cast_input, "it casts them"),
    "outside-of-the-autocast": (outside_of_the_autocast, "outside of an autocast"),
}
"""Programs that are warned of, each with words of the warning."""
