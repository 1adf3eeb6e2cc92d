"""Orders that no schedule can run must be refused before anything is captured, with a message that says why."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.graph import is_graph_capturing

from .training import Setup, capture, make_module


def illegal_order() -> dict[str, Any]:
    """A wgrad before its dgrad. Without `capture-exception-safety`, TE goes on as if in a capture after the refusal."""
    setup = Setup(order=(1, -1.5, -1), delay=True, mark_first=False)
    try:
        capture(setup, [make_module(setup, 0, delay=True)], None)
    except ValueError as refusal:
        refused = [float("_order[1]" not in str(refusal))]
        return {"errors": {"refused": refused}, "message": str(refusal), "damaged": bool(is_graph_capturing())}
    return {"errors": {"refused": [1.0]}, "message": "captured"}
