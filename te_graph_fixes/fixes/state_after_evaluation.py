"""``state-after-evaluation``: an evaluation in bf16 or another recipe takes a graph's FP8 state from its modules.

Upstream: open, TE 2.7 to main

Symptom, after such an evaluation between two replays: graphs of ``te.ops`` raise ``TypeError: 'NoneType' object is not
subscriptable`` or ``AttributeError``; the next checkpoint holds no FP8 state, or cannot be saved; scales are other than
eager ones (delayed scaling, error 0.4), in graphs and in later evaluations.

Modules note in each forward whether they run in FP8, and in which recipe; operations and modules drop a recipe state
that does not fit. A replay runs none of this, and goes on with the tensors of the capture, which nobody need own any
more. The graph now holds its recipe states, and does before its replay what a forward does to them
(`te_graph_fixes/provided/recipe_states.py`). A module's new state is now among those that are updated: after another
recipe its scales stayed at 1.0 for good, eagerly too. What runs by ``sub.forward(x)``, which TE's hooks do not see, is
covered where the recipe is that of the capture.

``not-needed``: all of the changes below stand where they would be made.
"""

from __future__ import annotations

from ..fix import Fix, Verdict
from ..provided import new_module
from ..shapes import Changes, graph_capture, require_names
from ..source import Source

HOLD = """
from ._te_recipe_states import RecipeStates

graphed.recipe_states = RecipeStates(func.modules())
"""

MODULE = 'm.fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()'

LOOP = """
for m in func.modules():
    ...
"""

KNOWN = "if m not in ANY_KNOWN: continue"

RESUME_ALONE = "graphed.recipe_states.resume_alone({known}, FP8GlobalStateManager)"

OPERATION = """
for mode in ("forward", "backward"):
    if m.num_quantizers(mode):
        ...
"""

RESUME = "graphed.recipe_states.resume(m, FP8GlobalStateManager)"

CLEAR = "self._fp8_workspaces.clear()"

CLEAR_AND_REGISTER_AGAIN = f"""
{CLEAR}
# The new recipe state is to be registered for updates; the index is that of the old one.
self.fp8_meta.pop(FP8GlobalStateManager.get_buffer_info(), None)
"""


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    factory = capture.inner("make_graphed_forward")
    require_names(factory, "func", "graphed")
    forward = factory.inner("new_fwd")
    loop = forward.one(LOOP)
    known = forward.text(forward.exactly(1, KNOWN, within=loop)[0]["ANY_KNOWN"])
    base = source.module("transformer_engine.pytorch.module.base")
    init = base.definition("TransformerEngineBaseModule.init_fp8_metadata")
    changes = Changes()
    changes.before(capture, [factory.node], HOLD)
    changes.before(forward, [forward.one(MODULE), forward.one(OPERATION)], RESUME)
    changes.before(forward, [loop], RESUME_ALONE.format(known=known))
    changes.replace(init, CLEAR, CLEAR_AND_REGISTER_AGAIN)
    return changes.verdict(
        "nothing gives a graph's recipe states back to its modules after another forward has taken them",
        "a graph holds its recipe states, and does before its replay what a forward does to them",
        new_module(source, "recipe_states"),
    )


FIX = Fix(
    id="state-after-evaluation",
    summary="an evaluation in bf16 or another recipe takes a graph's FP8 state from its modules",
    symptom="te.ops graphs raise, checkpoints lose FP8 state, scales go wrong after such an evaluation",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
