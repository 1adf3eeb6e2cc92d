"""Test that another project's test suite passes with the fixes, and that they print no message."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.child import python

pytestmark = pytest.mark.te

WARNINGS = ("error", "ignore:`torch.jit:DeprecationWarning")
"""Filters that turn warnings into errors, except torch 2.13's warning about torch.jit, which TE up to 2.19 uses."""

CONFTEST = "from tests import simulator\nsimulator.install()\n"

SUITE = """
import torch
import transformer_engine.pytorch as te


def test_a_capture_leaves_main_grad_alone():
    options = {"bias": False, "fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = te.Linear(32, 32, **options)
    module.weight.main_grad = torch.zeros(32, 32, dtype=torch.float32, device="cuda")
    module.weight.grad_added_to_main_grad = False
    te.make_graphed_callables(module, (torch.randn(16, 32, dtype=torch.bfloat16, device="cuda").requires_grad_(),))
    assert not module.weight.main_grad.any()
"""


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_foreign_suite_passes_in_silence(tmp_path: Path, is_fixed: bool) -> None:
    """With the fixes, the suite must pass, although it turns warnings into errors. Without the fixes, it must fail."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_graphs.py").write_text(SUITE)
    run = ["-m", "te_graph_fixes", "run", "--", sys.executable] if is_fixed else []
    suite = ["-m", "pytest", "-p", "no:cacheprovider", *(f"-W{each}" for each in WARNINGS), tmp_path]
    done = python(*run, *suite, cwd=tmp_path, PYTHONWARNINGS=",".join(WARNINGS))
    assert re.search(r"^=* ?1 (passed|failed) in [^,]*$", done.stdout, re.MULTILINE), done.stdout
    assert (done.returncode == 0) == is_fixed, done.stdout + done.stderr
    assert done.stderr == ""
