"""The life cycle of the package with TransformerEngine (TE) itself, on the simulator, in child processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from te_graph_fixes.patching.source import Source
from te_graph_fixes.state import State
from tests.support import published
from tests.support.child import on_simulator, python, simulate

VERDICTS = {fix: verdict.state for fix, verdict in published.examined("installed")[1].items()}
NEEDED = sorted(fix for fix, verdict in VERDICTS.items() if verdict == State.APPLICABLE)

PRELUDE = """
import importlib, inspect, os, sys, threading

def check(active=True):
    import te_graph_fixes
    from te_graph_fixes.patching.installation import compile_patches
    from te_graph_fixes.patching.source import Source
    from te_graph_fixes.decision import verdicts
    source = Source.installed()
    found = {fix: verdict for fix, verdict in verdicts(source).items() if verdict.state == "applicable"}
    if active:
        statuses = {fix: status.status for fix, status in te_graph_fixes.report().fixes.items()}
        assert {fix for fix, status in statuses.items() if status == "applied"} == set(found), statuses
    for change in compile_patches(source, found):
        wanted = change.after if active else change.before
        if wanted is None:
            owner, _, name = change.qualname.rpartition(".")
            module = sys.modules[change.module]
            assert name not in vars(getattr(module, owner) if owner else module), change
        else:
            assert change.live.__code__ == wanted, change

def attempt(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

ORDERS = {
    "before torch and TE": """
assert not {"transformer_engine", "wrapt"} & set(sys.modules)
import te_graph_fixes
assert set(status.status for status in te_graph_fixes.report().fixes.values()) == {"pending"}
assert not {"transformer_engine", "wrapt"} & set(sys.modules)
import torch, transformer_engine.pytorch
""",
    "after the names were taken": """
from transformer_engine.pytorch import GroupedLinear, make_graphed_callables
import te_graph_fixes
import transformer_engine.pytorch as te
assert GroupedLinear is te.GroupedLinear and make_graphed_callables is te.make_graphed_callables
""",
    "in a thread, while TE is imported": """
thread = threading.Thread(target=importlib.import_module, args=("transformer_engine.pytorch",))
thread.start()
while "transformer_engine.pytorch" not in sys.modules: pass
import te_graph_fixes
thread.join()
""",
    "reloaded, taken back, applied again": """
import te_graph_fixes
import transformer_engine.pytorch as te
import transformer_engine.pytorch.graph as graph
held = te.make_graphed_callables
check()
signature = inspect.signature(graph._make_graphed_callables)
te_graph_fixes.deactivate()
check(active=False)
te_graph_fixes.activate()
check()
assert inspect.signature(graph._make_graphed_callables) == signature
importlib.reload(te_graph_fixes)
check()
assert held is sys.modules["transformer_engine.pytorch.graph"].make_graphed_callables
te_graph_fixes.deactivate()
check(active=False)
te_graph_fixes.activate()
""",
    "after imports of TE that failed": """
import te_graph_fixes
for name in ("module.grouped_linear", "graph"):
    sys.modules["transformer_engine.pytorch." + name] = None
    assert attempt(importlib.import_module, "transformer_engine.pytorch").startswith("ModuleNotFoundError"), name
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        if name != "transformer_engine.common" and not name.startswith("transformer_engine.common."):
            del sys.modules[name]
import transformer_engine.pytorch
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_events_does_not_matter(order: str) -> None:
    simulate("-c", PRELUDE + ORDERS[order] + "\ncheck()\n", imported=())


def test_tracebacks_and_sources_show_the_corrected_lines() -> None:
    simulate(
        "-c",
        PRELUDE
        + """
import inspect, linecache, traceback, te_graph_fixes
import transformer_engine.pytorch as te
from te_graph_fixes.patching.installation import compile_patches, patched
from te_graph_fixes.patching.source import Source
from te_graph_fixes.decision import verdicts
import torch

source = Source.installed()
chosen = {fix: verdict for fix, verdict in verdicts(source).items() if verdict.state == "applicable"}
found = compile_patches(source, chosen)
texts = {name: text for name, (_, text) in patched(source, chosen).items()}
for change in found:
    if change.maker is None:
        lines, first = inspect.getsourcelines(change.live)
        assert f"def {change.after.co_name}(" in "".join(lines), change.qualname
        wanted = texts[change.module].split("\\n")[first - 1 : first - 1 + len(lines)]
        assert "".join(lines) == "\\n".join(wanted) + "\\n", change.qualname

try:
    te.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(2, 2),), allow_unused_input="", enabled=False,
                              num_warmup_iters="none")
