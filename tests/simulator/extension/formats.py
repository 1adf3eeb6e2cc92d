"""The arithmetic of the block-scaled formats: encoding and decoding. In this module, blocks lie along rows.

- MXFP8 (OCP Microscaling Formats 1.0): FP8 codes, and an E8M0 scale (a power of two) for each block of 32 or 32 x 32
- NVFP4: E2M1 codes, two in a byte, an E4M3 scale for each block of 16 or 16 x 16, and an FP32 scale for the tensor
- block-scaled FP8: FP8 codes, and an FP32 scale for each block of 128 or 128 x 128
"""

from __future__ import annotations

import functools
import math

import torch

__all__: list[str] = []

MX_BLOCK, NV_BLOCK, TILE = 32, 16, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_E2M1, LARGEST_E4M3, LARGEST_FLOAT = 6.0, 448.0, torch.finfo(torch.float32).max


def largest(values, *dims):
    """Return the largest magnitudes over ``dims``, ignoring NaN as fmax does."""
    return values.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dims)


def encode_mxfp8(values, dtype, height):
    """Return codes and scales of blocks of ``height`` rows. Each row of a block has a copy of the block's scale.

    A scale is the smallest power of two that avoids an overflow.
    """
    blocks = values.reshape(len(values), -1, MX_BLOCK)
    limit = torch.finfo(dtype).max
    of_block = largest(blocks.reshape(-1, height, *blocks.shape[1:]), 1, 3).repeat_interleave(height, dim=0)
    wanted = of_block * (1 / torch.tensor(limit))
    bits = wanted.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000)) & (exponent < 0xFE)
    scale = (exponent + up.int()).clamp(max=0xFE).masked_fill(wanted.isnan(), 0xFF).to(torch.uint8)
    inverse = power_of_two(torch.where(scale == 0xFF, scale, 0xFE - scale)).unsqueeze(2)
    codes = (blocks * inverse).clamp(-limit, limit).to(dtype).view(torch.uint8)
    return codes.reshape(values.shape), scale


def decode_mxfp8(codes, scale, dtype, to):
    values = codes.contiguous().view(dtype).to(to)
    return values * power_of_two(scale).to(to).repeat_interleave(MX_BLOCK, dim=1)[:, : values.shape[1]]


def power_of_two(biased):
    """Return the powers of two that E8M0 bytes encode. The smallest is a subnormal float. The byte 0xFF encodes NaN."""
    bits = biased.int() << 23
    return bits.masked_fill(biased == 0, 0x400000).masked_fill(biased == 0xFF, 0x7FFFFFFF).view(torch.float32)


def encode_nvfp4(values, amax, height, random):
    """Return the packed codes and the scales of blocks of ``height`` rows.

    If ``random`` is not None, round stochastically with these random numbers.
    """
    lines, columns = len(values), values.shape[1] // NV_BLOCK
    encode = torch.full_like(amax, LARGEST_E4M3 * LARGEST_E2M1).div(amax).clamp(max=LARGEST_FLOAT)
    encode = encode.masked_fill((amax == 0) | (encode == 0), 1.0)
    of_block = largest(values.reshape(lines // height, height, columns, NV_BLOCK), 1, 3)
    of_block = of_block.repeat_interleave(height, dim=0)
    if _divides_by_six():
        scale = of_block / torch.full_like(of_block, LARGEST_E2M1) * encode
    else:
        scale = of_block * (encode * (1 / torch.tensor(LARGEST_E2M1)))
    scale = scale.clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)
    inverse = (1 / (scale.float() * (1 / encode))).clamp(max=LARGEST_FLOAT)
    codes = _e2m1(values * inverse.repeat_interleave(NV_BLOCK, dim=1), random)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.view(torch.uint8)


def decode_nvfp4(codes, scale, amax, to):
    """Return the values of packed codes, as a matrix of dtype ``to``."""
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(len(codes), -1)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=to)[codes.long()]
    factor = scale.contiguous().view(torch.float8_e4m3fn).to(to) * amax.to(to)
    factor *= torch.tensor(1 / (LARGEST_E2M1 * LARGEST_E4M3), dtype=to)
    return values * factor.repeat_interleave(NV_BLOCK, dim=1)


def encode_tiles(values, dtype, height, power_of_two_scales, epsilon, infinite):
    """Return codes and inverse scales of blocks of ``height`` rows. ``infinite`` replaces a scale that overflows."""
    lines, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % TILE, 0, -lines % height))
    amax = largest(padded.reshape(-1, height, tiles(columns), TILE), 1, 3).clamp(min=epsilon)
    limit = torch.finfo(dtype).max
    scale = torch.full_like(amax, limit).div(amax)
    scale = scale.masked_fill(scale.isinf(), infinite)
    if power_of_two_scales:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    scale = scale.masked_fill((amax == 0) | amax.isinf(), 1.0)
    codes = (values * spread(scale, height, values.shape)).clamp(-limit, limit).to(dtype)
    return codes.view(torch.uint8), 1 / scale


def spread(scale, height, shape):
    """Return a matrix of this ``shape`` with the scale of each value, for blocks of ``height`` x 128."""
    return scale.repeat_interleave(height, dim=0).repeat_interleave(TILE, dim=1)[: shape[0], : shape[1]]


def tiles(length):
    """Return the number of blocks of 128 that cover ``length`` elements."""
    return -(-length // TILE)


def swizzle(scale):
    """Return ``scale`` in the order that cuBLAS reads, in the same shape, which is a multiple of 128 x 4."""
    high, wide = scale.shape
    return scale.reshape(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4).reshape(high, wide)


def unswizzle(scale):
    """Return ``scale`` in the order of its blocks. This function is the inverse of `swizzle`."""
    high, wide = scale.shape
    return scale.reshape(high // 128, wide // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(high, wide)


@functools.cache
def _divides_by_six():
    """Return whether TE divides a block's largest magnitude by 6 in a separate, rounded operation (before TE 2.14)."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4TensorStorage

    return "fake_dtype" not in (NVFP4TensorStorage.__new__.__kwdefaults__ or {})


def _e2m1(values, random):
    """Return the E2M1 codes of ``values``, rounded to nearest (ties to even) or, with ``random``, stochastically."""
    size = values.abs().clamp(max=LARGEST_E2M1)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    quotient = size / step
    rounded = (quotient.round() if random is None else torch.floor(quotient + random)) * step
    codes = torch.bucketize(rounded.clamp(max=LARGEST_E2M1).contiguous(), torch.tensor(E2M1)).to(torch.uint8)
    return codes | values.signbit().to(torch.uint8) << 3
