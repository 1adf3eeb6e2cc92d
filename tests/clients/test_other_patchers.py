"""Test this package together with other tools that patch TransformerEngine (TE). docs/how.md lists these tools.

Each test changes a stand-in for TE as one of the tools changes TE, before or after this package fixes the stand-in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.activation.test_activation import World

REPLACE = """
def replace(everywhere):
    "Replace a function as Primus does or, if `everywhere`, in all modules that import it, as MindSpeed does."
    import transformer_engine.pytorch
    module = sys.modules["transformer_engine.pytorch.graph"]
    old, module.capture = module.capture, lambda x: ("theirs", x)
    for other in list(sys.modules.values()) if everywhere else [transformer_engine.pytorch]:
        for name, value in list(vars(other).items()):
            if value is old:
                setattr(other, name, module.capture)
"""
WRAP = """
def wrap():
    import functools, transformer_engine.pytorch as te
    module = sys.modules["transformer_engine.pytorch.graph"]
    theirs = module.capture
    @functools.wraps(theirs)
    def capture(x):
        return theirs(x)[0] + " wrapped", x
    module.capture = te.capture = capture
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_file_rewritten_after_the_import_affects_the_next_process(world: World) -> None:
    program = """
import pathlib, te_graph_fixes
assert results() == RIGHT
path = pathlib.Path(sys.modules["transformer_engine.pytorch.graph"].__file__)
path.write_text(path.read_text().replace("return inner(), x", "return inner(), x + 1"))
assert results() == RIGHT and statuses() == APPLIED
"""
    world.run(program)
    world.run("import te_graph_fixes; assert results() == ('right', 2, 'right', 2) and statuses() == APPLIED")


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_function_replaced_before_keeps_its_replacement(world: World, everywhere: bool) -> None:
    out = world.run(f"""
{REPLACE}
replace({everywhere})
import te_graph_fixes
assert results() == ("theirs", 1, "right", 2)
assert statuses() == {{"graph": "failed", "linear": "applied"}}
te_graph_fixes.deactivate()
assert results() == ("theirs", 1, "wrong", 2)
""")
    assert out.count("TEGraphFixesWarning") == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_function_replaced_after_is_reported(world: World, everywhere: bool) -> None:
    world.run(f"""
{REPLACE}
import te_graph_fixes
assert results() == RIGHT
replace({everywhere})
assert results() == ("theirs", 1, "right", 2)
assert statuses() == {{"graph": "failed", "linear": "applied"}}
assert te_graph_fixes.report().fixes["graph"].reason == "another package has replaced the fixed code"
te_graph_fixes.deactivate()
assert results() == ("theirs", 1, "wrong", 2)
""")


@pytest.mark.parametrize("first", ["wrap()", "import te_graph_fixes"])
def test_a_wrapper_and_a_fix_both_act_in_either_order(world: World, first: str) -> None:
    world.run(f"""
{WRAP}
{first}
import te_graph_fixes
if {first!r} != "wrap()":
    wrap()
assert results() == ("right wrapped", 1, "right", 2) and statuses() == APPLIED
""")
