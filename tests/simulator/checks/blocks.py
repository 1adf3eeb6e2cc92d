"""Compare the block-scaled formats with TE's NVFP4 reference, with their definitions, and with cuBLAS's scale order."""

from __future__ import annotations

import importlib
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import gemm as te_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from tests.simulator.runtime import any_fp8_layout, sm_arch

from .extension import E4M3, E5M2, close, gemm, gpu

FIELDS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
SHAPES = ((64, 128), (256, 192), (128, 512))
NVFP4 = {"plain": {}, "2d": {"with_2d_quantization": True}, "rht": {"with_rht": True, "with_post_rht_amax": True}}


def reference() -> Any:
    """Return TE's module with the reference for NVFP4. The module's name differs between versions of TE."""
    for name in ("reference_nvfp4", "quantization_ref_nvfp4", "quantization_nvfp4"):
        try:
            return importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("this TE has none of the known reference modules for NVFP4")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a bf16 tensor of this ``shape`` with values of very different magnitudes and a block of zeros."""
    rows = torch.exp2(torch.arange(shape[0]) % 23 - 11.0).unsqueeze(1)
    x = gpu(*shape, dtype=torch.float32, seed=seed) * rows
    x[:32, :32] = 0
    return x.bfloat16()


def contents(tensor: Any) -> list[bytes]:
    """Return the bytes of each field of a quantized tensor. Bytes are compared, because padding may be NaN."""
    return [getattr(tensor, name).numpy().tobytes() for name in FIELDS]


def cublas_order(scale: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``scale``, whose shape is a multiple of 128 x 4, in the order that cuBLAS documents."""
    out, wide = torch.empty(scale.numel(), dtype=torch.uint8), scale.shape[1] // 4
    for line, block in itertools.product(*map(range, scale.shape)):
        tile = (line // 128 * wide + block // 4) * 512
        out[tile + line % 32 * 16 + line % 128 // 32 * 4 + block % 4] = scale[line, block]
    return out


def padded(scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))


def nearest_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the FP8 codes of the finite values nearest to ``x``. If two values are equally near, use the even code."""
    codes = torch.arange(256).to(torch.uint8)
    table = codes.view(dtype).double()
    codes, table = codes[table.isfinite()], table[table.isfinite()]
    distance = (x.double().abs().reshape(-1, 1) - table[table >= 0]).abs()
    size = codes[table >= 0][(distance + (codes[table >= 0] % 2) * distance.abs() * 1e-15).argmin(dim=1)]
    return (size | x.reshape(-1).signbit().to(torch.uint8) << 7).view(x.shape)


def mx_by_definition(x: torch.Tensor, dtype: torch.dtype, height: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the MXFP8 codes and scales of ``x``, in blocks of ``height`` rows and 32 columns.

    A scale is the smallest power of two that avoids an overflow. The values of its block are divided by the scale.
    """
    blocks = x.double().reshape(x.shape[0], -1, 32)
    scale = torch.zeros(blocks.shape[:2], dtype=torch.uint8)
    for line, block in itertools.product(range(0, x.shape[0], height), range(scale.shape[1])):
        largest = float(blocks[line : line + height, block].abs().max()) / torch.finfo(dtype).max
        scale[line : line + height, block] = max(math.ceil(math.log2(largest)) + 127, 0) if largest else 0
    scaled = blocks / torch.exp2(scale.double() - 127).unsqueeze(2)
    return nearest_fp8(scaled, dtype).reshape(x.shape), scale


def fp8_blocks(**options: Any) -> Float8BlockQuantizer:
    return Float8BlockQuantizer(E4M3, **{"rowwise": True, "columnwise": True, **options})


def tiles_by_definition(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and inverse scales of ``x`` in block-scaled FP8, in blocks of ``height`` rows and 128 columns.

    A scale is the largest power of two that avoids an overflow. The values of its block are multiplied by the scale.
    """
    high, wide = -(-x.shape[0] // height), -(-x.shape[1] // 128)
    data, scale_inv = torch.empty(x.shape, dtype=torch.uint8), torch.empty(high, wide)
    for row, column in itertools.product(range(high), range(wide)):
        place = slice(row * height, (row + 1) * height), slice(column * 128, (column + 1) * 128)
        largest = float(x[place].abs().max())
        scale = 2.0 ** math.floor(math.log2(448 / largest)) if largest else 1.0
        data[place], scale_inv[row, column] = nearest_fp8(x[place].double() * scale, torch.float8_e4m3fn), 1 / scale
    return data, scale_inv


def assert_as_reference(out: Any, quantizer: Any, x: torch.Tensor) -> None:
    """Assert that data, scales and amaxes of ``out`` equal the results of ``quantizer``, TE's reference, for ``x``."""
    rows, columns = x.shape
    data, scale, data_t, scale_t, amax, amax_t = quantizer._quantize(x)
    assert torch.equal(out._amax_rowwise, amax)
    assert torch.equal(out._rowwise_scale_inv[:rows, : columns // 16], scale.view(torch.uint8))
    assert torch.equal(out._rowwise_data, data)
    if data_t is not None:
        assert torch.equal(out._amax_columnwise, amax_t)
        assert torch.equal(out._columnwise_scale_inv[:columns, : rows // 16], scale_t.view(torch.uint8))
        assert torch.equal(out._columnwise_data, data_t)


def check_mxfp8_is_that_of_its_definition() -> None:
    for (dtype, torch_dtype), shape in itertools.product(
        ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)), ((64, 128), (96, 160))
    ):
        x = values(*shape)
        out = tex.quantize(x, MXFP8Quantizer(dtype))
        data, scale = mx_by_definition(x, torch_dtype)
        assert torch.equal(out._rowwise_data, data)
        assert torch.equal(out._rowwise_scale_inv[: shape[0], : shape[1] // 32], scale)
        assert out._rowwise_scale_inv.shape == padded(scale).shape
        data, scale = mx_by_definition(x.t(), torch_dtype)
        assert torch.equal(out._columnwise_data, data.t())
        assert torch.equal(out._columnwise_scale_inv[: shape[0] // 32, : shape[1]], scale.t())
        assert out._columnwise_scale_inv.shape == padded(scale).t().shape
        close(tex.dequantize(out, tex.DType.kFloat32), x, 4e-2 if dtype == E4M3 else 8e-2)


def check_2d_blocks_of_mxfp8_are_those_of_their_definition() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    quantizer.with_2d_quantization = True  # an option that TE added in 2.19
    x = values(96, 160)
    out = tex.quantize(x, quantizer)
    data, scale = mx_by_definition(x, torch.float8_e4m3fn, height=32)
    assert torch.equal(out._rowwise_data, data)
    assert torch.equal(out._columnwise_data, data)
    assert torch.equal(out._rowwise_scale_inv[:96, :5], scale)
    assert torch.equal(out._columnwise_scale_inv[:3, :160], scale[::32].repeat_interleave(32, dim=1))


def check_the_transpose_of_2d_blocks_of_nvfp4_is_what_a_quantization_gives() -> None:
    for rows, columns in SHAPES:
        wanted = tex.quantize(values(rows, columns), NVFP4Quantizer(with_2d_quantization=True))
        data, scale = wanted._rowwise_data, wanted._rowwise_scale_inv
        assert torch.equal(tex.nvfp4_data_transpose(data, out=None), wanted._columnwise_data)
        found = torch.empty_like(wanted._columnwise_scale_inv)
        tex.nvfp4_2d_scale_transpose(scale, found, rows // 16, columns // 16)
        where = slice(columns), slice(rows // 16)
        assert torch.equal(found[where], wanted._columnwise_scale_inv[where])


def check_nvfp4_is_that_of_tes_reference() -> None:
    module = reference()
    formats = getattr(module, "reference_utils", None) or module.utils
    for (kind, options), shape in itertools.product(NVFP4.items(), SHAPES):
        x = values(*shape)
        out = tex.quantize(x, NVFP4Quantizer(**options))
        tile = (16, 16) if kind == "2d" else (1, 16)
        quantizer = module.NVFP4QuantizerRef(formats.Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=kind == "rht")
        assert_as_reference(out, quantizer, x)


def check_fp4_rounds_ties_to_even() -> None:
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[0] = torch.cat([ties, -ties])
    out = tex.quantize(x, NVFP4Quantizer())
    wanted = [0, 1, 1, 2, 2, 4, 4, 6]
    assert tex.dequantize(out, tex.DType.kFloat32)[0].tolist() == [*wanted, *(-one for one in wanted)]


def check_stochastic_rounding_takes_either_neighbour_and_keeps_the_mean() -> None:
    x = torch.full((256, 256), 6.0, dtype=torch.bfloat16)  # 6.0 in each block, so scales do not change the values
    for column, value in enumerate((0.125, 1.125, 2.25, 3.5, 4.5, -5.0, -0.75, 3.0), start=1):
        x[:, column::16] = value
    for options in ({}, {"with_2d_quantization": True}):
        torch.manual_seed(3)
        quantizer = NVFP4Quantizer(stochastic_rounding=True, **options)
        out, again = (tex.dequantize(tex.quantize(x, quantizer), tex.DType.kFloat32) for _ in range(2))
        for column, (low, high) in enumerate(
            ((0, 0.5), (1, 1.5), (2, 3), (3, 4), (4, 6), (-6, -4), (-1, -0.5), (3, 3)), start=1
        ):
            found = out[:, column::16]
            assert found.unique().tolist() == sorted({low, high})
            assert abs(found.mean() - x[0, column]) < 0.05 * (high - low) + 1e-6
        assert torch.equal(out[:, ::16], torch.full((256, 16), 6.0))
        assert not torch.equal(out, again)


def check_swizzled_scales_lie_as_cublas_reads_them() -> None:
    for quantizer, shape in itertools.product((MXFP8Quantizer(E4M3), NVFP4Quantizer()), SHAPES):
        plain = tex.quantize(values(*shape), quantizer)
        out = tex.quantize(values(*shape), quantizer)
        block, before = 32 if isinstance(quantizer, MXFP8Quantizer) else 16, out._rowwise_scale_inv
        tex.swizzle_scales_for_gemm_(out)
        assert out._with_gemm_swizzled_scales
        assert out._rowwise_scale_inv is not before
        rows, columns = shape
        scale = plain._rowwise_scale_inv[:rows, : columns // block]
        assert torch.equal(out._rowwise_scale_inv.flatten(), cublas_order(padded(scale)))
        scale = plain._columnwise_scale_inv
        scale = (scale.t() if block == 32 else scale)[:columns, : rows // block]
        assert torch.equal(out._columnwise_scale_inv.flatten(), cublas_order(padded(scale)))
        assert torch.equal(tex.dequantize(out, tex.DType.kFloat32), tex.dequantize(plain, tex.DType.kFloat32))


def check_scales_that_are_swizzled_at_once_are_the_same() -> None:
    quantizers = MXFP8Quantizer(E4M3), *(NVFP4Quantizer(**options) for options in NVFP4.values())
    for quantizer in quantizers:
        plain = tex.quantize(values(128, 256), quantizer)
        tex.swizzle_scales_for_gemm_(plain)
        quantizer.optimize_for_gemm = True
        out = tex.quantize(values(128, 256), quantizer)
        if isinstance(quantizer, MXFP8Quantizer):
            assert out._with_gemm_swizzled_scales
        if out._with_gemm_swizzled_scales:  # for NVFP4, only in TE 2.17 and later
            assert all(torch.equal(getattr(out, name), getattr(plain, name)) for name in FIELDS)


def check_the_flag_keeps_what_is_there() -> None:
    for quantizer in (MXFP8Quantizer(E4M3), *(NVFP4Quantizer(**options) for options in NVFP4.values())):
        out = tex.quantize(values(128, 128), quantizer)
        before = [getattr(out, name).clone() for name in FIELDS]
        tex.quantize(values(128, 128, seed=1), quantizer, out, torch.ones(1))
        assert all(torch.equal(getattr(out, name), one) for name, one in zip(FIELDS, before, strict=True))
        tex.quantize(values(128, 128, seed=1), quantizer, out, torch.zeros(1))
        wanted = tex.quantize(values(128, 128, seed=1), quantizer)
        assert all(torch.equal(getattr(out, name), getattr(wanted, name)) for name in FIELDS)


def check_usages_come_and_go_in_an_existing_tensor() -> None:
    for quantizer in (MXFP8Quantizer(E4M3), NVFP4Quantizer()):
        out = tex.quantize(values(64, 64), quantizer)
        quantizer.set_usage(columnwise=False)
        tex.quantize(values(64, 64), quantizer, out)
        assert [getattr(out, name) is None for name in FIELDS] == [False, False, True, True]
        quantizer.set_usage(rowwise=False, columnwise=True)
        tex.quantize(values(64, 64), quantizer, out)
        assert [getattr(out, name) is None for name in FIELDS] == [True, True, False, False]


def check_products_are_those_of_the_dequantized_values() -> None:
    module = reference()
    for layout, quantizer in itertools.product(("TN", "NN", "NT"), (MXFP8Quantizer(E4M3), NVFP4Quantizer())):
        shapes = {"TN": ((96, 64), (32, 64)), "NN": ((64, 96), (32, 64)), "NT": ((64, 96), (64, 32))}[layout]
        mx = isinstance(quantizer, MXFP8Quantizer)
        a, b = (tex.quantize(values(*shape, seed=seed), quantizer) for seed, shape in enumerate(shapes))

        def matrix(tensor: Any, rows: int, columns: int, columnwise: bool, mx: bool = mx) -> torch.Tensor:
            side = "columnwise" if columnwise else "rowwise"
            data, scale = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
            if not mx:
                lines, length = (columns, rows) if columnwise else (rows, columns)
                scale = scale[:lines, : length // 16].contiguous().view(torch.float8_e4m3fn).double()
                scale *= getattr(tensor, f"_amax_{side}").double() / (6 * 448)
                found = module.cast_from_fp4x2(data, torch.float64) * scale.repeat_interleave(16, dim=1)
                return found.t() if columnwise else found
            factor = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=0 if columnwise else 1)
            return data.view(torch.float8_e4m3fn).double() * factor[:rows, :columns]

        close(tex.dequantize(b, tex.DType.kFloat32), matrix(b, *shapes[1], columnwise=False), 1e-6)
        left = matrix(b, *shapes[1], columnwise=layout[1] == "T")
        right = matrix(a, *shapes[0], columnwise=layout[0] == "N")
        wanted = (left.t() if layout[1] == "T" else left) @ (right.t() if layout[0] == "T" else right)
        close(te_gemm.general_gemm(a, b, out_dtype=torch.float32, layout=layout)[0], wanted, 1e-6)
        for tensor in (a, b):
            assert not tensor._with_gemm_swizzled_scales
            tex.swizzle_scales_for_gemm_(tensor)
        close(gemm(a, b, layout)[0], wanted, 1e-6)


def check_a_split_is_quantized_and_multiplied_part_by_part() -> None:
    x, splits = values(256, 128), [128, 0, 64, 64]
    for make in (lambda: MXFP8Quantizer(E4M3), *(partial(NVFP4Quantizer, **each) for each in NVFP4.values())):
        parts, pieces = tex.split_quantize(x, splits, [make() for _ in splits]), x.split(splits)
        weights, out = [tex.quantize(gpu(128, 128, seed=seed), make()) for seed in range(4)], torch.empty(256, 128)
        none = [torch.empty(0)] * 4
        rest = (none, tex.DType.kFloat32, True, none, False, [torch.empty(1)], 1, False, False, 0)
        tex.te_general_grouped_gemm(weights, True, parts, False, [out], tex.DType.kFloat32, splits, *rest)
        singles = [tex.quantize(piece, make()) if len(piece) else None for piece in pieces]
        products = [gemm(weight, one, "TN")[0] for weight, one in zip(weights, singles, strict=True) if one is not None]
        assert torch.equal(out, torch.cat(products))
        for part, one in zip(parts, singles, strict=True):
            if one is not None:  # these products read the column-wise parts
                assert torch.equal(gemm(part, part, "NT")[0], gemm(one, one, "NT")[0])


def check_groups_are_quantized_and_multiplied_one_by_one_whatever_their_rows_are_at_a_replay() -> None:
    try:
        storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage")
    except ModuleNotFoundError:
        return  # TE before 2.14 lacks this module
    splits, ones, zeros = torch.tensor([64, 128, 0]), torch.ones(3), torch.zeros(1)
    x, dy = gpu(192, 128), gpu(192, 256, seed=1)
    offsets, of_rows = tex.splits_to_offsets(splits, 128), tex.splits_to_offsets(splits, 1)
    assert (offsets.tolist(), of_rows.tolist()) == ([0, 64 * 128, 192 * 128, 192 * 128], [0, 64, 192, 192])
    quantizers = [None, MXFP8Quantizer(E4M3), NVFP4Quantizer(**NVFP4["rht"])]
    if any_fp8_layout():
        quantizers.append(Float8CurrentScalingQuantizer(E4M3, device=torch.device("cuda")))
    for quantizer in quantizers:
        if quantizer is not None:
            quantizer.internal = quantizer.optimize_for_gemm = True
        weights = [gpu(256, 128, seed=seed) for seed in range(3)]
        if quantizer is not None:
            weights = [tex.quantize(weight, quantizer) for weight in weights]

        def grouped(data: torch.Tensor, quantizer: Any = quantizer) -> Any:
            if quantizer is not None:
                return tex.group_quantize(data, quantizer, 3, splits)
            kind, shape = storage.GroupedTensorStorage, tuple(data.shape)
            return kind(shape, data.dtype, num_tensors=3, data=data.reshape(-1), first_dims=splits)

        results = [torch.zeros(192, 256), torch.zeros(192, 128), [torch.ones(256, 128) for _ in range(3)]]
        out, dx = (grouped(result, None) for result in results[:2])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gx, gdy = grouped(x), grouped(dy)
            rest = (None, None, ones)
            tex.te_general_grouped_gemm_for_discrete_in(weights, True, gx, False, out, *rest, zeros)
            tex.te_general_grouped_gemm_for_discrete_in(weights, False, gdy, False, dx, *rest, zeros)
            tex.te_general_grouped_gemm_for_discrete_out(gx, False, gdy, True, results[2], *rest, ones)
            sums = None if quantizer is None else tex.bgrad_group_quantize(dy, quantizer, 3, splits)[1]
        for rows in ([64, 128, 0], [64, 0, 64], [0, 64, 128]):
            splits.copy_(torch.tensor(rows))
            for wgrad in results[2]:
                wgrad.fill_(1)
            graph.replay()
            singles = []
            for index, (one, grad) in enumerate(
                zip(x[: sum(rows)].split(rows), dy[: sum(rows)].split(rows), strict=True)
            ):
                if not len(one):
                    assert results[2][index].eq(1).all()
                    continue
                if sums is not None:
                    close(sums[index], grad.sum(dim=0), 1e-2)
                    one, grad = tex.quantize(one, quantizer), tex.quantize(grad, quantizer)
                    for each in (one, grad):
                        tex.swizzle_scales_for_gemm_(each)
                at, weight = sum(rows[:index]), weights[index]
                where = slice(at, at + rows[index])
                assert torch.equal(results[0][where], gemm(weight, one, "TN")[0])
                assert torch.equal(results[1][where], gemm(weight, grad, "NN")[0])
                assert torch.equal(results[2][index], 1 + gemm(one, grad, "NT")[0])
                singles.append(one)
            for name in FIELDS if hasattr(singles[0], FIELDS[0]) else ():
                wanted = torch.cat([getattr(one, name).flatten() for one in singles])
                field = name.removeprefix("_").replace("rowwise_scale", "scale")
                assert torch.equal(getattr(gx, field)[: len(wanted)], wanted), name


def check_shapes_that_a_gpu_does_not_take_are_refused() -> None:
    for quantizer, shape in ((MXFP8Quantizer(E4M3), (16, 64)), (NVFP4Quantizer(), (16, 24))):
        with pytest.raises(RuntimeError, match="requires tensor dims that are divisible by"):
            tex.quantize(gpu(*shape), quantizer)
    with pytest.raises(RuntimeError, match="RHT is only supported for bfloat16"):
        tex.quantize(gpu(16, 16, dtype=torch.float32), NVFP4Quantizer(**NVFP4["rht"]))
    with pytest.raises(RuntimeError, match="Pre-RHT amax is not supported"):
        tex.quantize(gpu(16, 16), NVFP4Quantizer(with_rht=True))
    quantizer = fp8_blocks(block_scaling_dim=2, force_pow_2_scales=False)
    if sm_arch() < 100:
        tex.quantize(gpu(128, 128), quantizer)
    else:
        with pytest.raises(RuntimeError, match="requires power of two scaling factors"):
            tex.quantize(gpu(128, 128), quantizer)


def check_options_that_are_not_simulated_are_refused() -> None:
    quantizer = NVFP4Quantizer()
    quantizer.an_option_of_a_later_version = True
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer with an_option_of_a_later_version"):
        tex.quantize(gpu(16, 16), quantizer)


def check_block_scaled_fp8_is_that_of_its_definition() -> None:
    for dim, shape in itertools.product((1, 2), ((128, 256), (192, 160))):
        x = values(*shape)
        out = tex.quantize(x, fp8_blocks(block_scaling_dim=dim))
        for matrix, side in ((x, "rowwise"), (x.t(), "columnwise")):
            data, scale_inv = tiles_by_definition(matrix, 128 if dim == 2 else 1)
            found = getattr(out, f"_{side}_scale_inv")
            assert found.shape[1] % 4 == 0
            scale_inv = scale_inv if dim == 2 else scale_inv.t()
            assert torch.equal(getattr(out, f"_{side}_data"), data)
            assert torch.equal(found[:, : scale_inv.shape[1]], scale_inv)


def check_block_scaled_fp8_keeps_the_flag_and_multiplies() -> None:
    square, lines = fp8_blocks(block_scaling_dim=2), fp8_blocks(block_scaling_dim=1)
    weight, x = tex.quantize(gpu(128, 256), square), tex.quantize(gpu(64, 256, seed=1), lines)
    before = contents(weight)
    tex.quantize(gpu(128, 256, seed=2), square, weight, torch.ones(1))
    assert contents(weight) == before
    grad = tex.quantize(gpu(64, 128, seed=3), lines)
    w, g, y = (tensor.dequantize(dtype=torch.float32).double() for tensor in (weight, grad, x))  # by TE's Python code
    close(gemm(weight, x, "TN")[0], y @ w.t(), 1e-6)
    close(gemm(weight, grad, "NN")[0], g @ w, 1e-6)
    close(gemm(x, grad, "NT")[0], gpu(64, 128, seed=3).double().t() @ gpu(64, 256, seed=1).double(), 5e-2)
    x, grad = (tex.quantize(gpu(80, width, seed=width), lines) for width in (256, 128))
    close(gemm(x, grad, "NT")[0], gpu(80, 128, seed=128).double().t() @ gpu(80, 256, seed=256).double(), 5e-2)
    parts = tex.split_quantize(gpu(192, 256), [64, 0, 128], [fp8_blocks(block_scaling_dim=1) for _ in range(3)])
    for part, piece in zip(parts, gpu(192, 256).split([64, 0, 128]), strict=True):
        if len(piece):
            assert torch.equal(part.dequantize(), tex.quantize(piece, lines).dequantize(dtype=torch.float32))
