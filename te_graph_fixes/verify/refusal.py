"""Orders that no schedule can run must be refused before anything is captured, with a message that says why."""

from __future__ import annotations

from typing import Any

from .training import Setup, capture, make_module


def illegal_order() -> dict[str, Any]:
    """A wgrad before its dgrad."""
    setup = Setup(order=(1, -1.5, -1), delay=True, mark_first=False)
    try:
        capture(setup, [make_module(setup, 0, delay=True)], None)
    except ValueError as refusal:
        return {"errors": {"refused": [float("_order[1]" not in str(refusal))]}, "message": str(refusal)}
    return {"errors": {"refused": [1.0]}, "message": "captured"}
