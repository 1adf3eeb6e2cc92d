"""Tensors of the block-scaled formats: their memory, their layouts of data and scales, and the swizzling of scales.

A tensor has up to two parts, row-wise and column-wise, each quantized from the high-precision source. Column-wise data
of MXFP8 have the tensor's layout, with blocks along columns. Column-wise data of NVFP4 and block-scaled FP8 are
transposed. Scales of MXFP8 and NVFP4 are padded to tiles of 128 x 4, which a GEMM reads in cuBLAS's order ("swizzled").
Scales of block-scaled FP8 are stored in the order that cuBLAS reads on Hopper. On Blackwell, a GEMM converts them to
scales of MXFP8.

These rules follow TE's C++ code of the same version as the installed Python code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any, NamedTuple

import torch

from ..graph import launch
from ..runtime import sm_arch
from . import formats
from .enums import torch_dtype
from .formats import MX_BLOCK, NV_BLOCK, TILE, tiles

__all__ = ["nvfp4_2d_scale_transpose", "nvfp4_data_transpose", "swizzle_scales_for_gemm_"]

MX, NV, TILED = "MXFP8", "NVFP4", "Float8Block"

_KNOWN = {
    "rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", "dtype", "block_len", "force_pow_2_scales",
    "amax_epsilon", "block_scaling_dim", "with_rht", "with_post_rht_amax", "with_amax_reduction",
    "amax_reduction_group", "with_2d_quantization", "stochastic_rounding", "rht_matrix",
    "rht_matrix_random_sign_mask_t", "nvfp4_e4m3_max", "nvfp4_4over6_err_mode",
}  # fmt: skip
"""The attributes of quantizers that the simulator supports."""


class Part(NamedTuple):
    """The row-wise or the column-wise half of a tensor. ``dtype`` is the type of FP8 data. Only NVFP4 has an ``amax``.

    - ``upright``: data have the tensor's layout although blocks lie along columns (column-wise MXFP8)
    - ``swizzled``: scales are in the order in which a GEMM reads them
    - ``height``: the height of a block of block-scaled FP8
    """

    kind: str
    data: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None
    dtype: torch.dtype | None
    columnwise: bool
    upright: bool
    swizzled: bool
    height: int

    scale_inv = None
    """None, because `matrix` includes the scales of the blocks."""

    def lines(self):
        """Return the data as a matrix of bytes with blocks along its rows."""
        if self.columnwise and not self.upright:
            return self.data.reshape(self.data.shape[0], -1)
        data = self.data.reshape(-1, self.data.shape[-1])
        return data.t() if self.upright else data

    def scales(self):
        """Return the scales without padding, one row for each row of blocks, as a view if they are not swizzled."""
        lines, columns = self.lines().shape
        if self.kind == TILED:
            scale = self.scale if self.height > 1 else self.scale.t()
            return scale[: -(-lines // self.height), : tiles(columns)]
        scale = self.scale.t() if self.upright else self.scale
        if self.swizzled:
            scale = formats.unswizzle(self.scale.view(scale.shape))
        return scale[:lines, : -(-columns // MX_BLOCK) if self.kind == MX else columns * 2 // NV_BLOCK]

    def matrix(self, to=torch.float64):
        """Return the values that data and scales encode, in the tensor's layout, as a matrix of dtype ``to``."""
        codes, scale = self.lines(), self.scales()
        if self.kind == NV:
            values = formats.decode_nvfp4(codes, scale, self.amax, to)
        elif self.kind == MX:
            values = formats.decode_mxfp8(codes, scale, self.dtype, to)
        else:
            values = codes.contiguous().view(self.dtype).to(to)
            values = values * formats.spread(scale.to(to), self.height, codes.shape)
        return values.t() if self.columnwise else values

    def store(self, codes, scale):
        """Write codes and scales that have blocks along rows. The padding of unswizzled scales does not change."""
        self.data.copy_((codes.t() if self.upright else codes).reshape(self.data.shape))
        if self.swizzled:
            self.scale.copy_(self.padded_and_swizzled(scale))
        else:
            self.scales().copy_(scale)

    def padded_and_swizzled(self, scale):
        """Pad ``scale`` with zeros to the size of this part's scales, and return it swizzled for a GEMM."""
        padded = torch.zeros_like(self.scale.t() if self.upright else self.scale)
        padded[: scale.shape[0], : scale.shape[1]] = scale
        return formats.swizzle(padded).view(self.scale.shape)


