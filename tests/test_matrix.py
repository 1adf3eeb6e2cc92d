"""Modules, recipes and ways of training on simulated GPUs: as eager with the package, and not without it.

Each TransformerEngine (TE) has another part of the combinations; the slow tests have all of them.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from tests.child import simulate
from tests.matrix import GPU_SPLITS, RECIPES, combinations

MINOR = int(version("transformer_engine").split(".")[1])
PART = f"{MINOR - 9}/29"
NO_MXFP8 = "not supported on 12.0+ architectures"
REFUSED = {
    ("hopper", "mxfp8"): "compute capability 10.0 or higher required",
    ("hopper", "nvfp4"): "compute capability 10.0 or higher required",
    ("blackwell-rtx", "mxfp8"): NO_MXFP8,
}
"""TE's own words for a recipe that a GPU does not have."""

NOT_THERE = [
    text
    for text, there in (
        ("refuses to capture te.checkpoint", MINOR >= 12),
        ("te.ops.GroupedLinear comes with ", MINOR >= 14),
        ("GroupedLinear has no kernels of grouped tensors ", MINOR >= 17),
        ("multi_tensor_adam takes no ", MINOR >= 14),
        ("operations do not support FP8 block scaling", MINOR >= 18),
        ("the GEMM needs columnwise data", MINOR >= 15),  # te.checkpoint of LayerNormMLP, block scaling; eagerly, too
    )
    if not there
]
"""What TE does not have, or has in a way that is not simulated."""

OTHER_KERNELS = ("values from the GPU", "value from the GPU", "FP8 block-scaling recipe on")
"""Why splits on the GPU cannot be captured in some recipes and on some GPUs: TE has other kernels there."""


def not_there(module: str, why: object) -> bool:
    on_gpu = module in (GPU_SPLITS, "ops.GroupedLinear")
    return any(text in str(why) for text in (*NOT_THERE, *(OTHER_KERNELS if on_gpu else ())))


ROW_SCALES = {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1"}
if MINOR < 19:
    ROW_SCALES["NVTE_BACKWARD_OVERRIDE"] = "dequantized"  # they have no column-wise part for a wgrad
FOUR_OVER_SIX = {"NVTE_NVFP4_4OVER6": "all"}
"""What makes TE's recipe of NVFP4 ask for them."""


def run(gpu: str, fixes: str, part: str, *recipes: str, **environment: str) -> dict[tuple[str, ...], object]:
    """What is wrong, or why it was skipped, by combination; None where nothing is."""
    output = simulate("-m", "tests.matrix", part, *recipes, TE_SIMULATOR_GPU=gpu, TE_GRAPH_FIXES=fixes, **environment)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [tuple(line["case"]) for line in lines] == combinations(part, recipes)
    found = {tuple(line["case"]): line.get("wrong", line.get("skipped")) for line in lines}
    return {case: why for case, why in found.items() if not not_there(case[0], why)}


def test_blackwell() -> None:
    found = run("blackwell", "on", PART)
    assert found == dict.fromkeys(found)


def test_blackwell_without_the_package() -> None:
    found = run("blackwell", "off", "4/33", "mxfp8", "nvfp4")
    assert any(found.values())


def test_rtx_takes_no_mxfp8() -> None:
    found = run("blackwell-rtx", "on", PART.replace("29", "37"), "nvfp4", "fp8-block", "mxfp8")
    refused = [why for (_, recipe, _), why in found.items() if recipe == "mxfp8"]
    assert refused
    assert all(NO_MXFP8 in str(why) for why in refused)
    assert not any(why for (_, recipe, _), why in found.items() if recipe != "mxfp8")


@pytest.mark.skipif(MINOR < 18, reason="weights are not asked for swizzled scales")
def test_cached_nvfp4_weights_on_rtx() -> None:
    found = {fixes: run("blackwell-rtx", fixes, "1/24", "nvfp4") for fixes in ("nvfp4-weight-preswizzle", "off")}
    assert {setting for _, _, setting in found["off"]} == {"cached"}
    assert all(found["off"].values())
    assert not any(found["nvfp4-weight-preswizzle"].values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ROW_SCALES, marks=pytest.mark.skipif(MINOR < 16, reason="they come with 2.16")),
        pytest.param(FOUR_OVER_SIX, marks=pytest.mark.skipif(MINOR < 17, reason="it comes with 2.17")),
    ],
    ids=["row-scales", "4over6"],
)
def test_nvfp4_with(options: dict[str, str]) -> None:
    found = run("blackwell", "on", "5/24", "nvfp4", NVTE_NVFP4_DISABLE_RHT="1", **options)
    assert found == dict.fromkeys(found)
    refused = run("blackwell", "on", "1/60", "nvfp4", **options)
    assert all("quantization does not support RHT" in str(why) for why in refused.values())  # the options are in use


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gpu", ["hopper", "blackwell", "blackwell-rtx"])
def test_all(gpu: str, recipe: str) -> None:
    found = run(gpu, "on", "1/1", recipe)
    wanted = REFUSED.get((gpu, recipe))
    assert all(why is None if wanted is None else wanted in str(why) for why in found.values()), found
