"""Modules, recipes and ways of training on simulated Blackwell GPUs: as eager with the package, and not without it.

Each TransformerEngine (TE) has another part of the combinations; between them, 2.10 to 2.20 have all.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from tests.child import simulate
from tests.matrix import combinations

MINOR = int(version("transformer_engine").split(".")[1])
PART = f"{MINOR - 9}/11"


def run(gpu: str, fixes: str, part: str, *recipes: str) -> dict[tuple[str, ...], object]:
    """What is wrong, or why it was skipped, by combination; None where nothing is."""
    output = simulate("-m", "tests.matrix", part, *recipes, TE_SIMULATOR_GPU=gpu, TE_GRAPH_FIXES=fixes)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [tuple(line["case"]) for line in lines] == combinations(part, recipes)
    return {tuple(line["case"]): line.get("wrong", line.get("skipped")) for line in lines}


def test_blackwell() -> None:
    found = run("blackwell", "on", PART)
    assert found == dict.fromkeys(found)


def test_blackwell_without_the_package() -> None:
    assert any(run("blackwell", "off", "5/24").values())


def test_rtx_takes_no_mxfp8() -> None:
    found = run("blackwell-rtx", "on", PART, "nvfp4", "fp8-block", "mxfp8")
    refused = [why for (_, recipe, _), why in found.items() if recipe == "mxfp8"]
    assert refused
    assert all("not supported on 12.0+ architectures" in str(why) for why in refused)
    assert not any(why for (_, recipe, _), why in found.items() if recipe != "mxfp8")


@pytest.mark.skipif(MINOR < 18, reason="weights are not asked for swizzled scales")
def test_cached_nvfp4_weights_on_rtx() -> None:
    found = {fixes: run("blackwell-rtx", fixes, "1/6", "nvfp4") for fixes in ("nvfp4-weight-preswizzle", "off")}
    assert {setting for _, _, setting in found["off"]} == {"cached"}
    assert all(found["off"].values())
    assert not any(found["nvfp4-weight-preswizzle"].values())