def is_block_scaled(value):
    """Return whether ``value`` is a quantizer or a tensor of a block-scaled format."""
    return type(value).__name__.startswith((MX, NV, TILED))


def kind_of(value):
    return next(kind for kind in (MX, NV, TILED) if type(value).__name__.startswith(kind))


def shape_of(tensor):
    """Return the shape of any tensor, quantized or not, as a list."""
    if getattr(tensor, "_data", tensor) is None:  # without `_data`, size() is correct only for matrices
        first, *rest = tensor._transpose.shape
        return [*rest, first]
    if not is_block_scaled(tensor) or kind_of(tensor) == MX:
        return list(tensor.size())
    pack = 2 if kind_of(tensor) == NV else 1
    if tensor._rowwise_data is not None:
        return [*tensor._rowwise_data.shape[:-1], pack * tensor._rowwise_data.shape[-1]]
    first, *rest = tensor._columnwise_data.shape
    return [*rest[:-1], pack * rest[-1], first]


def empty(quantizer, shape, dtype):
    """Return an uninitialized tensor of the class that belongs to ``quantizer``."""
    fields = {
        name: torch.empty(size, dtype=kind) if wanted else None
        for columnwise, wanted in usages_of(quantizer)
        for name, size, kind in fields_of(quantizer, shape, columnwise)
    }
    return _construct(quantizer, shape, dtype, fields, _kernel_swizzles(quantizer, shape), quantizer.internal)


