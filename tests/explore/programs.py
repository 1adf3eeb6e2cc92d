"""The modules, events and rules of random programs, and functions that draw and shrink programs.

This module does not import torch. To add a kind of module or an event, define it in `kinds` and add its name here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.verify.driver.program import Program

TE_LAYERS = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear", "subclassed")
ATTENTION = ("attention", "transformer_layer")
BLOCKS = (
    *("sequential", "nested", "Block", "ListBlock", "CallsForward", "WithNone", "Signed", "SignsFirst", "Unused"),
    *("KeptInBf16", "OwnAutocast", "Recomputed", "Named", "Structured", "Dropped", "CoreAttention"),
)
DRAWING = (*ATTENTION, "Dropped", "CoreAttention")
"""The modules that draw random numbers from the RNG tracker, if the program has one."""
MLPS = ("layernorm_mlp", "transformer_layer")
OPERATIONS = ("operation", "operations", "nested_operations")
OTHERS = ("torch_linear", "dropout", "Tied")
OF_RANKS = ("Parallel",)
SPECIAL_MODULES = (
    *("Adapted", "Routed", "normed", "Wide", "Teacher", "Router", "Returning", "Detached", "TwoPrecisions", "Listed"),
    *("patched", "patched_inside", "Masked"),
)
MODULES = (*TE_LAYERS, *BLOCKS, *ATTENTION, *OPERATIONS, *OTHERS, *OF_RANKS, *SPECIAL_MODULES, "Counting", "Fp8Output")
EVENTS = (
    *("step", "step_at_rate_0", "skipped_step", "eager_step", "evaluate", "evaluate_in_bf16", "evaluate_in_other"),
    *("infer", "save", "load", "recapture", "switch_recipe", "freeze", "reset_fp8", "raise_in_autocast"),
    *("reseed_tracker", "failed_capture", "misuse_keyword", "misuse_shape", "misuse_missing", "misuse_keys"),
    "misuse_backward",
)
EXTRA_CAPTURES = ("infer_in_inference_mode", "failed_capture_in_fp8", "nested_in_two_precisions")
SPECIAL_EVENTS = (
    *("evaluate_average", "evaluate_in_inference_mode", "interrupted_step", "unfreeze", "step_of_losses"),
    *("evaluate_copy", "failed_capture_in_garbage", *EXTRA_CAPTURES),
)
RECIPES = {
    "hopper": ("delayed", "current", "block"),
    "blackwell": ("delayed", "current", "mxfp8", "nvfp4"),
    "blackwell-rtx": ("delayed", "current", "nvfp4", "block"),
}


def runs_twice(p: Program) -> bool:
    """Return whether forwards without a backward run before or between forwards with a backward."""
    return bool(p.checkpoints or p.inference or p.first == "distillation")


RULES: dict[str, Callable[[Program], Any]] = {
    "each chunk of an order has the same number of layers": lambda p: not p.order or len(p.modules) % max(p.order) == 0,
    "if an order delays wgrads, TE requires one layer in each chunk": lambda p: (
        not (p.delay and p.order) or p.layers_as_chunks or len(p.modules) == max(p.order)
    ),
    "TE's backward_dw replaces a gradient, so the caller must take each gradient before the next": lambda p: (
        p.takes_grads or not p.delay
    ),
    "sends need an order, because other replays overwrite the sent gradient": lambda p: p.order or not p.sends,
    "attention cannot delay wgrads": lambda p: not (p.delay and {*ATTENTION} & {*p.modules}),
    "weight normalization computes a new weight for each forward, so no wgrad can be delivered later": lambda p: (
        "normed" not in p.modules or not (p.fused or p.fp8_params or p.delay)
    ),
    "if only a projection inside a layer is captured, no feature may need a graph of the whole layer": lambda p: (
        not p.inside
        or not (
            (p.order or p.together or p.delay or p.inference or p.checkpoints or p.in_bf16 or p.weights != "plain")
            or {"Named", "Structured", "Recomputed", "KeptInBf16", "Unused", "TwoPrecisions"} & {*p.modules}
            or any(each.startswith("misuse") for each in p.events)
        )
    ),
    "eager backward_dw() loses the wgrads of FP8 weights that compute without FP8": lambda p: (
        not (p.delay and p.fp8_params and (p.recipe == "bf16" or "KeptInBf16" in p.modules))
    ),
    "a capture in one call includes all layers": lambda p: not ((p.order or p.together) and p.not_captured),
    "each wgrad entry of an order needs a module that delays its wgrad": lambda p: (
        not any(each % 1 for each in p.order) or (p.delay and not {*OPERATIONS, *OTHERS} & {*p.modules})
    ),
    "an extra layer of torch accepts no is_first_microbatch": lambda p: (
        not (p.first == "plain" and p.weights == "cached")
    ),
    "FP8 weights cannot change their recipe": lambda p: (
        not p.fp8_params
        or (
            not {"switch_recipe", "evaluate_in_other", "interrupted_step", "load"} & {*p.events}
            and not (p.in_bf16 or p.calibrating or {"KeptInBf16", "OwnAutocast"} & {*p.modules})
        )
    ),
    "eager training creates FP8 state only in its first forward, so a program in FP8 begins with a step": lambda p: (
        p.recipe == "bf16" or p.events[:1] in {(each,) for each in EVENTS[:4]}
    ),
    "reseeding needs an RNG tracker": lambda p: p.tracker or "reseed_tracker" not in p.events,
    "a frozen module with delayed wgrads fails in eager training too": lambda p: (
        not p.delay or not (p.frozen or "freeze" in p.events)
    ),
    "hooks of parameters do not run for delayed wgrads": lambda p: not (p.delay and p.hooks),
    "a module that did not run has no wgrad": lambda p: not (p.delay and "Unused" in p.modules),
    "in these programs, a layer without a graph cannot delay wgrads": lambda p: not (p.delay and p.not_captured),
    "operations do not support block scaling": lambda p: (
        not {*OPERATIONS} & {*p.modules} or "block" not in (p.recipe, p.other)
    ),
    "sample arguments in a tuple have no keyword arguments": lambda p: not (p.tuples and "Named" in p.modules),
    "a tied layer is the last layer, and the first layer is a plain projection": lambda p: (
        "Tied" not in p.modules
        or (
            (p.modules[0] in TE_LAYERS[:2] and p.modules.index("Tied") == len(p.modules) - 1 > 0)
            and not (p.fused or p.fp8_params or p.delay or p.hooks or (len(p.order) and max(p.order) > 1))
        )
    ),
    "in delayed scaling, FP8 attention gets FP8 tensors, which the simulator cannot capture": lambda p: (
        not (
            p.fp8_attention
            and "delayed" in (p.recipe, p.other if "switch_recipe" in p.events else "")
            and {*ATTENTION} & {*p.modules}
        )
    ),
    "modules and hooks that communicate need ranks": lambda p: (
        p.ranks or not (p.hooks in ("reduces", "ddp") or {*OF_RANKS} & {*p.modules})
    ),
    "DDP needs one backward for each forward, with a gradient for every parameter": lambda p: (
        p.hooks != "ddp"
        or not (
            (p.order or p.delay or p.fused or p.frozen or runs_twice(p) or p.keeps_grads or not p.input_grads)
            or {"Unused", "Tied", "dropout", *OF_RANKS} & {*p.modules}
            or {"eager_step", "freeze", "raise_in_autocast"} & {*p.events}
        )
    ),
    "gloo cannot gather both parts of a block-scaled tensor at once": lambda p: (
        not {"mxfp8", "nvfp4"} & {p.recipe, p.other} or not {*OF_RANKS} & {*p.modules}
    ),
    "a dict cannot be in a tuple of sample arguments, or an argument of te.checkpoint": lambda p: (
        "Structured" not in p.modules or not (p.tuples or p.checkpoints)
    ),
    "only tensors can be shared static inputs, because TE reads their shapes": lambda p: (
        "Structured" not in p.modules or not p.reuse
    ),
    "a call with wrong keys needs a dict as input": lambda p: (
        "misuse_keys" not in p.events or p.modules[0] == "Structured"
    ),
    "calibration needs delayed scaling": lambda p: (
        not p.calibrating
        or (
            p.recipe == "delayed"
            and p.weights == "plain"
            and not p.in_bf16
            and not {"evaluate_in_other", "switch_recipe", "evaluate_in_bf16"} & {*p.events}
            and not {"OwnAutocast", "KeptInBf16", "grouped_linear"} & {*p.modules}
            and not (p.inference or p.checkpoints or "Recomputed" in p.modules)
        )
    ),
    "inference needs a graph and an event, and a first layer with one input and one output": lambda p: (
        bool(p.inference) == ("infer" in p.events)
        and not (p.inference and p.modules[0] in ("Named", "WithNone", "Signed", "SignsFirst", "Structured"))
    ),
    "an extra layer before the others needs one autocast for all layers": lambda p: not p.first or p.autocasts == "one",
    "a program needs something to train": lambda p: (
        p.input_grads or (not p.frozen and p.modules[0] not in ("dropout", "Tied"))
    ),
    "a checkpoint repeats forwards, which must not come between other replays of their pool": lambda p: (
        not p.checkpoints or (not p.order and not (p.together and len(p.modules) > 1))
    ),
    "a reentrant checkpoint needs an input with a gradient": lambda p: (
        (p.input_grads or not (p.checkpoints or "Recomputed" in p.modules))
        and not ({"Teacher", "Router"} & {*p.modules} and "Recomputed" in p.modules)
    ),
    "LayerNormMLP returns no dummy for one weight, so eager autograd calls the hooks with no gradient": lambda p: (
        not (p.hooks and p.fused and {*MLPS} & {*p.modules} and "bf16" not in (p.recipe,))
    ),
    "FP8 weights that are built without grad lack columnwise data, which a simulated LayerNormMLP needs": lambda p: (
        not (p.fp8_params and p.built_without_grad and {*MLPS} & {*p.modules})
    ),
    "chained operations cannot quantize their outputs in current scaling and NVFP4": lambda p: (
        "operations" not in p.modules or not {"current", "nvfp4"} & {p.recipe, p.other}
    ),
    "after an evaluation that caches weights in block scaling, LayerNormMLP cannot train even eagerly": lambda p: (
        not (p.inference and p.weights != "plain" and p.recipe == "block" and p.modules[0] in MLPS)
    ),
    "torch's checkpoint, used for modules of torch, accepts no keyword arguments": lambda p: (
        not (p.checkpoints and p.weights == "cached" and {*OTHERS} & {*p.modules})
    ),
    "if each layer is a chunk, delayed wgrads need entries in the order": lambda p: (
        not (p.delay and p.layers_as_chunks and len(p.modules) > 1) or any(each % 1 for each in p.order)
    ),
    "eager recomputation uses the oldest FP8 state, which may belong to a forward without a backward": lambda p: (
        "delayed" not in (p.recipe, p.other)
        or not (p.checkpoints or "Recomputed" in p.modules)
        or not ("raise_in_autocast" in p.events or ("Recomputed" in p.modules and runs_twice(p)))
    ),
    "on a GPU, the eager wgrad of the first of two FP8 operations reads an unwritten transpose": lambda p: (
        "operations" not in p.modules or "delayed" not in (p.recipe, p.other)
    ),
    "distillation runs the first layer twice, but an order cannot": lambda p: p.first != "distillation" or not p.order,
    "te.checkpoint treats an operation as a module of torch, so eager training recomputes it in bf16": lambda p: (
        not (p.checkpoints and {*OPERATIONS} & {*p.modules})
    ),
    "for an order, TE returns functions, which have no hooks": lambda p: not (p.module_hooks and p.order),
    "TE cannot capture a module with hooks again": lambda p: (
        not (p.module_hooks and {"recapture", "switch_recipe", "freeze", "unfreeze"} & {*p.events})
    ),
    "the frozen projections of an adapted layer cannot delay wgrads, and must stay frozen": lambda p: (
        "Adapted" not in p.modules or not (p.delay or "unfreeze" in p.events)
    ),
    "three gradients are summed in another order if two of them are in a graph": lambda p: (
        not (p.residual or p.in_place) or not {"Adapted", "Routed", "patched", "Returning"} & {*p.modules}
    ),
    "dropout draws in the order of memory, and a static input has the strides of its sample argument": lambda p: (
        not p.strided or "dropout" not in p.modules
    ),
    "eager training confuses a copied transpose of an FP8 weight with a later transpose": lambda p: (
        not (p.offload and p.fp8_params)
    ),
    "torch cannot add in place to a view that TE returns": lambda p: (
        not p.in_place or p.modules[-1] not in TE_LAYERS[1:4]
    ),
    "TE's eager backward_dw in FP8 reads the .grad of a bias, but the caller has taken it": lambda p: (
        not (p.delay and p.bias and p.takes_grads and p.recipe != "bf16" and "eager_step" in p.events)
    ),
    "eager training returns unwritten memory as the gradient of a GroupedLinear that delays its wgrad": lambda p: (
        not (p.delay and p.takes_grads and "grouped_linear" in p.modules and "eager_step" in p.events)
    ),
    "eager training may overlook that the input of a frozen layernorm_linear needs a gradient": lambda p: (
        "delayed" not in (p.recipe, p.other)
        or not any(name == "layernorm_linear" for number, name in enumerate(p.modules) if number in p.frozen)
    ),
    "a te.checkpoint without gradients leaves its copy of the scales to the next recomputation": (
        lambda p: not (p.first == "distillation" and p.weights == "cached" and "te" in p.checkpoints)
    ),
    "another input of the first layer would overwrite the sample argument that holds the program's input": lambda p: (
        not p.same_input or p.first not in ("frozen", "plain", "teacher", "distillation")
    ),
    "before TE 2.15, eager training sets grad_added_to_main_grad on the saved copy of a weight": lambda p: (
        not (p.offload and p.clears_marks)
    ),
    "only a frozen layer can be unfrozen": lambda p: "unfreeze" not in p.events or "freeze" in p.events,
    "a warmup hook needs the main_grads of captured layers, and a later capture would change them again": lambda p: (
        not p.warmup_hook
        or (
            p.fused
            and not p.not_captured
            and p.inference != "after"
            and not {"freeze", "switch_recipe", "recapture"} & {*p.events}
            and not {"failed_capture", "failed_capture_in_garbage", *EXTRA_CAPTURES} & {*p.events}
        )
    ),
    "reusing the FP8 weights of the first forward needs plain layers in FP8, and one recipe": lambda p: (
        p.weights != "own"
        or (
            {*p.modules} <= {*TE_LAYERS, "sequential", "nested", "Block"}
            and p.recipe != "bf16"
            and not (p.calibrating or p.inference or p.first or p.in_bf16 or p.checkpoints)
            and not {"evaluate_in_other", "evaluate_in_bf16", "switch_recipe", "reset_fp8"} & {*p.events}
        )
    ),
    "a module that counts forwards needs captures without a warmup": lambda p: (
        "Counting" not in p.modules or (not p.warmup and not p.checkpoints)
    ),
    "a layer without gradients is the first layer, and another layer follows": lambda p: (
        not {"Teacher", "Router"} & {*p.modules}
        or (
            not {"Teacher", "Router"} & {*p.modules[1:], p.modules[-1]}
            and not (p.order or p.delay or p.hooks or p.first or p.checkpoints or p.residual or p.in_place)
            and not {"freeze", "unfreeze"} & {*p.events}
        )
    ),
    "inference, inner graphs and checkpoints do not support several outputs": lambda p: (
        not {"Router", "Returning", "Detached"} & {*p.modules} or not (p.inference or p.inside or p.checkpoints)
    ),
    "several losses need retained graphs, and one replay for each microbatch": lambda p: (
        "step_of_losses" not in p.events
        or (
            p.retain
            and not (p.order or p.delay or p.checkpoints or p.inference or p.first or p.own_pool)
            and not (p.calibrating or p.residual or p.in_place or p.hooks or p.weights == "own")
            and not {"Recomputed", "Dropped", "dropout", "Tied", "Routed"} & {*p.modules}
        )
    ),
    "a copy would call the forward that was set on its original": lambda p: (
        "evaluate_copy" not in p.events
        or (
            p.weights == "plain"
            and not (p.fp8_params or p.module_hooks or p.ranks or p.inside or p.tracker or p.hooks or p.delay)
            and not p.inference  # the explorer assigns the training graph's forward again
            and not {*OPERATIONS, *DRAWING, "normed", "dropout", "WithNone", "Signed", "SignsFirst"} & {*p.modules}
        )
    ),
    "a layer that runs in two precisions cannot delay wgrads, and has limits (docs/limits.md)": lambda p: (
        "TwoPrecisions" not in p.modules or not (p.delay or p.checkpoints or (p.fused and p.weights != "plain"))
    ),
    "a graph that caches weights also caches the weights of a layer without is_first_microbatch": lambda p: (
        "Listed" not in p.modules or p.weights != "cached"
    ),
    "some features need the shapes of the sample arguments, but a mask has another shape at a replay": lambda p: (
        "Masked" not in p.modules or not (p.inside or p.tuples or p.checkpoints or p.inference or p.same_input)
    ),
    "a training loop that sets is_first_microbatch needs FP8, and must run each microbatch": lambda p: (
        p.weights != "set" or (p.recipe != "bf16" and not (p.checkpoints or p.inference or p.first or p.calibrating))
    ),
    "a training loop that sets is_first_microbatch of classes needs FP8 and plain layers": lambda p: (
        p.weights not in ("class", "property")
        or (
            p.recipe != "bf16"
            and not (p.checkpoints or p.inference or p.first or p.calibrating or p.inside)
            and not {"evaluate_copy", "evaluate_average"} & {*p.events}
            and {*p.modules} <= {*TE_LAYERS[:4]}
        )
    ),
    "without a warmup, each replay for evaluation resets the scales that the capture created in an own autocast": (
        lambda p: p.warmup or not p.inference or "OwnAutocast" not in p.modules
    ),
    "an FP8 output needs a captured layer before an eager layer, in delayed scaling": lambda p: (
        "Fp8Output" not in p.modules
        or (
            p.modules[:2] == ("Fp8Output", "linear")
            and p.not_captured == (1,)
            and p.recipe == "delayed"
            and not (p.in_bf16 or p.checkpoints or p.inside or p.inference or p.first or p.calibrating or p.hooks)
            and not (p.residual or p.in_place or p.delay or p.autocasts != "one" or p.weights != "plain")
        )
    ),
    "extra captures need training in FP8, in a process without ranks": lambda p: (
        not {*EXTRA_CAPTURES} & {*p.events}
        or (
            "bf16" not in (p.recipe, p.other if "switch_recipe" in p.events else "")
            and not (p.calibrating or p.fp8_params or p.ranks or p.tracker or p.delay)
        )
    ),
    "eager training in delayed scaling fails after FP8 in inference mode": lambda p: (
        "infer_in_inference_mode" not in p.events or p.recipe != "delayed"
    ),
    "a call with wrong arguments needs a graph of the first layer": lambda p: (
        not (0 in p.not_captured and any(each.startswith("misuse") for each in p.events))
    ),
}
"""The rules of programs, each with a function that returns a true value if a program keeps the rule."""


FOUND = {
    "the flag of the first FP8 module, after a graph without inputs or outputs that need gradients": Program(
        modules=("Router", "layernorm_linear"), recipe="delayed", input_grads=False
    ),
    "scales of attention, in current scaling and without a warmup": Program(
        modules=("CoreAttention",),
        recipe="current",
        fp8_attention=True,
        warmup=0,
        inference="first",
        events=("step", "infer"),
    ),
    "the skip flag of a recomputation, after the first microbatch of another graph": Program(
        modules=("linear", "Recomputed"),
        recipe="delayed",
        weights="cached",
        order=(2, 2, -2, 1, -2, -1, 1, -1),
        events=("step",),
    ),
    "the skip flag of a graph behind an eager module": Program(
        modules=("linear", "linear"), recipe="delayed", weights="cached", not_captured=(0,), events=("step",)
    ),
    "an RNG tracker created before the explorer calls gc.freeze()": Program(
        modules=("Dropped",), tracker=True, events=("step", "reseed_tracker", "step")
    ),
    "a frozen expert in FP8, which eager training leaves without its main_grad": Program(
        modules=("grouped_linear",), recipe="delayed", fused=True, fp8_params=True, events=("step", "freeze", "step")
    ),
    "an operation's FP8 weight after an evaluation in bf16": Program(
        modules=("operation",), recipe="delayed", fp8_params=True, events=("step", "evaluate_in_bf16", "step")
    ),
    "attention that is not in FP8 after an evaluation in another recipe": Program(
        modules=("CoreAttention",), recipe="delayed", other="current", events=("step", "evaluate_in_other", "step")
    ),
    "the delayed scales of FP8 attention in current scaling, which were never updated": Program(
        modules=("CoreAttention",), recipe="current", fp8_attention=True
    ),
    "FP8 state of operations in bf16, which a second capture created and left behind": Program(
        modules=("nested_operations", "linear"),
        recipe="delayed",
        in_bf16=(0,),
        together=True,
        events=("step", "recapture"),
    ),
    "an operation's FP8 state from a capture for inference, which was never updated": Program(
        modules=("nested_operations",), recipe="delayed", not_captured=(0,), inference="after", events=("step", "infer")
    ),
    "an operation's FP8 state from a capture, which was not updated before the first replay": Program(
        modules=("nested_operations",), recipe="delayed", events=("eager_step", "step")
    ),
    "the reduction group of an operation's FP8 state that a capture created outside of an autocast": Program(
        modules=("nested_operations",), recipe="delayed", inference="first", ranks=True, events=("eager_step", "infer")
    ),
    "a second module that counts as the first FP8 module, after a graph with an autocast of its own": Program(
        modules=("OwnAutocast", "linear"), recipe="delayed", other="delayed", first="eager"
    ),
    "the scales of a graph in a checkpoint outside of FP8 autocasts, which TE copies from 2.19 on": Program(
        modules=("OwnAutocast",), other="delayed", checkpoints=("te",), inference="first", events=("infer", "step")
    ),
    "a module in a list, which a replay left in the recipe of an evaluation": Program(
        modules=("Listed",),
        recipe="current",
        other="delayed",
        events=("evaluate_in_other", "step", "evaluate_in_other", "step", "evaluate_in_other"),
    ),
    "cached weights that a graph for inference quantized at each replay, because its capture had no warmup": Program(
        recipe="current", weights="cached", warmup=0, inference="first", events=("step", "infer", "step", "infer")
    ),
    "scales that a capture for inference created after a capture in another recipe, without a warmup": Program(
        modules=("linear", "nested_operations"),
        recipe="current",
        other="delayed",
        warmup=0,
        inference="first",
        events=("step", "infer", "switch_recipe", "infer"),
    ),
    "a buffer that counted as written, because a warmup that was not requested restored it": Program(
        modules=("Returning",), order=(1, 1, -1, -1), warmup=0
    ),
}
"""Programs that revealed bugs of this package, by bug. All of these bugs are fixed."""

CHOICES: dict[str, Callable[[random.Random, Program], Any]] = {
    "weights": lambda r, p: r.choice(("marked", "cached")),
    "frozen": lambda r, p: (r.randrange(len(p.modules)),),
    "in_bf16": lambda r, p: (r.randrange(len(p.modules)),),
    "not_captured": lambda r, p: (r.randrange(len(p.modules)),),
    "microbatches": lambda r, p: r.randint(1, 3),
    "warmup": lambda r, p: r.choice((0, 1, 2, 11)),
    "first": lambda r, p: r.choice(("eager", "frozen", "plain", "teacher", "distillation", "cached")),
    "autocasts": lambda r, p: r.choice(("each", "nested")),
    "hooks": lambda r, p: r.choice(("adds", "takes", "doubles")),
    "input_grads": lambda r, p: False,
    "sends": lambda r, p: (1, 2, 3, 4),  # every chunk sends its input grads
    "checkpoints": lambda r, p: ("te",) * len(p.modules),
    "optimizer": lambda r, p: r.choice(("adam", "adam of master weights", "master weights")),
}
"""The functions that draw the values of fields. A field without such a function is set to True."""
GROUPS: tuple[str, ...] = (
    *(*SPECIAL_MODULES, *SPECIAL_EVENTS),
    *("weights, fused", "grouped_linear, weights, fused", "recipe current, weights cached, reset_fp8"),
    *("weights cached, evaluate_in_other", "weights cached, infer", "weights cached, infer, step, step, infer"),
    *("recipe delayed, switch_recipe, switch_recipe", "OwnAutocast, linear, first"),
    *("Signed, SignsFirst, order, layers_as_chunks, reuse", "ListBlock, delay, wgrad_hooks", "delay, order, fused"),
    *("together, delay", "delay, input_grads", "linear, layernorm_linear, order, layers_as_chunks, reuse, sends"),
    *("linear, linear, order, layers_as_chunks, reuse, input_grads", "WithNone, linear, order, reuse"),
    *("linear, subclassed, together", "fp8_params, built_without_grad, optimizer", "layernorm_mlp, weights marked"),
    *("Dropped, tracker, reseed_tracker", "transformer_layer, tracker, save, load"),
    *("CoreAttention, fp8_attention, recipe current", "operation, evaluate_in_bf16, save"),
    *("linear, Tied", "operations, recipe bf16, other bf16", "Teacher, linear", "Router, linear"),
    *("nested_operations, recipe delayed, eager_step", "nested_operations, recipe delayed, infer, not_captured"),
    *("Structured, misuse_keys", "recipe delayed, Recomputed, first eager"),
    *("recipe delayed, Recomputed, autocasts nested", "recipe delayed, grouped_linear, first eager, recapture"),
    *("recipe current, linear, weights own", "recipe delayed, grouped_linear, weights own"),
    *("Adapted, fp8_params", "Adapted, hooks adds", "Routed, delay", "Wide, bias", "freeze, unfreeze"),
    *("Block, inside", "CoreAttention, inside", "Adapted, inside", "strided", "in_place", "in_place, reuse"),
    *("offload", "hooks adds, late_hooks", "module_hooks", "same_input", "weights cached, evaluate_average"),
    *("weights cached, interrupted_step", "attention, recipe current, fp8_attention, fp8_mha"),
    *("evaluate_in_inference_mode, weights cached", "warmup 0, Counting", "fused, warmup_hook zeroes"),
    *("fused, warmup_hook replaces", "Recomputed, recipe current, weights marked, first cached"),
    *("Returning, order", "Detached, order", "Masked, order", "TwoPrecisions, recipe delayed"),
    *("patched, evaluate_copy", "retain, step_of_losses", "retain, together, step_of_losses", "weights set, fused"),
    *("weights set, fused, order", "weights class", "weights class, fused", "weights class, order"),
    *("weights property", "weights property, order"),
    *("fused, flat_main_grads", "Wide, fused, flat_main_grads", "failed_capture_in_garbage, fused"),
    *("Fp8Output, linear, recipe delayed, not_captured 1", "weights cached, infer_in_inference_mode"),
    *("fused, failed_capture_in_fp8", "Router, layernorm_linear, recipe delayed, input_grads"),
)
"""Modules, events and fields that are drawn together, because chance would rarely combine them."""
ONLY_IN_GROUPS = (
    *("inside", "strided", "in_place", "offload", "late_hooks", "fp8_mha", "same_input", "module_hooks", "retain"),
    *("warmup_hook", "flat_main_grads"),
)
ONLY_OF_CASES = ("clean_start", "fit", "hidden", "freezes_first", "one_pool", "one_sample", "inference_mode")
"""Fields that `draw` leaves at their defaults, because only cases of `verify` and `draw_broken` set them."""


def broken_rule(program: Program) -> str | None:
    """Return the first rule that a program breaks, or None if it keeps all rules."""
    return next((why for why, holds in RULES.items() if not holds(program)), None)


def draw(seed: int, gpu: str = "hopper", ranks: bool = True) -> Program:
    """Return the random program of a seed. It breaks none of `RULES` and, without ``ranks``, runs in one process."""
    r = random.Random(seed)
    groups = [group.split(", ") for group in r.sample(GROUPS, r.choice((0, 1, 1, 2)))]
    families = r.choices(
        (TE_LAYERS, BLOCKS, ATTENTION, OPERATIONS, OTHERS), (5, 4, 1, 1, 1), k=r.choice((1, 1, 2, 3, 4))
    )
    drawn = tuple(map(r.choice, families if r.random() < 0.5 else families[:1] * len(families)))
    recipes = ("bf16", *RECIPES[gpu], *RECIPES[gpu])
    plain = Program(recipe=r.choice(recipes), other=r.choice(recipes))
    for tried, others in ((groups, drawn), (groups, ()), (groups[:1], ()), ([], drawn), ([], ())):
        wanted = [each.partition(" ") for group in tried for each in group]
        named = tuple(name for name, *_ in wanted if name in MODULES)
        program = replace(plain, modules=(*named, *others[len(named) :]) or plain.modules)
        for name, _, value in wanted:
            program = replace(program, **change(r, program, name, value))
        if not broken_rule(program):
            break
    known = {"modules", "recipe", "other", "inference", "order", "events", "ranks", *ONLY_IN_GROUPS, *ONLY_OF_CASES}
    known |= {name for name, *_ in wanted}
    names = [each.name for each in fields(program) if each.name not in known and r.random() < 0.2]
    names += ["order"] if r.random() < 0.5 and not program.order else []
    names += r.choices(EVENTS, (6, *[1] * (len(EVENTS) - 1)), k=r.randint(0, 3))
    for name in r.sample(names, len(names)):
        program = if_valid(program, change(r, program, name))
    if r.random() < 0.2:
        program = if_valid(program, {"events": program.events[1:]})
    alone = dict.fromkeys(("layers_as_chunks", "reuse", "tuples", "delay", "wgrad_hooks", "fused"), False)
    ddp = {"hooks": "ddp", "order": (), "sends": (), "frozen": (), **alone}
    shared = r.choice(({}, {"hooks": "reduces"}, ddp, {"modules": (*OF_RANKS, *program.modules[1:])}))
    return if_valid(program, {"ranks": True, **shared}) if ranks and r.random() < 0.05 else program


def if_valid(program: Program, changes: dict[str, Any]) -> Program:
    """Return the changed program, or the program unchanged if the changes break a rule."""
    changed = replace(program, **changes)
    return program if broken_rule(changed) else changed


def change(r: random.Random, program: Program, name: str, value: str = "") -> dict[str, Any]:
    """Return the fields of a program that change if the event ``name`` is added or the field ``name`` is set.

    The field is set to ``value`` or, without a ``value``, to a random value. For the name of a module, return {}.
    """
    if name in MODULES:
        return {}
    if name in (*EVENTS, *SPECIAL_EVENTS):
        inference = {"inference": program.inference or r.choice(("first", "after"))} if name == "infer" else {}
        return {"events": (*program.events[:-1], name, "step"), **inference}
    if name == "order":
        chunks = r.choice([n for n in range(1, len(program.modules) + 1) if len(program.modules) % n == 0])
        return {"order": draw_order(r, chunks, r.choice((1, 2, 2, 3, 4)), program.delay and r.random() < 0.5)}
    if name == "delay":
        return {"delay": True, "takes_grads": True}
    if value:
        given: Any = int(value) if value.isdigit() else value
        return {name: (given,) if isinstance(getattr(program, name), tuple) else given}
    return {name: CHOICES[name](r, program) if name in CHOICES else True}


def draw_order(r: random.Random, chunks: int, microbatches: int, wgrads: bool) -> tuple[float, ...]:
    """Return a random order of forwards, dgrads and, if ``wgrads`` is true, wgrads.

    Within each chunk, the microbatches are in ascending order.
    """
    order: list[float] = []
    done = {(chunk, part): 0 for chunk in range(1, chunks + 1) for part in range(3)}
    while True:
        able = []
        for (chunk, part), count in done.items():
            limit = done[chunk, part - 1] if part else microbatches
            if count < limit and (part < 2 or wgrads):
                able.append((chunk, part))
        if not able:
            return tuple(order)
        chunk, part = r.choice(able)
        done[chunk, part] += 1
        order.append((chunk, -chunk, -chunk - 0.5)[part])


CHECKPOINTS = ("", "te", "reentrant", "not reentrant")
CHANGES = ("replace_data", "assign", "replace_main_grads", "train_all", "write_in_place")


def draw_broken(seed: int) -> Program:
    """Return a program, drawn from ``seed``, that may break replay preconditions.

    Its forwards, backwards, evaluations and changes are in a random sequence.
    """
    r = random.Random(seed)
    layers = tuple(r.choice(("linear", "layernorm_linear", "layernorm_mlp")) for _ in range(r.randint(1, 3)))
    graphs = r.randint(2, 3)
    events: list[str] = []
    in_flight = forwards = 0
    for _ in range(r.randint(3, 10)):
        if r.random() < 0.12:
            events.append(f"{r.choice(CHANGES)} {r.randrange(len(layers))}")
        elif r.random() < 0.1:
            events.append(f"forward_without_grad {r.randrange(graphs)}")
        elif in_flight and r.random() < 0.6:
            events.append(f"backward {r.randrange(in_flight) if r.random() < 0.2 else 0}")
            in_flight -= 1
        else:
            events.append(f"forward {r.randrange(graphs) if r.random() < 0.2 else forwards % graphs}")
            in_flight, forwards = in_flight + 1, forwards + 1
    capture = r.choice(("together", "apart", "one_pool", "order", "order"))
    return Program(
        modules=layers,
        bias=True,
        microbatches=graphs,
        recipe="current" if r.random() < 0.3 else "bf16",
        fused=r.random() < 0.4,
        freezes_first=r.random() < 0.2,
        retain=r.random() < 0.2,
        checkpoints=tuple(r.choice(CHECKPOINTS) if r.random() < 0.3 else "" for _ in layers),
        events=(*events, *["backward 0"] * in_flight, "update"),
        together=capture == "together",
        one_pool=capture == "one_pool",
        order=((1,) * graphs + (-1,) * graphs) if capture == "order" else (),
        reuse=capture == "order",
    )


def smaller(program: Program) -> Iterator[Program]:
    """Yield simpler programs: a field or item is removed or replaced by the default, or the order is simpler."""
    plain = Program()
    for each in fields(program):
        value, default = getattr(program, each.name), getattr(plain, each.name)
        if value == default:
            continue
        yield replace(program, **{each.name: default})
        if each.name == "order":
            chunks = range(1, int(max(value)) + 1)
            yield replace(program, order=tuple(entry for entry in value if entry % 1 == 0))
            yield replace(program, order=tuple(part for chunk in chunks for part in (chunk, -chunk)))
            yield replace(program, order=tuple(part for chunk in chunks for part in (chunk, chunk, -chunk, -chunk)))
        elif isinstance(value, tuple):
            for place in range(len(value)):
                yield replace(program, **{each.name: value[:place] + value[place + 1 :]})
            if each.name in ("modules", "events"):
                for place, item in enumerate(value):
                    if item != default[0]:
                        changed = (*value[:place], default[0], *value[place + 1 :])
                        yield replace(program, **{each.name: changed})


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Reduce a program that ``fails`` until none of its `smaller` programs ``fails``. Return the reduced program."""
    tried: set[Program] = set()
    found = True
    while found:
        found = False
        for candidate in smaller(program):
            if candidate in tried or not (candidate.modules and candidate.events) or broken_rule(candidate):
                continue
            tried.add(candidate)
            if fails(candidate):
                program, found = candidate, True
                break
    return program
