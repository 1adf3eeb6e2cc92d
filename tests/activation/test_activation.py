"""Test the life cycle of the package in child processes, on a stand-in for TransformerEngine (TE).

The stand-in has a few functions under TE's module names. A copy of te_graph_fixes next to the stand-in contains fixes
for these functions. The tests are therefore fast and need no torch. `test_lifecycle.py` uses TE itself.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import te_graph_fixes
from tests.support.child import python

TE = {
    "transformer_engine/__init__.py": """
        import os
        try:
            from . import pytorch
        except ImportError as error:
            if not os.environ.get("SWALLOW"):
                raise
    """,
    "transformer_engine/pytorch/__init__.py": """
        import os, time
        if os.environ.get("FAIL_AT") == "start":
            raise ImportError("no CUDA")
        from transformer_engine.pytorch.graph import capture
        time.sleep(float(os.environ.get("SLOW", 0)))
        if os.environ.get("FIXES_AT") == "middle":
            import te_graph_fixes
        from transformer_engine.pytorch.linear import Linear
        if os.environ.get("FIXES_AT") == "end":
            import te_graph_fixes
        if os.environ.get("FAIL_AT") == "end":
            raise ImportError("no CUDA")
    """,
    "transformer_engine/pytorch/graph.py": """
        def capture(x):
            \"\"\"The docstring.\"\"\"
            def inner():
                result = "wrong"
                return result
            return inner(), x
    """,
    "transformer_engine/pytorch/linear.py": """
        import os
        if os.environ.get("FAIL_AT") == "linear":
            raise ImportError("no CUDA")
        class Linear:
            def forward(self, x):
                flag = "wrong"
                return flag, x
    """,
    "transformer_engine-2.12.0+vendor.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: transformer_engine
        Version: 2.12.0+vendor
    """,
}

FIX = '''
    """Bug: it is wrong.\n\nUpstream: https://link"""
    from ..fix import Fix

    PATCH = """
    @@ {module}.py {function}
    -{name} = "wrong"
    +{name} = "right"
    """
    UPSTREAM = """
    @@ {module}.py {function}
     {name} = "right"
    """
    FIX = Fix("symptom", PATCH, corrected=[(UPSTREAM, "right already")], requires={requires})
'''

CATALOGUE = {
    "graph": {"module": "graph", "function": "capture", "name": "result", "requires": ("linear",)},
    "linear": {"module": "linear", "function": "Linear.forward", "name": "flag", "requires": ()},
}

