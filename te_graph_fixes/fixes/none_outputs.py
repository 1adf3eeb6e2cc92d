"""Bug: a callable with an output that is None cannot be captured.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2657 (TE 2.13)

`_make_graphed_callables` treats every output as a tensor. With the fix, the capture omits outputs that are None, and a
replay returns None in their places.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 outputs, ANY_SPEC = _tree_flatten(func(*args, **kwargs))
 for hook in hooks:
     hook.remove()
+outputs = [o for o in outputs if o is not None]
 if is_training:
     ...
 else:
     ...
@@ (2 times)
 flatten_outputs, spec = _tree_flatten(outputs)
+# Outputs that are None are not part of the graph.
+spec = (spec, [o is None for o in flatten_outputs])
+flatten_outputs = [o for o in flatten_outputs if o is not None]
@@
-return _tree_unflatten(out, output_unflatten_spec)
+spec, is_none = output_unflatten_spec
+out = iter(out)
+return _tree_unflatten([None if none else next(out) for none in is_none], spec)
@@
 tuple(o.detach() for o in static_outputs)
"""
UPSTREAM = """
@@ graph.py _make_graphed_callables
 tuple(o.detach() if o is not None else o for o in static_outputs)
@@ (7 times)
 o is not None and o.requires_grad
@@ (7 times)
 o.requires_grad
"""

FIX = Fix(
    symptom="capturing a module that returns None as one of its outputs stops with AttributeError",
    group="crashes",
    affects="callables that return None among their outputs, such as vision encoders",
    merged="2.13",
    patch=PATCH,
    after=("backward-amax-reduction",),
    corrected=[(UPSTREAM, "outputs may be None")],
)
