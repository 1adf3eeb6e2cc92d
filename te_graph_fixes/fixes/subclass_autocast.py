"""``subclass-autocast``: after a capture, modules of a captured subclass keep the capture's recipe for good.

Upstream: open, TE 2.7 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 was closed without this case)

Symptom: where a module of a class and one of its subclass are captured in this order, as Megatron-Core's dense
`TransformerLayer` and `MoETransformerLayer` are, all later eager calls of the subclass run in the capture's autocast
instead of the caller's: modules that were not captured lose FP8 without an error (outputs off by 0.037), captured ones
take the graph's path in evaluation.

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module, and puts back what it
found. On the subclass it finds, inherited, the replacement that it has just made. A class that inherits a replaced
``__call__`` is now left alone: the replacement tells modules apart, not classes.

``not-needed``: the condition of the replacement is `INHERITS`.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, applicable, not_needed
from ..shapes import graph_interface
from ..source import Source, unrecognized

WRAP = """
block_cls = type(block)
if ANY_KNOWN:
    return
old_call_funcs[block_cls] = block_cls.__call__
"""

KNOWN = "block_cls in old_call_funcs"

INHERITS = 'next(cls for cls in block_cls.__mro__ if "__call__" in vars(cls)) in old_call_funcs'


def examine(source: Source) -> Verdict:
    public = graph_interface(source)
    known = public.exactly(1, WRAP)[0]["ANY_KNOWN"]
    if public.has(f"if {INHERITS}: return"):
        return not_needed("a subclass that inherits the capture's __call__ is left alone")
    if ast.unparse(known) != KNOWN:
        raise unrecognized(f"`if {KNOWN}`", public, f"`if {ast.unparse(known)}`")
    if not public.has("for module_cls, old_call in old_call_funcs.items(): module_cls.__call__ = old_call"):
        raise unrecognized("the loop that puts every __call__ back", public)
    return applicable("a subclass keeps the capture's __call__ of its base class", [public.replace(known, INHERITS)])


FIX = Fix(
    id="subclass-autocast",
    summary="after a capture, modules of a captured subclass keep the capture's recipe for good",
    symptom="eager calls of a subclass lose FP8 or take the graph's path, where its base class was captured before it",
    upstream=("https://github.com/NVIDIA/TransformerEngine/issues/1207",),
    affected=">=2.7",
    examine=examine,
)
