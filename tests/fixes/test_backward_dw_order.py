"""``backward-dw-order``: recognised on every TransformerEngine (TE), and what it does there on the simulator."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.verify.cases import Case
from tests.support.child import measured
from tests.support.legal_orders import NAMED, random_orders
from tests.support.published import source

FIX = CATALOGUE["backward-dw-order"]
GRAPH = "transformer_engine.pytorch.graph"

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
    assert FIX.verdict_on(Source.at(tmp_path)).state == "unrecognized"


@pytest.mark.parametrize("module", ["layernorm_linear", "grouped_linear"])
def test_orders_give_what_eager_gives(module: str) -> None:
    orders = [order for order in [*NAMED.values(), *random_orders(4, 4)] if len(order) < 30]
    cases = [
        Case(
            f"{order}, {reuse}",
            (),
            "programs:compare",
            {"modules": (module,) * int(max(order)), "delay": True, "bias": True, "order": order, "reuse": reuse},
        )
        for order, reuse in itertools.product(orders, (False, True))
    ]
    found = measured(*cases)
    assert [case for case, line in found.items() if line["error"]] == []
    assert len(found) == len(cases)
