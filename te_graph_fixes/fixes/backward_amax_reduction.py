"""``backward-amax-reduction``: a graph that needs no backward switches off the backward's amax reduction of others.

Upstream: open, TE 2.7 to main (corrected from 2.10 on)

Symptom: delayed scaling with a frozen first graph, a graphed teacher, self-distillation, or a graph of plain torch
first: scales of the backward stay 1 in the whole autocast, wgrads are off by 1.16 to 1.20, small gradients become 0.

In an autocast the first FP8 module that has a backward updates the scales of all backwards at its end. To find it, TE
keeps a flag. Eager modules take the flag with grad mode on and something that needs a gradient; `Graphed.forward`
always takes it. It is now left for the next module where no output needs a gradient, and where the graph holds no FP8
module. Whether the graph sets the flag that says if weights are new is decided before that, as it was.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, lacks_delayed_wgrads, require_names, start_of_warmup
from ..source import Node, Source, unrecognized

WITHOUT_FP8 = "callables_without_fp8 = set()"

HOOK = """
if module is func and not any(
    isinstance(m, BasicOperation) or getattr(m, "fp8", False) for m in func.modules()
):
    callables_without_fp8.add(func_idx)
"""

USES_FP8 = "i not in callables_without_fp8"

TAKE = "ctx.is_first_module = FP8GlobalStateManager.is_first_fp8_module()"
TAKE_FOR_FP8 = "ctx.is_first_module = uses_fp8 and FP8GlobalStateManager.is_first_fp8_module()"

REMEMBER = "is_first_module = {flag}"
GIVE_BACK = """
if not any(o is not None and o.requires_grad for o in out):
    # As eager modules do, leave the reduction of the backward's amaxes to one that has a backward.
    {flag} = is_first_module
"""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    capture = module.definition("_make_graphed_callables")
    factory = capture.inner("make_graphed_autograd_function")
    forward, functionalized = factory.inner("Graphed").inner("forward"), factory.inner("functionalized")
    flag = _flag(source)
    hook = capture.inner("hook_fn")
    require_names(hook, "module", "func_idx")
    require_names(capture, "func")
    replays = [match for match in functionalized.matches("out = ANY_CALL") if _is_replay(match["ANY_CALL"])]
    if len(replays) != 1:
        raise unrecognized("`out = Graphed.apply(...)` once", functionalized, f"it {len(replays)} times")
    replay = [replays[0].node]
    changes = Changes()
    changes.before(capture, [start_of_warmup(capture)], WITHOUT_FP8)
    changes.first(hook, HOOK)
    changes.graph_argument(capture, USES_FP8, "uses_fp8")
    changes.replace(forward, TAKE, TAKE_FOR_FP8)
    changes.before(functionalized, replay, REMEMBER.format(flag=flag))
    changes.after(functionalized, replay, GIVE_BACK.format(flag=flag))
    return changes.verdict(
        "a graph always takes the flag of the first FP8 module",
        "a graph without a backward leaves the amax reduction to the next module",
    )


def _flag(source: Source) -> str:
    """How this TE names the flag."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    manager = quantization.definition("FP8GlobalStateManager")
    if manager.has("quantization_state = FP8GlobalState()"):
        quantization.definition("FP8GlobalState").one("is_first_fp8_module: bool = False")
        return "FP8GlobalStateManager.quantization_state.is_first_fp8_module"
    manager.one("IS_FIRST_FP8_MODULE = False")
    return "FP8GlobalStateManager.IS_FIRST_FP8_MODULE"


def _is_replay(node: Node) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "Graphed.apply"


FIX = Fix(
    id="backward-amax-reduction",
    summary="a graph that needs no backward switches off the backward's amax reduction of the whole autocast",
    symptom="delayed scaling with a frozen or teacher graph first: wgrads off by 1.2, small gradients become 0",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
