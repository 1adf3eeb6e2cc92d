"""Bug: a failed capture leaves the process in a damaged state and hides its error.

Upstream: none yet

An exception in `make_graphed_callables` leaves the process in this state:

- garbage collection is off
- sample inputs and parameters have no ``.grad``
- eager FP8 modules behave as in a capture, in its recipe and with its forward hooks
- the queues of delayed wgrads contain wgrads of the warmup
- random states and FP8 scales have the values of the warmup
- the skip flag exists if the capture was the first with cached weights

If a forbidden operation invalidates the capture, the error "operation failed due to a previous error during capture"
hides the first error. The stream of the capture stays current, and random numbers raise "Offset increment outside graph
capture encountered unexpectedly". With the fix, ``finally`` and ``except`` clauses restore all of this state, and the
first exception is raised.
"""

from ..fix import Fix
from .shapes import SKIP_FLAG

PATCH = """
@@ graph.py _graph_context_wrapper
-with torch.cuda.graph(*args, **kwargs):
-    yield
-if gc_is_enabled:
-    gc.enable()
+stream = torch.cuda.current_stream()
+failure = None
+try:
+    with torch.cuda.graph(*args, **kwargs):
+        try:
+            yield
+        except BaseException as error:
+            failure = error
+            raise
+except BaseException as error:
+    if error is failure:
+        raise
+    # PyTorch could not end the capture. Its stream is still current, and its memory pool and the
+    # random number generators still belong to it. An empty capture releases the generators. An
+    # error in this cleanup must not hide the error of the capture.
+    with contextlib.suppress(Exception):
+        torch.cuda.set_stream(stream)
+        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), kwargs["pool"])
+        torch._C._cuda_releasePool(torch.cuda.current_device(), kwargs["pool"])
+    with contextlib.suppress(Exception):
+        empty_graph = torch.cuda.CUDAGraph()
+        if graph_safe_rng_available():
+            for state in get_all_rng_states().values():
+                empty_graph.register_generator_state(state)
+        with torch.cuda.graph(empty_graph):
+            torch.zeros(1, device="cuda")
+    if failure is None:
+        raise
+    # Python prints the last exception of a chain at the end, so raise the error of the capture last.
+    error.__context__ = failure.__context__
+    raise failure
+finally:
+    failure = None
+    if gc_is_enabled:
+        gc.enable()

@@ graph.py _none_grad_context_wrapper (if there)
-yield
-for input_tensor, original_grad in zip(inputs, original_input_grads):
-    input_tensor.grad = original_grad
+try:
+    yield
+finally:
+    for input_tensor, original_grad in zip(inputs, original_input_grads):
+        input_tensor.grad = original_grad

@@ graph.py _make_graphed_callables
-ANY_OUTPUTS = ANY_FORWARD
-for hook in hooks:
-    hook.remove()
+try:
+    ANY_OUTPUTS = ANY_FORWARD
+finally:
+    for hook in hooks:
+        hook.remove()

@@ graph.py make_graphed_callables
-set_capture_start()
@@
-wrap_autocast(module)
@@
-graphed_callables = ANY_CAPTURE
+capture = lambda: ANY_CAPTURE
+
+# If the capture fails, restore all changed state, as far as the device still responds.
+import traceback
+from ._te_first_microbatches import SavedState
+from ._te_fp8_state_at_replay import global_state, restore_after_failure
+
+submodules = [m for module in modules for m in module.modules()]
+saved_state = SavedState(submodules)
+delayed_wgrads = [getattr(getattr(m, "wgrad_store", None), "context", None) for m in submodules]
+delayed_wgrads = [(context, list(context.queue)) for context in delayed_wgrads if context]
+skip_flag = global_state().skip_fp8_weight_update_tensor
+try:
+    set_capture_start()
+    for module in modules:
+        wrap_autocast(module)
+    graphed_callables = capture()
+except BaseException as error:
+    global_state().skip_fp8_weight_update_tensor = skip_flag
+    with contextlib.suppress(Exception):
+        saved_state.restore_marks()
+        saved_state.restore_weights(submodules)
+    for context, pending in delayed_wgrads:
+        context.queue.clear()
+        context.queue.extend(pending)
+    with contextlib.suppress(Exception):
+        restore_fp8_tensors(modules, saved_fp8_tensors)
+    with contextlib.suppress(Exception):
+        restore_after_failure()
+    with contextlib.suppress(Exception):
+        if graph_safe_rng_available():
+            for gen, state in zip(generators, original_rng_states):
+                gen.set_state(state)
+        else:
+            torch.cuda.set_rng_state(original_rng_states)
+    for frame, _ in traceback.walk_tb(error.__traceback__):
+        if frame.f_code.co_filename == _make_graphed_callables.__code__.co_filename:
+            with contextlib.suppress(RuntimeError):  # a running frame cannot be cleared
+                frame.clear()  # frees the graphs, even if the caller keeps the error
+    with contextlib.suppress(Exception):
+        torch.cuda.empty_cache()  # frees memory that only this warmup's stream could reuse
+    raise
+finally:
+    set_capture_end()
+    for module_cls, old_call in old_call_funcs.items():
+        module_cls.__call__ = old_call
"""

FIX = Fix(
    symptom="after a failed capture: no garbage collection, lost gradients, eager FP8 with the wrong recipe",
    group="crashes",
    affects="programs that catch an exception of a capture and continue",
    patch=SKIP_FLAG + PATCH,
)
