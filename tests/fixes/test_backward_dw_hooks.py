"""``backward-dw-hooks`` on the simulator: hooks after each replayed wgrad.

Run as a program it replays the delayed wgrads of two captured modules, and prints which hooks ran and what they saw.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import published
from tests.support.child import simulate

pytestmark = pytest.mark.te

FIX = "backward-dw-hooks"
NEEDED = FIX in published.te("installed").needed


def replay(setting: str) -> dict[str, Any]:
    """Return the JSON that `main` prints in a child process on the simulator."""
    output = simulate(__file__, TE_GRAPH_FIXES=setting)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def test_hooks_run_after_each_replay_and_see_its_gradients() -> None:
    found = replay(FIX)
    assert sorted(found["hooks"][:2]) == [["first", 1], ["second", 1]]
    assert sorted(found["hooks"][2:]) == [["first", 2], ["second", 2]]
    if NEEDED:
        assert [name for name, _ in found["hooks"]] == ["first", "second"] * 2


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_no_hook_runs() -> None:
    assert replay("off")["hooks"] == []


def main() -> None:
    """Replay one graph twice. Each hook records how many microbatches its module's ``main_grad`` contains."""
    import torch
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401

    options: dict[str, Any] = {
        "bias": False,
        "fuse_wgrad_accumulation": True,
        "delay_wgrad_compute": True,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }
    layers = {"first": te.Linear(32, 32, **options), "second": te.Linear(32, 32, **options)}
    hooks: list[tuple[str, int]] = []
    for name, layer in layers.items():
        layer.weight.main_grad = torch.zeros(32, 32, device="cuda")
        layer.weight.grad_added_to_main_grad = False
        layer.register_wgrad_accumulation_and_reduce_hooks(
            lambda name=name: hooks.append((name, layers[name].weight.main_grad))
        )
    x = torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(torch.nn.Sequential(*layers.values()), (x,), allow_unused_input=True)
    hooks.clear()
    for layer in layers.values():
        layer.weight.main_grad.zero_()
    once: dict[str, torch.Tensor] = {}
    seen = []
    for _ in range(2):
        graphed(x).backward(torch.ones(16, 32, dtype=torch.bfloat16, device="cuda"))
        graphed.backward_dw()
        for name, grad in hooks:
            once.setdefault(name, grad.clone())
            seen.append((name, round(float(grad.norm() / once[name].norm()))))
        hooks.clear()
    print(json.dumps({"hooks": seen}))


if __name__ == "__main__":
    main()
