"""Bug: no hook runs after the replay of a delayed wgrad.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2614 (TE 2.13), reported as
https://github.com/NVIDIA/Megatron-LM/issues/2999

At its end, the `backward_dw` of a module runs the hooks registered by `register_wgrad_accumulation_and_reduce_hooks`.
The `backward_dw` of a graphed callable only replays the graph. With the fix, it then runs the hooks of the callable's
modules, in the order of ``modules()``.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables.backward_dw
 bwd_dw_graphs[graph_idx].replay()
+# The weight gradients are ready.
+for module in graph_callables[graph_idx].modules():
+    if (
+        module in visited_te_modules.get(graph_idx, ())
+        and isinstance(module, TransformerEngineBaseModule)
+        and module.need_backward_dw()
+    ):
+        for wgrad_accumulation_and_reduce_hook in module.wgrad_accumulation_and_reduce_hooks:
+            wgrad_accumulation_and_reduce_hook()
@@ (0 times)
 for ANY_MODULE in ANY_MODULES:
     ...

@@ module/base.py TransformerEngineBaseModule.backward_dw
 for ANY_HOOK in self.wgrad_accumulation_and_reduce_hooks:
     ANY_HOOK()
"""

UPSTREAM = """
@@ graph.py _make_graphed_callables.backward_dw
 ANY_GRAPH.replay()
@@
 for module in te_modules:
     if isinstance(module, TransformerEngineBaseModule) and module.need_backward_dw():
         module._trigger_wgrad_accumulation_and_reduce_hooks()
"""

FIX = Fix(
    symptom="delayed wgrads: Megatron's DDP never reduces the gradients of captured layers",
    group="pipelines and delayed wgrads",
    affects="Megatron --delay-wgrad-compute with its DDP",
    merged="2.13",
    patch=PATCH,
    corrected=[(UPSTREAM, "the hooks are run after the replay")],
    check_hints=("hooks",),
)
