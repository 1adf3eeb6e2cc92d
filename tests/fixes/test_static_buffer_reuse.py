"""``static-buffer-reuse`` on the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_graph_fixes.patching.source import Source
from te_graph_fixes.verify.driver.program import Program
from tests.explore.scripts import script
from tests.support.child import measured, on_simulator, simulate

FIX = "static-buffer-reuse"
FOUND = {
    "gradient": Program(
        modules=("linear", "linear"),
        order=(1, 1, -1, 1, -1, -1),
        layers_as_chunks=True,
        reuse=True,
        input_grads=False,
        events=("step",),
    ),
    "None": Program(modules=("WithNone", "linear"), order=(1, 1, -1, -1), reuse=True, events=("step",)),
}
"""What the explorer found."""
LEAVES_OUT_NONE = (
    "o is not None and o.requires_grad" in Source.installed().module("transformer_engine.pytorch.graph").text
)


def errors(setting: str) -> dict[str, list[float]]:
    return measured("reused-buffers", TE_GRAPH_FIXES=setting)["reused-buffers"]["measures"]["errors"]  # type: ignore[no-any-return]


def test_buffers_are_handed_on_to_what_is_alike() -> None:
    assert errors(FIX) == {"gradients": [0.0], "tensors": [0.0], "outputs": [0.0]}


def test_without_the_fix_they_are_handed_on_by_shape() -> None:
    assert all(min(found) > 0.2 for found in errors("off").values())


@pytest.mark.parametrize("name", FOUND)
def test_what_the_explorer_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / "found.py"
    path.write_text(script(FOUND[name]))
    assert not simulate(path)
    without = on_simulator(path, TE_GRAPH_FIXES_DISABLE=FIX)
    assert without.returncode == (name != "None" or LEAVES_OUT_NONE), without.stdout + without.stderr
