"""The quantization functions for all formats, and the kernels of per-tensor FP8 (delayed and current scaling)."""

from __future__ import annotations

import math

import torch

from ..graph import launch
from ..runtime import any_fp8_layout
from . import blocks
from .blocks import is_block_scaled, skipped
from .enums import torch_dtype

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_quantize",
    "multi_tensor_scale",
    "quantize",
    "split_quantize",
]

_LARGEST_FLOAT = torch.finfo(torch.float32).max


def quantize(tensor, quantizer, output=None, noop=None):
    """Quantize ``tensor`` into ``output``, or into a new tensor if ``output`` is None, and return the result.

    If ``noop`` is 1, the data of ``output`` stay, but scales may be swizzled, and amaxes of NVFP4 with RHT change.
    """
    output = cast(tensor, quantizer, output, noop)
    if is_block_scaled(quantizer):
        blocks.swizzle_after_quantize(output, quantizer)
    return output


def cast(tensor, quantizer, output=None, noop=None):
    """Quantize like `quantize`, but do not swizzle scales afterwards. If ``quantizer`` is None, return ``tensor``."""
    if quantizer is None:
        return tensor
    kind = _kind(quantizer)
    if output is None:
        output = _empty(quantizer, tensor.shape, tensor.dtype)
    else:
        _match_usage(output, quantizer)
    if not tensor.numel():
        return output
    if kind == "blocks":
        blocks.cast(tensor, quantizer, output, noop)
        return output
    rowwise, columnwise, scale_inv = output._data, output._transpose, output._scale_inv
    results = [one for one in (rowwise, columnwise) if one is not None] + [scale_inv]
    dtype = torch_dtype(quantizer.dtype)
    if kind == "delayed":
        launch(
            cast_delayed, [*results, quantizer.amax],
            tensor, quantizer.scale, quantizer.amax, rowwise, columnwise, scale_inv, noop, dtype,
        )  # fmt: skip
        return output
    amax = getattr(quantizer, "amax", None)
    scale = getattr(quantizer, "scale", None)
    amax = torch.empty(1, dtype=torch.float32) if amax is None else amax
    scale = torch.empty(1, dtype=torch.float32) if scale is None else scale
    options = (getattr(quantizer, "use_existing_amax", False), quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    reduces = quantizer.with_amax_reduction and torch.distributed.is_initialized()
    group = quantizer.amax_reduction_group if reduces else None
    launch(
        cast_current, [*results, amax, scale],
        tensor, scale, amax, rowwise, columnwise, scale_inv, noop, dtype, options, group,
    )  # fmt: skip
    return output


def split_quantize(tensor, split_sizes, quantizers, disable_bulk_allocation=False):
    """Return a list of groups of consecutive rows of ``tensor``, each quantized with its own quantizer."""
    parts = torch.split(tensor, list(split_sizes))
    if disable_bulk_allocation or len({type(one) for one in quantizers}) != 1 or not is_block_scaled(quantizers[0]):
        return multi_tensor_quantize(parts, quantizers)
    outputs = blocks.empty_parts(quantizers, [part.shape for part in parts], tensor.dtype)
    for part, quantizer, output in zip(parts, quantizers, outputs, strict=True):
        if part.numel():
            blocks.cast(part, quantizer, output, None)
    return outputs


def multi_tensor_quantize(tensors, quantizers):
    """Return a list of the tensors, each quantized with its own quantizer."""
    return [cast(tensor, quantizer) for tensor, quantizer in zip(tensors, quantizers, strict=True)]


def bgrad_quantize(grad_output, quantizer):
    """Return the bias gradient of ``grad_output``, and the quantized ``grad_output``."""
    bias_grad = torch.empty(grad_output.shape[-1], dtype=grad_output.dtype)
    launch(_sum_rows, [bias_grad], bias_grad, grad_output)
    return bias_grad, cast(grad_output, quantizer)


def dequantize(tensor, dtype):
    """Return the values of a quantized tensor as a tensor of dtype ``dtype``."""
    if is_block_scaled(tensor):
        return blocks.dequantize(tensor, torch_dtype(dtype))
    if not hasattr(tensor, "_scale_inv"):
        raise NotImplementedError(f"the simulator does not support dequantize of {type(tensor).__name__}")
    if tensor._data is None:
        raise RuntimeError("the simulator cannot dequantize a tensor without row-wise data")
    result = torch.empty(tensor._data.shape, dtype=torch_dtype(dtype))
    launch(_dequantize, [result], result, tensor._data, tensor._scale_inv, torch_dtype(tensor._fp8_dtype))
    return result


def fp8_transpose(data, dtype, *, out=None):
    """Return FP8 data, in ``out`` if given, with the last dimension of ``data`` moved to the front."""
    if out is None:
        out = torch.empty(_transposed_shape(data.shape), dtype=torch.uint8)
    launch(_transpose, [out], out, data)
    return out


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    return _empty(quantizer, shape, dtype)


def compute_amax(tensor, amax):
    """Write the largest magnitude in ``tensor`` into ``amax``."""
    launch(_store_amax, [amax], amax, tensor)


def fused_amax_and_scale_update_after_reduction(reduced_amaxes, amax_histories, scales, algorithm, fp8_dtype, margin):
    """Shift every amax history by one step, and compute the scales of the next step from the histories.

    As in TE's kernel, a history and its scale do not change if there is no new amax.
    """
    if algorithm not in ("max", "most_recent"):
        raise NotImplementedError(f"the simulator does not support the amax algorithm {algorithm!r}")
    largest = torch.finfo(torch_dtype(fp8_dtype)).max * 2.0**-margin
    position = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        amaxes = reduced_amaxes[position : position + scale.numel()]
        position += scale.numel()
        launch(_update_scale, [history, scale], history, scale, amaxes, algorithm == "max", largest)


def multi_tensor_scale(chunk, noop, lists, scale):
    """Multiply every tensor of the first list by ``scale``, and store the product in the tensor of the second list."""
    for source, target in zip(*lists, strict=True):
        launch(_multiply, [target], target, source, scale)


def multi_tensor_compute_scale_and_scale_inv(chunk, noop, lists, largest, power_of_two, epsilon):
    """Compute the scale and the inverse scale for each amax in the lists."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        launch(_store_scale, [scale, scale_inv], amax, scale, scale_inv, largest, power_of_two, epsilon)


def _kind(quantizer):
    kinds = {"Float8Quantizer": "delayed", "Float8CurrentScalingQuantizer": "current"}
    name = type(quantizer).__name__
    if is_block_scaled(quantizer):
        return "blocks"
    if name not in kinds:
        raise NotImplementedError(f"the simulator does not support quantization with {name}")
    return kinds[name]


def _transposed_shape(shape):
    return [shape[-1], *shape[:-1]]


def _empty(quantizer, shape, dtype):
    """Return an uninitialized tensor of TE's class with the representations that the quantizer requests."""
    if is_block_scaled(quantizer):
        return blocks.empty(quantizer, shape, dtype)
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, Float8TensorStorage

    _kind(quantizer)
    shape = list(shape)
    rowwise, transposed = _needs(quantizer)
    parts = {
        "data": torch.empty(shape, dtype=torch.uint8) if rowwise else None,
        "data_transpose": torch.empty(_transposed_shape(shape), dtype=torch.uint8) if transposed else None,
        "fp8_scale_inv": torch.empty(1, dtype=torch.float32),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if not quantizer.internal:
        return Float8Tensor(shape=shape, dtype=dtype, **parts)
    if "fake_dtype" in Float8TensorStorage.__new__.__kwdefaults__:  # TE 2.14 and later
        parts["fake_dtype"] = dtype
    return Float8TensorStorage(**parts)


def _match_usage(output, quantizer):
    """Allocate the representations that ``quantizer`` requests and ``output`` lacks. Remove those not requested."""
    if is_block_scaled(quantizer):
        blocks.match_usage(output, quantizer)
        return
    if not hasattr(output, "_transpose_invalid"):
        raise NotImplementedError(f"the simulator does not support quantization into {type(output).__name__}")
    shape = list(output.size())
    rowwise, transposed = _needs(quantizer)
    if not rowwise:
        output._data = None
    elif output._data is None:
        output._data = torch.empty(shape, dtype=torch.uint8)
    if not transposed:
        output._transpose = None
    elif output._transpose is None:
        output._transpose = torch.empty(_transposed_shape(shape), dtype=torch.uint8)
    output._transpose_invalid = not transposed
    output._fp8_dtype = quantizer.dtype


def _needs(quantizer):
    """Return whether a per-tensor FP8 tensor of this quantizer has data, and whether it has a transpose."""
    return quantizer.rowwise_usage or any_fp8_layout(), quantizer.columnwise_usage and not any_fp8_layout()


# The kernels.


def _largest_magnitude(values):
    """Return the largest magnitude, ignoring NaN as the GPU's fmax does."""
    return values.abs().nan_to_num(nan=0.0, posinf=math.inf).amax()


def _quotient(largest, amax):
    """Return ``largest / amax``, rounded once. In torch, ``number / tensor`` rounds the reciprocal too."""
    return torch.full_like(amax, largest).div(amax).clamp(max=_LARGEST_FLOAT)


def _cast(values, scale, rowwise, columnwise, scale_inv, dtype):
    largest = torch.finfo(dtype).max
    data = (values * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if rowwise is not None:
        rowwise.copy_(data.view(rowwise.shape))
    if columnwise is not None:
        _transpose(columnwise, data)
    scale_inv.copy_(1.0 / scale)


def cast_delayed(tensor, scale, amax, rowwise, columnwise, scale_inv, noop, dtype):
    if skipped(noop):
        return
    values = tensor.float()
    amax.copy_(torch.maximum(amax, _largest_magnitude(values)))
    _cast(values, scale, rowwise, columnwise, scale_inv, dtype)


def cast_current(tensor, scale, amax, rowwise, columnwise, scale_inv, noop, dtype, options, group=None):
    if skipped(noop):
        return
    use_existing_amax, epsilon, power_of_two = options
    values = tensor.float()
    if not use_existing_amax:
        amax.fill_(_largest_magnitude(values))
    if group is not None:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    _scale_of(amax, scale, torch.finfo(dtype).max, power_of_two, epsilon)
    _cast(values, scale, rowwise, columnwise, scale_inv, dtype)


def _scale_of(amax, scale, largest, power_of_two, epsilon):
    bounded = max(amax.item(), epsilon)
    if bounded == 0.0 or math.isinf(bounded):
        scale.fill_(1.0)
    else:
        scale.copy_(_quotient(largest, amax.clamp(min=epsilon)))
        if power_of_two:
            scale.copy_(torch.exp2(torch.floor(torch.log2(scale))))


def _store_scale(amax, scale, scale_inv, largest, power_of_two, epsilon):
    _scale_of(amax, scale, largest, power_of_two, epsilon)
    scale_inv.copy_(1.0 / scale)


def _multiply(target, source, factor):
    target.copy_(source * factor)


def _transpose(out, data):
    out.copy_(data.reshape(-1, data.shape[-1]).t().reshape(out.shape))


def _dequantize(result, data, scale_inv, dtype):
    result.copy_(data.view(dtype).float() * scale_inv)


def _sum_rows(result, values):
    result.copy_(values.reshape(-1, values.shape[-1]).double().sum(dim=0))


def _store_amax(amax, tensor):
    amax.fill_(_largest_magnitude(tensor.float()))


def _update_scale(history, scale, reduced, of_all, largest):
    last = torch.where(reduced != 0, reduced, history[0])
    shifted = torch.cat([history[1:], last.unsqueeze(0)])
    amax = shifted.amax(dim=0) if of_all else last
    shifted[0] = 0.0
    history.copy_(torch.where(last != 0, shifted, history))
    usable = torch.isfinite(amax) & (amax > 0) & (last != 0)
    scale.copy_(torch.where(usable, _quotient(largest, amax), scale))
