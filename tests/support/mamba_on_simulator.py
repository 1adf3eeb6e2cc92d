"""A model of ``tests/gpu/megatron_configs.py`` with Mamba layers on the simulator, small: eager and graphs compared.

    MASTER_PORT=29501 python -m tests.simulator tests/support/mamba_on_simulator.py NAME RECIPE

It needs Megatron-Core. The kernels of mamba-ssm need a GPU: plain torch operations stand in for them here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from torch.nn.functional import conv1d, silu, softplus  # noqa: E402

from tests.support.megatron_on_simulator import stand_in  # noqa: E402


class GatedNorm(torch.nn.Module):
    """RMSNorm, without a gate: Megatron's has been applied before."""

    def __init__(self, size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **other: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight.float()).to(x.dtype)


def convolve_and_scan(
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **other: Any,
) -> torch.Tensor:
    """Return a depthwise causal convolution, the recurrence of Mamba 2 as a masked product, and the gate."""
    heads, length, inner = decay.shape[0], given.shape[1], decay.shape[0] * headdim
    gate, mixed, dt = given.split([inner, given.shape[2] - inner - heads, heads], -1)
    mixed = conv1d(mixed.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    mixed = silu(mixed[..., :length]).transpose(1, 2).float()
    x, b, c = mixed.split([inner, *[(mixed.shape[2] - inner) // 2] * 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for each in (b, c))
    dt = softplus(dt.float() + dt_bias)
    passed = (dt * decay).cumsum(1)
    mask = torch.ones(length, length, device="cuda").triu(1)[..., None]
    kept = (passed[:, :, None] - passed[:, None] - 1e9 * mask).exp()
    y = torch.einsum("bihn,bjhn,bijh,bjh,bjhp->bihp", c, b, kept, dt, x) + D.float()[:, None] * x
    return (y.flatten(2) * silu(gate.float())).to(given.dtype)


def stand_in_for_mamba() -> None:
    names = ("mamba_ssm", "ops", "triton", "layernorm_gated"), ("mamba_ssm", "ops", "triton", "ssd_combined")
    for path in names:
        for depth in range(1, len(path) + 1):
            sys.modules.setdefault(".".join(path[:depth]), ModuleType(path[depth - 1]))
    norms, kernels = (sys.modules[".".join(path)] for path in names)
    norms.RMSNorm = GatedNorm  # type: ignore[attr-defined]
    kernels.mamba_chunk_scan_combined = None  # type: ignore[attr-defined]
    kernels.mamba_split_conv1d_scan_combined = convolve_and_scan  # type: ignore[attr-defined]


def main(name: str, recipe: str) -> None:
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", NVTE_MASKED_SOFTMAX_FUSION="0")
    import megatron_configs as configs

    configs.moe.HIDDEN, configs.moe.TOKENS, configs.moe.VOCABULARY = 64, 64, 128
    configs.moe.stand_in_for_apex()
    stand_in_for_mamba()
    stand_in()
    sizes = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 16, "ffn_hidden_size": 128}
    configs.CONFIGS[name] |= sizes
    print(json.dumps(configs.measure(name, recipe)["ranks"][0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
