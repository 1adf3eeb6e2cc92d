"""``wgrad-hook-order`` on the simulator: the order in which gradient hooks are run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from tests.child import simulate

FIX = CATALOGUE["wgrad-hook-order"]
NEEDED = FIX.verdict(Source.installed()).verdict == "applicable"
HOOKS_NEEDED = CATALOGUE["backward-dw-hooks"].verdict(Source.installed()).verdict == "applicable"


def run(setting: str) -> dict[str, Any]:
    """``tests/gpu/wgrad_hook_order.py`` in a child process on the simulator."""
    output = simulate("tests/gpu/wgrad_hook_order.py", TE_GRAPH_FIXES=setting)
    return json.loads(output.splitlines()[-1])


def test_hooks_are_run_in_the_order_of_the_forwards() -> None:
    found = run(FIX.id + ",backward-dw-hooks")
    assert found["order"] == list(range(8))


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
@pytest.mark.skipif(HOOKS_NEEDED, reason="this TE runs no hooks of its own after a replay")
def test_without_the_fix_they_are_in_the_order_of_addresses() -> None:
    # One process in 40,000 has them in the right order by chance.
    assert run("off")["order"] != list(range(8))
