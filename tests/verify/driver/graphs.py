"""The layers of a program, and their graphs."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .modules import MODULES, torch_linear
from .program import Skipped
from .setting import OPTIONS, autocast, hidden, make_recipe, process_group, program, sample, seed_tracker


def arguments(layer: Any, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
    """Return the positional and keyword arguments of a layer for an input and an offset."""
    return layer.arguments(x, offset) if hasattr(layer, "arguments") else ((x,), {})


def parameters_of(layer: Any) -> list[Any]:
    """Return the parameters of a layer: its own parameters, and the parameters that it receives as inputs."""
    return [*layer.parameters(), *getattr(layer, "given", {}).values()]


class Captured:
    """The graphs and layers of a program. The layers have the attributes and hooks that a training framework adds."""

    def __init__(self, graphed: bool) -> None:
        FP8GlobalStateManager.reset()
        torch.manual_seed(1)
        if program.tracker:
            seed_tracker(1)
        self.graphed = graphed
        self.recipe = program.recipe
        if program.warmup_hook and "post_warmup_hook" not in inspect.signature(te.make_graphed_callables).parameters:
            raise Skipped("this TransformerEngine has no post_warmup_hook")
        self.seen: dict[str, list[torch.Tensor | None]] = {}
        self.event = "made"
        self.called: list[str] = []
        self.nodes: list[Any] = []
        self.in_flight: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.run_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kept: list[torch.Tensor | None] = []
        OPTIONS.update(bias=program.bias, fuse_wgrad_accumulation=program.fused)
        OPTIONS["delay_wgrad_compute"] = program.delay and graphed
        with (
            torch.set_grad_enabled(not program.built_without_grad),
            te.quantized_model_init(enabled=program.fp8_params, recipe=make_recipe(program.recipe)),
        ):
            self.layers: list[Any] = []
            for kind in program.modules:
                self.layers.append(self.layers[-1] if kind == "again" else MODULES[kind]())
            self.extra: Any = None
            if program.first in ("eager", "frozen", "teacher", "cached"):
                self.extra = te.Linear(hidden(), hidden(), params_dtype=torch.bfloat16, device="cuda")
            if program.first == "plain":
                self.extra = torch_linear()
        if program.first in ("frozen", "teacher"):
            self.extra.requires_grad_(False).eval()
        self.extra_forward: Any = getattr(self.extra, "forward", None)
        if program.modules[-1] == "Tied":
            self.layers[-1].weight = next(weight for weight in self.layers[0].parameters() if weight.dim() == 2)
        for number in program.frozen:
            self.layers[number].requires_grad_(False)
        for number, layer in enumerate(self.layers):
            self.prepare(number, layer)
            if program.freezes_first:
                next(layer.parameters()).requires_grad_(False)
        self.chunks = max(program.order) if program.order else 1
        self.per_chunk = len(self.layers) // self.chunks
        self.microbatches = program.order.count(1) if program.order else program.microbatches
        self.forwards = [layer.forward for layer in self.layers]
        self.eager: list[list[Any]] = [[forward] * self.microbatches for forward in self.forwards]
        self.calls: list[list[Any]] = [[layer] * self.microbatches for layer in self.layers]
        self.find_parameters()
        modules = [module for layer in self.layers for module in layer.modules()]
        self.before_capture = {module: {name: vars(module).get(name) for name in REPLACED} for module in modules}
        if program.optimizer in ("adam", "adam of master weights"):
            master = program.optimizer == "adam of master weights"
            self.adam = te.optimizers.FusedAdam(self.parameters, master_weights=master, use_decoupled_grad=True)
        elif program.optimizer == "master weights":
            self.master = {parameter: parameter.detach().dequantize() for parameter in self.parameters}
        self.input = sample()
        self.pool = torch.cuda.graph_pool_handle() if program.one_pool else None
        if graphed:
            self.capture()
        if program.takes_grads or program.clean_start:
            self.called.clear()
            for parameter in self.weights:
                parameter.main_grad.zero_()
        for number, layer in enumerate(self.layers if program.late_hooks else ()):
            self.hook_parameters(number, layer)
        for layer in self.layers if program.module_hooks else ():
            layer.register_forward_hook(lambda *_: self.called.append("module, forward"))
            layer.register_full_backward_hook(lambda *_: self.called.append("module, backward"))
        if program.hooks == "ddp":
            self.reducing = list(map(DistributedDataParallel, self.layers))

    def find_parameters(self) -> None:
        self.parameters = list(dict.fromkeys(parameter for layer in self.layers for parameter in parameters_of(layer)))
        self.weights = {parameter for layer in self.layers for parameter in fused(layer)}

    def fused_weights(self) -> list[Any]:
        """Return the parameters with fused wgrads, in the order of the layers."""
        return [parameter for parameter in self.parameters if parameter in self.weights]

    def chunk(self, number: int) -> range:
        """Return the range of layer numbers in a chunk."""
        return range(number * self.per_chunk, (number + 1) * self.per_chunk)

    def prepare(self, number: int, layer: Any) -> None:
        """Set ``is_first_microbatch``, ``main_grad`` and hooks on a layer, as a training framework does."""
        if program.weights != "plain":
            for module in layer.modules():
                if isinstance(module, TransformerEngineBaseModule) and not isinstance(module, te.DotProductAttention):
                    (reuse_first_weights if program.weights == "own" else mark)(module)
        if program.weights == "own":
            with torch.no_grad(), autocast(self.recipe):
                layer(sample())
        if program.fused:
            weights = fused(layer)
            for parameter, main_grad in zip(weights, make_main_grads(weights), strict=True):
                parameter.main_grad = main_grad
                if program.warmup_hook and self.graphed and number >= 0:  # -1 stands for the layer of an event
                    parameter.main_grad.fill_(7.0)
                parameter.grad_added_to_main_grad = False
        if program.takes_grads:
            for parameter in parameters_of(layer):
                parameter.taken = torch.zeros_like(parameter)
        if not program.late_hooks:
            self.hook_parameters(number, layer)
        if program.wgrad_hooks and self.graphed and number >= 0:  # eagerly, `wgrad` records the calls
            for index, module in enumerate(delayed(layer)):
                module.register_wgrad_accumulation_and_reduce_hooks(
                    lambda index=index: self.called.append(f"wgrad {number} {index}")
                )

    def hook_parameters(self, number: int, layer: Any) -> None:
        for parameter in layer.parameters() if program.hooks not in ("", "ddp") else ():
            if parameter.requires_grad:
                self.hook(number, parameter)

    def hook(self, number: int, parameter: Any) -> None:
        """Register a hook on a parameter.

        Its calls are recorded by the number of the layer, because the order of the hooks within a layer may vary.
        """

        def hook(grad: torch.Tensor) -> Any:
            self.called.append(f"hook {number}")
            if program.hooks == "reduces":
                dist.all_reduce(parameter.grad)
            elif program.hooks in ("takes", "of the node"):
                parameter.taken.add_(parameter.grad)  # The hook runs on the capture stream, so it must free no memory.
                parameter.grad = None
            return grad * 2 if program.hooks == "doubles" else None

        parameter.taken = torch.zeros_like(parameter)
        if program.hooks == "doubles":
            parameter.register_hook(hook)
        elif program.hooks == "of the node":
            with torch.cuda.stream(torch.cuda.Stream()):  # a node of the default stream cannot be captured
                self.nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            self.nodes[-1].register_hook(lambda *_: hook(parameter))
        else:
            parameter.register_post_accumulate_grad_hook(hook)

    def capture(self) -> None:
        """Capture the graphs that the program has: of its layers, of its extra layer, and for inference."""
        if program.inference == "first":
            self.capture_inference()
        if program.first in ("frozen", "teacher", "plain", "cached"):
            leaf = sample().requires_grad_(program.first in ("plain", "cached"))
            self.graph(self.extra, (leaf,), cache_quantized_params="cached" in (program.first, program.weights))
        if program.order:
            self.capture_order()
        elif program.together:
            samples, named = zip(*map(self.samples, range(len(self.layers))), strict=True)
            enabled = tuple(self.fp8(number) for number in range(len(self.layers)))
            self.graph(tuple(self.layers), samples, sample_kwargs=named, enabled=enabled)
        else:
            for number, layer in enumerate(self.layers):
                if number not in program.not_captured:
                    samples, named = self.samples(number)
                    part = getattr(layer, "first", layer) if program.inside else layer
                    self.graph(part, samples, sample_kwargs=named, enabled=self.fp8(number))
        if program.inference == "after":
            self.capture_inference()

    def fp8(self, number: int) -> bool:
        return self.recipe != "bf16" and number not in program.in_bf16 and not program.calibrating

    def graph(self, modules: Any, samples: Any, **options: Any) -> Any:
        if program.warmup_hook:
            captured = modules if isinstance(modules, tuple) else (modules,)
            options["post_warmup_hook"] = functools.partial(change_main_grads, captured)
        return te.make_graphed_callables(
            modules,
            samples,
            **{
                "num_warmup_iters": program.warmup,
                "allow_unused_input": True,
                "enabled": self.recipe != "bf16" and not program.calibrating,
                "calibrating": program.calibrating,
                "recipe": make_recipe(self.recipe),
                "amax_reduction_group": process_group(),
                "cache_quantized_params": program.weights == "cached",
                "retain_graph_in_backward": program.retain,
                "pool": torch.cuda.graph_pool_handle() if program.own_pool else self.pool,
                **options,
            },
        )

    def samples(self, number: int) -> tuple[Any, Any]:
        """Return the positional and keyword sample arguments of a layer."""
        leaf = self.input if program.one_sample or (program.same_input and not number) else sample()
        if program.input_grads or number % self.per_chunk:
            leaf.requires_grad_()
        layer = self.layers[number]
        return getattr(layer, "sample_arguments", functools.partial(arguments, layer))(leaf, sample())

    def capture_order(self) -> None:
        """Capture a graph for each layer and microbatch of the program's order."""
        numbers = [
            number for chunk in range(self.chunks) for _ in range(self.microbatches) for number in self.chunk(chunk)
        ]
        order, per_chunk = list(program.order), self.per_chunk
        if program.layers_as_chunks:
            numbers = [number for number in range(len(self.layers)) for _ in range(self.microbatches)]
            order = [part for entry in order for part in self.layers_of(entry)]
            per_chunk = 1
        samples, named = zip(*map(self.samples, numbers), strict=True)
        runs = self.graph(
            tuple(self.layers),
            samples if program.tuples else list(samples),
            sample_kwargs=None if program.tuples else list(named),
            enabled=tuple(self.fp8(number) for number in range(len(self.layers))),
            _order=order,
            _num_layers_per_chunk=[per_chunk] * (len(self.layers) // per_chunk),
            _reuse_graph_input_output_buffers=program.reuse,
        )
        self.calls = [[run for run, n in zip(runs, numbers, strict=True) if n == m] for m in range(len(self.layers))]

    def layers_of(self, entry: float) -> list[float]:
        """Return the entries that replace a chunk's ``entry`` if each of its layers is a chunk."""
        chunk, part = abs(math.ceil(entry)) - 1, math.ceil(entry) - entry
        layers = [number + 1 for number in self.chunk(chunk)]
        return layers if entry > 0 else [-layer - part if part else -layer for layer in reversed(layers)]  # type: ignore

    def capture_inference(self) -> None:
        """Capture a graph of the first layer for inference, in addition to its graphs for training."""
        layer = self.layers[0]
        layer.eval()
        before = {name: vars(layer).get(name) for name in REPLACED}
        with torch.inference_mode() if program.inference_mode else torch.no_grad():
            self.graph((layer,), ((sample(),),), enabled=self.fp8(0))
        self.infer, self.reset_inference = layer.forward, layer.reset
        restore(layer, before)
        layer.train()

    def release(self) -> None:
        """Reset the graphs, and restore the attributes of the modules."""
        runs = {id(graph): graph for calls in self.calls for graph in calls}.values()
        for graph in [*runs, *self.before_capture, self.extra]:
            if "reset" in getattr(graph, "__dict__", ()):
                graph.reset()
        for module, before in self.before_capture.items():
            restore(module, before)
        if self.extra is not None:
            restore(self.extra, {})
        if program.inference:
            self.reset_inference()
            self.infer = None
        self.calls = [[layer] * self.microbatches for layer in self.layers]


REPLACED = ("forward", "backward_dw", "reset")
"""The attributes that a capture without a schedule sets on a module."""


def restore(module: Any, before: dict[str, Any]) -> None:
    """Restore the attributes `REPLACED` of a module to their values in ``before``, and delete the others."""
    for name in REPLACED:
        vars(module).pop(name, None)
        if before.get(name) is not None:
            setattr(module, name, before[name])


def mark(module: Any) -> None:
    """Add ``is_first_microbatch`` to a module, and wrap the module's forward so that it receives the attribute.

    As in Megatron-Core, the wrapper then clears the attribute, unless the training loop sets it.
    """
    forward = module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **{**kwargs, "is_first_microbatch": module.is_first_microbatch})
        if program.weights not in MARKS_OF_THE_LOOP:
            module.is_first_microbatch = False
        return out

    if program.weights in OF_CLASSES:
        module.__class__ = type("Marked", (type(module),), OF_CLASSES[program.weights])
    else:
        module.is_first_microbatch = True
    module.forward = marked


