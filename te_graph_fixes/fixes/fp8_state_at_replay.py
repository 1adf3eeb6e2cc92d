"""``fp8-state-at-replay``: replays leave out what eager forwards do with the scales of delayed scaling.

Upstream: open, TE 2.7 to main (corrected from 2.10 on)

Symptom: modules of a graph never get new scales (0.20 to 2.16 in all that follows, gradients of exactly 0) where they

1. are run by ``sub.forward(x)``, or are a `te.ops.Linear` or another fused operation that is captured by itself;
2. run in a ``te.autocast`` of their own; inside an outer one of another recipe it is an ``AttributeError``;
3. are recomputed by ``te.checkpoint`` around the graph: the second forward uses the scales that came after the first;
4. are attention in FP8 in current scaling, which TE scales with delay in part;
5. are in a `te.ops.Sequential` that runs eagerly between its capture and its first replay.

Before a replay TE puts the FP8 state of those modules into the buffers of the amax reduction which the warmup's forward
hooks have seen, with the recipe of the autocast around it. Now modules say in the capture what state they use, where
eager ones put it into the buffers, and a replay does the same with it
(`te_graph_fixes/provided/captured_fp8.py`, shipped beside the patched modules). What the warmup has left in the scales
of modules with an autocast of their own is taken back. Operations get no state for a capture in which they run without
FP8, where they would keep it, and what they have given up there is not put back (``AssertionError``). What they have
from a capture goes into the buffers in their next eager forward, if no replay comes before.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, not_applicable
from ..provided import new_module
from ..shapes import Changes, lacks_delayed_wgrads, require_names, start_of_warmup
from ..source import Definition, Source, unrecognized

REGISTER = """
if not FP8GlobalStateManager.fp8_graph_capturing():
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
"""
USE = """
from .._te_captured_fp8 import use_fp8_state

use_fp8_state(self.fp8_meta)
"""
PREPARE_OPERATIONS = """
for idx, op in enumerate(self._basic_ops):
    op.pre_fuser_forward(requires_grad=idx >= self.first_op_requiring_backward)
"""
USE_OF_OPERATIONS = """
if recipe is not None and recipe.delayed():
    from .._te_captured_fp8 import use_fp8_state

    for op in self._basic_ops:
        for mode in ("forward", "backward"):
            if op.num_quantizers(mode):
                use_fp8_state(op._fp8_metas[mode], of_module=False)
"""

BEGIN = """
from ._te_captured_fp8 import begin_capture, with_fp8_state

fp8_capture = begin_capture()
used_fp8_states = {}
outside_of_autocast = set()
"""
HOOK = """
if not (FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.fp8_graph_capturing()):
    # Without FP8, or in an autocast of its own: the recipe of a replay's autocast is not for it.
    outside_of_autocast.update((func_idx, m) for m in module.modules())
"""
CAPTURE = "_graph_context_wrapper(fwd_graph, pool=mempool)"
BEGIN_GRAPH = "used_fp8_states[fwd_graph] = fp8_capture.begin_graph()"
TE_MODULES = "te_modules = visited_te_modules.get(i, set())"
IN_AUTOCAST = """
te_modules = {m for m in visited_te_modules.get(i, ()) if (i, m) not in outside_of_autocast}
"""
RETURNED = "ret = []"
END = "fp8_capture.end()"
WITH_STATE = "graphed = with_fp8_state(graphed, used_fp8_states[fwd_graphs[i]])"

WITHOUT_STATE = " and not has_other_state(m)"
WITHOUT_SAVED = " and module_tensors is not None" + WITHOUT_STATE

KEPT = {
    "save_fp8_tensors": {"TransformerEngineBaseModule": WITHOUT_STATE, "BasicOperation": WITHOUT_STATE},
    "restore_fp8_tensors": {"TransformerEngineBaseModule": WITHOUT_STATE, "BasicOperation": WITHOUT_SAVED},
}
"""What saves and restores the state of delayed scaling around a capture, whose it takes for that, and when."""

IMPORT_STATE = "from ._te_captured_fp8 import has_other_state"


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    capture = module.definition("_make_graphed_callables")
    base = source.module("transformer_engine.pytorch.module.base")
    prepare = base.definition("TransformerEngineBaseModule.prepare_forward")
    fuser = source.module("transformer_engine.pytorch.ops.fuser").definition("OperationFuser.__call__")
    fuser.one("recipe = FP8GlobalStateManager.get_fp8_recipe()")
    hook = capture.inner("hook_fn")
    require_names(hook, "module", "func_idx")
    require_names(module.definition("restore_fp8_tensors"), "module_tensors")
    changes = Changes("graphed")
    changes.after(prepare, [prepare.one(REGISTER)], USE)
    changes.after(fuser, [fuser.one(PREPARE_OPERATIONS)], USE_OF_OPERATIONS)
    changes.before(capture, [start_of_warmup(capture)], BEGIN)
    changes.first(hook, HOOK)
    changes.before(capture, _forwards(capture), BEGIN_GRAPH)
    changes.before(capture, [capture.one(RETURNED)], END)
    changes.replace(capture, TE_MODULES, IN_AUTOCAST)
    changes.after(capture, [_autograd_function(capture)], WITH_STATE)
    for name, kinds in KEPT.items():
        changes.first(module.definition(name), IMPORT_STATE + "\n")
        for kind, condition in kinds.items():
            test = f"isinstance(m, {kind})"
            changes.replace(module.definition(name), test, test + condition)
    return changes.verdict(
        "replays leave out what eager forwards do with FP8 state",
        "replays do with FP8 state what eager forwards do",
        new_module(source, "captured_fp8"),
    )


def _forwards(capture: Definition) -> list[ast.With]:
    """The statements that capture a forward: with an order, and without."""
    found = [
        node
        for node in capture.nodes(ast.With)
        if CAPTURE in [ast.unparse(item.context_expr) for item in node.items]
        and capture.has("outputs = func(*args, **kwargs)", within=node)
    ]
    if len(found) != 2:
        raise unrecognized(f"`with {CAPTURE}` around a forward twice", capture, f"it {len(found)} times")
    return found


def _autograd_function(capture: Definition) -> ast.Assign:
    """The statement that makes the autograd function ``graphed`` of graph ``i``."""
    found = [
        node
        for node in capture.nodes(ast.Assign)
        if isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "make_graphed_autograd_function"
        and ast.unparse(node.targets[0]) in ("graphed", "(graphed, helpers)")
        and "fwd_graphs[i]" in map(ast.unparse, node.value.args)
    ]
    if len(found) != 1:
        raise unrecognized("graphed = make_graphed_autograd_function(...) once", capture, f"it {len(found)} times")
    return found[0]


FIX = Fix(
    id="fp8-state-at-replay",
    summary="replays leave out what eager forwards do with the scales of delayed scaling",
    symptom="scales that never change: sub.forward(), te.ops.Linear alone, own autocasts; other scales: te.checkpoint",
    upstream=(),
    affected=">=2.10",
    examine=examine,
    looks_like=("fp8 gradient", "fp8 backward .grad", "fp8 backward main_grad"),
)
