"""``tuple-samples``: samples given as a tuple are refused where buffers are reused.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2426 (TE 2.12)

Where buffers are reused, TE asserts that ``sample_args`` is a list, or assigns to items of the default tuple of
``sample_kwargs``. Tuples are now made into lists.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
-assert isinstance(sample_args, list), ANY_TEXT
+if isinstance(sample_args, tuple):
+    sample_args = list(sample_args)
+if isinstance(sample_kwargs, tuple):
+    sample_kwargs = list(sample_kwargs)
"""
UPSTREAM = """
@@ graph.py _make_graphed_callables
 if isinstance(sample_args, tuple):
     sample_args = list(sample_args)
 if isinstance(sample_kwargs, tuple):
     sample_kwargs = list(sample_kwargs)
"""

FIX = Fix(
    symptom="samples given as a tuple are refused where buffers are reused: AssertionError",
    group="crashes",
    affects="own callers that give samples in a tuple with _reuse_graph_input_output_buffers",
    affected_versions=">=2.6,<2.12",
    patch=PATCH,
    corrected=[(UPSTREAM, "samples may be tuples")],
)
