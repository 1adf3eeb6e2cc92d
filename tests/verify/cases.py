"""The registry of the cases of `tests.verify`. This module imports neither torch nor TransformerEngine (TE)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import did_you_mean


@dataclass(frozen=True)
class Case:
    """One comparison of graph replays with eager training.

    ``function`` (``module:name`` in this package) is called with ``options`` and returns measures by name. The measure
    ``errors`` maps names of results to lists of relative errors, which are 0.0 for bit-identical results. If the
    measure ``damaged`` is true, the process cannot run another case. ``fixes`` are the ids of the tested fixes.
    ``--quick`` selects the cases whose ``quick`` is true.
    """

    name: str
    fixes: tuple[str, ...]
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    def measure(self) -> dict[str, Any]:
        """Run the case in this process, with TE and a GPU. Return the measures by name."""
        module, _, name = self.function.partition(":")
        measures: dict[str, Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)(**self.options)
        return measures

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


PIPELINED = (
    *(1, 1, 1, 1, 2, 3, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5),
    *(1, -3, -3.5, -2, -2.5, 1, -1, -1.5, 1, -1, -1.5, 1, -1, -1.5, 2, -1, 3, -1.5, 2, -3, -3.5, 3, -2, -2.5),
    *(2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, -3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5, -1, -1.5, -1, -1.5),
)
"""The schedule in TE #2376, with three chunks and eight microbatches."""

OVERLAPPED = (
    *(1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, -4, 2, -3, 3, -4),
    *(4, -3, 3, -2, 4, -1, -2, -1, -4, -3, -4, -3, -2, -1, -2, -1),
)
"""The schedule of the first of two pipeline stages, with two model chunks of two layers each, and four microbatches.

Each layer is a chunk of the schedule, as with Megatron-Core's ``overlap_moe_expert_parallel_comm``.
"""
UNEVEN_SENDS = (
    *(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, -3, 3, -3, 1, -3, 1, -3, 2, -2, 2, -2, 3, -2, 3, -2),
    *(-1, -1, -1, -1, -3, -3, -2, -2, -1, -1),
)
"""The schedule of the first of two pipeline stages, with three model chunks, and six microbatches in groups of four."""
INTERLEAVED = (1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1)
"""The schedule of the first of two pipeline stages, with two chunks and four microbatches."""

BLACKWELL_RECIPES = ("mxfp8", "nvfp4")

SKIP, WARMUP, ORDER = "grouped-linear-skip-flag", "warmup-reset", "backward-dw-order"
PARAM_GRADS, HOOKS, HOOK_ORDER = "param-grad-lifetime", "backward-dw-hooks", "wgrad-hook-order"
DELIVERY, PRESWIZZLE, TRANSPOSES = "delayed-wgrad-delivery", "nvfp4-weight-preswizzle", "fp8-weight-transposes"
CACHED, EVALUATION, STALE = "cached-weight-lifetime", "state-after-evaluation", "stale-fp8-weights"
NO_WARMUP, UNREACHED, MEMORY = "capture-without-warmup", "wgrad-without-dgrad", "wgrad-memory-reuse"
EXPERTS, RECOMPUTE, CONTRACT = "grouped-linear-amax-reduction", "recompute-in-graphs", "replay-contract"
LEAVES, NESTED, REDUCTION = "leaf-grad-lifetime", "nested-autocast", "backward-amax-reduction"
STATE, NOT_CACHED = "fp8-state-at-replay", (STALE, WARMUP, PARAM_GRADS)


def _program(name: str, fixes: Iterable[str], quick: bool = False, **options: Any) -> Case:
    """Return a case of one `Program`, by default with three steps.

    By default, the program removes each ``.grad`` right after its backward, so that gradients do not add up in
    ``.grad``.
    """
    return Case(name, tuple(fixes), "programs:compare", {"events": _STEPS, "takes_grads": True, **options}, quick)


def _programs(
    name: str, fixes: Iterable[str], programs: Mapping[str, Mapping[str, Any]], quick: bool = False, **shared: Any
) -> Case:
    """Return a case of several programs, each with its own options and the ``shared`` options."""
    options = {"programs": programs, "events": _STEPS, **shared}
    return Case(name, tuple(fixes), "programs:compare_each", options, quick)


def _memory(
    name: str, fixes: Iterable[str], programs: Mapping[str, Mapping[str, Any]], quick: bool = False, **shared: Any
) -> Case:
    """Return a case of several programs whose captures should need equal amounts of memory."""
    return Case(name, tuple(fixes), "memory:compare", {"programs": programs, **shared}, quick)


