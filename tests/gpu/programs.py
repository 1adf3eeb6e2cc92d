"""More programs of several modules and autocasts than ``verify`` has: a JSON line for each. Runs on the simulator too.

    python tests/gpu/programs.py [PROGRAM ...]
    TE_GRAPH_FIXES=off python tests/gpu/programs.py

``errors`` are those of outputs, dgrads, wgrads and scales, or ``failed`` is the exception.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.graph import set_capture_end

import te_graph_fixes
from te_graph_fixes.verify.programs import (
    MICROBATCHES,
    OPTIONS,
    PROGRAMS,
    Block,
    OwnAutocast,
    autocast,
    capture,
    compare,
    linear,
    operation,
    other_rng_states,
    program,
    random,
)  # fmt: skip
from te_graph_fixes.verify.training import HIDDEN, make_recipe


@program
def subclass_inside(recipe: Any, graphed: bool) -> Any:
    """An inner module of a subclass of a captured class."""

    class Special(te.Linear):
        pass

    block, first = Block(), linear()
    block.first = Special(HIDDEN, HIDDEN, **OPTIONS)
    if graphed:
        capture(first, block, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return block(first(x))

    return run, (first, block)


@program
def frozen_rng_states(recipe: Any, graphed: bool) -> Any:
    """As `other_rng_states`, captured between `gc.freeze()` and `gc.unfreeze()`."""
    return other_rng_states(recipe, graphed, frozen=True)


@program
def enabled_by_module(recipe: Any, graphed: bool) -> Any:
    """A layer in FP8 that holds projections, and a captured projection in bf16."""
    block, last = Block(), linear()
    if graphed:
        capture(block, last, recipe=recipe, enabled=(True, False))

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            hidden = block(x)
        return last(hidden)

    return run, (block, last)


@program
def bf16_inside(recipe: Any, graphed: bool) -> Any:
    """A layer keeps one of its projections in bf16, next to a captured projection."""

    class Mixed(Block):
        def forward(self, x: torch.Tensor) -> Any:
            with te.autocast(enabled=False):
                x = self.first(x)
            return self.second(x)

    block, last = Mixed(), linear()
    if graphed:
        capture(block, last, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return last(block(x))

    return run, (block, last)


@program
def bf16_graph_used_eagerly_later(recipe: Any, graphed: bool) -> Any:
    """A graph in bf16 is replayed inside an FP8 autocast, and its projection used eagerly in FP8."""
    block = torch.nn.Sequential(linear())
    forward = block.forward
    if graphed:
        capture(block, recipe=None)

    def run(x: torch.Tensor, _: bool) -> Any:
        if graphed:
            with autocast(recipe):
                x = block(x)
        else:
            x = forward(x)
        with autocast(recipe):
            return forward(x)

    return run, (block,)


@program
def eager_before_replay(recipe: Any, graphed: bool) -> Any:
    """An operation runs eagerly after its capture, for a step, before its first replay."""
    block, seen = te.ops.Sequential(operation()), []
    forward = block.forward
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        seen.append(x)
        with autocast(recipe):
            return (block if len(seen) > MICROBATCHES else forward)(x)

    return run, (block,)


@program
def graphed_teacher(recipe: Any, graphed: bool) -> Any:
    """A teacher's graph runs in inference mode, a student's graph then."""
    teacher, student = Block().eval(), linear()
    with torch.no_grad(), autocast(recipe):
        teacher(random())
    if graphed:
        capture(teacher, recipe=recipe, grad=False)
        capture(student, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            with torch.inference_mode():
                target = teacher(x)
            return student(x) - target.clone()

    return run, (teacher, student)


@program
def eager_after_frozen(recipe: Any, graphed: bool) -> Any:
    """A frozen graph, then eager modules."""
    frozen, block = linear().requires_grad_(False).eval(), Block()
    if graphed:
        capture(frozen, recipe=recipe, grad=False)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return block(frozen(x.detach())) + x

    return run, (frozen, block)


@program
def evaluation_between(recipe: Any, graphed: bool) -> Any:
    """An eager evaluation before each step."""
    block = Block()
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        if first:
            with torch.no_grad(), autocast(recipe):
                block.eval()(x)
            block.train()
        with autocast(recipe):
            return block(x)

    return run, (block,)


@program
def several_autocasts(recipe: Any, graphed: bool) -> Any:
    """Each module in an autocast of the caller's, the first without gradients."""
    frozen, block, last = linear().requires_grad_(False).eval(), Block(), linear()
    if graphed:
        capture(frozen, recipe=recipe, grad=False)
        capture(block, last, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            hidden = frozen(x.detach()) + x
        with autocast(recipe):
            hidden = block(hidden)
        with autocast(recipe):
            return last(hidden)

    return run, (frozen, block, last)


@program
def operations_inside(recipe: Any, graphed: bool) -> Any:
    """A module that calls an operation by itself, a `te.ops.Sequential` and a projection.

    Behind another one in FP8 an operation gets an FP8 gradient whose transpose nobody has written: docs/survey.md.
    """
    block = torch.nn.Sequential(operation(), te.ops.Sequential(operation()), linear())
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return block(x)

    return run, (block,)


def _own_autocast(name: str, outer: str | None, enabled: bool = True) -> None:
    def own(recipe: Any, graphed: bool) -> Any:
        block, last = OwnAutocast(recipe), linear()
        other = recipes.DelayedScaling(amax_history_len=5) if outer == "fp8-delayed" else outer and make_recipe(outer)
        if graphed:
            capture(block, recipe=other)

        def run(x: torch.Tensor, _: bool) -> Any:
            if outer is None:
                return last(block(x))
            with te.autocast(enabled=enabled, recipe=other):
                return last(block(x))

        return run, (block, last)

    PROGRAMS[name] = own


_own_autocast("own-autocast-alone", None)
_own_autocast("own-autocast-in-another-delayed", "fp8-delayed")


@program
def two_own_autocasts(recipe: Any, graphed: bool) -> Any:
    """A module that enters two autocasts, one after the other; then an eager module in a third."""

    class Two(OwnAutocast):
        def forward(self, x: torch.Tensor) -> Any:
            with autocast(self.recipe):
                x = self.first(x)
            with autocast(self.recipe):
                return self.second.forward(x)

    block, last = Two(recipe), linear()
    if graphed:
        capture(block, recipe=None)

    def run(x: torch.Tensor, _: bool) -> Any:
        x = block(x)
        with autocast(recipe):
            return last(x)

    return run, (block, last)


@program
def checkpoint_of_graph_and_eager(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` around a graph and an eager module, and around another graph."""
    block, last, other = Block(), linear(), linear()
    if graphed:
        capture(block, recipe=recipe)
        capture(other, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return te.checkpoint(other, te.checkpoint(lambda x: last(block(x)), x))

    return run, (block, last, other)


@program
def checkpoint_without_reentrance(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` with ``use_reentrant=False`` around a graph."""
    block = Block()
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, _: bool) -> Any:
        with autocast(recipe):
            return te.checkpoint(block, x, use_reentrant=False)

    return run, (block,)


if __name__ == "__main__":
    applied = [fix for fix, status in te_graph_fixes.report().fixes.items() if status.status == "applied"]
    print(json.dumps({"te": te_graph_fixes.report().te_version, "applied": applied}))
    for name in sys.argv[1:] or PROGRAMS:
        for recipe in ("fp8-delayed", "fp8-current"):
            if recipe == "fp8-current" and not sys.argv[1:]:
                continue
            calls = {
                cls: cls.__call__ for cls in (te.Linear, torch.nn.Sequential, te.ops.Linear, te.ops.Sequential, Block)
            }
            try:
                found: dict[str, Any] = {key: max(values) for key, values in compare(name, recipe)["errors"].items()}
                print(json.dumps({"case": [name, recipe], "errors": found}), flush=True)
            except Exception as error:
                print(json.dumps({"case": [name, recipe], "failed": f"{type(error).__name__}: {error}"}), flush=True)
                set_capture_end()
                for cls, call in calls.items():
                    cls.__call__ = call