except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    graph = [frame for frame in frames if frame.filename == "<te_graph_fixes: transformer_engine.pytorch.graph>"]
    lines = texts["transformer_engine.pytorch.graph"].split("\\n")
    assert graph and all(frame.line == lines[frame.lineno - 1].strip() for frame in graph)
    assert any(frame.name == "_make_graphed_callables" for frame in graph), frames
else:
    raise AssertionError("no error")
""",
    )


def broken(folder: Path) -> Path:
    """A copy of the installed TE in which no fix finds the graph code."""
    location = Source.installed().location
    shutil.copytree(location, folder / "transformer_engine", ignore=shutil.ignore_patterns("__pycache__"))
    for metadata in Path(location).parent.glob("transformer_engine-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)
    path = folder / "transformer_engine" / "pytorch" / "graph.py"
    text = path.read_text()
    path.write_text(
        text.replace("def _make_graphed_callables(", "def _renamed(") + "\n_make_graphed_callables = _renamed\n"
    )
    return folder


def test_strict_raises_at_every_import_of_te(tmp_path: Path) -> None:
    simulate(
        "-c",
        PRELUDE
        + """
import te_graph_fixes
for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine") * 2:
    found = str(attempt(importlib.import_module, name))
    assert found.startswith("FixNotAppliedError: TransformerEngine"), found
    assert "fixes that it needs cannot be applied" in found, found
    assert "transformer_engine.pytorch" not in sys.modules
te_graph_fixes.deactivate()
import transformer_engine.pytorch
found = attempt(te_graph_fixes.activate, None, None, True)
assert found.startswith("FixNotAppliedError"), found
""",
        path=broken(tmp_path),
        imported=(),
        TE_GRAPH_FIXES_STRICT="1",
    )


def test_without_strict_it_warns_once(tmp_path: Path) -> None:
    done = on_simulator(
        "-c",
        PRELUDE
        + """
import te_graph_fixes
import transformer_engine.pytorch
te_graph_fixes.activate()
assert "unrecognized" in {status.status for status in te_graph_fixes.report().fixes.values()}
""",
        path=broken(tmp_path),
        imported=(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TEGraphFixesWarning") == 1, done.stderr


def test_status_imports_neither_torch_nor_te() -> None:
    status = """
import sys
from te_graph_fixes.commands.cli import main
status = main(["status", "--json"])
assert not {"torch", "numpy", "transformer_engine"} & set(sys.modules)
sys.exit(status)
"""
    done = python("-c", status)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {fix: record["verdict"] for fix, record in found["fixes"].items()} == VERDICTS
    assert os.path.samefile(found["source"], Source.installed().location)


CAPTURE = """
import gc, warnings
warnings.simplefilter("always")

def capture():
    import torch, transformer_engine.pytorch as te
    module = te.Linear(32, 32).cuda()
    return te.make_graphed_callables(module, (torch.randn(8, 32, device="cuda", requires_grad=True),))

def said(function, *args):
    with warnings.catch_warnings(record=True) as found:
        function(*args)
    return [str(warning.message) for warning in found if warning.category.__name__ == "TEGraphFixesWarning"]

def without():
    import te_graph_fixes
    return {status.earlier_graphs for status in te_graph_fixes.report().fixes.values() if status.status == "applied"}
"""


@pytest.mark.skipif(not NEEDED, reason="this TE needs no fix")
def test_graphs_that_were_captured_before_are_not_forgotten() -> None:
    simulate(
        "-c",
        CAPTURE
        + """
early = capture()
(text,) = said(__import__, "te_graph_fixes")
assert "1 graph captured before the fixes were in place will stay without them" in text, text
import te_graph_fixes
assert without() == {1}, without()
late = capture()
assert without() == {1}, without()
assert "(not in 1 graph captured before)" in str(te_graph_fixes.report())
try:
    te_graph_fixes.activate(strict=True)
except te_graph_fixes.FixNotAppliedError as error:
    assert "1 graph captured before" in str(error), error
else:
    raise AssertionError("no error")
assert without() == set()
""",
        imported=(),
    )
