"""``failed-capture-state``: a capture that fails leaves the process damaged, and hides why it failed.

Upstream: none yet

After an exception in `make_graphed_callables` garbage collection stays off, sample inputs and parameters have lost
their grads, eager FP8 modules still take the path of graphs, and keep the capture's recipe and its forward hooks;
wgrads that were delayed come out of order, random numbers and FP8 scales are those of the warmup. Where a forbidden
operation has spoiled the capture, one sees "operation failed due to a previous error during capture" instead of that
operation's error, work goes on in the capture's stream, and random numbers raise "Offset increment outside graph
capture encountered unexpectedly". All of that is now put back in ``finally`` or ``except`` clauses, and the first
exception is raised again.
"""

from ..fix import Fix

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
+    # PyTorch could not end the capture, and has left its stream, its memory pool and the random
+    # number generators in it. An empty capture brings the generators out.
+    with contextlib.suppress(AttributeError, KeyError, RuntimeError):
+        torch.cuda.set_stream(stream)
+        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), kwargs["pool"])
+        torch._C._cuda_releasePool(torch.cuda.current_device(), kwargs["pool"])
+    with contextlib.suppress(RuntimeError):
+        empty_graph = torch.cuda.CUDAGraph()
+        if graph_safe_rng_available():
+            for state in get_all_rng_states().values():
+                empty_graph.register_generator_state(state)
+        with torch.cuda.graph(empty_graph):
+            torch.zeros(1, device="cuda")
+    if failure is None:
+        raise
+    # Show what went wrong in the capture last, where one looks for it.
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
+# Put back what the capture changes where it fails, too, as far as the device still answers.
+submodules = [m for module in modules for m in module.modules()]
+first_microbatch = [
+    (m, m.is_first_microbatch) for m in submodules if hasattr(m, "is_first_microbatch")
+]
+delayed_wgrads = [getattr(getattr(m, "wgrad_store", None), "context", None) for m in submodules]
+delayed_wgrads = [(context, list(context.queue)) for context in delayed_wgrads if context]
+try:
+    set_capture_start()
+    for module in modules:
+        wrap_autocast(module)
+    graphed_callables = capture()
+except BaseException:
+    for m, value in first_microbatch:
+        m.is_first_microbatch = value
+    for context, pending in delayed_wgrads:
+        context.queue.clear()
+        context.queue.extend(pending)
+    with contextlib.suppress(Exception):
+        restore_fp8_tensors(modules, saved_fp8_tensors)
+    with contextlib.suppress(Exception):
+        if graph_safe_rng_available():
+            for gen, state in zip(generators, original_rng_states):
+                gen.set_state(state)
+        else:
+            torch.cuda.set_rng_state(original_rng_states)
+    raise
+finally:
+    set_capture_end()
+    for module_cls, old_call in old_call_funcs.items():
+        module_cls.__call__ = old_call
"""

FIX = Fix(
    symptom="after a capture that failed: no garbage collection, lost gradients, eager FP8 with the wrong recipe",
    group="crashes",
    affects="programs that catch an exception of a capture and go on",
    patch=PATCH,
)
