"""Grouped tensors: consecutive groups of rows, one for each product. The numbers of rows are in GPU memory.

The kernels read the numbers of rows at each replay. The groups are stored one after the other, each in the layout of
a separate tensor, with padded scales. The memory after the last group is unused.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch

from ..graph import launch
from ..runtime import any_fp8_layout
from .blocks import (
    MX,
    NV,
    Part,
    cast_mx,
    cast_nv,
    fields_of,
    for_gemm,
    is_block_scaled,
    kind_of,
    random_states,
    refuse,
    usages_of,
)
from .enums import torch_dtype
from .formats import MX_BLOCK, NV_BLOCK, tiles
from .gemm import Factor, Operand, gemm, operand_of
from .quantize import cast_current

__all__ = [
    "bgrad_group_quantize",
    "get_grouped_gemm_setup_workspace_size",
    "group_quantize",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
]

CURRENT = "Float8CurrentScalingQuantizer"


def get_grouped_gemm_setup_workspace_size(number):
    """Return the number of bytes that the pointers of ``number`` products need."""
    return 128 * number


def splits_to_offsets(splits, stride):
    """Return a tensor with the index of the first element of each group, and the end of the last group."""
    offsets = torch.empty(len(splits) + 1, dtype=torch.int64)
    launch(_sum_up, [offsets], offsets, splits, stride)
    return offsets


def splits_to_offsets_multi(splits, device, *, strides, include_leading_zero, dtypes, bulk_allocate):
    """Return the splits as int64 on the GPU, and a list of offsets for each stride, with a leading 0 if requested."""
    splits = splits.to(device=device, dtype=torch.int64)
    found = []
    for stride, zero, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        found.append(torch.empty(len(splits) + zero, dtype=dtype))
        launch(_sum_up, found[-1:], found[-1], splits, stride)
    return splits, found


def group_quantize(tensor, quantizer, number, first_dims, tensor_offsets=None):
    """Return a grouped tensor with the quantized groups of rows, one after another."""
    kind = kind_of(quantizer) if is_block_scaled(quantizer) else type(quantizer).__name__
    if kind == CURRENT and any_fp8_layout() and first_dims is not None:
        return _quantize_per_tensor(tensor, quantizer, number, first_dims, tensor_offsets)
    if kind not in (MX, NV):
        raise NotImplementedError(f"the simulator does not support group_quantize with {type(quantizer).__name__}")
    refuse(quantizer)
    if (
        first_dims is None
        or (kind == NV and not quantizer.with_rht)
        or getattr(quantizer, "with_2d_quantization", False)
    ):
        raise NotImplementedError(
            "the simulator does not support group_quantize into equal parts or 2D blocks, or to NVFP4 without RHT"
        )
    grouped = _empty(tensor, quantizer, number, first_dims, tensor_offsets)
    sides = [_side(grouped, columnwise) for columnwise, wanted in usages_of(quantizer) if wanted]
    states = random_states(len(sides)) if getattr(quantizer, "stochastic_rounding", False) else None
    writes = [field for side in sides for field in side if isinstance(field, torch.Tensor)]
    launch(_cast, writes, tensor, first_dims, sides, getattr(quantizer, "rht_matrix", None), states)
    return grouped


def bgrad_group_quantize(tensor, quantizer, number, first_dims, tensor_offsets=None):
    """Return the result of `group_quantize`, and a matrix with the sum of the rows of each group."""
    sums = torch.empty(number, tensor.shape[-1], dtype=tensor.dtype)
    launch(_sum_groups, [sums], sums, tensor, first_dims)
    return group_quantize(tensor, quantizer, number, first_dims, tensor_offsets), sums


def te_general_grouped_gemm_for_discrete_in(
    A, transa, B, transb, D, bias, bias_scale, alpha, beta, *workspaces_and_options
):
    """Multiply each group of rows of ``B`` by its matrix of ``A``, into the same rows of ``D``. Return ``D``."""
    if transb or bias_scale is not None:
        raise NotImplementedError(
            "the simulator does not support te_general_grouped_gemm_for_discrete_in with transb or bias_scale"
        )
    matrices = for_gemm([operand_of(one, not transa) for one in A])
    biases = None if bias is None else bias.rowwise_data.view(len(A), -1)
    out = D.rowwise_data.view(D.logical_shape)
    launch(_multiply, [out], out, matrices, transa, _side(B, False), B.first_dims, biases, alpha, beta)
    return D


def te_general_grouped_gemm_for_discrete_out(
    A, transa, B, transb, D, bias, bias_scale, alpha, beta, *workspaces_and_options
):
    """Multiply each transposed group of ``B`` by its group of ``A``, into its matrix of ``D``. Return ``D``."""
    if transa or not transb or bias is not None or bias_scale is not None:
        raise NotImplementedError(
            "the simulator supports te_general_grouped_gemm_for_discrete_out only with the layout NT and no bias"
        )
    launch(_multiply_each, list(D), list(D), _side(B, True), _side(A, True), B.first_dims, alpha, beta)
    return D


class _Side(NamedTuple):
    """The row-wise or the column-wise half of a grouped tensor. ``quantizer`` is None if the data are not quantized."""

    quantizer: Any
    data: torch.Tensor
    scale: torch.Tensor | None
    amax: torch.Tensor | None
    columnwise: bool
    swizzled: bool
    columns: int

    def groups(self, first_dims):
        """Yield each group as a `Part` or `Operand`, or None for a group without rows."""
        at = scale_at = 0
        for number, rows in enumerate(_numbers(first_dims)):
            if not is_block_scaled(self.quantizer):
                data = self.data[at : at + rows * self.columns].view(rows, self.columns)
                scale = None if self.scale is None else self.scale[number : number + 1]
                dtype = data.dtype if scale is None else torch_dtype(self.quantizer.dtype)
                yield Operand(data, False, dtype, scale) if rows else None
                at += rows * self.columns
                continue
            sizes = [size for _, size, _ in fields_of(self.quantizer, (rows, self.columns), self.columnwise)]
            end, scale_end = at + math.prod(sizes[0]), scale_at + math.prod(sizes[1])
            mx = kind_of(self.quantizer) == MX
            part = Part(
                kind_of(self.quantizer),
                self.data[at:end].view(sizes[0]),
                self.scale[scale_at:scale_end].view(sizes[1]),
                None if self.amax is None else self.amax[number : number + 1],
                torch_dtype(self.quantizer.dtype) if mx else None,
                self.columnwise,
                self.columnwise and mx,
                self.swizzled,
                1,
            )
            yield part if rows else None
            at, scale_at = end, scale_end


def _side(grouped, columnwise):
    side = "columnwise_" if columnwise and is_block_scaled(grouped.quantizer) else ""
    data = grouped.columnwise_data if side else grouped.rowwise_data
    if data is None:
        raise RuntimeError(f"the grouped GEMM needs {side or 'rowwise_'}data, which the tensor does not have")
    return _Side(
        grouped.quantizer,
        data,
        getattr(grouped, f"{side}scale_inv"),
        getattr(grouped, f"{side}amax"),
        bool(side),
        bool(grouped._with_gemm_swizzled_scales),
        grouped.logical_shape[1],
    )


def _quantize_per_tensor(tensor, quantizer, number, first_dims, offsets):
    fields = {name: torch.empty(number, dtype=torch.float32) for name in ("scale_inv", "amax", "scale")}
    fields["data"] = torch.empty(tensor.numel(), dtype=torch.uint8)
    grouped = _construct(tensor, quantizer, number, first_dims, offsets, fields)
    options = (False, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    launch(_cast_per_tensor, [*fields.values()], tensor, first_dims, _side(grouped, False), grouped.scale, options)
    return grouped


def _empty(tensor, quantizer, number, first_dims, offsets):
    (rows, columns), mx = tensor.shape, kind_of(quantizer) == MX
    fields = {}
    for columnwise, wanted in usages_of(quantizer):
        if wanted:
            side = "columnwise_" if columnwise else ""
            fields[f"{side}data"] = torch.empty(rows * columns // (1 if mx else 2), dtype=torch.uint8)
            size = _most_scales(rows, columns, number, MX_BLOCK if mx else NV_BLOCK, columnwise)
            fields[f"{side}scale_inv"] = torch.empty(size, dtype=torch.uint8)
            if not mx:
                fields[f"{side}amax"] = torch.empty(number, dtype=torch.float32)
    return _construct(tensor, quantizer, number, first_dims, offsets, fields)


def _construct(tensor, quantizer, number, first_dims, offsets, fields):
    name, file = ("Storage", "storage.grouped_tensor_storage") if quantizer.internal else ("", "grouped_tensor")
    module = importlib.import_module(f"transformer_engine.pytorch.tensor.{file}")
    return getattr(module, f"GroupedTensor{name}")(
        shape=tuple(tensor.shape), dtype=tensor.dtype, num_tensors=number, quantizer=quantizer, first_dims=first_dims,
        tensor_offsets=splits_to_offsets(first_dims, tensor.shape[1]) if offsets is None else offsets,
        with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm), **fields,
    )  # fmt: skip


def _most_scales(rows, columns, number, block, columnwise):
    """Return the number of bytes that padded scales of ``number`` groups need at most, however the rows are split."""
    if columnwise:
        return 128 * tiles(columns) * (rows // block + 3 * number)
    return (rows + 127 * number) * -(-(columns // block) // 4) * 4


# The kernels.


def _numbers(first_dims):
    return [int(rows) for rows in first_dims.unbind()]


def _sum_up(offsets, splits, stride):
    ends = splits.cumsum(0) * stride
    offsets.copy_(torch.cat([torch.zeros(len(offsets) - len(ends), dtype=ends.dtype), ends]))


def _sum_groups(sums, tensor, first_dims):
    sizes = _numbers(first_dims)
    for total, rows in zip(sums, tensor[: sum(sizes)].split(sizes), strict=True):
        total.copy_(rows.double().sum(dim=0))


def _cast(tensor, first_dims, sides, rht, states):
    sizes = _numbers(first_dims)
    halves = zip(*(side.groups(first_dims) for side in sides), strict=True)
    for rows, group in zip(tensor[: sum(sizes)].split(sizes), halves, strict=True):
        parts = [part for part in group if isinstance(part, Part)]
        if parts and parts[0].kind == MX:
            cast_mx(rows, parts, 1, None)
        elif parts:
            cast_nv(rows, parts, 1, rht, states, None)


def _cast_per_tensor(tensor, first_dims, side, scale, options):
    sizes = _numbers(first_dims)
    values = zip(tensor[: sum(sizes)].split(sizes), side.groups(first_dims), strict=True)
    for number, (rows, group) in enumerate(values):
        if isinstance(group, Operand):
            one = slice(number, number + 1)
            cast_current(
                rows, scale[one], side.amax[one], group.data, None, group.scale_inv, None, group.dtype, options
            )


def _multiply(out, matrices, transposed, side, first_dims, biases, alpha, beta):
    at = 0
    for number, rows in enumerate(side.groups(first_dims)):
        if rows is not None:
            end = at + _numbers(first_dims)[number]
            bias = None if biases is None else biases[number]
            _product(Factor(rows, False), Factor(matrices[number], transposed), out[at:end], bias, number, alpha, beta)
            at = end


def _multiply_each(outs, left, right, first_dims, alpha, beta):
    pairs = zip(left.groups(first_dims), right.groups(first_dims), strict=True)
    for number, (out, (a, b)) in enumerate(zip(outs, pairs, strict=True)):
        if a is not None and b is not None:
            _product(Factor(a, True), Factor(b, False), out, None, number, alpha, beta)
        elif beta[number % len(beta)] == 0:
            out.zero_()


def _product(left, right, out, bias, number, alpha, beta):
    """Compute product ``number``. ``alpha`` and ``beta`` have one element for all products, or one for each."""
    accumulate = bool(beta[number % len(beta)] == 1)
    gemm(left, right, out, float(alpha[number % len(alpha)]), bias, False, None, accumulate)
