"""``weak-reference-layout``: reused outputs and grad inputs lose their strides, or are refused for their dtype.

Upstream: none yet, TE 2.10 to main; https://github.com/NVIDIA/Megatron-LM/issues/7155 and
https://github.com/NVIDIA/Megatron-LM/issues/7410 are about float64

Symptom: with ``_reuse_graph_input_output_buffers``, which Megatron-Core sets, a callable whose output is no contiguous
tensor returns another one, without an error: ``y.t()`` comes back transposed, ``y.chunk(2, 1)[1]``, ``y[:, ::2]`` and
``expand`` as garbage; gradients of inputs likewise. A router in float64 stops the capture with ``RuntimeError: Could
not infer dtype of _WeakRefTensor``, as do uint8 to uint64, complex numbers, some kinds of float8, and int16 up to 2.17.

Static outputs and grad inputs become weak references, made from an address, a shape and a dtype that numpy knows. They
are now made of all bytes of the tensor, viewed with its dtype and strides (`te_graph_fixes/shipped/weak_references.py`,
shipped beside the patched modules).
"""

from ..fix import Fix
from ..patching.patch import SemanticPatch

PATCH = """
@@ utils.py make_weak_ref
+from ._te_weak_references import weak_reference
+
 def convert_to_torch_tensor(ANY): ...
@@
-convert_to_torch_tensor(_WeakRefTensor(x.data_ptr(), x.dtype, x.shape)) if x.is_cuda else x
+weak_reference(x) if x.is_cuda else x
"""

FIX = Fix(
    symptom="outputs that are not contiguous (.t(), chunk) come back as garbage, or 'Could not infer dtype'",
    group="gradients",
    users="_reuse_graph_input_output_buffers (Megatron-Core sets it) with strided outputs or moe_router_dtype=fp64",
    examine=SemanticPatch(
        PATCH, "weak references are contiguous, and of some dtypes only", provides=("weak_references",)
    ),
)
