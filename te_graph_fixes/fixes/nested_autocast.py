"""``nested-autocast``: modules in a captured module lose FP8 if their class or a base class is captured too.

Upstream: none yet, TE 2.10 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 leaves this case open)

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module. The replacement finds an
instance by its ``id``, and enables FP8 for captured modules. All other instances run in ``autocast(enabled=False)``,
even inside captured modules. In ``Sequential(Sequential(te.Linear), te.Linear)``, the inner modules run in bf16. So
does a `te.Linear` inside a layer, if another `te.Linear` is captured together with the layer (relative error of outputs
0.06 to 1.47, any recipe). With the fix, such modules run in the autocast of their caller.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables.call_func
-with ..., ANY_AUTOCAST(..., _graph=True):
+with ..., ANY_AUTOCAST(..., _graph=True) if id(self) in module_uses_fp8 else contextlib.nullcontext():
     outputs = old_call_funcs[block_cls](self, *args, **kwargs)
@@
 ANY_AUTOCAST(..., enabled=module_uses_fp8.get(id(self), False), _graph=True)
"""

FIX = Fix(
    symptom="inner modules lose FP8 if their class is captured elsewhere too, and nested te.ops.Sequential crashes",
    group="FP8 state",
    affects="captured modules that contain modules of a captured class",
    patch=PATCH,
    check_hints=("fp8 output", "fp8 gradient"),
)
