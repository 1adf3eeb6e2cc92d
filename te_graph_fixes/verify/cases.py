"""The registry of cases. Nothing here imports torch or TransformerEngine (TE)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..fixes import CATALOGUE
from ..settings import nearest


@dataclass(frozen=True)
class Case:
    """One measurement of graph replay against eager.

    ``function`` (``module:name`` within this package) is called with ``options`` and returns measures, by name. Its
    ``errors`` hold lists of numbers by name, all 0.0 where replay and eager are the same bit for bit; ``damaged``
    says that the process is not fit for another case.
    ``fixes`` are the ids that the case is about; ``quick`` cases are those of ``verify --quick``.
    """

    name: str
    fixes: tuple[str, ...]
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    def measure(self) -> dict[str, Any]:
        """Run the case in this process, which must be able to import TE and have a GPU."""
        module, _, name = self.function.partition(":")
        measures: dict[str, Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)(**self.options)
        return measures

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


# TE #2376: three chunks, eight microbatches.
PIPELINED = (
    *(1, 1, 1, 1, 2, 3, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5),
    *(1, -3, -3.5, -2, -2.5, 1, -1, -1.5, 1, -1, -1.5, 1, -1, -1.5, 2, -1, 3, -1.5, 2, -3, -3.5, 3, -2, -2.5),
    *(2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, -3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5, -1, -1.5, -1, -1.5),
)

# Three model chunks, six microbatches in groups of four, on the first of two stages.
UNEVEN_SENDS = {
    "order": (
        *(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, -3, 3, -3, 1, -3, 1, -3, 2, -2, 2, -2, 3, -2, 3, -2),
        *(-1, -1, -1, -1, -3, -3, -2, -2, -1, -1),
    ),
    "sizes": (1, 1, 1),
    "first_stage": True,
    "module": "LayerNormLinear",
}

SKIP, WARMUP, ORDER = "grouped-linear-skip-flag", "warmup-reset", "backward-dw-order"
DUMMIES, PARAMETER_HOOKS = "fused-dummy-copies", "parameter-hooks"
PARAM_GRADS, ACCESSORS = "param-grad-lifetime", "skip-flag-accessors"
HOOKS, HOOK_ORDER = "backward-dw-hooks", "wgrad-hook-order"
GRAD_INPUTS, DELIVERY = "grad-input-lifetime", "delayed-wgrad-delivery"
PRESWIZZLE = "nvfp4-weight-preswizzle"
TRANSPOSES, CACHED, EVALUATION = "fp8-weight-transposes", "cached-weight-lifetime", "state-after-evaluation"
SAFETY, SUBCLASS, STALE = "failed-capture-state", "subclass-autocast", "stale-fp8-weights"
ARGUMENTS, CALIBRATING, RESET = "replay-arguments", "calibration-recipe", "skip-flag-reset"
RNG_STATES, NO_WARMUP = "rng-states-at-replay", "capture-without-warmup"
UNREACHED, BUFFERS = "wgrad-without-dgrad", "static-buffer-reuse"
WEAK = "weak-reference-layout"
MEMORY, EXPERTS = "wgrad-memory-reuse", "grouped-linear-amax-reduction"
RECOMPUTE, MAIN_GRADS = "recompute-in-graphs", "warmup-main-grads"
CONTRACT, LEAVES = "replay-contract", "leaf-grad-lifetime"
NESTED, REDUCTION, STATE = "nested-autocast", "backward-amax-reduction", "fp8-state-at-replay"


def _training(name: str, fixes: Iterable[str], quick: bool = False, **options: Any) -> Case:
    return Case(name, tuple(fixes), "training:compare", options, quick)


def _program(name: str, fixes: Iterable[str], quick: bool = False, **options: Any) -> Case:
    return Case(name, tuple(fixes), "programs:compare", {"name": name, **options}, quick)


def _order(name: str, order: Iterable[float], quick: bool = False, **options: Any) -> Case:
    """Delayed wgrads in ``order``, of modules that do not mark first microbatches."""
    options = {"order": tuple(order), "delay": True, "mark_first": False, "reuse": True, **options}
    return _training(name, (ORDER,), quick, **options)


def _contract(name: str, *fixes: str, quick: bool = False) -> Case:
    """A program of ``verify.contract``."""
    return Case(name, fixes, "contract:compare", {"name": name}, quick)


def _events(name: str, fixes: Iterable[str], events: str, quick: bool = False, **options: Any) -> Case:
    """Events of ``verify.evaluation``, by name."""
    return Case(name, tuple(fixes), "evaluation:compare", {"events": tuple(events.split()), **options}, quick)


_STEPS = "first later update first later update first later"

_ALL = (
    _training("experts-fp8-delayed", (SKIP, WARMUP), module="GroupedLinear", recipe="fp8-delayed", quick=True),
    _training("experts-fp8-current", (SKIP, WARMUP), module="GroupedLinear", recipe="fp8-current"),
    _training("experts-fp8-block", (SKIP, WARMUP), module="GroupedLinear", recipe="fp8-block"),
    _training("experts-fp8-fit", (SKIP, WARMUP), module="GroupedLinear", recipe="fp8-delayed", fit=True, steps=6),
    _training("experts-bf16", (WARMUP,), module="GroupedLinear", quick=True),
    _training("linear-bf16", (WARMUP,)),
    _training("no-warmup", (NO_WARMUP,), recipe="fp8-delayed", order=(1, -1) * 2, warmup=0, quick=True),
    _training("no-warmup-delayed", (NO_WARMUP,), delay=True, mark_first=False, order=(1, -1, -1.5) * 2, warmup=0),
    _training("linear-fp8-delayed", (WARMUP,), recipe="fp8-delayed"),
    _training("flag-set-by-caller", (ACCESSORS,), recipe="fp8-delayed", set_flag=True, quick=True),
    _training("weights-not-cached", (STALE, WARMUP), recipe="fp8-current", cache=False, fit=True, steps=6, quick=True),
    *(
        _training(f"{name}-not-cached", (STALE, WARMUP, PARAM_GRADS), module=module, recipe="fp8-current", cache=False)
        for name, module in (("norm", "LayerNormLinear"), ("mlp", "LayerNormMLP"), ("experts", "GroupedLinear"))
    ),
    _training("other-module-first", (STALE,), recipe="fp8-current", other_first=True),
    _training("cached-nvfp4", (PRESWIZZLE,), recipe="nvfp4", order=(1, 1, 1, -1, -1, -1), quick=True),
    _order("forward-before-wgrad", (1, -1, 1, -1.5, -1, -1.5), quick=True),
    _order("two-chunks-wgrads-last", (1, 2, -2, -1, -2.5, -1.5)),
    _order("two-microbatches-wgrads-last", (1, 1, -1, -1, -1.5, -1.5)),
    _order("pipelined", PIPELINED),
    _order("pipelined-experts-fp8", PIPELINED, module="GroupedLinear", recipe="fp8-current"),
    _order("wgrads-not-in-order", (1, 1, -1, -1), reuse=False),
    Case("wgrad-before-dgrad", (ORDER,), "refusal:illegal_order"),
    Case("layers-as-chunks", (GRAD_INPUTS,), "pipeline:sent_gradients", quick=True),
    Case("last-send-before-cooldown", (GRAD_INPUTS,), "pipeline:sent_gradients", UNEVEN_SENDS),
    _training("hooks-after-wgrad", (HOOKS,), delay=True, mark_first=False, hooks=True, quick=True),
    _training("delayed-unfused", (DELIVERY,), delay=True, mark_first=False, fused=False, quick=True),
    _training("delayed-bias", (DELIVERY,), delay=True, mark_first=False, bias=True),
    _training(
        "delayed-without-graphs", (DELIVERY,), graphs=False, delay=True, mark_first=False, fused=False, bias=True
    ),
    _training(
        *("delayed-experts-without-graphs", (DELIVERY,)),
        module="GroupedLinear",
        graphs=False,
        delay=True,
        mark_first=False,
        fused=False,
        bias=True,
    ),
    _training(
        *("delayed-experts-in-order", (DELIVERY,)),
        module="GroupedLinear",
        order=(1, 1, -1, -1.5, -1, -1.5),
        delay=True,
        mark_first=False,
        fused=False,
    ),
    _training("delayed-bias-fp8", (DELIVERY,), delay=True, mark_first=False, bias=True, recipe="fp8-current"),
    _training("delayed-experts-bias", (DELIVERY,), module="GroupedLinear", delay=True, mark_first=False, bias=True),
    _training("delayed-mlp-bias", (DELIVERY,), module="LayerNormMLP", delay=True, mark_first=False, bias=True),
    Case("delayed-forward-method", (DELIVERY,), "gradients:delayed_wgrads", {"together": False}),
    Case("delayed-together", (MEMORY,), "gradients:delayed_wgrads", {"together": True}, quick=True),
    Case("hook-order", (HOOK_ORDER, HOOKS), "callables:hook_order", quick=True),
    Case("plain-data-delayed", (UNREACHED, DELIVERY), "callables:plain_data", quick=True),
    Case("reused-buffers", (BUFFERS,), "callables:reused_buffers", quick=True),
    Case("output-strides", (WEAK,), "callables:output_strides", quick=True),
    Case("output-dtypes", (WEAK,), "callables:output_dtypes", quick=True),
    Case("none-output", ("none-outputs",), "callables:none_output", quick=True),
    _training(
        "samples-in-tuple", ("tuple-samples",), quick=True, order=(1, -1) * 2, mark_first=False, reuse=True, tuples=True
    ),
    Case("failed-capture", (SAFETY,), "aftermath:failed_capture", quick=True),
    Case("subclass-after-capture", (SUBCLASS,), "aftermath:subclass_after_capture", quick=True),
    _program("nested-modules", (NESTED,), quick=True),
    _program("nested-operations", (NESTED,), recipe="fp8-current"),
    _program("experts-after-steps", (EXPERTS,), quick=True),
    _program("frozen-first", (REDUCTION,), quick=True),
    _program("self-distillation", (REDUCTION,)),
    _program("plain-torch-first", (REDUCTION,)),
    _program("forward-method", (STATE,), quick=True),
    _program("operations-in-bf16", (STATE,)),
    _program("own-autocast", (STATE,)),
    _program("own-autocast-of-another", (STATE,)),
    _program("checkpoint", (STATE,)),
    _program("recompute-behind-another", (RECOMPUTE,), quick=True),
    _program("recompute-in-an-autocast", (RECOMPUTE,)),
    _program("recompute-after-another", (RECOMPUTE,)),
    _program("reset-between-steps", (RESET,), recipe="fp8-current", quick=True),
    _program("calibration", (CALIBRATING,), quick=True),
    _program("other-rng-states", (RNG_STATES,), quick=True),
    Case("misused-arguments", (ARGUMENTS,), "refusal:misused_arguments", quick=True),
    _contract("more-microbatches", CONTRACT, quick=True),
    _contract("fewer-microbatches", CONTRACT),
    _contract("other-recipe-under-way", CONTRACT),
    _contract("graph-twice-before-its-backward", CONTRACT),
    _contract("module-twice-in-a-tuple", CONTRACT),
    _contract("captures-nested-in-a-pool", CONTRACT),
    _contract("captures-after-each-other-in-a-pool", CONTRACT),
    _contract("backward-twice", CONTRACT),
    _contract("checkpoint-of-te", CONTRACT, LEAVES, quick=True),
    _contract("output-behind-a-checkpoint", CONTRACT),
    _contract("one-sample-for-all", CONTRACT),
    _contract("deep-copy", CONTRACT),
    _contract("replaced-module", CONTRACT),
    _contract("moved-before-the-backward", CONTRACT),
    _contract("checkpoint-of-torch", CONTRACT, LEAVES),
    _contract("checkpoint-without-reentry", CONTRACT, LEAVES),
    _contract("checkpoints-in-delayed-scaling", CONTRACT),
    _contract("checkpoints-in-flight", CONTRACT),
    _contract("wgrad-after-the-next-forward", CONTRACT),
    _contract("wgrad-before-the-backward", CONTRACT),
    _contract("data-of-a-parameter", CONTRACT, quick=True),
    _contract("offloaded-weights", CONTRACT),
    _contract("loaded-weights", CONTRACT),
    _contract("other-main-grad", CONTRACT),
    _contract("data-of-an-fp8-parameter", CONTRACT),
    _contract("written-in-place", CONTRACT),
    _contract("unfrozen-parameters", CONTRACT),
    _contract("gathered-input-grads", LEAVES, quick=True),
    _contract("parameters-as-inputs", LEAVES),
    Case("cast-input", (ARGUMENTS,), "contract:warned", {"name": "cast-input"}),
    Case("outside-of-the-autocast", (CONTRACT,), "contract:warned", {"name": "outside-of-the-autocast"}),
    _training("plain-grad", (PARAM_GRADS,), fused=False, mark_first=False, quick=True),
    _training("plain-grad-fit", (PARAM_GRADS,), fused=False, mark_first=False, fit=True, steps=6),
    _events("fp8-params-of-master", (TRANSPOSES,), _STEPS, recipe="fp8-delayed", fp8_params=True, update="master"),
    _events("fp8-params-block-no-grad", (TRANSPOSES,), _STEPS, recipe="fp8-block", fp8_params=True, no_grad=True),
    _events(
        *("operation-alone", (EVALUATION, STATE), "first bf16 first update save bf16 first update first save"),
        module="ops.Linear",
        recipe="fp8-delayed",
        alone=True,
    ),
    _events("fp8-params-no-grad", (TRANSPOSES,), _STEPS, quick=True, fp8_params=True, no_grad=True),
    _events(
        *("fp8-experts-no-grad", (TRANSPOSES,), _STEPS),
        module="GroupedLinear",
        fp8_params=True,
        no_grad=True,
        pipelined=True,
    ),
    _events(
        *("inference-and-training", (CACHED,)),
        "infer-first first later update infer-later infer-first first infer-later later update first infer-later later",
        quick=True,
        cache=True,
        captures=("infer", "train"),
    ),
    _events(
        *("inference-and-training-in-order", (CACHED,)),
        "infer-first first later update infer-later first later update first later",
        cache=True,
        captures=("infer", "train"),
        pipelined=True,
    ),
    _events(
        *("inference-and-eager-training", (CACHED,)),
        "infer-first eager-first eager-later update infer-first eager-later update eager-first infer-later",
        cache=True,
        recipe="fp8-delayed",
        captures=("infer",),
    ),
    _events(
        *("cached-after-other-recipe", (CACHED, EVALUATION)),
        "first later update other first later update first later other later update first",
        cache=True,
    ),
    _events(
        *("checkpoint-after-bf16", (EVALUATION,)),
        "first update save bf16 first update save other first save",
        recipe="fp8-delayed",
        other="fp8-current",
    ),
    _events(
        *("forward-method-after-others", (EVALUATION, STATE)),
        "first update save bf16 first update save other first save",
        recipe="fp8-delayed",
        other="fp8-current",
        by_forward=True,
    ),
    _events(
        *("ops-after-bf16", (EVALUATION,)),
        "first update bf16 save first update save bf16 first first save",
        quick=True,
        module="ops.Linear",
        recipe="fp8-delayed",
    ),
    _events(
        *("ops-after-other-recipe", (EVALUATION,)),
        "first update other first update save other first first save",
        module="ops.Linear",
        recipe="fp8-delayed",
        other="fp8-current",
    ),
    _training("norm-and-bias", (PARAM_GRADS,), module="LayerNormLinear", bias=True, mark_first=False),
    Case("recomputed-weights", (STALE, WARMUP, PARAM_GRADS), "gradients:recomputed_weights"),
    Case("recomputed-weights-mxfp8", (STALE, WARMUP, PARAM_GRADS), "gradients:recomputed_weights", {"recipe": "mxfp8"}),
    Case("recomputed-weights-nvfp4", (STALE, WARMUP, PARAM_GRADS), "gradients:recomputed_weights", {"recipe": "nvfp4"}),
    Case("main-grads-at-capture", (MAIN_GRADS,), "gradients:main_grads_at_capture", quick=True),
    Case("tied-weight", (PARAM_GRADS,), "gradients:tied_weight", quick=True),
    Case("fused-mlps", (PARAM_GRADS, DUMMIES), "gradients:fused_mlps", quick=True),
    Case("parameter-hooks", (PARAMETER_HOOKS, PARAM_GRADS), "gradients:parameter_hooks", quick=True),
)

BLACKWELL_RECIPES = ("mxfp8", "nvfp4")


def _in_blackwell_recipes(cases: Iterable[Case]) -> Iterable[Case]:
    """Whatever is trained, once more in the recipes that came with Blackwell; elsewhere these cases are skipped."""
    done = set()
    for case in cases:
        options = {name: value for name, value in case.options.items() if name != "recipe"}
        if case.function != "training:compare" or str(options) in done:
            continue
        done.add(str(options))
        name = re.sub(r"-(bf16|nvfp4|fp8(-delayed|-current|-block)?)\b", "", case.name)
        for recipe in BLACKWELL_RECIPES:
            if case.options.get("recipe") != recipe:
                yield replace(case, name=f"{name}-{recipe}", options={**options, "recipe": recipe}, quick=False)


CASES: dict[str, Case] = {case.name: case for case in (*_ALL, *_in_blackwell_recipes(_ALL))}
"""Every case by its name."""


def select(wanted: Iterable[str], quick: bool = False) -> list[Case]:
    """The cases that fix ids and case names ask for, all if there are none; ValueError for an unknown one."""
    names = list(wanted)
    unknown = [name for name in names if name not in CATALOGUE and name not in CASES]
    if unknown:
        near = nearest(unknown, [*CATALOGUE, *CASES])
        words = ", ".join(map(repr, unknown))
        raise ValueError(f"unknown fix or case {words}; {near}see te-graph-fixes list, or verify without names for all")
    return [
        case
        for case in CASES.values()
        if (case.quick or not quick) and (not names or case.name in names or set(case.fixes) & set(names))
    ]
