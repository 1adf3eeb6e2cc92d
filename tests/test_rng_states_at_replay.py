"""``rng-states-at-replay`` on the simulator: whose states those of a capture were."""

from __future__ import annotations

import json

from tests.child import simulate

TWO_TRACKERS = """
import gc, json, torch, te_graph_fixes
import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

class Dropped(te.Linear):
    def forward(self, x):
        with tracker.fork():
            return torch.nn.functional.dropout(super().forward(x), 0.5)

def outputs(graphs):
    global tracker
    tracker, other = CudaRNGStatesTracker(), CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    gc.freeze()  # what looks through all objects does not find the tracker any more
    torch.manual_seed(7)
    module = Dropped(32, 32, params_dtype=torch.bfloat16, device="cuda")
    x = torch.ones(32, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    if graphs:
        module = te.make_graphed_callables(module, (x,))
    tracker.reset()
    tracker.add("model-parallel-rng", 2)
    yield module(x).tolist()
    other.add("model-parallel-rng", 3)
    yield module(x).tolist()
    tracker.set_states({name: each.clone_state() for name, each in tracker.get_states().items()})
    yield module(x).tolist()
    yield other.get_states()["model-parallel-rng"].get_state().tolist()

eager = [*outputs(False)]
print(json.dumps([a == b for a, b in zip(eager, outputs(True))]))
"""


def test_a_tracker_that_is_frozen_beside_another() -> None:
    assert json.loads(simulate("-c", TWO_TRACKERS)) == [True] * 4
    without = simulate("-c", TWO_TRACKERS, TE_GRAPH_FIXES_DISABLE="rng-states-at-replay")
    assert not any(json.loads(without)[:3])
