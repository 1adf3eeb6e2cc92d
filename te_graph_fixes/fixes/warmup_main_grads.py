"""Bug: warmup adds its random wgrads to ``main_grad``.

Upstream: none yet, TE 2.10 to main (upstream/warmup-main-grads.md).

After warmup, `make_graphed_callables` restores FP8 state and random states, but not ``main_grad``. With the fix, all
parameters share the memory of the largest ``main_grad`` of their dtype during warmup. The content of this memory is
restored afterwards, even if the warmup fails. ``pre_warmup_hook`` and ``post_warmup_hook`` see the real
``main_grad``."""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_warmup_main_grads import preserve_main_grads
+
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), contextlib.ExitStack() as warmup_states:
     if pre_warmup_hook is not None:
         pre_warmup_hook()
+    warmup_states.enter_context(preserve_main_grads(callables if is_training else ()))
     ...
+    warmup_states.close()
     if post_warmup_hook is not None:
         post_warmup_hook()
@@ (or)
+has_warmup_hooks = pre_warmup_hook is not None or post_warmup_hook is not None
+preserved_modules = callables if is_training and not has_warmup_hooks else ()
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), preserve_main_grads(preserved_modules), contextlib.ExitStack() as warmup_states:
     for func_idx, func in ANY_CALLABLES:
         ...
         if pre_warmup_hook is not None:
             pre_warmup_hook()
+        if is_training and has_warmup_hooks:
+            warmup_states.enter_context(preserve_main_grads(callables))
         ...
+        warmup_states.close()
         if post_warmup_hook is not None:
             post_warmup_hook()
@@ (or)
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), preserve_main_grads(callables if is_training else ()):
     for func_idx, func in ANY_CALLABLES:
         ...
         def hook_fn(...):
             ...
         for ANY_ITERATION in range(num_warmup_iters):
             ...
         ...
"""

FIX = Fix(
    symptom="a capture adds random values to main_grad, so the next step's fused wgrads are wrong, or NaN",
    group="gradients",
    affects="fused wgrads in training loops that zero main_grad only before the capture (Megatron zeroes it after)",
    cost="host memory for the largest main_grad of each dtype during warmup, if it is not zero",
    patch=PATCH,
)
