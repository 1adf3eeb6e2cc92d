"""Compare the stand-in for TE's C extension, and TE's modules that use it, with plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

E4M3, E5M2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def delayed(scale: float = 1.0, dtype: Any = E4M3, **usage: bool) -> Float8Quantizer:
    ones = torch.ones(1, device="cuda")
    return Float8Quantizer(scale=ones * scale, amax=torch.zeros(1, device="cuda"), fp8_dtype=dtype, **usage)


def gemm(a: Any, b: Any, layout: str, **options: Any) -> Any:
    arguments = {
        "D": None, "quantizer": None, "out_dtype": tex.DType.kFloat32, "bias": None, "bias_type": tex.DType.kBFloat16,
        "gelu": False, "gelu_in": None, "grad": False, "accumulate": False, **options,
    }  # fmt: skip
    names = ("D", "quantizer", "out_dtype", "bias", "bias_type", "gelu", "gelu_in", "grad")
    rest = (torch.empty(1), 1, arguments["accumulate"], False)
    return tex.generic_gemm(a, layout[0] == "T", b, layout[1] == "T", *(arguments[name] for name in names), *rest)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-2) -> None:
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert difference < tolerance, f"the relative error is {difference:.2e}"


def check_delayed_scaling_rounds_as_torch_does() -> None:
    x = gpu(16, 32) * 100
    for dtype, torch_dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        quantizer = delayed(3.0, dtype)
        out = tex.quantize(x, quantizer)
        largest = torch.finfo(torch_dtype).max
        wanted = (x.float() * 3).clamp(-largest, largest).to(torch_dtype)
        assert torch.equal(out._data, wanted.view(torch.uint8))
        assert torch.equal(out._transpose, wanted.view(torch.uint8).t())
        assert out._scale_inv.item() == torch.tensor(1 / 3, dtype=torch.float32).item()
        assert quantizer.amax.item() == x.abs().max().item()
        assert torch.equal(tex.dequantize(out, tex.DType.kFloat32), wanted.float() * out._scale_inv)


def check_amax_is_the_largest_so_far_without_nan() -> None:
    quantizer = delayed()
    tex.quantize(torch.tensor([[1.0, float("nan")]]), quantizer)
    assert quantizer.amax.item() == 1
    tex.quantize(torch.tensor([[-5.0, 2.0]]), quantizer)
    tex.quantize(torch.tensor([[3.0, 2.0]]), quantizer)
    assert quantizer.amax.item() == 5


def check_current_scaling_uses_the_whole_range() -> None:
    x = gpu(8, 16)
    for power_of_two in (False, True):
        quantizer = Float8CurrentScalingQuantizer(E4M3, "cuda", force_pow_2_scales=power_of_two)
        out = tex.quantize(x, quantizer)
        scale = torch.tensor(448.0).div(x.abs().max().float())
        if power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        assert torch.equal(out._scale_inv, (1 / scale).view(1))
        assert torch.equal(out._data.view(torch.float8_e4m3fn), (x.float() * scale).to(torch.float8_e4m3fn))
    out = tex.quantize(torch.zeros(4, 4), Float8CurrentScalingQuantizer(E4M3, "cuda"))
    assert out._scale_inv.item() == 1


def check_the_flag_skips_the_update() -> None:
    flag = torch.zeros(1, device="cuda")
    for quantizer in (delayed(2.0), Float8CurrentScalingQuantizer(E4M3, "cuda")):
        out = tex.quantize(gpu(8, 8), quantizer)
        before = [part.clone() for part in (out._data, out._transpose, out._scale_inv)]
        amax = getattr(quantizer, "amax", torch.zeros(1)).clone()  # newer TE has no amax in current scaling
        flag.fill_(1.0)
        tex.quantize(gpu(8, 8, seed=1) * 9, quantizer, out, flag)
        assert all(torch.equal(*pair) for pair in zip(before, (out._data, out._transpose, out._scale_inv), strict=True))
        assert torch.equal(getattr(quantizer, "amax", amax), amax)
        flag.fill_(0.0)
        tex.quantize(gpu(8, 8, seed=1) * 9, quantizer, out, flag)
        assert not torch.equal(before[0], out._data)
        assert torch.equal(out._data.t(), out._transpose)


def check_usages_say_which_data_there_is() -> None:
    x = gpu(8, 16)
    assert tex.quantize(x, delayed(rowwise=True, columnwise=False))._transpose is None
    out = tex.quantize(x, delayed(rowwise=False, columnwise=True))
    assert out._data is None
    tex.quantize(x, delayed(rowwise=True, columnwise=False), out)
    assert out._transpose is None
    assert out._transpose_invalid
    assert out._data.shape == (8, 16)
    tex.quantize(x, delayed(), out)
    assert not out._transpose_invalid
    assert torch.equal(out._transpose, out._data.t())


def check_split_quantize_and_bias_gradient() -> None:
    x = gpu(12, 16)
    quantizers = [delayed(), delayed(2.0), delayed(3.0)]
    parts = tex.split_quantize(x, [4, 0, 8], quantizers)
    assert [part._data.shape[0] for part in parts] == [4, 0, 8]
    assert torch.equal(parts[2]._data, tex.quantize(x[4:], delayed(3.0))._data)
    bias_grad, out = tex.bgrad_quantize(x, delayed())
    close(bias_grad, x.float().sum(0), 1e-2)
    assert torch.equal(out._data, tex.quantize(x, delayed())._data)


def check_histories_and_scales() -> None:
    history = torch.tensor([[9.0, 6.0], [2.0, 4.0], [1.0, 5.0]])
    scale = torch.tensor([10.0, 20.0])
    tex.fused_amax_and_scale_update_after_reduction(torch.tensor([3.0, 0.0]), [history], [scale], "max", E4M3, 1)
    assert history.tolist() == [[0, 0], [1, 5], [3, 6]]
    assert torch.equal(scale, torch.tensor([224 / 3, 224 / 6]))
    history, scale = torch.zeros(2, 1), torch.tensor([7.0])
    update = tex.fused_amax_and_scale_update_after_reduction
    update(torch.tensor([2.0]), [history], [scale], "most_recent", E5M2, 0)
    assert scale.tolist() == [57344 / 2]
    history = torch.tensor([[0.0], [8.0], [4.0]])
    update(torch.tensor([0.0]), [history], [scale], "max", E5M2, 0)
    assert history.tolist() == [[0], [8], [4]]
    assert scale.tolist() == [57344 / 2]
    with pytest.raises(NotImplementedError, match="median"):
        update(torch.tensor([0.0]), [history], [scale], "median", E5M2, 0)


def check_gemm_layouts() -> None:
    x, w, dy = gpu(2, 3, 16), gpu(32, 16, seed=1), gpu(2, 3, 32, seed=2)
    close(gemm(w, x, "TN")[0], x.double() @ w.double().t(), 1e-6)
    close(gemm(w, dy, "NN")[0], dy.double() @ w.double(), 1e-6)
    wanted = dy.double().view(6, 32).t() @ x.double().view(6, 16)
    close(gemm(x, dy, "NT")[0], wanted, 1e-6)
    assert gemm(w, x, "TN", out_dtype=None)[0].dtype == torch.bfloat16
    main_grad = torch.ones(32, 16)
    assert gemm(x, dy, "NT", D=main_grad, accumulate=True)[0] is main_grad
    close(main_grad, wanted + 1, 1e-6)
    gemm(x, dy, "NT", D=main_grad)
    close(main_grad, wanted, 1e-6)
    with pytest.raises(RuntimeError, match="output of shape"):
        gemm(x, dy, "NT", D=torch.empty(3, 3))


def check_gemm_epilogues() -> None:
    x, w, dy, bias = gpu(6, 16), gpu(32, 16, seed=1), gpu(6, 32, seed=2), gpu(32, seed=3)
    linear = x.double() @ w.double().t() + bias.double()
    close(gemm(w, x, "TN", bias=bias)[0], linear, 1e-6)
    out, _, pre, _ = gemm(w, x, "TN", bias=bias, gelu=True)
    close(pre, linear, 1e-2)
    close(out, F.gelu(linear, approximate="tanh"), 1e-6)
    _, bias_grad, _, _ = gemm(x, dy, "NT", bias=bias, grad=True)
    close(bias_grad, dy.double().sum(0), 1e-2)
    at = gpu(6, 16, seed=4).double().requires_grad_()
    F.gelu(at, approximate="tanh").backward(dy.double() @ w.double())
    assert at.grad is not None
    close(gemm(w, dy, "NN", gelu=True, gelu_in=at.detach().bfloat16(), grad=True)[0], at.grad, 1e-6)
    with pytest.raises(NotImplementedError, match="communication"):
        tex.generic_gemm(w, True, x, False, *[None] * 4, tex.DType.kFloat32, *[None] * 7, comm_overlap=object())


def check_fp8_gemm_reads_the_layout_that_hopper_reads() -> None:
    x, w, dy = gpu(16, 32), gpu(48, 32, seed=1), gpu(16, 48, seed=2)
    qx, qw, qdy = tex.quantize(x, delayed(8.0)), tex.quantize(w, delayed(4.0)), tex.quantize(dy, delayed(2.0, E5M2))
    values = [part.dequantize().double() for part in (qx, qw, qdy)]
    close(gemm(qw, qx, "TN")[0], values[0] @ values[1].t(), 1e-6)
    close(gemm(qw, qdy, "NN")[0], values[2] @ values[1], 1e-6)
    close(gemm(qx, qdy, "NT")[0], values[2].t() @ values[0], 1e-6)
    qw._transpose.zero_()
    assert gemm(qw, qdy, "NN")[0].abs().max() == 0
    qw._transpose_invalid = True
    with pytest.raises(RuntimeError, match="column-wise"):
        gemm(qw, qdy, "NN")


def check_grouped_gemm() -> None:
    splits, empty = [4, 0, 12], torch.empty(0)
    x, dy = gpu(16, 32), gpu(16, 48, seed=1)
    weights = [gpu(48, 32, seed=seed) for seed in (2, 3, 4)]
    biases = [gpu(48, seed=seed) for seed in (5, 6, 7)]
    xs, dys = torch.split(x, splits), torch.split(dy, splits)

    def grouped(a: Any, b: Any, layout: str, out: Any, bias: Any, single: bool, grad: bool, accumulate: bool) -> Any:
        flags = (tex.DType.kBFloat16, single, [empty] * 3, grad, [empty], 1, accumulate, False, 0)
        transposed = layout[0] == "T", layout[1] == "T"
        return tex.te_general_grouped_gemm(
            a, transposed[0], b, transposed[1], out, tex.DType.kFloat32, splits, bias, *flags
        )

    out = torch.full((16, 48), 9.0)
    grouped(weights, xs, "TN", [out], biases, True, False, False)
    wanted = [part @ w.t() + bias for part, w, bias in zip(xs, weights, biases, strict=True)]
    close(out, torch.cat(wanted), 1e-2)
    grads = [torch.full((48, 32), 1.0) for _ in splits]
    bias_grads = [torch.full((48,), 9.0) for _ in splits]
    assert grouped(xs, dys, "NT", grads, bias_grads, False, True, True) is bias_grads
    for grad, bias_grad, part, dpart in zip(grads, bias_grads, xs, dys, strict=True):
        close(grad, 1 + dpart.double().t() @ part.double(), 1e-6)
        assert torch.allclose(bias_grad, dpart.double().sum(0).float())
    for inputs in (xs, tex.split_quantize(x, splits, [delayed() for _ in splits])):
        outputs = dys if inputs is xs else tex.split_quantize(dy, splits, [delayed() for _ in splits])
        grads[1].fill_(1.0)
        grouped(inputs, outputs, "NT", grads, [empty] * 3, False, True, True)
        assert torch.equal(grads[1], torch.ones(48, 32))
        grouped(inputs, outputs, "NT", grads, [empty] * 3, False, True, False)
        assert grads[1].abs().max() == 0


def check_normalizations() -> None:
    for centered, zero_centered in itertools.product((True, False), repeat=2):
        x = gpu(6, 16).double().requires_grad_()
        gamma, beta = gpu(16, seed=1).double().requires_grad_(), gpu(16, seed=2).double().requires_grad_()
        dz, eps = gpu(6, 16, seed=3), 1e-5
        scale = gamma + 1 if zero_centered else gamma
        wanted = F.layer_norm(x, (16,), scale, beta, eps) if centered else F.rms_norm(x, (16,), scale, eps)
        wanted.backward(dz.double())
        tensors = [part.detach().float() for part in (x, gamma, beta)]
        tail = (eps, None, None, tex.DType.kFloat32, 0, zero_centered)
        if centered:
            out, mu, rsigma = tex.layernorm_fwd(*tensors, *tail)
            found = tex.layernorm_bwd(dz, tensors[0], mu, rsigma, tensors[1], 0, zero_centered)
        else:
            out, mu, rsigma = tex.rmsnorm_fwd(*tensors[:2], *tail)
            assert mu is None
            found = tex.rmsnorm_bwd(dz, tensors[0], rsigma, tensors[1], 0, zero_centered)
        close(out, wanted.detach(), 1e-5)
        for grad, part in zip(found, (x, gamma, beta), strict=False):
            assert part.grad is not None
            close(grad, part.grad, 1e-5)


def check_activations() -> None:
    functions = {
        "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
        "srelu": lambda x: F.relu(x) ** 2, "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    }  # fmt: skip
    gated = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "qgeglu": "qgelu"}
    for name, of in gated.items():
        functions[name] = lambda x, of=of: functions[of](x[..., :8]) * x[..., 8:]
    for name, function in functions.items():
        x = gpu(4, 16, dtype=torch.float32).requires_grad_()
        wanted = function(x)
        dy = gpu(*wanted.shape, dtype=torch.float32, seed=1)
        wanted.backward(dy)
        assert x.grad is not None
        close(getattr(tex, name)(x.detach(), None), wanted.detach(), 1e-5)
        close(getattr(tex, f"d{name}")(dy, x.detach(), None), x.grad, 1e-5)
        if name not in gated:
            bias_grad, dx = getattr(tex, f"dbias_d{name}")(dy, x.detach(), None)
            close(dx, x.grad, 1e-5)
            close(bias_grad, x.grad.sum(0), 1e-5)
    quantized = tex.gelu(gpu(4, 16), delayed())
    assert torch.equal(quantized._data, tex.quantize(tex.gelu(gpu(4, 16), None), delayed())._data)


def check_helpers_on_plain_tensors() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    assert torch.equal(tex.fp8_transpose(data, E4M3), data.view(6, 4).t().reshape(4, 2, 3))
    rows, padded = torch.arange(10.0).view(5, 2) + 1, torch.empty(8, 2)
    tex.fused_multi_row_padding(rows, padded, [2, 3], [4, 4])
    assert torch.equal(padded, torch.cat([rows[:2], torch.zeros(2, 2), rows[2:], torch.zeros(1, 2)]))
    back = torch.empty(5, 2)
    tex.fused_multi_row_unpadding(padded, back, [4, 4], [2, 3])
    assert torch.equal(back, rows)
    amax = torch.zeros(1)
    tex.compute_amax(torch.tensor([1.0, -3.0]), amax)
    assert amax.item() == 3


def check_what_is_missing_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.fused_attn_fwd is not implemented"):
        tex.fused_attn_fwd(1, 2)
    with pytest.raises(NotImplementedError, match=r"CommOverlap\.whatever"):
        tex.CommOverlap.whatever()
    assert not hasattr(tex, "__nothing__")
    for call in (lambda: tex.quantize(gpu(4, 4), object()), lambda: gemm(object(), gpu(4, 4), "TN")):
        with pytest.raises((NotImplementedError, AttributeError), match="object"):
            call()


def check_tes_linear_modules_compute_what_torch_does() -> None:
    x, dy = gpu(16, 32).float(), gpu(16, 48, seed=1)
    for recipe, tolerance in ((None, 1e-2), (recipes.Float8CurrentScaling(), 6e-2), (recipes.DelayedScaling(), 9e-2)):
        for kind in ("Linear", "LayerNormLinear", "GroupedLinear"):
            torch.manual_seed(0)
            arguments = (2, 32, 48) if kind == "GroupedLinear" else (32, 48)
            module = getattr(te, kind)(*arguments, params_dtype=torch.bfloat16, device="cuda")
            inp = x.bfloat16().requires_grad_()
            extra = ([0, 16],) if kind == "GroupedLinear" else ()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = module(inp, *extra)
            out.backward(dy)
            name = "weight1" if kind == "GroupedLinear" else "weight"
            weight = module.get_parameter(name).detach().float().requires_grad_()
            reference = x.clone().requires_grad_()
            normalized = F.layer_norm(reference, (32,)) if kind == "LayerNormLinear" else reference
            wanted = normalized @ weight.t()
            wanted.backward(dy.float())
            grads = ((inp.grad, reference.grad), (module.get_parameter(name).grad, weight.grad))
            for found, expected in ((out, wanted), *grads):
                close(found.detach(), expected.detach(), tolerance)
            bias = module.get_parameter("bias1" if kind == "GroupedLinear" else "bias")
            close(bias.grad, dy.float().sum(0), tolerance)


def check_adam_is_that_of_torch() -> None:
    for adamw, dtype in itertools.product((True, False), (torch.float32, torch.bfloat16)):
        wanted = torch.nn.Parameter(gpu(8, 16, dtype=torch.float32))
        found = torch.nn.Parameter(wanted.detach().to(dtype))
        wanted.data.copy_(found)
        options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
        reference = (torch.optim.AdamW if adamw else torch.optim.Adam)([wanted], **options)
        adam = te.optimizers.FusedAdam([found], adam_w_mode=adamw, master_weights=dtype != torch.float32, **options)
        for step in range(3):
            found.grad = gpu(8, 16, dtype=dtype, seed=step + 1)
            wanted.grad = found.grad.float()
            reference.step()
            adam.step()
        close(found, wanted, 1e-6 if dtype == torch.float32 else 4e-3)
        if dtype != torch.float32:
            close(adam.state[found]["master_param"], wanted, 1e-6)


def check_adam_of_fp8_weights_quantizes_the_new_ones() -> None:
    with te.quantized_model_init(enabled=True, recipe=recipes.DelayedScaling()):
        weight = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda").weight
    weight._quantizer.scale.fill_(8.0)
    before, amax = weight.dequantize().float(), weight._quantizer.amax.clone()
    adam = te.optimizers.FusedAdam([weight], lr=0.5, master_weights=True, adam_w_mode=False)
    weight.grad = gpu(32, 32)
    adam.step()
    master = adam.state[weight]["master_param"]
    close(master, before - 0.5 * weight.grad.float().sign(), 1e-3)  # Adam's first step depends only on the sign
    assert torch.equal(weight._data, (8 * master).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(weight._quantizer.amax, torch.maximum(amax, master.abs().amax()).reshape(amax.shape))
    assert weight._scale_inv.item() == 1 / 8
