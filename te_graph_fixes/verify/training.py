"""Several steps of several microbatches, through graphs and eagerly, and the errors between the two.

As in Megatron-Core, modules may mark first microbatches (they pass ``is_first_microbatch`` to TransformerEngine, TE,
and set it to False after their forward; it is set to True before a step), the wgrad may be fused into ``main_grad``
(float32, zeroed before a step), and an optimizer step changes the weights between steps. Eager training never delays
its wgrads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import BLACKWELL_RECIPES

HIDDEN = 128
TOKENS = 256
LEARNING_RATE = 0.1
FIRST = "is_first_microbatch"

RECIPES: dict[str, tuple[str, str]] = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}
"""By the name of a recipe, TE's class and the function that says whether this GPU has it. ``bf16`` needs neither.

``fp8-`` may stand before the name.
"""


class Skipped(Exception):
    """This GPU or this TE lacks what a case needs."""


def require_recomputation() -> None:
    """Raise `Skipped` where this TE does not capture `te.checkpoint`."""
    if not hasattr(te.graph, "_none_grad_context_wrapper"):
        raise Skipped("TE before 2.12 refuses to capture te.checkpoint")


@dataclass(frozen=True)
class Setup:
    """What is trained. ``order`` is TE's ``_order``; None makes one graph for the microbatches of a step.

    - ``mark_first``: modules mark first microbatches
    - ``cache``: FP8 graphs cache weights (default: where the modules mark first microbatches)
    - ``other_first``: another FP8 module runs before the first microbatch, in its autocast
    - ``set_flag``: the caller sets the flag that says whether weights are new, as Megatron-Core does, besides
    - ``fit``: the loss is the squared distance to fixed targets, so that gradients depend on the weights; else output
      grads are given
    - ``delay``: graphs delay their wgrads; without wgrad entries in ``order`` each is replayed right after its dgrad
    - ``graphs``: else it is eager modules which delay their wgrads that are compared with those that do not
    - ``hooks``: the values of ``main_grad`` that hooks see after each wgrad are compared too
    - ``reuse``: buffers are reused
    - ``tuples``: samples are given in a tuple
    - ``adam``: TE's FusedAdam with FP32 weights updates the parameters
    - ``evaluate``: after each update the modules are evaluated, in the recipe and without one, without a graph
    """

    module: str = "Linear"
    recipe: str = "bf16"
    order: Sequence[float] | None = None
    microbatches: int = 3
    steps: int = 3
    fused: bool = True
    bias: bool = False
    delay: bool = False
    graphs: bool = True
    hooks: bool = False
    reuse: bool = False
    tuples: bool = False
    mark_first: bool = True
    cache: bool | None = None
    other_first: bool = False
    set_flag: bool = False
    fit: bool = False
    fp8_params: bool = False
    experts: int = 2
    uneven: bool = False
    warmup: int = 3
    adam: bool = False
    evaluate: bool = False

    @property
    def schedule(self) -> Sequence[float]:
        """The entries of a step, with a wgrad after each dgrad where the order has none and wgrads are delayed."""
        order = self.order or (1, -1) * self.microbatches
        if not self.delay or any(entry % 1 for entry in order):
            return order
        return [each for entry in order for each in ([entry, entry - 0.5] if entry < 0 else [entry])]

    @property
    def caches_weights(self) -> bool:
        return self.recipe != "bf16" and (self.mark_first if self.cache is None else self.cache)


@dataclass
class Step:
    """What one step computed: outputs and dgrads in the order of the schedule, all gradients at its end."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    dgrads: list[torch.Tensor] = field(default_factory=list)
    wgrads: list[torch.Tensor] = field(default_factory=list)
    seen_by_hooks: list[torch.Tensor] = field(default_factory=list)


OTHERS: dict[str, Callable[[dict[str, Any]], tuple[Any, tuple[Any, ...]]]] = {}
"""By name, what makes a module other than TE's of its name, and what its forward takes besides. Tests add their own."""


def make_recipe(name: str) -> Any:
    """The recipe of this name, None for ``bf16``; `Skipped` where the GPU lacks it."""
    if name == "bf16":
        return None
    recipe, available = RECIPES[name.removeprefix("fp8-")]
    has, why = getattr(te, available)(return_reason=True)
    if not has:
        raise Skipped(" ".join(why.split()))
    return getattr(recipes, recipe)()