def empty_parts(quantizers, shapes, dtype):
    """Return uninitialized tensors for the parts of a split.

    One buffer contains the row-wise fields of all tensors, and a second buffer contains the column-wise fields.
    """
    parts: list[dict[str, Any]] = [{} for _ in quantizers]
    for columnwise, wanted in usages_of(quantizers[0]):
        wished = [fields_of(quantizer, shape, columnwise) for quantizer, shape in zip(quantizers, shapes, strict=True)]
        places, total = [], 0
        for fields in zip(*wished, strict=True):  # the data of all parts, then their scales, then their amaxes
            for part, (name, size, kind) in zip(parts, fields, strict=True):
                start = -(-total // 256) * 256 if name.endswith("data") else -(-total // 16) * 16
                total = start + math.prod(size) * kind.itemsize
                places.append((part, name, size, kind, start, total))
        buffer = torch.empty(total, dtype=torch.uint8) if wanted else None
        for part, name, size, kind, start, end in places:
            part[name] = None if buffer is None else buffer[start:end].view(kind).view(size)
    swizzled = all(
        _kernel_swizzles(quantizer, shape, in_split=True) for quantizer, shape in zip(quantizers, shapes, strict=True)
    )
    rows = zip(quantizers, shapes, parts, strict=True)
    return [_construct(quantizer, shape, dtype, part, swizzled, internal=True) for quantizer, shape, part in rows]


def match_usage(output, quantizer):
    """Allocate the parts that ``quantizer`` requests and ``output`` lacks. Remove all parts that are not requested."""
    shape = shape_of(output)
    for columnwise, wanted in usages_of(quantizer):
        for name, size, kind in fields_of(quantizer, shape, columnwise):
            if not wanted:
                setattr(output, f"_{name}", None)
            elif getattr(output, f"_{name}") is None:
                setattr(output, f"_{name}", torch.empty(size, dtype=kind))
    output._with_gemm_swizzled_scales = _kernel_swizzles(quantizer, shape)
    if hasattr(output, "_fp8_dtype"):
        output._fp8_dtype = quantizer.dtype


def cast(tensor, quantizer, output, noop):
    """Quantize ``tensor`` into ``output``, which has the parts that the quantizer requests.

    If ``noop`` is 1, ``output`` does not change, except for the amaxes of NVFP4 with RHT.
    """
    refuse(quantizer)
    parts = [_part(output, columnwise) for columnwise, wanted in usages_of(quantizer) if wanted]
    writes = [field for part in parts for field in part if isinstance(field, torch.Tensor)]
    if kind_of(quantizer) == TILED:
        if sm_arch() >= 100 and not quantizer.force_pow_2_scales:
            raise RuntimeError("FP8 block scaling is emulated with MXFP8, which requires power of two scaling factors")
        options = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        launch(_cast_tiles, writes, tensor, parts, *options, noop)
    elif kind_of(quantizer) == MX:
        height = MX_BLOCK if getattr(quantizer, "with_2d_quantization", False) else 1  # since TE 2.19
        launch(cast_mx, writes, tensor, parts, height, noop)
    elif not quantizer.with_rht:
        states = random_states(1) if quantizer.stochastic_rounding else None
        height = NV_BLOCK if quantizer.with_2d_quantization else 1
        launch(cast_nv, writes, tensor, parts, height, None, states, noop)
    else:
        if tensor.dtype != torch.bfloat16:
            raise RuntimeError("RHT is only supported for bfloat16 input")
        if not quantizer.with_post_rht_amax:
            raise RuntimeError("Pre-RHT amax is not supported yet")
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        fused = _sm_100_to_110() and rows % 64 == 0 and columns % 128 == 0
        states = random_states(1 if fused else len(parts)) if quantizer.stochastic_rounding else None
        if quantizer.columnwise_usage and not fused:
            torch.empty([columns, rows], dtype=tensor.dtype)  # TE stores the transformed input for a second kernel
        launch(cast_nv, writes, tensor, parts, 1, quantizer.rht_matrix, states, noop)


def swizzle_after_quantize(tensor, quantizer):
    """From TE 2.17 on, swizzle scales into new memory if ``quantizer`` requests it, even if the no-op flag is set."""
    if _swizzles_after() and quantizer.optimize_for_gemm:
        swizzle_scales_for_gemm_(tensor)


def swizzle_scales_for_gemm_(tensor):
    """Replace the scales of an MXFP8 or NVFP4 tensor with new, swizzled scales, unless they are already swizzled."""
    if not is_block_scaled(tensor) or kind_of(tensor) == TILED or _is_swizzled(tensor):
        return
    for columnwise in (False, True):
        name = f"_{_side(columnwise)}_scale_inv"
        if getattr(tensor, name) is not None:
            setattr(tensor, name, for_gemm([_part(tensor, columnwise)])[0].scale)
    tensor._with_gemm_swizzled_scales = True


def nvfp4_data_transpose(data, *, out=None):
    """Return the transpose of a matrix of E2M1 codes. Each byte of ``data`` and of the result contains two codes."""
    rows, columns = data.shape
    if rows % 2:
        raise RuntimeError(f"NVFP4 transpose requires an even number of rows (got {rows})")
    if out is None:
        out = torch.empty([2 * columns, rows // 2], dtype=torch.uint8)
    launch(_transpose_codes, [out], out, data)
    return out


def nvfp4_2d_scale_transpose(scale, out, high, wide):
    """Write the transposed scales of ``high`` x ``wide`` blocks to ``out``, except for the padding."""
    launch(_transpose_scales, [out], scale, out, high, wide)


def for_gemm(operands):
    """Return a list of operands as a GEMM reads them. Scales that are not swizzled are swizzled into one new buffer."""
    places, total = {}, 0
    for index, part in enumerate(operands):
        if isinstance(part, Part) and part.kind != TILED and not part.swizzled:
            start = -(-total // 16) * 16
            total = start + part.scale.numel()
            places[index] = slice(start, total)
    buffer = torch.empty(total, dtype=torch.uint8) if places else None

    def ready(index, part):
        if isinstance(part, Part) and part.kind == TILED and sm_arch() >= 100:
            return _as_mxfp8(part)
        if buffer is None or index not in places:
            return part
        scale = buffer[places[index]].view(part.scale.shape)
        launch(_swizzle, [scale], scale, part)
        return part._replace(scale=scale, swizzled=True)

    return [ready(index, part) for index, part in enumerate(operands)]


def operand(tensor, columnwise):
    """Return the column-wise or row-wise part of ``tensor`` for a GEMM. Raise RuntimeError if the part has no data."""
    if getattr(tensor, f"_{_side(columnwise)}_data") is None:
        raise RuntimeError(f"the GEMM needs {_side(columnwise)} data, which the tensor does not have")
    return _part(tensor, columnwise)


def dequantize(tensor, dtype):
    """Return the values of a block-scaled tensor as a tensor of dtype ``dtype``."""
    if tensor._rowwise_data is None and kind_of(tensor) != MX:
        raise RuntimeError("the simulator cannot dequantize a tensor without row-wise data")
    result = torch.empty(shape_of(tensor), dtype=dtype)
    launch(_dequantize, [result], result, _part(tensor, tensor._rowwise_data is None))
    return result


def skipped(noop):
    """Return whether a no-op flag exists and is set."""
    return noop is not None and noop.numel() > 0 and noop.item() == 1.0


def _as_mxfp8(part):
    """Return a part of block-scaled FP8 as a part of MXFP8, with the same codes and new, swizzled scales."""
    lines, columns = part.lines().shape
    scale = torch.empty([tiles(lines) * 128, tiles(columns) * 4], dtype=torch.uint8)
    launch(_convert_scales, [scale], scale, part)
    return part._replace(kind=MX, scale=scale, swizzled=True)


def _side(columnwise):
    return "columnwise" if columnwise else "rowwise"


def usages_of(quantizer):
    return (False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage)


def _is_swizzled(tensor):
    return bool(getattr(tensor, "_with_gemm_swizzled_scales", False))  # since TE 2.12


def _part(tensor, columnwise):
    kind, side = kind_of(tensor), _side(columnwise)
    return Part(
        kind,
        getattr(tensor, f"_{side}_data"),
        getattr(tensor, f"_{side}_scale_inv"),
        getattr(tensor, f"_amax_{side}") if kind == NV else None,
        None if kind == NV else torch_dtype(tensor._fp8_dtype),
        columnwise,
        columnwise and kind == MX,
        kind != TILED and _is_swizzled(tensor),
        TILE if kind == TILED and tensor._is_2D_scaled else 1,
    )


def fields_of(quantizer, shape, columnwise):
    """Return (name, shape, dtype) for each field of one part of a tensor with this ``shape``."""
    kind, side = kind_of(quantizer), _side(columnwise)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    lines, along = (columns, rows) if columnwise else (rows, columns)
    data = [columns, *shape[:-1]] if columnwise else list(shape)
    if kind == TILED:
        high, wide = (tiles(lines), tiles(along)) if quantizer.block_scaling_dim == 2 else (tiles(along), lines)
        return [(f"{side}_data", data, torch.uint8), (f"{side}_scale_inv", [high, -(-wide // 4) * 4], torch.float32)]
    block = MX_BLOCK if kind == MX else NV_BLOCK
    if rows % block or columns % block:
        raise RuntimeError(
            f"{kind} requires tensor dims that are divisible by {block} (got shape=({','.join(map(str, shape))}))"
        )
    scale = [-(-lines // 128) * 128, -(-(along // block) // 4) * 4]
    if kind == MX:
        scale = scale[::-1] if columnwise else scale
        return [(f"{side}_data", list(shape), torch.uint8), (f"{side}_scale_inv", scale, torch.uint8)]
    data = [columns, rows // 2] if columnwise else [*shape[:-1], columns // 2]
    return [
        (f"{side}_data", data, torch.uint8),
        (f"{side}_scale_inv", scale, torch.uint8),
        (f"amax_{side}", [1], torch.float32),
    ]


def _construct(quantizer, shape, dtype, fields, swizzled, internal):
    kind = kind_of(quantizer)
    name, file = ("Float8BlockwiseQ", "float8_blockwise") if kind == TILED else (kind, kind.lower())
    module = importlib.import_module(f"transformer_engine.pytorch.tensor.{file}_tensor")
    cls = getattr(module, f"{name}TensorStorage" if internal else f"{name}Tensor")
    known = inspect.signature(cls.__new__).parameters
    fields = {**fields, "fp4_dtype" if kind == NV else "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if kind == TILED:
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if not internal:
        fields.update(shape=list(shape), dtype=dtype)
    elif "fake_dtype" in known:  # TE 2.14 and later
        fields["fake_dtype"] = dtype
    if "with_gemm_swizzled_scales" in known:  # TE 2.12 and later
        fields["with_gemm_swizzled_scales"] = swizzled
    if "data_format" in known:  # TE 2.10 and 2.11
        fields["data_format"] = module.tex.Float8BlockScaleTensorFormat.GEMM_READY
    tensor = cls(**fields)
    tensor._with_gemm_swizzled_scales = swizzled
    return tensor


def refuse(quantizer):
    """Raise NotImplementedError if ``quantizer`` uses an option that the simulator does not support."""
    for name in sorted(vars(quantizer).keys() - _KNOWN):
        if getattr(quantizer, name):
            raise NotImplementedError(f"the simulator does not support {type(quantizer).__name__} with {name}")
    if getattr(quantizer, "with_amax_reduction", False) and torch.distributed.is_initialized():
        raise NotImplementedError("the simulator does not support quantize with an amax reduction over ranks")


def random_states(number):
    """Return a tensor with a seed for each of ``number`` kernels. Each replay draws new seeds."""
    states = torch.empty(number, 2, dtype=torch.int64)
    launch(_draw, [states], states)
    return states


# The next functions infer how the installed TE's C++ code works from Python code that changed in the same version.


@functools.cache
def _swizzles_after():
    """Return whether TE swizzles scales after the quantization (2.17 and later)."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    return "nvfp4_use_4over6" in NVFP4Quantizer.__annotations__


@functools.cache
def _swizzles_2d():
    """Return whether TE's kernel for 2D blocks of NVFP4 swizzles the scales while it quantizes (2.18 and later)."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return hasattr(TransformerEngineBaseModule, "_enable_weight_preswizzle")


def _sm_100_to_110():
    return 100 <= sm_arch() <= 110


def _kernel_swizzles(quantizer, shape, in_split=False):
    """Return whether the kernel that quantizes also swizzles the scales for a GEMM."""
    if kind_of(quantizer) == TILED or not getattr(quantizer, "optimize_for_gemm", False):  # since TE 2.12
        return False
    if kind_of(quantizer) == MX:
        return True
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if not _swizzles_after() or not _sm_100_to_110() or columns % 128:
        return False
    if quantizer.with_rht:
        return rows % (128 if in_split else 64) == 0
    fused = _swizzles_2d() and not in_split and quantizer.with_2d_quantization
    return fused and rows % 128 == 0


# The kernels.


def _swizzle(scale, part):
    scale.copy_(part.padded_and_swizzled(part.scales()))


def _dequantize(result, part):
    result.copy_(part.matrix(torch.float32).reshape(result.shape))


def _transpose_codes(out, data):
    codes = torch.stack([data & 15, data >> 4], dim=-1).reshape(len(data), -1).t()
    out.copy_(codes[:, ::2] | codes[:, 1::2] << 4)


def _transpose_scales(scale, out, high, wide):
    of_blocks = scale[: high * NV_BLOCK : NV_BLOCK, :wide]
    out[: wide * NV_BLOCK, :high] = of_blocks.t().repeat_interleave(NV_BLOCK, dim=0)


def _draw(states):
    states.random_()


def cast_mx(tensor, parts, height, noop):
    if skipped(noop):
        return
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    for part in parts:
        part.store(*formats.encode_mxfp8(rows.t() if part.columnwise else rows, part.dtype, height))


def _cast_tiles(tensor, parts, power_of_two, epsilon, noop):
    if skipped(noop):
        return
    rows, infinite = tensor.float().reshape(-1, tensor.shape[-1]), torch.finfo(tensor.dtype).max
    for part in parts:
        values = rows.t() if part.columnwise else rows
        part.store(*formats.encode_tiles(values, part.dtype, part.height, power_of_two, epsilon, infinite))


def _convert_scales(scale, part):
    lines, columns = part.lines().shape
    bits = part.scales().contiguous().view(torch.int32)
    exponents = (bits >> 23).to(torch.uint8).repeat_interleave(part.height, dim=0)[:lines]
    padded = torch.zeros_like(scale)
    padded[:lines, : 4 * tiles(columns)] = exponents.repeat_interleave(4, dim=1)
    scale.copy_(formats.swizzle(padded))


def cast_nv(tensor, parts, height, rht, states, noop):
    """Quantize ``tensor`` into NVFP4 ``parts``, in blocks of ``height`` rows.

    The matrix ``rht`` transforms the column-wise part. ``states`` contains the seeds for stochastic rounding.
    """
    if skipped(noop) and rht is None:
        return
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    generator = torch.Generator()
    for number, part in enumerate(parts):
        values = rows.t() if part.columnwise else rows
        if part.columnwise and rht is not None:
            values = (values.reshape(-1, NV_BLOCK) @ rht.float()).bfloat16().float().reshape(values.shape)
        part.amax.copy_(formats.largest(values, 0, 1))  # with RHT, TE writes amaxes even if the no-op flag is set
        if skipped(noop):
            continue
        random = None
        if states is not None:
            if number < len(states):
                generator.manual_seed(int(states[number, 0]))
            random = torch.rand(values.shape, generator=generator)
        part.store(*formats.encode_nvfp4(values, part.amax, height, random))
