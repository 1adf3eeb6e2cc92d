"""``backward-dw-hooks``: recognised on every TransformerEngine (TE); on the simulator, hooks after each replayed wgrad.

Run as a program it replays the delayed wgrads of two captured modules, and prints which hooks ran and what they saw.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from tests.support.child import simulate
from tests.support.published import source

FIX = CATALOGUE["backward-dw-hooks"]
NEEDED = FIX.verdict_on(Source.installed()).state == "applicable"
REVERSED_HOOKS = (
    "for wgrad_accumulation_and_reduce_hook in self.wgrad_accumulation_and_reduce_hooks:",
    "for wgrad_accumulation_and_reduce_hook in reversed(self.wgrad_accumulation_and_reduce_hooks):",
)
MUTATIONS = {
    "another replay": ("graph.py", "bwd_dw_graphs[graph_idx].replay()", "bwd_dw_graphs[0].replay()"),
    "another condition": ("graph.py", "if need_bwd_dw_graph.get(graph_idx, False):", "if True:"),
    "other callables": ("graph.py", "= func\n", "= func.forward\n"),
    "no modules": ("graph.py", "visited_te_modules = {}", "visited_te_modules = dict()"),
    "other hooks": ("module/base.py", *REVERSED_HOOKS),
}


def copy(version: str, folder: Path) -> Path:
    """The part of a TE that the fix looks at, in ``folder``."""
    for part in ("__init__.py", "pytorch/__init__.py", "pytorch/graph.py", "pytorch/module/base.py"):
        target = folder / "transformer_engine" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source(version) / "transformer_engine" / part, target)
    return folder / "transformer_engine" / "pytorch"


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("version", ["2.10.0", "2.12.0"])
def test_another_shape_is_unrecognized(version: str, name: str, tmp_path: Path) -> None:
    part, old, new = MUTATIONS[name]
    path = copy(version, tmp_path) / part
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    verdict = FIX.verdict_on(Source.at(tmp_path))
    assert (verdict.state, verdict.edits) == ("unrecognized", ())


def replay(setting: str) -> dict[str, Any]:
    """What `main` prints in a child process on the simulator."""
    output = simulate(__file__, TE_GRAPH_FIXES=setting)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def test_hooks_run_after_each_replay_and_see_its_gradients() -> None:
    found = replay(FIX.id)
    assert sorted(found["hooks"][:2]) == [["first", 1], ["second", 1]]
    assert sorted(found["hooks"][2:]) == [["first", 2], ["second", 2]]
    if NEEDED:
        assert [name for name, _ in found["hooks"]] == ["first", "second"] * 2


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_no_hook_runs() -> None:
    assert replay("off")["hooks"] == []


def main() -> None:
    """Two replays of one graph; each hook notes how many microbatches its module's ``main_grad`` holds."""
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
