"""``cached-weight-lifetime`` and ``state-after-evaluation`` on the simulator: a graph owns what it reads."""

from __future__ import annotations

import pytest

from tests.support import published
from tests.support.child import simulate

pytestmark = pytest.mark.te

FIXES = {"cached-weight-lifetime", "state-after-evaluation"}
REQUIRED = {"fp8-state-at-replay", "nested-autocast"}

OWNERS = """
import gc, weakref, te_graph_fixes, torch
import transformer_engine.pytorch as te
from tests.verify.driver.events import Training
from tests.verify.driver.program import Program
from tests.verify.driver.setting import use

options = {"inference": "first", "not_captured": (0,), "events": ("infer",)}
use(Program(recipe="delayed", other="current", weights="cached", **options))
training = Training(graphed=True)
(module,) = training.layers
weight = module._fp8_workspaces["weight"]
states = [module.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd")]
held = [weight._data, weight._scale_inv, *(state.scale for state in states), *(state.amax_history for state in states)]
held = [weakref.ref(tensor) for tensor in held]
training.event = "an evaluation"
training.evaluation("current")
del weight, states
te.quantization.FP8GlobalStateManager.reset()  # forgets the scales that it updated
gc.collect()
print([reference() is not None for reference in held])
"""


def test_a_graph_owns_what_it_reads() -> None:
    assert simulate("-c", OWNERS, TE_GRAPH_FIXES=",".join(FIXES | REQUIRED)).splitlines()[-1] == str([True] * 6)
    if published.te("installed").needed >= FIXES:
        assert simulate("-c", OWNERS, TE_GRAPH_FIXES="off").splitlines()[-1] == str([False] * 6)
