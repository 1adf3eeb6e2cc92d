"""Test that the fixes change no result of TransformerEngine's edited functions in training without a capture."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from te_graph_fixes.patching.installation import compile_patches
from tests.support import published
from tests.support.child import simulate

pytestmark = pytest.mark.te

QUICK = {"hopper": "2/15", "blackwell": "1/14", "blackwell-rtx": "3/16"}
"""The programs for each simulated GPU, as the argument PART of `tests.support.eager_training`."""


def is_capture_only(module: str, name: str) -> bool:
    """Return whether only captures and replays run a function. TE calls `make_weak_ref` only in ``graph.py``."""
    return module.endswith(".graph") or name == "make_weak_ref"


def edited() -> list[tuple[str, str]]:
    """Return the module and the name of each edited function that also runs in eager training."""
    source, _ = published.examined("installed")
    needed = published.needed("installed")
    patches = compile_patches(source, needed)
    names = [(patch.module, patch.qualname) for patch in patches]
    return [name for name in names if not is_capture_only(*name)]


@functools.cache
def outcome(switch: str, gpu: str, part: str) -> list[Any]:
    """Run the programs of ``part``. Return digests of each program and, as the last item, the functions that ran."""
    functions = json.dumps(edited() if switch == "on" else [])
    program = ("-m", "tests.support.eager_training", functions, part)
    lines = simulate(*program, imported=(), TE_GRAPH_FIXES=switch, TE_SIMULATOR_GPU=gpu).splitlines()
    return [json.loads(line) for line in lines if line.startswith("[")]


def compare(gpu: str, part: str) -> None:
    *alone, _ = outcome("off", gpu, part)
    *fixed, _ = outcome("on", gpu, part)
    assert alone
    assert fixed == alone


@pytest.mark.parametrize("gpu", QUICK)
def test_eager_training_is_that_of_te(gpu: str) -> None:
    compare(gpu, QUICK[gpu])


def test_every_edited_function_runs() -> None:
    ran = {name for gpu, part in QUICK.items() for name in outcome("on", gpu, part)[-1]}
    assert {f"{module}.{name}" for module, name in edited()} - ran == set()


@pytest.mark.full
@pytest.mark.parametrize("gpu", QUICK)
def test_all_eager_training_is_that_of_te(gpu: str) -> None:
    compare(gpu, "1/1")
