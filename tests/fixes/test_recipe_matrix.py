"""Test modules, recipes and settings on simulated GPUs: graphs equal eager runs with the package, and not without.

Each TransformerEngine (TE) has another part of the combinations; the slow tests have all of them.
"""

from __future__ import annotations

import json

import pytest

from tests.support.child import simulate
from tests.support.published import TE
from tests.support.recipe_matrix import GPU_SPLITS, RECIPES, combinations

pytestmark = pytest.mark.te

NO_MXFP8 = "not supported on 12.0+ architectures"
REFUSED = {
    ("hopper", "mxfp8"): "compute capability 10.0 or higher required",
    ("hopper", "nvfp4"): "compute capability 10.0 or higher required",
    ("blackwell-rtx", "mxfp8"): NO_MXFP8,
}
"""TE's own words for a recipe that a GPU does not have."""

NOT_THERE = {
    "refuses to capture te.checkpoint": 12,
    "te.ops.GroupedLinear comes with ": 14,
    "GroupedLinear has no kernels of grouped tensors ": 17,
    "multi_tensor_adam takes no ": 14,
    "operations do not support FP8 block scaling": 18,
    "the GEMM needs columnwise data": 15,  # te.checkpoint of LayerNormMLP, block scaling; eagerly, too
}
"""What TE does not have, or has in a way that is not simulated, before the minor version."""

OTHER_KERNELS = ("values from the GPU", "value from the GPU", "FP8 block-scaling recipe on")
"""Why splits on the GPU cannot be captured in some recipes and on some GPUs: TE has other kernels there."""


def not_there(te: TE, module: str, why: object) -> bool:
    missing = [text for text, since in NOT_THERE.items() if te.minor < since]
    on_gpu = module in (GPU_SPLITS, "ops.GroupedLinear")
    return any(text in str(why) for text in (*missing, *(OTHER_KERNELS if on_gpu else ())))


def run(te: TE, gpu: str, fixes: str, part: str, *recipes: str, **environment: str) -> dict[tuple[str, ...], object]:
    """Return, for each combination, its mismatches, the reason why it was skipped, or None if it is equal."""
    environment |= {"TE_SIMULATOR_GPU": gpu, "TE_GRAPH_FIXES": fixes}
    output = simulate("-m", "tests.support.recipe_matrix", part, *recipes, path=te.path, **environment)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [tuple(line["case"]) for line in lines] == combinations(part, recipes)
    found = {tuple(line["case"]): line.get("wrong", line.get("skipped")) for line in lines}
    return {case: why for case, why in found.items() if not not_there(te, case[0], why)}


def test_blackwell(tried_te: TE) -> None:
    found = run(tried_te, "blackwell", "on", f"{tried_te.minor - 9}/29")
    assert found == dict.fromkeys(found)


def test_blackwell_without_the_package(tried_te: TE) -> None:
    found = run(tried_te, "blackwell", "off", "4/33", "mxfp8", "nvfp4")
    assert any(found.values())


def test_rtx_takes_no_mxfp8(tried_te: TE) -> None:
    found = run(tried_te, "blackwell-rtx", "on", f"{tried_te.minor - 9}/37", "nvfp4", "fp8-block", "mxfp8")
    refused = [why for (_, recipe, _), why in found.items() if recipe == "mxfp8"]
    assert refused
    assert all(NO_MXFP8 in str(why) for why in refused)
    assert not any(why for (_, recipe, _), why in found.items() if recipe != "mxfp8")


def test_cached_nvfp4_weights_on_rtx(tried_te: TE) -> None:
    tried_te.require("nvfp4-weight-preswizzle")
    found = {fix: run(tried_te, "blackwell-rtx", fix, "1/24", "nvfp4") for fix in ("nvfp4-weight-preswizzle", "off")}
    assert {setting for _, _, setting in found["off"]} == {"cached"}
    assert all(found["off"].values())
    assert not any(found["nvfp4-weight-preswizzle"].values())


@pytest.mark.parametrize(
    ("since", "options"),
    [(16, {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1"}), (17, {"NVTE_NVFP4_4OVER6": "all"})],
    ids=["row-scales", "4over6"],
)
def test_nvfp4_with(tried_te: TE, since: int, options: dict[str, str]) -> None:
    """Options of TE's NVFP4 recipe that environment variables select are as in eager training."""
    if tried_te.minor < since:
        pytest.skip(f"comes with TransformerEngine 2.{since}")
    if since == 16 and tried_te.minor < 19:
        options = {**options, "NVTE_BACKWARD_OVERRIDE": "dequantized"}  # no column-wise part for a wgrad
    found = run(tried_te, "blackwell", "on", "5/24", "nvfp4", NVTE_NVFP4_DISABLE_RHT="1", **options)
    assert found == dict.fromkeys(found)
    refused = run(tried_te, "blackwell", "on", "1/60", "nvfp4", **options)
    assert all("quantization does not support RHT" in str(why) for why in refused.values())  # the options are in use


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gpu", ["hopper", "blackwell", "blackwell-rtx"])
def test_all(tried_te: TE, gpu: str, recipe: str) -> None:
    found = run(tried_te, gpu, "on", "1/1", recipe)
    wanted = REFUSED.get((gpu, recipe))
    assert all(why is None if wanted is None else wanted in str(why) for why in found.values()), found