def _training(
    name: str, fixes: Iterable[str], module: str = "linear", recipe: str = "bf16", quick: bool = False, **options: Any
) -> Case:
    """Return a case with three microbatches per step, one module per chunk, and fused wgrads.

    As in Megatron-Core, modules have an ``is_first_microbatch`` attribute, and FP8 graphs cache weights.
    """
    given = {
        "modules": (module,) * int(max(options.get("order", (1,)))),
        "recipe": recipe,
        "microbatches": 3,
        "fused": True,
        "weights": "marked" if recipe == "bf16" else "cached",
        "takes_grads": PARAM_GRADS not in fixes,  # the bug of this fix appears when gradients add up in ``.grad``
        "drops_dummies": True,
        "clean_start": True,
    }
    return _program(name, fixes, quick, **{**given, **options})


def _order(name: str, order: tuple[float, ...], **options: Any) -> Case:
    """Return a case that delays wgrads in the schedule ``order``. Its modules have no ``is_first_microbatch``."""
    given = {"order": order, "delay": True, "weights": "plain", "reuse": True}
    return _training(name, (ORDER,), **{**given, **options})


def _contract(name: str, *fixes: str, quick: bool = False, breaks: bool = False, **options: Any) -> Case:
    """Return a case that replays graphs in an unusual sequence.

    If ``breaks`` is true, the sequence breaks a replay precondition, so the case may raise an error.
    """
    given = {"modules": ("layernorm_mlp",), "bias": options.get("modules") != ("linear",), "takes_grads": False}
    return _program(name, fixes or (CONTRACT,), quick, breaks=breaks, **{**given, **options})


def _outputs(name: str, outputs: Iterable[str]) -> Case:
    """Return a case with a program for each of the ``outputs``, which are kinds of outputs in `driver.outputs`.

    Two microbatches are in flight, and a third one reuses the static buffers of the first.
    """
    programs = {output: {"modules": (f"{output} output",)} for output in outputs}
    options = {"order": (1, 1, -1, 1, -1, -1), "reuse": True, "takes_grads": True, "events": ("step",)}
    return _programs(name, ("weak-reference-layout",), programs, quick=True, **options)


def _recomputed(name: str, recipe: str) -> Case:
    """Return a case of a module that recomputes activations, alone and after another model that caches weights."""
    programs = {"alone": {}, "after cached": {"first": "cached", "order": (1, -1) * 2}}
    return _programs(name, NOT_CACHED, programs, modules=("Recomputed",), recipe=recipe, weights="marked")


def _changed(*changes: str) -> tuple[str, ...]:
    """Return the events of two microbatches, with the events ``changes`` between them, and of an optimizer step."""
    return "forward", "backward", *changes, "forward", "backward", "update"


