"""Graphs must draw from the current state of an RNG tracker."""

import torch
from transformer_engine.pytorch import make_graphed_callables
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker


class _Dropout(torch.nn.Module):
    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        with self.tracker.fork():
            return torch.nn.functional.dropout(inp)


def test_make_graphed_callables_after_reset_of_rng_tracker() -> None:
    """After ``reset`` and ``add``, a replay must draw the random numbers of the new seed."""
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    module = _Dropout(tracker)
    inp = torch.randn(128, 128, device="cuda")
    eager = module.forward
    graphed = make_graphed_callables(module, (inp.clone(),))
    outputs = []
    for run in (graphed, eager):
        tracker.reset()
        tracker.add("model-parallel-rng", 2)
        outputs.append(run(inp).clone())
    assert torch.equal(*outputs)
