"""``backward-dw-order``: recognised on every TransformerEngine (TE), and what it does there on the simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from te_graph_fixes.fixes.backward_dw_order import FIX
from te_graph_fixes.source import Source
from tests.child import simulate
from tests.published import source

GRAPH = "transformer_engine.pytorch.graph"

WITH = f"{FIX.id},capture-without-warmup"
"""The fix with what it requires."""

# Text of TE's that decides what the edits mean, and something that means another thing.
EVERYWHERE = {
    "layers in order": (
        "list(reversed(range(_num_layers_per_chunk[m_chunk])))",
        "list(range(_num_layers_per_chunk[m_chunk]))",
    ),
    "another index": ("bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no", "bwd_idx[m_chunk] + l_no"),
    "another wgrad graph": ("bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]", "bwd_dw_graph = bwd_dw_graphs[0]"),
    "another key": ("if static_grad_outputs_keys in static_grad_outputs_dict:", "if static_grad_outputs_dict:"),
    "another queue": ("fwd_sample_qs = {}", "fwd_sample_qs = []"),
    "no pytree": ("import tree_unflatten as _tree_unflatten", "import tree_unflatten"),
    "other chunks": ("previous_per_callable_bwd_idx = None", "previous_per_callable_bwd_idx = 0"),
}
SINCE_2_11 = {
    "another offset": ("per_callable_bwd_idx -= _num_layers_per_chunk[m_chunk]", "per_callable_bwd_idx -= 1"),
    "another chunk": ("m_chunk = -ceil(c_id) - 1", "m_chunk = -floor(c_id) - 1"),
    "another check": ("if wgrad_validation_list[i] is None:", "if not wgrad_validation_list[i]:"),
    "another loop": ("for i, c_id in enumerate(_order):", "for i, c_id in enumerate(_order, 1):"),
    "another start": ("_order_without_wgrad = []", "_order_without_wgrad = list()"),
}
ONLY_2_10 = {
    "another chunk": ("m_chunk = -c_id - 1", "m_chunk = c_id + 1"),
    "other microbatches": ("num_microbatches = len(_order) // num_model_chunks // 2", "num_microbatches = 1"),
    "another condition": ("if need_bwd_dw_graph[per_callable_bwd_idx]:", "if True:"),
    "another surface": (
        "per_callable_static_input_surfaces[per_callable_bwd_idx]",
        "per_callable_static_input_surfaces[0]",
    ),
}
MUTATIONS = [
    *(("2.10.0", name, *texts) for name, texts in (EVERYWHERE | ONLY_2_10).items()),
    *((version, name, *texts) for version in ("2.12.0", "2.20.2") for name, texts in (EVERYWHERE | SINCE_2_11).items()),
]


def copy(version: str, folder: Path) -> Path:
    """The part of a TE that the fix looks at, in ``folder``."""
    for part in ("__init__.py", "pytorch/__init__.py", "pytorch/graph.py"):
        target = folder / "transformer_engine" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source(version) / "transformer_engine" / part, target)
    return folder / "transformer_engine" / "pytorch"


@pytest.mark.parametrize(("version", "name", "old", "new"), MUTATIONS, ids=lambda value: str(value)[:24])
def test_another_shape_is_unrecognized(version: str, name: str, old: str, new: str, tmp_path: Path) -> None:
    graph = copy(version, tmp_path) / "graph.py"
    text = graph.read_text()
    assert old in text
    graph.write_text(text.replace(old, new))
    assert FIX.verdict(Source.at(tmp_path)).verdict == "unrecognized"


def test_another_plan_module_is_unrecognized(tmp_path: Path) -> None:
    (copy("2.12.0", tmp_path) / "_te_graph_order.py").write_text("")
    verdict = FIX.verdict(Source.at(tmp_path))
    assert (verdict.verdict, verdict.edits) == ("unrecognized", ())
    assert "another version of a module that this package provides" in verdict.reason


def sweep(setting: str, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of ``tests/gpu/order_sweep.py`` and its other lines, in a child process on the simulator."""
    output = simulate("tests/gpu/order_sweep.py", *arguments, TE_GRAPH_FIXES=setting)
    *lines, summary = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return summary, lines


SHORT = ("--recipes", "bf16", "--longest", "20")


def test_every_order_gives_what_eager_gives() -> None:
    summary, lines = sweep(WITH, "Linear", "LayerNormLinear", "GroupedLinear", "--random", "4", "--longest", "20")
    assert summary["bit-identical"] == summary["cases"] >= 12 * 4, lines
    assert summary["applied"] == WITH.split(",")
    assert summary["inference"] == 0.0


@pytest.mark.slow
def test_long_orders_give_what_eager_gives() -> None:
    summary, lines = sweep(WITH, "Linear", "LayerNormLinear", "GroupedLinear", "--random", "7")
    assert summary["bit-identical"] == summary["cases"] == 12 * 12, lines


@pytest.mark.parametrize("variant", ["--share", "--whole"])
def test_shared_samples_and_orders_without_wgrads(variant: str) -> None:
    summary, lines = sweep(WITH, "Linear", "--random", "4", *SHORT, variant)
    assert summary["bit-identical"] == summary["cases"] >= 6, lines


def test_chunks_of_two_layers_without_wgrads() -> None:
    summary, lines = sweep(WITH, "LayerNormLinear", *SHORT, "--whole", "--layers", "2")
    assert summary["bit-identical"] == summary["cases"] == 6, lines


def test_illegal_orders_are_refused() -> None:
    summary, _ = sweep(WITH, "Linear", "--illegal", "40")
    assert summary["refused"] == 40


def test_all_fixes_together() -> None:
    summary, lines = sweep("on", "GroupedLinear", *SHORT)
    assert summary["bit-identical"] == summary["cases"] == 6, lines
    assert FIX.id in summary["applied"]


@pytest.mark.parametrize("variant", [(), ("--share",), ("--whole",)])
def test_without_the_fix(variant: tuple[str, ...]) -> None:
    summary, lines = sweep("off", "Linear", *SHORT, *variant)
    works = variant == ("--whole",) and (Source.installed().version or "").startswith("2.10.")
    assert (summary["bit-identical"] == summary["cases"]) == works, lines


def test_illegal_orders_without_the_fix() -> None:
    summary, _ = sweep("off", "Linear", "--illegal", "5")
    assert summary["refused"] == 0