OF_CLASSES: dict[str, dict[str, Any]] = {
    "class": {"is_first_microbatch": False},
    "property": {"is_first": True, "is_first_microbatch": property(lambda module: module.is_first)},
}
"""For each value of ``weights`` that sets ``is_first_microbatch`` on a class, the attributes of this class."""
MARKS_OF_THE_LOOP = ("set", *OF_CLASSES)


def set_mark(module: Any, is_first: bool) -> None:
    """Set ``is_first_microbatch`` of a module or, if it belongs to the module's class (`OF_CLASSES`), of the class."""
    if program.weights == "property":
        type(module).is_first = is_first
    else:
        (type(module) if program.weights == "class" else module).is_first_microbatch = is_first


def reuse_first_weights(module: Any) -> None:
    """Pass ``is_first_microbatch=True`` only to the first forward of a module. Later forwards reuse its FP8 weights."""
    forward, marks = module.forward, itertools.chain([True], itertools.repeat(False))
    module.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "is_first_microbatch": next(marks)})


def delayed(layer: Any) -> list[Any]:
    """Return the modules of a layer that can delay wgrads, in the order of their forwards, or []."""
    return [
        module
        for module in layer.modules()
        if hasattr(module, "register_wgrad_accumulation_and_reduce_hooks") and [*module.parameters(recurse=False)]
    ]