PRELUDE = """
import importlib.machinery, logging, os, sys, threading, time, warnings
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout, level="INFO")
logging.captureWarnings(True)
warnings.simplefilter("always")

def results():
    import transformer_engine.pytorch as te
    return te.capture(1) + te.Linear().forward(2)

RIGHT, WRONG = ("right", 1, "right", 2), ("wrong", 1, "wrong", 2)

def statuses():
    import te_graph_fixes
    return {fix: status.status for fix, status in te_graph_fixes.report().fixes.items()}

APPLIED = {"graph": "applied", "linear": "applied"}

def attempt(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def purge():
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line[indent:] + "\n" for line in lines))


class World:
    """A folder with a stand-in for TE and a copy of te_graph_fixes, in which tests run programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        original = Path(te_graph_fixes.__file__).parent
        shutil.copytree(original, folder / "te_graph_fixes", ignore=shutil.ignore_patterns("__pycache__", "fixes"))
        (folder / "te_graph_fixes" / "fixes").mkdir()
        for name in ("__init__.py", "shapes.py"):
            shutil.copy(original / "fixes" / name, folder / "te_graph_fixes" / "fixes")
        (folder / "te_graph_fixes" / "_version.py").write_text(f"version = {te_graph_fixes.__version__!r}\n")
        write(folder, TE)
        write(folder, {f"te_graph_fixes/fixes/{name}.py": FIX.format(**record) for name, record in CATALOGUE.items()})

    def run(self, program: str, *options: str, **environment: str) -> str:
        """Return the output of a program. Fail unless its exit status is 0."""
        start = *options, "-c", PRELUDE + program
        done = python(*start, path=self.folder, cwd=self.folder, timeout=60, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def own_world(tmp_path: Path) -> World:
    """Return a new `World`, which the test may change."""
    return World(tmp_path)


ORDERS = {
    "before TE": "import te_graph_fixes",
    "after TE": "import transformer_engine.pytorch; import te_graph_fixes",
    "after the names were taken": """
from transformer_engine.pytorch import Linear, capture
held = Linear()
import te_graph_fixes
assert capture(1) + held.forward(2) == RIGHT
""",
    "after one module of TE": "import transformer_engine.pytorch.graph; import te_graph_fixes",
    "while another thread has found TE and not begun it": """
found = threading.Event()
class Loader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec):
        found.set()
        while not any(type(finder).__name__ == "ImportHookFinder" for finder in sys.meta_path): time.sleep(0.01)
        time.sleep(0.3)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformer_engine.pytorch" and not found.is_set():
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = Loader(name, spec.origin)
            return spec
sys.meta_path.insert(0, Finder())
thread = threading.Thread(target=importlib.import_module, args=("transformer_engine.pytorch",))
thread.start(); found.wait()
import te_graph_fixes
thread.join()
""",
    "many threads at once": """
os.environ["SLOW"] = "0.1"
names = ["transformer_engine.pytorch", "te_graph_fixes", "transformer_engine.pytorch.linear"] * 5
threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "reloaded after TE": "import te_graph_fixes, transformer_engine.pytorch; importlib.reload(te_graph_fixes)",
    "TE imported anew": "import te_graph_fixes, transformer_engine.pytorch; purge()",
    "the order of finders changed": """
import te_graph_fixes
sys.meta_path.append(sys.meta_path.pop(0)); sys.meta_path.insert(0, sys.meta_path.pop())
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_imports_does_not_matter(world: World, order: str) -> None:
    world.run(ORDERS[order] + "\nassert results() == RIGHT, results()\nassert statuses() == APPLIED, statuses()\n")


@pytest.mark.parametrize("place", ["middle", "end"])
def test_te_that_imports_the_package_itself_is_an_error(world: World, place: str) -> None:
    """Fixes cannot be applied before TE's import ends. The error is no ImportError, because TE would catch it."""
    world.run(
        f"""
os.environ["FIXES_AT"] = "{place}"
found = attempt(importlib.import_module, "transformer_engine")
assert found.startswith("RuntimeError: The fixes cannot be applied while this thread is importing "), found
del os.environ["FIXES_AT"]
assert results() == RIGHT  # the hook remains, though the import of the package has failed
import te_graph_fixes
assert results() == RIGHT and statuses() == APPLIED
""",
        SWALLOW="1",
    )


@pytest.mark.parametrize("swallowed", [False, True])
def test_an_import_of_te_that_fails_is_corrected_when_retried(world: World, swallowed: bool) -> None:
    world.run(
        f"""
import te_graph_fixes
for place in ("start", "linear", "end"):
    os.environ["FAIL_AT"] = place
    for _ in range(2):
        found = attempt(importlib.import_module, "transformer_engine")
        assert {swallowed} or found == "ImportError: no CUDA", (place, found)
        sys.modules.pop("transformer_engine", None)
    del os.environ["FAIL_AT"]
    assert results() == RIGHT, place
    assert statuses() == APPLIED, place
    purge()
""",
        SWALLOW="1" if swallowed else "",
    )


SEQUENCES = ["".join(parts) for length in (1, 2, 3) for parts in itertools.product("adir", repeat=length)]
SEQUENCES += ["aidai", "iadra"]


def test_activating_and_deactivating_in_any_order(world: World) -> None:
    world.run(f"""
import te_graph_fixes
for sequence in {SEQUENCES}:
    te_graph_fixes.deactivate()
    purge()
    active, imported = False, None
    for event in sequence:
        if event == "a":
            te_graph_fixes.activate()
            active = True
        elif event == "d":
            te_graph_fixes.deactivate()
            active = False
        elif event == "i":
            imported = importlib.import_module("transformer_engine.pytorch")
        elif imported:
            importlib.reload(sys.modules["transformer_engine.pytorch.graph"])
            importlib.reload(sys.modules["transformer_engine.pytorch.linear"])
            importlib.reload(imported)
        if imported:
            assert results() == (RIGHT if active else WRONG), (sequence, event)
    expected = {{"applied" if imported else "pending"}} if active else {{"reverted", "disabled"}}
    assert set(statuses().values()) <= expected, (sequence, statuses())
""")


def test_a_reload_of_a_module_of_te_shows_in_the_report(world: World) -> None:
    """The package does not notice the reload itself (docs/limits.md), but the report shows the unfixed code."""
    world.run("""
import te_graph_fixes
assert results() == RIGHT
graph = importlib.reload(sys.modules["transformer_engine.pytorch.graph"])
assert graph.capture(1)[0] == "wrong"
assert statuses() == {"graph": "failed", "linear": "applied"}
te_graph_fixes.activate()
assert graph.capture(1)[0] == "right"
assert statuses() == APPLIED
""")


GRAPH = "transformer_engine/pytorch/graph.py"
SHAPES: dict[str, Callable[[str], str]] = {
    "missing": lambda text: text.replace('result = "wrong"', 'result = "other"'),
    "twice": lambda text: text.replace('result = "wrong"', 'result = "wrong"\n        result = "wrong"'),
    "defined twice": lambda text: text + text,
    "renamed": lambda text: text.replace("def capture", "def renamed") + "capture = renamed\n",
}


def test_an_unknown_shape_is_said_once_and_nothing_changes(own_world: World) -> None:
    path = own_world.folder / GRAPH
    texts = [change(path.read_text()) for change in SHAPES.values()]
    out = own_world.run(
        f"""
import te_graph_fixes
for text in {texts}:
    with open({GRAPH!r}, "w") as file: file.write(text)  # two of the texts have the same reason
    for _ in range(2):
        purge()
        te_graph_fixes.activate()
        assert results()[0] != "right" and results()[2] == "right"
        assert statuses() == {{"graph": "unrecognized", "linear": "applied"}}
        assert "looked for" in te_graph_fixes.report().fixes["graph"].reason
""",
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert out.count("1 fix that TransformerEngine 2.12.0+vendor needs cannot be applied") == 3
    assert out.count("\n  graph: ") == out.count("looked for") == out.count("TEGraphFixesWarning") == 3


@pytest.mark.parametrize(
    ("imported", "name"), [("before", "transformer_engine"), ("after", "transformer_engine.pytorch")]
)
def test_strict_raises_at_every_attempt(own_world: World, imported: str, name: str) -> None:
    path = own_world.folder / GRAPH
    path.write_text(SHAPES["missing"](path.read_text()))
    own_world.run(
        f"""
if {imported!r} == "before":
    import transformer_engine.pytorch
    for _ in range(3):
        assert attempt(importlib.import_module, "te_graph_fixes").startswith("FixNotAppliedError: 1 fix that ")
        assert results() == ("other", 1, "wrong", 2)
    purge()
else:
    import te_graph_fixes
for name in [{name!r}, "transformer_engine.pytorch.graph", "transformer_engine.pytorch.linear"] * 2:
    found = attempt(importlib.import_module, name)
    assert found.startswith("FixNotAppliedError: 1 fix that TransformerEngine 2.12"), found
    assert "TE_GRAPH_FIXES_DISABLE" in found
    assert "transformer_engine.pytorch" not in sys.modules
os.environ["TE_GRAPH_FIXES_DISABLE"] = "graph"
import te_graph_fixes
te_graph_fixes.activate()
assert results() == ("other", 1, "right", 2)
assert statuses() == {{"graph": "disabled", "linear": "applied"}}
purge()
del os.environ["TE_GRAPH_FIXES_DISABLE"]
te_graph_fixes.activate()
assert attempt(importlib.import_module, {name!r}).startswith("FixNotAppliedError")
path = "transformer_engine/pytorch/graph.py"
text = open(path).read()
open(path, "w").write(text.replace('"other"', '"right"'))
assert results() == RIGHT  # the failed import has left no module
assert statuses() == {{"graph": "not-needed", "linear": "applied"}}
""",
        TE_GRAPH_FIXES_STRICT="1",
        PYTHONDONTWRITEBYTECODE="1",  # otherwise, Python would use the bytecode of an earlier text from the same second
    )


def test_after_a_strict_refusal_the_report_says_that_nothing_is_applied(own_world: World) -> None:
    write(own_world.folder, {"te_graph_fixes/fixes/third.py": ADDS_A_MODULE})
    own_world.run("""
import te_graph_fixes, transformer_engine.pytorch as te
te_graph_fixes.deactivate()
te.Linear.forward = lambda self, x: ("theirs", x)
for _ in range(2):
    found = attempt(lambda: te_graph_fixes.activate(strict=True))
    assert found.startswith("FixNotAppliedError: ") and "requires linear" in found, found
    assert set(statuses().values()) == {"failed"}, statuses()
    assert results() == ("wrong", 1, "theirs", 2)
    assert "transformer_engine.pytorch._te_warn_once" not in sys.modules
te_graph_fixes.activate()
assert results() == ("wrong", 1, "theirs", 2)
assert statuses() == {"graph": "failed", "linear": "failed", "third": "applied"}
""")


ADDS_A_MODULE = '''
    from ..fix import Fix

    PATCH = """
    @@ graph.py capture (at its start)
    +from ._te_warn_once import warn_once
    """
    FIX = Fix("symptom", PATCH)
'''


def test_a_te_that_is_imported_past_the_finder_shows_in_the_report(world: World) -> None:
    world.run("""
import te_graph_fixes
class Finder:
    find_spec = staticmethod(importlib.machinery.PathFinder.find_spec)
sys.meta_path.insert(0, Finder)
assert results() == WRONG
assert statuses() == {"graph": "failed", "linear": "failed"}
assert "was not noticed" in te_graph_fixes.report().fixes["graph"].reason
sys.meta_path.remove(Finder)
te_graph_fixes.activate()
assert results() == RIGHT and statuses() == APPLIED
""")


@pytest.mark.parametrize(("strict", "when"), [(False, "before"), (True, "after")])
def test_a_failure_of_ours_leaves_te_as_it_was(world: World, strict: bool, when: str) -> None:
    out = world.run(f"""
if {when!r} == "after":
    import transformer_engine.pytorch
os.environ["TE_GRAPH_FIXES"] = "off"
import te_graph_fixes
from te_graph_fixes.patching import installation as engine
del os.environ["TE_GRAPH_FIXES"]
install, calls = engine.Installation._install, []
def fail(*arguments):
    calls.append(arguments)
    if len(calls) % 2 == 0:
        raise RuntimeError("injected")
    install(*arguments)
engine.Installation._install = fail
for _ in range(2):
    found = attempt(te_graph_fixes.activate, None, None, {strict})
    if {when!r} == "before":
        found = attempt(importlib.import_module, "transformer_engine.pytorch")
    if {strict}:
        assert "RuntimeError: injected" in found, found
    assert len(calls) >= 2
    assert statuses() == {{"graph": "failed", "linear": "failed"}}
    if not {strict}:
        assert results() == WRONG
engine.Installation._install = install
te_graph_fixes.activate()
assert results() == RIGHT
assert statuses() == APPLIED
""")
    assert out.count("TEGraphFixesWarning") == (0 if strict else 1)


SETTINGS = {
    "off": ("off", "", "wrong wrong", "disabled disabled"),
    "on": ("on", "", "right right", "applied applied"),
    "one": ("linear", "", "wrong right", "disabled applied"),
    "one disabled": ("on", "graph", "wrong right", "disabled applied"),
    "its requirement disabled": ("on", "linear", "wrong wrong", "disabled disabled"),
    "named and disabled": (" graph,linear,", "graph", "wrong right", "disabled applied"),
    "named without its requirement": ("graph", "", "right right", "applied applied"),
    "named, its requirement disabled": ("graph", "linear", "wrong wrong", "disabled disabled"),
}


def test_the_settings_choose_the_fixes(world: World) -> None:
    """The environment variables and the arguments of `activate` select the same fixes."""
    out = world.run(f"""
import te_graph_fixes
for name, (switch, disable, values, expected) in {SETTINGS}.items():
    ids = [word.strip() for word in switch.split(",") if word.strip()]
    only = None if switch == "on" else [] if switch == "off" else ids
    for by in ("variables", "arguments"):
        variables = {{"TE_GRAPH_FIXES": switch, "TE_GRAPH_FIXES_DISABLE": disable}} if by == "variables" else {{}}
        os.environ.update(variables)
        te_graph_fixes.activate(*(() if variables else (only, list(filter(None, disable.split(","))))))
        assert results()[::2] == tuple(values.split()), (name, by, results())
        assert " ".join(statuses().values()) == expected, (name, by, statuses())
        if name == "its requirement disabled":
            assert te_graph_fixes.report().fixes["graph"].reason.startswith("requires linear, which is disabled")
        for variable in variables:
            del os.environ[variable]
""")
    assert "ERROR" not in out


def test_a_stand_in_for_te_is_said_once(world: World) -> None:
    out = world.run("""
from unittest.mock import MagicMock
sys.modules["transformer_engine"] = sys.modules["transformer_engine.pytorch"] = MagicMock()
import te_graph_fixes
assert set(statuses().values()) == {"failed"}
found = attempt(te_graph_fixes.activate, None, None, True)
assert found.startswith("FixNotAppliedError: 2 fixes that TransformerEngine (ve"), found
""")
    assert out.count("\n  graph, linear: transformer_engine in sys.modules is a stand-in without files") == 1
    assert out.count("TEGraphFixesWarning") == 1


def test_a_te_without_pytorch_has_nothing_to_correct(own_world: World) -> None:
    shutil.rmtree(own_world.folder / "transformer_engine" / "pytorch")
    (own_world.folder / "transformer_engine" / "__init__.py").write_text("")
    own_world.run("""
import te_graph_fixes, transformer_engine
assert set(statuses().values()) == {"pending"}
from te_graph_fixes.commands.cli import main
assert main(["status"]) == 0
assert main(["diff"]) == 0
""")


@pytest.mark.parametrize("first", ["transformer_engine", "te_graph_fixes"])
def test_the_warning_names_the_users_line_and_the_report(own_world: World, first: str) -> None:
    path = own_world.folder / GRAPH
    path.write_text(SHAPES["missing"](path.read_text()))
    others = "import te_graph_fixes, transformer_engine\n"
    (own_world.folder / "late.py").write_text(f"import {first}\n\n{others}")
    done = python("late.py", cwd=own_world.folder)
    assert (done.returncode, done.stderr.count("TEGraphFixesWarning")) == (0, 1), done.stderr
    assert "late.py:3: TEGraphFixesWarning: 1 fix that TransformerEngine" in done.stderr
    assert "  te-graph-fixes issue\n" in done.stderr


def test_the_report_as_plain_data_and_as_a_table(world: World) -> None:
    out = world.run("""
import json, te_graph_fixes
results()
found = json.loads(json.dumps(te_graph_fixes.report().as_dict()))
assert found["te_version"] == "2.12.0+vendor"
assert found["te_graph_fixes_version"] == te_graph_fixes.__version__
assert found["fixes"]["graph"] == {
    "status": "applied",
    "reason": "Bug: it is wrong",
    "upstream": ["https://link"],
    "targets": ["transformer_engine.pytorch.graph"],
    "earlier_graphs": 0,
}
print(te_graph_fixes.report())
""")
    title, *lines = out.splitlines()
    assert title == f"te-graph-fixes {te_graph_fixes.__version__}, TransformerEngine 2.12.0+vendor"
    expected = [[fix, "applied", "Bug: it is wrong"] for fix in ("graph", "linear")]
    assert [line.split(None, 2) for line in lines] == expected


def test_a_copy_of_te_graphs_under_another_name_is_said(world: World) -> None:
    """The report and a warning name the module with the copy."""
    out = world.run(
        """
import types, warnings
import te_graph_fixes
copy = sys.modules["hotfix.graph"] = types.ModuleType("hotfix.graph")
exec("def _make_graphed_callables(): pass", vars(copy))
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import transformer_engine.pytorch
print(te_graph_fixes.report().as_dict()["copies"], *[each.message for each in warned], te_graph_fixes.report())
"""
    )
    said = "hotfix.graph is a copy of TransformerEngine's graph.py. The fixes do not apply to graphs that it captures."
    assert out.startswith(f"['hotfix.graph'] {said} ")
    assert out.count(said) == 2


def test_no_syntax_tree_of_te_stays_in_memory(world: World) -> None:
    """A syntax tree in memory would slow down every later garbage collection."""
    world.run("""
import ast, gc
import te_graph_fixes
assert results() == RIGHT
gc.collect()
assert not [thing for thing in gc.get_objects() if isinstance(thing, ast.Module)]
""")
