"""Matrix products: ``generic_gemm`` and the grouped GEMM, with bias, GELU and accumulation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..graph import launch
from ..runtime import any_fp8_layout
from .activation import gelu_value
from .blocks import Part, for_gemm, is_block_scaled, operand, shape_of
from .enums import torch_dtype
from .quantize import cast

__all__ = ["generic_gemm", "te_general_grouped_gemm"]


def generic_gemm(
    A, transa, B, transb, D, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
    alpha=1.0, beta=None,
):  # fmt: skip
    """Return the product ``op(B) @ op(A)``, the bias gradient, the input of GELU, and ``extra_output``.

    Each of the last three may be None. ``A`` comes first because the matrices are stored by rows, and cuBLAS reads them
    by columns.
    """
    if comm_overlap is not None:
        raise NotImplementedError("the simulator does not support generic_gemm with communication overlap")
    if accumulate and beta not in (None, 1.0):
        raise NotImplementedError(f"the simulator does not support generic_gemm with beta={beta}")
    left, right, shape = _operands(A, transa, B, transb)
    dtype = torch_dtype(out_dtype) if out_dtype is not None else (D if D is not None else B).dtype
    out = torch.empty(shape, dtype=dtype) if D is None else D
    if out.numel() != math.prod(shape):
        raise RuntimeError(f"the output of shape {tuple(out.shape)} does not fit the product of shape {shape}")
    bias_grad = torch.empty(B.shape[-1], dtype=torch_dtype(bias_type)) if grad and bias is not None else None
    if gelu and not grad:
        gelu_in = torch.empty(shape, dtype=torch_dtype(bias_type))
    right, left = _for_gemm([right])[0], _for_gemm([left])[0]
    _launch(left, right, out, alpha, bias_grad if grad else bias, grad, gelu_in if gelu else None, accumulate)
    if quantizer is not None:
        out = cast(out, quantizer)
    return out, bias_grad, gelu_in if gelu else None, extra_output


def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspaces,
    workspace_size, accumulate, use_split_accumulator, math_sm_count,
):  # fmt: skip
    """Write the product of each pair of ``A`` and ``B`` to ``D`` or, if ``single_output``, to rows of ``D[0]``.

    Return ``bias``, which contains the bias gradients if ``grad`` is True.
    """
    if D is None:
        raise NotImplementedError("the simulator does not support te_general_grouped_gemm without outputs")
    factors = [_operands(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    full = [one for one in factors if one[0].operand.data.numel() and one[1].operand.data.numel()]
    rights = iter(_for_gemm([right for _, right, _ in full]))
    lefts = iter(_for_gemm([left for left, _, _ in full]))
    row = 0
    for index, (left, right, shape) in enumerate(factors):
        if single_output:
            rows = math.prod(shape[:-1])
            out = D[0].view(-1, shape[-1])[row : row + rows]
            row += rows
        else:
            out = D[index]
        gelu_in = pre_gelu_out[index] if pre_gelu_out[index].numel() else None
        its_bias = bias[index] if bias[index].numel() else None
        if not left.operand.data.numel() or not right.operand.data.numel():  # without tokens, an operand has no scales
            if not accumulate:
                out.zero_()
            if grad and its_bias is not None:
                its_bias.zero_()
        else:
            _launch(next(lefts), next(rights), out, 1.0, its_bias, grad, gelu_in, accumulate)
    return bias


class Operand(NamedTuple):
    """A GEMM's operand. With ``columns_first``, its data are transposed. ``scale_inv`` is None for unquantized data."""

    data: torch.Tensor
    columns_first: bool
    dtype: torch.dtype
    scale_inv: torch.Tensor | None

    def matrix(self):
        """Return the values as a matrix in float64, not yet multiplied by ``scale_inv``."""
        if self.columns_first:  # the quantization has transposed the tensor
            stored = self.data.reshape(self.data.shape[0], -1).t()
        else:
            stored = self.data.reshape(-1, self.data.shape[-1])
        return stored.double() if self.scale_inv is None else stored.contiguous().view(self.dtype).double()


class Factor(NamedTuple):
    """An operand of a GEMM, and whether the GEMM transposes it."""

    operand: Operand | Part
    transposed: bool

    def matrix(self):
        """Return the matrix of the operand, transposed if the GEMM transposes it, in float64."""
        values = self.operand.matrix()
        return values.t() if self.transposed else values


def operand_of(tensor, columnwise):
    """Return the `Operand` or `Part` of ``tensor`` that a GEMM reads, from column-wise data if ``columnwise``.

    If GEMMs accept any layout of per-tensor FP8, as on capability 10.0, they always read its row-wise data.
    """
    if is_block_scaled(tensor):
        return operand(tensor, columnwise)
    if not hasattr(tensor, "_scale_inv"):
        if not isinstance(tensor, torch.Tensor):
            raise NotImplementedError(f"the simulator does not support a GEMM of {type(tensor).__name__}")
        return Operand(tensor, False, tensor.dtype, None)
    if not hasattr(tensor, "_transpose_invalid"):
        raise NotImplementedError(f"the simulator does not support a GEMM of {type(tensor).__name__}")
    columnwise = columnwise and not any_fp8_layout()
    data = tensor._transpose if columnwise else tensor._data
    if data is None or (columnwise and tensor._transpose_invalid):
        kind = "column-wise" if columnwise else "row-wise"
        raise RuntimeError(f"the GEMM needs {kind} FP8 data, which the tensor does not have")
    return Operand(data, columnwise, torch_dtype(tensor._fp8_dtype), tensor._scale_inv)


def _operands(A, transa, B, transb):
    """Return the `Factor` of ``B``, the `Factor` of ``A``, and the shape of their product."""
    shape_a, shape_b = shape_of(A), shape_of(B)
    columns = math.prod(shape_a[:-1]) if transa else shape_a[-1]
    rows = [shape_b[-1]] if transb else shape_b[:-1]
    return Factor(operand_of(B, transb), transb), Factor(operand_of(A, not transa), transa), [*rows, columns]


def _for_gemm(factors):
    ready = for_gemm([factor.operand for factor in factors])
    return [factor._replace(operand=one) for factor, one in zip(factors, ready, strict=True)]


def _launch(left, right, out, alpha, bias, grad, gelu_in, accumulate):
    writes = [out]
    if grad and bias is not None:
        writes.append(bias)
    if gelu_in is not None and not grad:
        writes.append(gelu_in)
    launch(gemm, writes, left, right, out, alpha, bias, grad, gelu_in, accumulate)


def gemm(left, right, out, alpha, bias, grad, gelu_in, accumulate):
    """Run the kernel. Sums are in float64, so the order of summation does not matter."""
    rows = left.matrix()
    product = (rows @ right.matrix()) * alpha
    for factor in (left, right):
        if factor.operand.scale_inv is not None:
            product *= factor.operand.scale_inv.double()
    if bias is not None and not grad:
        product += bias.double()
    if bias is not None and grad:
        bias.copy_(rows.sum(dim=1))
    if gelu_in is not None and not grad:
        gelu_in.copy_(product.view(gelu_in.shape))
        product = gelu_value(product)
    if gelu_in is not None and grad:
        with torch.enable_grad():
            at = gelu_in.double().view(product.shape).requires_grad_()
            (product,) = torch.autograd.grad(gelu_value(at), at, product)
    product = product.float().view(out.shape)
    out.copy_(out.float() + product if accumulate else product)