def make_module(setup: Setup, seed: int, graphed: bool) -> Any:
    """A module of ``setup``; equal seeds give equal weights."""
    options: dict[str, Any] = {
        "bias": setup.bias,
        "fuse_wgrad_accumulation": setup.fused,
        "delay_wgrad_compute": setup.delay and graphed,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }
    sizes: tuple[int, ...] = (HIDDEN, HIDDEN)
    arguments: tuple[Any, ...] = ()
    if setup.module == "GroupedLinear":
        sizes, arguments = (setup.experts, *sizes), (token_splits(setup.experts, setup.uneven),)
    elif setup.module == "LayerNormMLP":
        sizes = HIDDEN, 2 * HIDDEN
    torch.manual_seed(seed)
    context = nullcontext()
    if setup.fp8_params:
        context = te.quantized_model_init(enabled=True, recipe=make_recipe(setup.recipe))
    with context:
        if setup.module in OTHERS:
            module, arguments = OTHERS[setup.module](options)
        else:
            module = getattr(te, setup.module)(*sizes, **options)
    forward = module.forward

    def marked(x: torch.Tensor) -> Any:
        out = forward(x, *arguments, is_first_microbatch=module.is_first_microbatch)
        module.is_first_microbatch = False
        return out

    if setup.mark_first:
        module.is_first_microbatch = True
        module.forward = marked
    elif arguments:
        module.forward = lambda x: forward(x, *arguments)
    for parameter in module.parameters():
        if in_main_grad(setup, parameter):
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device="cuda")
            parameter.grad_added_to_main_grad = False
    return module


def token_splits(experts: int, uneven: bool) -> list[int]:
    """The tokens of each expert: multiples of 16, as FP8 needs; uneven ones leave the last of several without any."""
    even = TOKENS // experts
    splits = [even] * experts
    if uneven and experts > 1:
        splits[0], splits[-1] = even + splits[-1], 0
    return splits


def in_main_grad(setup: Setup, parameter: torch.Tensor) -> bool:
    """TE fuses the accumulation of weights only; norms and biases get a ``.grad``."""
    return setup.fused and parameter.dim() == 2


def capture(setup: Setup, modules: Sequence[Any], recipe: Any) -> list[Any]:
    """A graphed callable for each microbatch of each chunk."""
    options: dict[str, Any] = {
        "num_warmup_iters": setup.warmup,
        "allow_unused_input": True,
        "enabled": recipe is not None,
        "recipe": recipe,
        "cache_quantized_params": setup.caches_weights,
    }
    if setup.order is None:
        graphed = te.make_graphed_callables(modules[0], (random().requires_grad_(),), **options)
        return [graphed] * setup.microbatches
    samples = [(random().requires_grad_(),) for _ in range(_count(setup.order))]
    return list(
        te.make_graphed_callables(
            tuple(modules),
            tuple(samples) if setup.tuples else samples,
            sample_kwargs=None if setup.tuples else [{} for _ in samples],
            _order=list(setup.order),
            _num_layers_per_chunk=[1] * len(modules),
            _reuse_graph_input_output_buffers=setup.reuse,
            **options,
        )
    )


def train(setup: Setup, graphed: bool) -> Iterator[Step]:
    """Train eagerly or through graphs, and give what each step computed."""
    recipe = make_recipe(setup.recipe)
    FP8GlobalStateManager.reset()
    schedule = setup.schedule
    chunks = int(max(schedule))
    microbatches = _count(schedule) // chunks
    modules = [make_module(setup, seed, graphed) for seed in range(chunks)]
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    other = te.Linear(HIDDEN, HIDDEN, **options) if setup.other_first else None
    parameters = [parameter for module in modules for parameter in module.parameters()]
    torch.manual_seed(100)
    shape = (setup.steps, chunks, microbatches, TOKENS, HIDDEN)
    inputs = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)  # with ``fit``, the targets
    if setup.fit:
        inputs[:], output_grads[:] = inputs[0].clone(), output_grads[0].clone()
    done = Step()

    def hook() -> None:
        done.seen_by_hooks.extend(parameter.main_grad.clone() for parameter in parameters)

    if setup.hooks and graphed:
        modules[0].register_wgrad_accumulation_and_reduce_hooks(hook)
    runs = [each for each in modules for _ in range(microbatches)]
    if graphed and setup.graphs:
        runs = capture(setup, modules, recipe)
    left = [parameter.grad for parameter in parameters if parameter.grad is not None]  # by the capture
    torch.manual_seed(200)  # NVFP4 rounds at random, and a warmup has drawn numbers too
    for step in range(setup.steps):
        _begin(setup, modules)
        done, left = Step(wgrads=left), []
        counts: dict[float, int] = {}
        leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for entry in schedule:
            chunk, microbatch = abs(math.ceil(entry)) - 1, counts.get(entry, 0)
            counts[entry] = microbatch + 1
            run = runs[chunk * microbatches + microbatch]
            if entry > 0:
                x = inputs[step, chunk, microbatch].clone().requires_grad_()
                if setup.set_flag:
                    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(microbatch > 0)
                marks = {FIRST: microbatch == 0} if graphed and setup.caches_weights else {}
                with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                    if other is not None and microbatch == 0:
                        other(x.detach())
                    leaves[chunk, microbatch] = x, run(x, **marks)
                done.outputs.append(leaves[chunk, microbatch][1].detach().clone())
            elif entry % 1 == 0:
                x, out = leaves.pop((chunk, microbatch))
                given = output_grads[step, chunk, microbatch]
                out.backward(out.detach() - given if setup.fit else given)
                done.dgrads.append(_or_zeros(x.grad, x).clone())
                for parameter in modules[chunk].parameters():
                    if in_main_grad(setup, parameter):
                        parameter.grad = None  # a dummy
                if setup.hooks and not graphed:
                    hook()
            elif graphed:
                run.backward_dw()
        torch.cuda.synchronize()
        done.wgrads += _optimizer_step(setup, parameters)
        if setup.evaluate:
            done.outputs += _evaluate(setup, modules, recipe, inputs[step, 0, 0])
        yield done


