"""``nested-autocast``: modules inside a captured one lose FP8 where their class, or a base of it, is captured as well.

Upstream: none yet, TE 2.10 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 leaves this case open)

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module. The replacement looks an
instance up by its ``id`` and gives FP8 to those that are captured; all others, those inside of captured modules too,
run in ``autocast(enabled=False)``. In ``Sequential(Sequential(te.Linear), te.Linear)``, or where a `te.Linear` is
captured next to a layer that holds one, the inner modules run in bf16 (outputs off by 0.06 to 1.47, any recipe). They
now run in the autocast that they are called in.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables.call_func
 with ..., ANY_AUTOCAST(
     ...,
     enabled=module_uses_fp8.get(id(self), False),
     _graph=True,
-):
+) if id(self) in module_uses_fp8 else contextlib.nullcontext():
     outputs = old_call_funcs[block_cls](self, *args, **kwargs)
"""

FIX = Fix(
    symptom="inner modules lose FP8 if their class is captured elsewhere too, or te.ops.Sequential crashes",
    group="FP8 state",
    affects="captured modules inside of which others of the same class run, or beside which such a class is captured",
    patch=PATCH,
    check_hints=("fp8 output", "fp8 gradient"),
)
