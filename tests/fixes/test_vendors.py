"""Test that the fixes apply and work in TransformerEngines (TE) with known changes of vendors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from te_graph_fixes.decision import Reading, decide, read
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import Settings
from tests.support.child import measured
from tests.support.published import examined, source

pytestmark = pytest.mark.te


def one_stream(text: str) -> str:
    """Return graph.py with one stream for warmup and captures, as ROCm's TransformerEngine #644 describes."""
    warmup = "    with torch.cuda.stream(torch.cuda.Stream()):"
    assert text.count(warmup) == 1
    text = text.replace(warmup, "    capture_stream = torch.cuda.Stream()\n    with torch.cuda.stream(capture_stream):")
    text, captures = re.subn(r"(?<=pool=mempool)(?=\s*\))", ", stream=capture_stream", text)
    assert captures == 6
    return text


def other_devices(text: str) -> str:
    """Return utils.py for devices of several vendors, as TransformerEngine-FL describes."""
    text, conditions = re.subn(r"if x\.is_cuda(?=\s+else x)", "if x.device.type == te_device_type()", text)
    assert conditions == 1
    return text.replace("\ndef ", '\ndef te_device_type():\n    return "cuda"\n\n\ndef ', 1)


VENDORS: dict[str, tuple[str, Callable[[str], str]]] = {
    "ROCm": ("graph.py", one_stream),
    "FL": ("utils.py", other_devices),
}


def with_change(version: str, vendor: str, folder: Path) -> Path:
    """Copy a published TE to ``folder``, apply a vendor's change to the copy, and return the folder."""
    shutil.copytree(source(version), folder, dirs_exist_ok=True)
    name, change = VENDORS[vendor]
    file = folder / "transformer_engine" / "pytorch" / name
    file.write_text(change(file.read_text()))
    return folder


@pytest.mark.parametrize("version", ["2.12.0", "2.14.0", "2.15.0", "2.20.2"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendors_change_costs_no_fix(vendor: str, version: str, tmp_path: Path) -> None:
    changed = decide(read(Source.at(with_change(version, vendor, tmp_path))), Settings())
    plain = decide(Reading(*examined(version)), Settings())
    assert changed.cannot_apply == {}
    assert changed.to_apply.keys() == plain.to_apply.keys()


CASES = {
    "experts-bf16": "warmup-reset",
    "recompute-behind-another": "recompute-in-graphs",
    "reset-between-steps": "skip-flag-reset",
    "weights-not-cached": "stale-fp8-weights",
    "delayed-together": "wgrad-memory-reuse",
    "two-microbatches-wgrads-last": "backward-dw-order",
}
"""Cases of `verify`, each with its tested fix."""


@pytest.mark.parametrize("version", ["2.12.0", "2.14.0", "2.15.0"])
def test_fixes_work_where_warmup_and_captures_share_a_stream(version: str, tmp_path: Path) -> None:
    path = with_change(version, "ROCm", tmp_path)
    needed = decide(read(Source.at(path)), Settings()).to_apply
    cases = [case for case, fix in CASES.items() if fix in needed]
    without, fixed = (measured(*cases, path=path, TE_GRAPH_FIXES=setting) for setting in ("off", "on"))
    assert {case: found.get("error") for case, found in fixed.items()} == dict.fromkeys(cases, 0.0)
    assert [case for case, found in without.items() if found.get("error") == 0.0] == []
