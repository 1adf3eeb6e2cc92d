"""Bug: modules in a captured module lose FP8 if their class or a base class is captured too.

Upstream: none yet, TE 2.10 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 leaves this case open)

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module. The replacement finds an
instance by its ``id``, and enables FP8 for captured modules. All other instances run in ``autocast(enabled=False)``,
even inside captured modules. A `te.Linear` inside a layer therefore runs in bf16 if another `te.Linear` is captured
together with the layer (relative error of outputs 0.06 to 1.47, any recipe). If a layer and a block that contains it
are captured in one call with different values of ``enabled``, the layer ignores the autocast of the block. With the
fix, only the outermost module enters the autocast of its capture. The modules that it calls run in the autocast of
their caller. A call of ``make_graphed_callables`` raises `ValueError` if it contains a module twice with different
values of ``enabled``, because TE knows only one value for each module.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables
 module_uses_fp8 = dict(...)
+if any(module_uses_fp8[id(m)] != use_fp8 for m, use_fp8 in zip(modules, enabled)):
+    raise ValueError(
+        "make_graphed_callables got one module twice, with different values of `enabled`. Capture two modules instead."
+    )
@@
+calls = []
+
+@contextlib.contextmanager
+def outermost(autocast_of_module):
+    # A module that another module calls, or recomputes in a backward, runs in the autocast of its caller.
+    is_nested = calls or torch._C._current_graph_task_id() != -1
+    calls.append(None)
+    try:
+        with contextlib.nullcontext() if is_nested else autocast_of_module:
+            yield
+    finally:
+        calls.pop()
+
 old_call_funcs = {}
@@ graph.py make_graphed_callables.call_func
-with ..., ANY_AUTOCAST(..., _graph=True):
+with ..., outermost(ANY_AUTOCAST(..., _graph=True)):
     outputs = old_call_funcs[block_cls](self, *args, **kwargs)
@@
 ANY_AUTOCAST(..., enabled=module_uses_fp8.get(id(self), False), _graph=True)
"""

FIX = Fix(
    symptom="inner modules lose FP8 if their class is captured elsewhere too, and nested te.ops.Sequential crashes",
    group="FP8 state",
    affects="captured modules that contain other modules with the class of a captured module",
    patch=PATCH,
    check_hints=("fp8 output", "fp8 gradient"),
)
