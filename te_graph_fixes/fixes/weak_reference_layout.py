"""Bug: reused outputs and grad inputs lose their strides, and some dtypes raise an error.

Upstream: none yet, TE 2.10 to main; https://github.com/NVIDIA/Megatron-LM/issues/7155 and
https://github.com/NVIDIA/Megatron-LM/issues/7410 are about float64

With ``_reuse_graph_input_output_buffers``, static outputs and grad inputs become weak references. TE builds each weak
reference from an address, a shape and a dtype. The strides are lost silently. The capture fails for dtypes that TE's
table of numpy dtypes lacks: float64, uint8 to uint64, complex numbers, some float8 dtypes, and int16 up to TE 2.17.
With the fix, a weak reference covers the bytes of the tensor, viewed with its dtype and strides.
"""

from ..fix import Fix

PATCH = """
@@ utils.py make_weak_ref
+from ._te_weak_reference_layout import num_bytes, view_like
+
 def convert_to_torch_tensor(...): ...
@@
-convert_to_torch_tensor(_WeakRefTensor(x.data_ptr(), x.dtype, x.shape)) if ANY_ON_DEVICE else x
+(
+    view_like(convert_to_torch_tensor(_WeakRefTensor(x.data_ptr(), torch.int8, (num_bytes(x),))), x)
+    if ANY_ON_DEVICE
+    else x
+)
"""

FIX = Fix(
    symptom="outputs that are not contiguous (.t(), chunk) are wrong, or a capture raises 'Could not infer dtype'",
    group="gradients",
    affects="_reuse_graph_input_output_buffers (in Megatron) with non-contiguous outputs or --moe-router-dtype fp64",
    patch=PATCH,
)