def _count(order: Sequence[float]) -> int:
    return sum(entry > 0 for entry in order)


def random() -> torch.Tensor:
    """Values for one microbatch."""
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")


def _begin(setup: Setup, modules: Iterable[Any]) -> None:
    for module in modules:
        if setup.mark_first:
            module.is_first_microbatch = True
        for parameter in module.parameters():
            parameter.grad = None
            if in_main_grad(setup, parameter):
                parameter.main_grad.zero_()


def _optimizer_step(setup: Setup, parameters: Sequence[Any]) -> list[torch.Tensor]:
    """Change every parameter by its gradient, and give the gradients."""
    found = []
    with torch.no_grad():
        for parameter in parameters:
            grad = parameter.main_grad if in_main_grad(setup, parameter) else _or_zeros(parameter.grad, parameter)
            found.append(grad.clone())
            if setup.adam:
                parameter.grad = grad.to(parameter.dtype)
                continue
            weight = parameter.dequantize() if setup.fp8_params and parameter.dim() == 2 else parameter
            rate = 0.25 / (TOKENS * setup.microbatches) if setup.fit else LEARNING_RATE
            parameter.copy_(weight - (rate * grad).to(weight.dtype))
    if setup.adam:
        te.optimizers.FusedAdam(parameters, lr=LEARNING_RATE, master_weights=True).step()
    return found


def _evaluate(setup: Setup, modules: Iterable[Any], recipe: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What each module gives for ``x`` in evaluation mode, in the recipe and without one."""
    _begin(setup, modules)
    found = []
    for module in modules:
        module.eval()
        for each in (recipe, None):
            with torch.no_grad(), te.autocast(enabled=True, recipe=each) if each else nullcontext():
                found.append(module(x).clone())
        module.train()
    return found


def _or_zeros(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient that was never delivered counts as zeros: an error of 1.0."""
    return torch.zeros(like.shape, dtype=torch.bfloat16, device="cuda") if grad is None else grad


def error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest error of a tensor: the norm of the difference over the norm of what is wanted.

    0.0 is bit for bit. Missing tensors are an error of 1.0, values that are not finite one of inf.
    """
    if len(found) != len(wanted):
        return 1.0
    return max((_error(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    if found.shape != wanted.shape:
        return math.inf
    difference, norm = _norm([found.double() - wanted.double()]), _norm([wanted])
    return difference / norm if math.isfinite(difference) and norm else math.inf


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


def compare(**options: Any) -> dict[str, Any]:
    """Train a `Setup` with these ``options`` both ways: by step the errors, and the wgrad norm relative to eager."""
    setup = Setup(**options)
    errors: dict[str, list[float]] = {"outputs": [], "dgrads": [], "wgrads": [], "seen_by_hooks": []}
    norms = []
    try:
        eager = list(train(setup, graphed=False))
    except Skipped:
        raise
    except Exception as why:
        if setup.recipe in BLACKWELL_RECIPES:
            raise Skipped(f"{setup.module} does not take {setup.recipe}: {' '.join(str(why).split())}") from why
        raise
    for graphed, wanted in zip(train(setup, graphed=True), eager, strict=True):
        for name, found in errors.items():
            found.append(error(getattr(graphed, name), getattr(wanted, name)))
        norms.append(_norm(graphed.wgrads) / _norm(wanted.wgrads))
    return {"errors": errors, "wgrad_norm": norms}
