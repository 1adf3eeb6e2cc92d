"""Bug: with reused buffers, TE refuses sample arguments in a tuple.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2426 (TE 2.12)

With reused buffers, TE requires a list for ``sample_args``, and assigns to items of ``sample_kwargs``, which is a tuple
by default. With the fix, tuples are converted to lists.
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
    symptom="with reused buffers, sample arguments in a tuple stop the capture with AssertionError",
    group="crashes",
    affects="captures with sample arguments in a tuple and _reuse_graph_input_output_buffers",
    merged="2.12",
    patch=PATCH,
    corrected=[(UPSTREAM, "sample arguments may be tuples")],
)
