"""Bug: after a capture, modules of a captured subclass keep the recipe of the capture.

Upstream: none yet, TE 2.10 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 leaves this case open)

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module, and afterwards restores
the previous ``__call__``. If a subclass comes after its base class, it inherits the replacement as its previous
``__call__``, so TE leaves the replacement on the subclass. This happens to Megatron-Core's `MoETransformerLayer` after
`TransformerLayer`. Eager calls then run in the autocast of the capture, and modules that were not captured lose FP8.
With the fix, TE does not replace ``__call__`` on a class that inherits a replacement. This suffices, because the
replacement distinguishes modules, not classes.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables
 block_cls = type(block)
-if block_cls in old_call_funcs:
+if next(cls for cls in block_cls.__mro__ if "__call__" in vars(cls)) in old_call_funcs:
     return
 old_call_funcs[block_cls] = block_cls.__call__
"""

FIX = Fix(
    symptom="after a capture, eager calls of a subclass of a captured class keep the recipe of the capture",
    group="FP8 state",
    affects="a class captured before its subclass: TransformerLayer, MoETransformerLayer in Megatron-Core's hybrids",
    patch=PATCH,
)