def make_main_grads(weights: list[Any]) -> list[torch.Tensor]:
    """Return a ``main_grad`` of zeros for each weight. Views of a flat buffer are at least two bytes apart."""
    if not program.flat_main_grads:
        return [torch.zeros(weight.shape, device="cuda") for weight in weights]
    buffer = torch.zeros(4 * sum(weight.numel() + 1 for weight in weights), dtype=torch.uint8, device="cuda")
    main_grads, end = [], 0
    for weight, dtype in zip(weights, itertools.cycle((torch.float32, torch.bfloat16))):
        start = -(-(end + 2) // dtype.itemsize) * dtype.itemsize
        end = start + weight.numel() * dtype.itemsize
        main_grads.append(buffer[start:end].view(dtype).view(weight.shape))
    return main_grads


def change_main_grads(modules: Iterable[Any]) -> None:
    """Zero or replace each ``main_grad`` of modules between their warmup and capture, as users do."""
    for weight in (weight for module in modules for weight in fused(module)):
        if program.warmup_hook == "zeroes":
            weight.main_grad.zero_()
        else:
            weight.main_grad = torch.zeros_like(weight.main_grad)


def fused(layer: Any) -> list[Any]:
    """Return the parameters of a layer whose wgrads are added to ``main_grad``, or []."""
    return [
        parameter
        for module in layer.modules()
        if getattr(module, "fuse_wgrad_accumulation", getattr(module, "_accumulate_into_main_grad", False))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter.requires_grad
    ]