MISUSES = ("misuse_keyword", "misuse_shape", "misuse_missing", "misuse_more", "misuse_backward", "step")
VIEWS = ("contiguous", "transposed", "chunk", "steps", "expanded", "permuted", "number", "negative")
DTYPES = (
    *("float64", "float16", "complex64", "complex128", "bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)
_STEPS = ("step",) * 3
_MLPS = ("layernorm_mlp",) * 2
_TWO = (1, 1, -1, -1)
_TWICE = ("forward", "forward", "backward", "backward", "update")
_BOTH = ("forward 0", "forward 1", "backward", "backward", "update")
_THREE_IN_FLIGHT = (
    *("forward 0", "forward 1", "forward 0", "backward", "forward 1", "backward", "backward", "backward"),
    "update",
)
_EVALUATED = ("step", "save", "evaluate_in_bf16", "step", "save", "evaluate_in_other", "step", "save")

# `ruff format` would spread each case over many lines.
# fmt: off
_ALL = (
    _training("experts-fp8-delayed", (SKIP, WARMUP), module="grouped_linear", recipe="delayed", quick=True),
    _training("experts-fp8-current", (SKIP, WARMUP), module="grouped_linear", recipe="current"),
    _training("experts-fp8-block", (SKIP, WARMUP), module="grouped_linear", recipe="block"),
    _training("experts-fp8-fit", (SKIP, WARMUP), module="grouped_linear", recipe="delayed", fit=True,
        events=_STEPS * 2),
    _training("experts-bf16", (WARMUP,), module="grouped_linear", quick=True),
    _training("linear-bf16", (WARMUP,)),
    _training("no-warmup", (NO_WARMUP,), recipe="delayed", order=(1, -1) * 2, warmup=0, quick=True),
    _training("no-warmup-delayed", (NO_WARMUP,), delay=True, weights="plain", order=(1, -1, -1.5) * 2, warmup=0),
    _training("no-warmup-evaluation", (NO_WARMUP,), module="nested_operations", recipe="delayed", weights="plain",
        warmup=0, inference="first", events=("infer", "step", "infer")),
    _training("linear-fp8-delayed", (WARMUP,), recipe="delayed"),
    _training("flag-set-by-caller", ("skip-flag-accessors",), recipe="delayed", sets_flag=True, quick=True),
    _training("weights-not-cached", (STALE, WARMUP), recipe="current", weights="marked", fit=True, events=_STEPS * 2,
        quick=True),
    _training("weights-kept", (STALE,), recipe="delayed", weights="marked"),
    _training("experts-kept", (STALE,), module="grouped_linear", recipe="delayed", weights="marked"),
    _training("norm-not-cached", NOT_CACHED, module="layernorm_linear", recipe="current", weights="marked"),
    _training("mlp-not-cached", NOT_CACHED, module="layernorm_mlp", recipe="current", weights="marked"),
    _training("experts-not-cached", NOT_CACHED, module="grouped_linear", recipe="current", weights="marked"),
    _training("own-autocast-not-cached", (STALE, WARMUP), module="OwnAutocast", other="current", weights="marked"),
    _training("other-module-first", (STALE,), recipe="current", first="eager"),
    _training("cached-nvfp4", (PRESWIZZLE,), module="Wide", recipe="nvfp4", order=(1, 1, 1, -1, -1, -1), quick=True),
    _order("forward-before-wgrad", (1, -1, 1, -1.5, -1, -1.5), quick=True),
    _order("two-chunks-wgrads-last", (1, 2, -2, -1, -2.5, -1.5)),
    _order("two-microbatches-wgrads-last", (1, 1, -1, -1, -1.5, -1.5)),
    _order("pipelined", PIPELINED),
    _order("pipelined-experts-fp8", PIPELINED, module="grouped_linear", recipe="current"),
    _order("wgrads-not-in-order", (1, 1, -1, -1), reuse=False),
    _program("wgrad-before-dgrad", (ORDER,), refusal=r"_order\[1\]", order=(1, -1.5, -1), fused=True, delay=True),
    _program("layers-as-chunks", ("grad-input-lifetime",), True, modules=("linear",) * 4, fused=True, order=OVERLAPPED,
        reuse=True, sends=(1, 3), events=("step",)),
    _program("last-send-before-cooldown", ("grad-input-lifetime",), modules=("layernorm_mlp",) * 3, fused=True,
        order=UNEVEN_SENDS, reuse=True, sends=(2, 3), events=("step",)),
    _training("hooks-after-wgrad", (HOOKS,), delay=True, weights="plain", wgrad_hooks=True, quick=True),
    _training("delayed-unfused", (DELIVERY,), delay=True, weights="plain", fused=False, quick=True),
    _training("delayed-bias", (DELIVERY,), delay=True, weights="plain", bias=True),
    _training("delayed-experts-in-order", (DELIVERY,), module="grouped_linear", order=(1, 1, -1, -1.5, -1, -1.5),
        delay=True, weights="plain", fused=False),
    _training("delayed-bias-fp8", (DELIVERY,), delay=True, weights="plain", bias=True, recipe="current"),
    _training("delayed-experts-bias", (DELIVERY,), module="grouped_linear", delay=True, weights="plain", bias=True),
    _training("delayed-mlp-bias", (DELIVERY,), module="layernorm_mlp", delay=True, weights="plain", bias=True),
    _program("delayed-forward-method", (DELIVERY,), modules=("CallsForward",), fused=True, delay=True),
    _program("delayed-together", (MEMORY, CONTRACT), True, modules=("layernorm_linear", "layernorm_linear"),
        together=True, fused=True, delay=True),
    _program("hook-order", (HOOK_ORDER, HOOKS), True, modules=("ListBlock",), fused=True, delay=True, wgrad_hooks=True),
    _program("plain-data-delayed", (UNREACHED, DELIVERY), True, modules=("linear", "layernorm_linear"), delay=True,
        input_grads=False),
    _programs("reused-buffers", ("static-buffer-reuse",), {
        "gradients": {"input_grads": False},
        "tensors": {"modules": ("SumOfOne", "Sum"), "input_grads": False, "layers_as_chunks": False,
            "order": (1, 2, -2, -1) * 2},
        "outputs": {"modules": ("SignsFirst", "Signed")},
    }, quick=True, modules=("Sum", "Sum"), order=(1, -1) * 2, layers_as_chunks=True, reuse=True, takes_grads=True),
    _outputs("output-strides", VIEWS),
    _outputs("output-dtypes", ("conjugate", *DTYPES)),
    _memory("memory-of-microbatches", ("warmup-outputs",),
        {"two": {"order": (1, -1) * 2}, "16": {"order": (1, -1) * 16}}, quick=True, modules=("layernorm_mlp",),
        hidden=256, fused=True, reuse=True),
    _programs("none-output", ("none-outputs",), {"without an order": {}, "in order": {"order": (1, -1)}}, quick=True,
        modules=("WithNone",), takes_grads=True),
    _training("samples-in-tuple", ("tuple-samples",), quick=True, order=(1, -1) * 2, weights="plain", reuse=True,
        tuples=True),
    _programs("failed-capture", ("failed-capture-state",), {
        "warmup": {"events": ("failed_capture 0 1", "step")},
        "capture": {"events": ("failed_capture 2 3", "step", "recapture")},
        "wgrad": {"events": ("failed_capture 4", "step"), "delay": True, "takes_grads": True},
        "arguments": {"events": ("failed_capture 7 8", "step")},
    }, quick=True, recipe="delayed"),
    _program("subclass-after-capture", ("subclass-autocast",), True, modules=("linear", "subclassed"), together=True,
        other="current", events=("train_another",)),
    _program("nested-modules", (NESTED,), True, modules=("nested", "Block", "linear"), recipe="delayed", together=True),
    _program("nested-operations", (NESTED,), modules=("nested_operations",), recipe="current"),
    _program("experts-after-steps", (EXPERTS,), True, modules=("grouped_linear",), recipe="delayed", first="eager",
        events=("step", "recapture", "step")),
    _program("frozen-first", (REDUCTION,), True, first="frozen", recipe="delayed", weights="cached"),
    _program("self-distillation", (REDUCTION,), modules=("Block",), first="distillation", recipe="delayed"),
    _program("plain-torch-first", (REDUCTION,), first="plain", recipe="delayed"),
    _program("forward-method", (STATE,), True, modules=("CallsForward", "operation"), recipe="delayed",
        order=(1, -1) * 2),
    _program("operations-in-bf16", (STATE,), modules=("nested_operations", "Block"), recipe="delayed", in_bf16=(0,),
        together=True, events=("step", "recapture", "step")),
    _program("own-autocast", (STATE,), modules=("OwnAutocast",), recipe="current", other="delayed"),
    _program("own-autocast-outside-of-others", (STATE,), modules=("OwnAutocast",), recipe="bf16", other="delayed",
        autocasts="none", weights="plain"),
    _program("own-autocast-of-another", (STATE,), modules=("OwnAutocast",), recipe="delayed", other="current",
        events=("step", "recapture", "step")),
    _program("own-autocast-after-an-eager-module", (STATE,), modules=("OwnAutocast", "linear"), recipe="current",
        other="delayed", first="eager"),
    _program("checkpoint", (STATE,), modules=("Block", "linear"), not_captured=(1,), checkpoints=("te", "te"),
        recipe="delayed"),
    _program("recompute-behind-another", (RECOMPUTE,), True, modules=("Recomputed",), recipe="delayed", first="eager",
        order=(1, -1) * 2),
    _program("recompute-in-an-autocast", (RECOMPUTE,), modules=("Recomputed", "linear"), recipe="delayed",
        autocasts="nested"),
    _program("recompute-in-a-later-capture", (RECOMPUTE,), modules=("linear", "Recomputed"), recipe="delayed",
        events=("evaluate", "recapture")),
    _program("recompute-after-another", (RECOMPUTE,), modules=("layernorm_linear", "Recomputed"), recipe="delayed",
        weights="cached", order=(2, 2, -2, 1, -2, -1, 1, -1)),
    _program("reset-between-steps", ("skip-flag-reset",), True, recipe="current", weights="cached",
        events=("step", "reset_fp8", "step", "reset_fp8", "step")),
    _program("calibration", ("calibration-recipe",), True, modules=("Block",), recipe="delayed", calibrating=True),
    _program("other-rng-states", ("rng-states-at-replay",), True, modules=("Dropped",), recipe="delayed", tracker=True,
        events=("step", "save", "reseed_tracker", "step", "load", "step", "recapture", "step")),
    _programs("misused-arguments", ("replay-arguments",), {
        "named": {"modules": ("Named",), "events": MISUSES},
        "keys": {"modules": ("Structured",), "events": ("misuse_keys", "misuse_key", "step")},
        "gradient": {"input_grads": False, "events": ("misuse_grad", "step")},
    }, quick=True),
    _contract("more-microbatches", breaks=True, quick=True, order=_TWO, reuse=True, events=_THREE_IN_FLIGHT),
    _contract("fewer-microbatches", order=(1, 1, 1, -1, 1, -1, -1, -1), reuse=True, events=_BOTH),
    _contract("other-recipe-under-way", CONTRACT, breaks=True, recipe="delayed", other="current", order=_TWO,
        events=("step", "step", "forward 0", "evaluate_in_other", "forward 1", "evaluate_in_other", "backward",
        "backward", "update")),
    _contract("graph-twice-before-its-backward", breaks=True, events=_TWICE),
    _contract("module-twice-in-a-tuple", breaks=True, modules=("layernorm_mlp", "again"), together=True),
    _contract("captures-nested-in-a-pool", breaks=True, modules=_MLPS, one_pool=True),
    _contract("captures-after-each-other-in-a-pool", modules=_MLPS, one_pool=True,
        events=("forward 0 0", "backward", "forward 0 1", "backward", "forward 0 0", "backward", "update")),
    _contract("backward-twice", breaks=True, modules=("torch_mlp",),
        events=("forward", "backward_and_keep", "backward", "update")),
    _contract("checkpoint-of-te", CONTRACT, LEAVES, quick=True, modules=_MLPS, together=True, checkpoints=("te", "")),
    _contract("output-behind-a-checkpoint", modules=_MLPS, together=True, checkpoints=("te", ""),
        events=("forward", "backward", "read_outputs")),
    _contract("one-sample-for-all", modules=_MLPS, together=True, one_sample=True),
    _contract("one-sample-for-two-inputs", modules=("SumOfOne", "Sum"), order=(1, -1) * 2, reuse=True),
    _contract("deep-copy", events=("continue_with_a_copy", "step")),
    _contract("deep-copy-in-delayed-scaling", recipe="delayed", events=("step", "continue_with_a_copy", "step")),
    _contract("added-module", breaks=True, modules=("sequential",), events=("add_module", "step")),
    _contract("replaced-module", breaks=True, modules=("sequential",), events=("replace_module", "step")),
    _contract("moved-before-the-backward", breaks=True, events=("forward", "move_weights", "backward", "update")),
    _contract("forward-in-a-backward", breaks=True, events=("forward", "backward_that_runs", "update")),
    _contract("loaded-under-way", breaks=True, order=_TWO,
        events=("step", "forward 0", "assign", "forward 1", "assign", "backward", "backward", "update")),
    _contract("checkpoints-of-a-chunk", modules=_MLPS, order=_TWO, reuse=True, checkpoints=("te", "te"),
        events=("forward 0", "backward", "forward 1", "backward", "update")),
    _contract("checkpoints-in-another-order", breaks=True, modules=_MLPS, order=_TWO, reuse=True,
        checkpoints=("te", "te"), events=("forward 1", "forward 0", "backward", "backward", "update")),
    _contract("operation-in-a-checkpoint", breaks=True, modules=_MLPS, order=_TWO, reuse=True,
        checkpoints=("te", "not reentrant"), events=("forward 1", "forward 0", "backward", "backward", "update")),
    _contract("checkpoint-of-torch", CONTRACT, LEAVES, modules=_MLPS, together=True,
        checkpoints=("reentrant with more", "")),
    _contract("checkpoint-without-reentry", CONTRACT, LEAVES, modules=_MLPS, together=True,
        checkpoints=("not reentrant", "")),
    _contract("checkpoints-in-delayed-scaling", modules=_MLPS, together=True, recipe="delayed",
        checkpoints=("te", "te")),
    _contract("checkpoints-in-flight", breaks=True, modules=_MLPS, order=_TWO, checkpoints=("reentrant", ""),
        events=("step",)),
    _contract("checkpoint-outside-of-the-autocast", breaks=True, recipe="current", checkpoints=("reentrant",)),
    _contract("checkpoint-inside-of-the-autocast", recipe="delayed", checkpoints=("reentrant",),
        events=("microbatch_in_autocast",) * 3 + ("update",)),
    _contract("checkpoints-of-two-microbatches", breaks=True, modules=_MLPS, checkpoints=("te", "te"), events=_TWICE),
    _contract("checkpoints-of-one-module", breaks=True, modules=("layernorm_mlp", "again"), not_captured=(1,),
        checkpoints=("te", "te")),
    _contract("recomputed-for-another-microbatch", breaks=True, modules=("layernorm_mlp", "again"), not_captured=(1,),
        retain=True, checkpoints=("", "not reentrant"),
        events=("forward 0 0", "forward 0 1", "backward 1", "backward", "update")),
    _contract("targets-of-two-microbatches", breaks=True, modules=("layernorm_mlp", "torch_linear"), frozen=(0,),
        not_captured=(1,), input_grads=False, events=_TWICE),
    _contract("wgrad-after-the-next-forward", breaks=True, modules=("linear",), fused=True, delay=True,
        events=("forward", "backward", "forward", "wgrad", "update")),
    _contract("wgrad-before-the-backward", breaks=True, modules=("linear",), fused=True, delay=True,
        events=("forward", "wgrad", "backward", "update")),
    _contract("data-of-a-parameter", breaks=True, quick=True, events=_changed("replace_data")),
    _contract("offloaded-weights", breaks=True, events=_changed("move_weights", "write_in_place")),
    _contract("loaded-weights", breaks=True, events=_changed("assign")),
    _contract("other-main-grad", breaks=True, modules=("linear",), fused=True, events=_changed("replace_main_grads")),
    _contract("other-main-grad-under-way", breaks=True, modules=("linear",), fused=True, order=_TWO,
        events=("forward 0", "forward 1", "backward", "replace_main_grads", "backward", "update")),
    _contract("data-of-an-fp8-parameter", breaks=True, modules=("linear",), recipe="current", fp8_params=True,
        events=_changed("replace_fp8_data")),
    _contract("written-in-place", modules=("linear",), fused=True,
        events=_changed("write_in_place", "zero_main_grads")),
    _contract("frozen-fused-weight", breaks=True, modules=("linear",), fused=True, events=_changed("train_none")),
    _contract("frozen-delayed-weight", DELIVERY, modules=("linear",), delay=True,
        events=("forward", "backward", "wgrad", "update", "train_none", "forward", "backward", "wgrad", "update")),
    _contract("unfrozen-parameters", breaks=True, freezes_first=True, events=_changed("train_all")),
    _contract("gathered-input-grads", LEAVES, quick=True,
        events=("forward", "backward", "forward", "backward", *("forward_again", "backward") * 2, "read_input_grads")),
    _program("parameters-as-inputs", (LEAVES,), modules=("Bare",), bias=True, retain=True, microbatches=3,
        takes_grads=False),
    _program("cast-input", ("replay-arguments",), events=("cast_input",)),
    _program("outside-of-the-autocast", (CONTRACT,), recipe="current", events=("outside_of_the_autocast",)),
    _training("plain-grad", (PARAM_GRADS,), fused=False, weights="plain", quick=True),
    _training("plain-grad-fit", (PARAM_GRADS,), fused=False, weights="plain", fit=True, events=_STEPS * 2),
    _program("fp8-params-of-master", (TRANSPOSES,), recipe="delayed", fp8_params=True, optimizer="master weights"),
    _program("fp8-params-block-no-grad", (TRANSPOSES,), recipe="block", fp8_params=True, built_without_grad=True),
    _program("operation-alone", (EVALUATION, STATE), modules=("operation",), recipe="delayed",
        events=("step", "evaluate_in_bf16", "step", "save", "evaluate_in_bf16", "step", "step", "save")),
    _program("fp8-params-no-grad", (TRANSPOSES,), True, recipe="current", fp8_params=True, built_without_grad=True),
    _program("fp8-experts-no-grad", (TRANSPOSES,), modules=("grouped_linear",), recipe="current", fp8_params=True,
        built_without_grad=True, order=(1, -1) * 2),
    _program("inference-and-training", (CACHED,), True, recipe="current", weights="cached", inference="first",
        events=("infer", "step", "step", "infer", "infer", "step", "infer")),
    _program("inference-and-training-in-order", (CACHED,), recipe="current", weights="cached", inference="first",
        order=(1, -1) * 2, events=("infer", "step", "infer", "step", "step")),
    _program("inference-and-eager-training", (CACHED,), recipe="delayed", weights="cached", inference="first",
        not_captured=(0,), events=("step", "infer", "step", "infer", "step")),
    _program("inference-mode-first", ("inference-mode-capture",), True, weights="cached", inference="first",
        inference_mode=True, events=("infer", "step", "infer", "step")),
    _program("cached-after-other-recipe", (CACHED, EVALUATION), recipe="current", other="delayed", weights="cached",
        events=("step", "evaluate_in_other", "step", "evaluate_in_other", "step")),
    _program("checkpoint-after-bf16", (EVALUATION,), recipe="delayed", other="current", events=_EVALUATED),
    _program("forward-method-after-others", (EVALUATION, STATE), modules=("CallsForward",), recipe="delayed",
        other="current", events=_EVALUATED),
    _program("ops-after-bf16", (EVALUATION,), True, modules=("one_operation",), recipe="delayed",
        events=("step", "evaluate_in_bf16", "save", "step", "save", "evaluate_in_bf16", "step", "step", "save")),
    _program("ops-after-other-recipe", (EVALUATION,), modules=("one_operation",), recipe="delayed", other="current",
        events=("step", "evaluate_in_other", "step", "save", "evaluate_in_other", "step", "save")),
    _training("norm-and-bias", (PARAM_GRADS,), module="layernorm_linear", bias=True, weights="plain"),
    _recomputed("recomputed-weights", "current"),
    _recomputed("recomputed-weights-mxfp8", "mxfp8"),
    _recomputed("recomputed-weights-nvfp4", "nvfp4"),
    _programs("main-grads-at-capture", ("warmup-main-grads",), {"backward": {}, "delayed": {"delay": True}}, quick=True,
        modules=("Routed",), fused=True),
    _programs("cleared-marks", ("grad-added-mark",), {
        "backward": {}, "delayed": {"delay": True}, "in order": {"order": (1, 1, -1, -1)},
    }, quick=True, modules=("layernorm_mlp",), fused=True, clears_marks=True, takes_grads=True),
    _program("tied-weight", (PARAM_GRADS,), True, modules=("linear", "Tied"), fused=True, events=(*("forward 0 0",
        "backward", "drop_grads", "forward 0 1", "backward", "keep_grads") * 3, "read_kept_grads", "update")),
    _programs("fused-mlps", (PARAM_GRADS, "fused-dummy-copies"), {
        "in order": {"modules": ("layernorm_mlp",) * 4, "order": INTERLEAVED, "events": ("step", "dummies")},
        "without an order": {"modules": ("layernorm_mlp",), "events": ("dummies",)},
    }, quick=True, bias=True, fused=True, reuse=True, clean_start=True),
    _programs("parameter-hooks", ("parameter-hooks", PARAM_GRADS), {
        f"{hooks}{' in order' if order else ''}": {"hooks": hooks, "order": order}
        for hooks in ("adds", "takes", "doubles", "of the node")
        for order in ((), (1, -1))
    }, quick=True, modules=("layernorm_linear",), bias=True),
)
# Only tests run these programs, on the simulator.
_BESIDE = (
    _program("subclass-inside", (NESTED,), modules=("linear", "SpecialInside"), recipe="delayed", together=True),
    _program("enabled-by-module", (NESTED,), modules=("Block", "linear"), recipe="delayed", together=True,
        in_bf16=(1,)),
    _program("bf16-inside", (NESTED,), modules=("KeptInBf16", "linear"), recipe="delayed", together=True),
    _program("bf16-graph-used-eagerly-later", (), other="delayed", events=("step", "evaluate_in_other", "step")),
    _program("eager-before-replay", (STATE,), modules=("nested_operations",), recipe="delayed",
        events=("eager_step", "step")),
    _program("graphed-teacher", (), recipe="delayed", first="teacher"),
    _program("eager-after-frozen", (), modules=("Block",), recipe="delayed", first="frozen", not_captured=(0,)),
    _program("evaluation-between", (), modules=("Block",), recipe="delayed",
        events=("step", "evaluate") * 2 + ("step",)),
    _program("several-autocasts", (), modules=("linear", "Block", "linear"), recipe="delayed", autocasts="each",
        frozen=(0,)),
    _program("operations-beside", (), modules=("operation", "nested_operations", "linear"), recipe="delayed",
        together=True),
    _program("own-autocast-alone", (), modules=("OwnAutocast", "linear"), other="delayed"),
    _program("own-autocast-in-another-delayed", (), modules=("OwnAutocast", "linear"), recipe="delayed",
        other="delayed"),
    # Without the fixes, this program causes an illegal memory access on Blackwell.
    _program("own-autocast-and-validations", (STATE, CACHED), modules=("OwnAutocast",), recipe="nvfp4", other="mxfp8",
        weights="cached", hidden=128, events=("step", "evaluate") * 2 + ("step",)),
    _program("checkpoints-of-graphs-and-eager", (), modules=("Block", "linear", "linear"), recipe="delayed",
        not_captured=(1,), checkpoints=("te",) * 3),
    _program("master-mlp", (TRANSPOSES,), modules=("layernorm_mlp",), recipe="current", fp8_params=True,
        optimizer="master weights"),
    _program("master-operation", (TRANSPOSES,), modules=("operation",), recipe="current", fp8_params=True,
        optimizer="master weights"),
    _program("fp8-params-operation", (EVALUATION,), modules=("operation",), recipe="delayed", fp8_params=True,
        events=("step", "evaluate_in_bf16", "step", "save", "step", "save")),
    _program("no-grad-load", (TRANSPOSES,), modules=("layernorm_linear",), recipe="delayed", fp8_params=True,
        built_without_grad=True, events=("step", "save", "step", "load", "eager_step", "step")),
    _program("operation-by-forward", (EVALUATION,), modules=("CallsOperations",), recipe="current", other="delayed",
        events=_EVALUATED),
    _program("shared-experts", (CACHED,), modules=("grouped_linear",), recipe="delayed", weights="cached",
        inference="first", events=("infer", "step", "step", "infer", "infer", "step", "infer")),
    _program("shared-mlp", (CACHED,), modules=("layernorm_mlp",), recipe="current", weights="cached",
        inference="first", order=(1, -1) * 2, events=("infer", "step", "step", "infer", "infer", "step", "infer")),
    _program("spoiled-capture", ("failed-capture-state",), recipe="delayed", events=("failed_capture 5 6", "step")),
    _program("other-needs-of-gradients", ("static-buffer-reuse",), modules=("linear", "linear"),
        order=(1, 1, -1, 1, -1, -1), layers_as_chunks=True, reuse=True, input_grads=False, events=("step",)),
    _programs("uneven-experts", (), {
        f"{kind}, {recipe}": {"modules": (kind,), "recipe": recipe}
        for kind in ("uneven_experts", "padded_experts")
        for recipe in ("delayed", "current", "block")
    }, order=(1, 1, -1, 1, -1, -1), weights="cached", hidden=128),
    *(
        _programs(f"uneven-experts-{recipe}", (), {
            "list of splits": {"modules": ("uneven_experts",)},
            "padded": {"modules": ("padded_experts",)},
            "splits on the GPU": {"modules": ("experts_on_gpu",)},
            "operation": {"modules": ("grouped_operation",), "weights": "plain"},
        }, recipe=recipe, order=(1, 1, -1, 1, -1, -1), weights="cached", hidden=128)
        for recipe in BLACKWELL_RECIPES
    ),
    _program("none-output-and-reuse", (), modules=("WithNone", "linear"), order=(1, 1, -1, -1), reuse=True,
        events=("step",)),
)
# fmt: on


def _in_blackwell_recipes(cases: Iterable[Case]) -> Iterable[Case]:
    """Yield the `_training` cases in each of the `BLACKWELL_RECIPES`. GPUs other than Blackwell skip them."""
    done = []
    for case in cases:
        own = case.options.get("recipe")
        options = {name: value for name, value in case.options.items() if name not in ("recipe", "takes_grads")}
        if own == "bf16" and options["weights"] == "marked":
            options["weights"] = "cached"
        if "drops_dummies" not in options or options in done:
            continue
        done.append(options)
        name = re.sub(r"-(bf16|nvfp4|fp8(-delayed|-current|-block)?)\b", "", case.name)
        for recipe in BLACKWELL_RECIPES:
            if recipe != own:
                again = {**case.options, **options, "recipe": recipe}
                if recipe == "nvfp4" and options["weights"] == "cached":
                    again["hidden"] = 128  # a smaller size hides the bug of `nvfp4-weight-preswizzle`
                yield replace(case, name=f"{name}-{recipe}", options=again, quick=False)


CASES: dict[str, Case] = {case.name: case for case in (*_ALL, *_in_blackwell_recipes(_ALL))}
"""Every case by its name."""
SIMULATED: dict[str, Case] = {case.name: case for case in _BESIDE}
"""The cases that only tests run, by name. A case is wrong without its ``fixes``."""


def select(wanted: Iterable[str], quick: bool = False) -> list[Case]:
    """Return the cases whose names or fix ids are in ``wanted``, or all cases if it is empty.

    If ``quick`` is true, return only quick cases. Raise ValueError if a name is unknown, or if no case is left.
    """
    names = list(wanted)
    unknown = [name for name in names if name not in CATALOGUE and name not in CASES]
    if unknown:
        hint = did_you_mean(unknown, [*CATALOGUE, *CASES])
        words = ", ".join(map(repr, unknown))
        raise ValueError(
            f"unknown fix or case {words}. {hint}Run `te-graph-fixes list`, or `python -m tests.verify` without names."
        )
    chosen = [case for case in CASES.values() if not names or {case.name, *case.fixes} & {*names}]
    cases = [case for case in chosen if case.quick or not quick]
    if not cases:
        raise ValueError(f"no case of {', '.join(names)} is quick; omit --quick")
    return cases
