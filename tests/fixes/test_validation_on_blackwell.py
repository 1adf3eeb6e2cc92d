"""An illegal access in the first backward after a validation: modules with a recipe of their own in a graph."""

from __future__ import annotations

from tests.support.child import ROOT, on_simulator

PROGRAM = ROOT / "tests" / "support" / "validation_on_blackwell.py"


def test_training_goes_on_as_eager() -> None:
    done = on_simulator(PROGRAM, TE_SIMULATOR_GPU="blackwell")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_fixes_it_does_not() -> None:
    done = on_simulator(PROGRAM, TE_SIMULATOR_GPU="blackwell", TE_GRAPH_FIXES="off")
    assert done.returncode == 1, done.stdout + done.stderr
