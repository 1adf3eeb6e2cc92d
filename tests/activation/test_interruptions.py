"""Test an activation that an exception interrupts at each of its statements."""

from __future__ import annotations

from pathlib import Path

from tests.activation.test_activation import World

PROGRAM = """
import itertools
import te_graph_fixes
from te_graph_fixes import activation
from te_graph_fixes.patching import installation

assert results() == RIGHT
logging.disable()
CLASSES = activation._Activation, installation.Installation
METHODS = {getattr(method, "__code__", None) for owner in CLASSES for method in vars(owner).values()}
reached = set()

def tracer(error, at):
    lines = itertools.count(1)

    def trace(frame, event, _):
        if event == "line" and next(lines) == at:
            reached.add((error, at))
            raise error
        return trace

    return lambda frame, *_: trace if frame.f_code in METHODS else None

for error in (ValueError, KeyboardInterrupt):
    for at in itertools.count(1):
        te_graph_fixes.deactivate()
        assert results() == WRONG
        sys.settrace(tracer(error, at))
        try:
            te_graph_fixes.activate()
        except error:
            pass
        sys.settrace(None)
        graph, _, linear, _ = results()
        wanted = {"graph": graph == "right", "linear": linear == "right"}
        assert {fix: status == "applied" for fix, status in statuses().items()} == wanted, (error, at)
        if (error, at) not in reached:
            break
print(len(reached) > 200)
"""


def test_an_exception_at_each_statement_of_the_activation(tmp_path: Path) -> None:
    """After each interruption, the report names the fixes whose code runs, and `deactivate` reverts them."""
    assert World(tmp_path).run(PROGRAM).splitlines()[-1] == "True"
