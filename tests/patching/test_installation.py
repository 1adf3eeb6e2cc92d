"""Test on a stand-in package that every kind of function is fixed in place and reverted."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wrapt

from te_graph_fixes.patching.installation import Change, Installation, InstallationError, patched
from te_graph_fixes.patching.matching import Pattern
from te_graph_fixes.patching.source import Edit, Source

CODE = "standin.code"


def change(edits: Iterable[Edit], new_modules: Mapping[str, str] | None = None) -> Change:
    return Change(edits=tuple(edits), new_modules=new_modules or {})


class StandIn:
    """A package with one module, imported from a file."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(str(folder / "standin"), "1.0")
        self.module: ModuleType = importlib.import_module(CODE)

    def edit(self, qualname: str, old: str, new: str) -> Change:
        """Return a `Change` that replaces the only match of ``old`` in a function with ``new``, at the same indent."""
        module = self.source.module(CODE)
        (match,) = module.definition(qualname).exactly(1, Pattern(old, ast.parse(old).body))
        start, end = module.span(match.nodes[0])
        indent = " " * (start - module.text.rindex("\n", 0, start) - 1)
        return change([Edit(CODE, start, end, new.replace("\n", f"\n{indent}"))])

    def insert(self, qualname: str, below: str, text: str) -> Change:
        """Return a `Change` that inserts ``text`` before ``below``, which must occur once in the function."""
        (edit,) = self.edit(qualname, below, f"{text}\n").edits
        return change([edit._replace(end=edit.start)])

    def add(self, after: str, text: str) -> Change:
        """Return a `Change` that adds the definition ``text`` below the definition ``after``."""
        module = self.source.module(CODE)
        node = module.definition(after).node
        end = module.starts[(node.end_lineno or 0) + 1]
        return change([Edit(CODE, end, end, "\n" + textwrap.indent(text, " " * node.col_offset) + "\n")])

    def install(self, *verdicts: Change, **named: Change) -> Installation:
        fixes = {**{f"fix-{i}": v for i, v in enumerate(verdicts)}, **named}
        installation = Installation(self.source, fixes)
        installation.install()
        assert all(map(installation.is_live, fixes))
        return installation


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StandIn]]:
    def make(content: str | bytes) -> StandIn:
        (tmp_path / "standin").mkdir()
        (tmp_path / "standin" / "__init__.py").write_text("")
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "standin" / "code.py").write_bytes(data)
        monkeypatch.syspath_prepend(tmp_path)
        return StandIn(tmp_path)

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "standin"]:
        del sys.modules[name]


METHODS = """
import functools

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ("decorated", function(*args, **kwargs))
    return wrapper

class Base:
    def plain(self, x):
        return ("base", x)

class Module(Base):
    scale = 10

    def __init__(self):
        self.__hidden = 7

    def mangled(self):
        result = self.__hidden
        return result

    def plain(self, x):
        found = super().plain(x)
        return found

    @decorate
    def decorated(self, x, *, y=2):
        result = x * y
        return result

    @staticmethod
    def static(x):
        result = x
        return result

    @classmethod
    def of_class(cls, x):
        result = cls.scale * x
        return result

    @functools.lru_cache
    def cached(self, x):
        result = x
        return result

    def closure(self, x):
        def inner(y):
            result = x + y
            return result
        return inner
"""


@pytest.mark.parametrize(
    ("name", "old", "new", "call", "before", "after"),
    [
        ("mangled", "result = self.__hidden", "result = -self.__hidden", lambda m: m.mangled(), 7, -7),
        ("plain", "found = ANY", "found = super().plain(-x)", lambda m: m.plain(1), ("base", 1), ("base", -1)),
        (
            "decorated",
            "result = x * y",
            "result = -x * y",
            lambda m: m.decorated(3),
            ("decorated", 6),
            ("decorated", -6),
        ),
        ("static", "result = x", "result = -x", lambda m: m.static(3), 3, -3),
        ("of_class", "result = cls.scale * x", "result = -cls.scale * x", lambda m: m.of_class(3), 30, -30),
        ("cached", "result = x", "result = -x", lambda m: m.cached.__wrapped__(m, 3), 3, -3),
        ("closure", "result = x + y", "result = x - y", lambda m: m.closure(5)(3), 8, 2),
    ],
)
def test_every_kind_of_method_is_corrected_in_place(
    standin: Callable[..., StandIn], name: str, old: str, new: str, call: Callable[[Any], Any], before: Any, after: Any
) -> None:
    package = standin(METHODS)
    held, instance = vars(package.module.Module)[name], package.module.Module()
    assert call(instance) == before
    installation = package.install(package.edit(f"Module.{name}", old, new))
    assert vars(package.module.Module)[name] is held
    assert call(instance) == after
    installation.revert()
    assert call(instance) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_of_another_tool_stays(standin: Callable[..., StandIn], when: str) -> None:
    package = standin(METHODS)

    def trace(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ("traced", wrapped(*args, **kwargs))

    def wrap() -> None:
        wrapt.wrap_function_wrapper(CODE, "Module.mangled", trace)

    if when == "before":
        wrap()
    installation = package.install(package.edit("Module.mangled", "result = self.__hidden", "result = 8"))
    if when == "after":
        wrap()
    assert installation.is_live("fix-0")
    assert package.module.Module().mangled() == ("traced", 8)
    wrapper = package.module.Module.mangled
    package.module.Module.mangled = wrapper.__wrapped__
    assert installation.is_live("fix-0")
    assert package.module.Module().mangled() == 8
    package.module.Module.mangled = wrapper
    installation.revert()
    assert package.module.Module().mangled() == ("traced", 7)


def test_a_function_that_has_run_often_is_recognised(standin: Callable[..., StandIn]) -> None:
    package = standin("def run(n):\n    t = 0\n    for i in range(n):\n        t += [i, 2.5][0] * 2\n    return t\n")
    for _ in range(2000):
        package.module.run(5)
    package.install(package.edit("run", "t = 0", "t = 1"))
    assert package.module.run(5) == 21


@pytest.mark.parametrize(
    "content",
    [
        "# -*- coding: latin-1 -*-\ndef run(x):\n    text = 'é'; y = 'ü' + x\n    return y\n".encode("latin-1"),
        b"\xef\xbb\xbfdef run(x):\n    y = '\xc3\xbc' + x\n    return y\n",
        "def run(x):\r\n    y = 'ü' + x\r\n    return y\r\n".encode(),
        "def run(x):\n\ty = 'ü' + x\n\treturn y\n".encode(),
        "FORM = 'a\x0cb'\n\x0c\ndef run(x):\n    y = 'ü' + x\n    return y\n".encode(),
        "'''\u2028'''\ndef run(x):\n    y = 'ü' + x\n    return y".encode(),
        "def other():\n    return '''\na = (\n'''\n\ndef run(x):\n    y = 'ü' + x\n    return y\n".encode(),
        "from __future__ import annotations\ndef run(x: NoSuch) -> Nor:\n    y = 'ü' + x\n    return y\n".encode(),
    ],
    ids=["latin-1", "bom", "crlf", "tabs", "form feed", "no last line break", "string", "future"],
)
def test_any_text_of_a_module_is_corrected(standin: Callable[..., StandIn], content: bytes) -> None:
    package = standin(content)
    assert package.module.run("a") == "üa"
    package.install(package.edit("run", "return y", "return y + 'ß'"))
    assert package.module.run("a") == "üaß"
    assert inspect.getsource(package.module.run).rstrip().endswith("return y + 'ß'")


def test_an_edit_that_needs_another_closure_changes_nothing(standin: Callable[..., StandIn]) -> None:
    package = standin("class A:\n    def run(self):\n        x = 1\n        return x\n")
    with pytest.raises(ValueError, match="requires a code object with 0 free vars, not 1"):
        package.install(package.edit("A.run", "x = 1", "x = super().__hash__()"))
    assert package.module.A().run() == 1


@pytest.mark.parametrize("pattern", ["import sys", "X = 1", "y: int = 0"])
def test_text_outside_of_functions_is_left_alone(standin: Callable[..., StandIn], pattern: str) -> None:
    text = "import sys\nX = 1\nclass A:\n    y: int = 0\n    def run(self):\n        return X\n"
    package = standin(text)
    start = text.index(pattern)
    verdict = change([Edit(CODE, start, start + len(pattern), "other = 1")])
    with pytest.raises(InstallationError, match="is neither in a function nor adds a class method"):
        Installation(package.source, {"fix": verdict})


@pytest.mark.parametrize(
    ("below", "text"),
    [
        ("A.run", "X = 1"),
        ("run", "def added(): pass"),
        ("A.run", "def added(self): pass"),
        ("A.run", "@staticmethod\ndef added(): pass"),
        ("A.run", "@classmethod\ndef added(cls, x=1): pass"),
    ],
)
def test_only_class_methods_without_default_values_are_added(
    standin: Callable[..., StandIn], below: str, text: str
) -> None:
    package = standin("class A:\n    def run(self):\n        return 1\n\ndef run():\n    return 1\n")
    with pytest.raises(InstallationError, match="is neither in a function nor adds a class method"):
        Installation(package.source, {"fix": package.add(below, text)})


def test_the_last_statement_of_a_function_can_go(standin: Callable[..., StandIn]) -> None:
    text = "def run(x):\n    x.append(1)\n    x.append(2)\n"
    package = standin(text)
    package.install(change([Edit(CODE, text.index("    x.append(2)"), len(text), "")]))
    package.module.run(found := [])
    assert found == [1]


@pytest.mark.parametrize(
    "text",
    [
        "@classmethod\ndef added(cls, x):\n    return cls().run() + x + 3",
        "@classmethod\ndef added(cls, x):\n    return cls().__y() + x + 2",
        "@classmethod\ndef added(cls, x):\n    return x * math.floor(3.5)",
    ],
)
def test_class_methods_are_added_and_removed(standin: Callable[..., StandIn], text: str) -> None:
    methods = "    def __y(self):\n        return 2\n    def run(self):\n        return 1\n"
    package = standin(f"import math\nclass A:\n{methods}")
    names = set(vars(package.module.A))
    installation = package.install(change=package.add("A.run", text))
    assert package.module.A.added(2) == 6
    assert installation.is_live("change")
    installation.revert()
    assert set(vars(package.module.A)) == names


def test_a_function_to_be_added_that_somebody_else_has_added_is_reported(standin: Callable[..., StandIn]) -> None:
    package = standin("class A:\n    def run(self):\n        return 1\n")
    package.module.A.added = theirs = lambda self: "theirs"
    added = package.add("A.run", "@classmethod\ndef added(cls): return 'ours'")
    assert set(Installation(package.source, {"fix": added}).failing_changes()) == {"fix"}
    assert vars(package.module.A)["added"] is theirs


def test_insertions_at_one_place_come_in_the_declared_order(standin: Callable[..., StandIn]) -> None:
    package = standin("def run(x):\n    return x\n")
    first = package.insert("run", "return x", "x.append('z')\nx.append('a')")
    second = package.insert("run", "return x", "x.append(1)")
    text = "def run(x):\n    x.append('z')\n    x.append('a')\n    x.append(1)\n    return x\n"
    for before, behind in (("a", "b"), ("b", "a")):
        verdicts = {behind: replace(second, after=(before,)), before: first}
        assert patched(package.source, verdicts)[CODE][1] == text
    package.install(**verdicts)
    assert package.module.run([]) == ["z", "a", 1]


@pytest.mark.parametrize("what", ["function", "code", "class", "module attribute missing"])
def test_what_somebody_has_replaced_is_reported_and_not_touched(standin: Callable[..., StandIn], what: str) -> None:
    package = standin("class A:\n    def run(self):\n        return 1\n\ndef other():\n    return 1\n")
    verdicts = {
        "first": package.edit("A.run", "return 1", "return 2"),
        "second": package.edit("other", "return 1", "return 2"),
    }
    if what == "function":
        package.module.A.run = lambda self: 5
    elif what == "code":
        package.module.A.run.__code__ = (lambda self: 5).__code__
    elif what == "class":
        package.module.A = type("A", (), {"run": lambda self: 5})
    else:
        del package.module.A.run
    reasons = Installation(package.source, verdicts).failing_changes()
    reason = "another package has replaced A.run of standin.code, or its file has changed since the import"
    assert reasons == {"first": reason}
    assert package.module.other() == 1


NEW_MODULE = """
from dataclasses import dataclass

@dataclass
class Plan:
    size: int

    def double(self):
        return 2 * self.size
"""


def with_module(package: StandIn, text: str, other: str = "") -> Change:
    edit = package.edit("run", "return 1", "from standin._plan import Plan\nreturn Plan(2).size")
    modules = {"standin._plan": text, **({"standin._other": other} if other else {})}
    return change(edit.edits, modules)


def test_a_module_is_added_and_removed(standin: Callable[..., StandIn]) -> None:
    package = standin("def run():\n    return 1\n")
    installation = package.install(with_module(package, NEW_MODULE))
    assert package.module.run() == 2
    assert sys.modules["standin"]._plan is sys.modules["standin._plan"]
    source = inspect.getsource(sys.modules["standin._plan"].Plan.double)
    assert source == "    def double(self):\n        return 2 * self.size\n"
    assert inspect.getsource(sys.modules["standin._plan"].Plan.double) == source
    added = sys.modules.pop("standin._plan")
    assert not installation.is_live("fix-0")
    sys.modules["standin._plan"] = added
    assert installation.is_live("fix-0")
    installation.revert()
    assert "standin._plan" not in sys.modules
    assert not hasattr(sys.modules["standin"], "_plan")
    assert package.module.run() == 1


def test_a_module_that_is_added_again_keeps_what_it_holds(standin: Callable[..., StandIn]) -> None:
    """A second installation adds the same module object, unless the module's package was imported again."""
    package = standin("def run():\n    return 1\n")
    added = []
    for _ in range(2):
        installation = package.install(change([], {"standin._plan": "held = []\n"}))
        added.append(sys.modules["standin._plan"])
        installation.revert()
    assert added[0] is added[1]
    for name in ("standin", CODE):
        del sys.modules[name]
    importlib.import_module(CODE)
    package.install(change([], {"standin._plan": "held = []\n"}))
    assert sys.modules["standin._plan"] is not added[0]


def test_a_module_that_raises_leaves_nothing(standin: Callable[..., StandIn]) -> None:
    package = standin("def run():\n    return 1\n")
    fixes = {"fix": with_module(package, NEW_MODULE, "raise ValueError('x')")}
    reasons = Installation(package.source, fixes).failing_changes()
    assert reasons == {"fix": "a support module cannot be imported here: ValueError: x"}
    with pytest.raises(ValueError, match="x"):
        Installation(package.source, fixes).install()
    assert {name for name in sys.modules if name.startswith("standin.")} == {CODE}
    assert set(vars(sys.modules["standin"])) & {"_plan", "_other"} == set()
    assert package.module.run() == 1


@pytest.mark.parametrize("failing", range(3))
def test_a_failure_at_any_step_leaves_nothing(
    standin: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    package = standin(
        "class A:\n    def run(self, x=1):\n        return x\n\ndef run():\n    return 1\n\ndef last():\n    return 1\n"
    )
    verdicts = {
        "a": package.edit("A.run", "return x", "return -x"),
        "b": package.add("A.run", "@classmethod\ndef added(cls): pass"),
        "c": with_module(package, NEW_MODULE),
        "d": package.edit("last", "return 1", "return 2"),
    }
    before = snapshot(package)
    steps = iter(range(10))
    install = Installation._install

    def fail(*args: Any) -> None:
        if next(steps) == failing:
            raise KeyboardInterrupt("injected")
        install(*args)

    monkeypatch.setattr(Installation, "_install", fail)
    installation = Installation(package.source, verdicts)
    with pytest.raises(KeyboardInterrupt, match="injected"):
        installation.install()
    assert snapshot(package) == before


def snapshot(package: StandIn) -> Any:
    module = package.module
    codes = [function.__code__ for function in (module.A.run, module.run, module.last)]
    return codes, set(vars(module.A)), set(vars(sys.modules["standin"])), set(sys.modules)


def test_reverting_leaves_what_others_put_in_place_later(standin: Callable[..., StandIn]) -> None:
    package = standin("class A:\n    def run(self):\n        return 1\n\ndef run():\n    return 1\n")
    installation = package.install(
        package.edit("A.run", "return 1", "return 2"),
        package.add("A.run", "@classmethod\ndef added(cls): pass"),
        with_module(package, NEW_MODULE),
    )

    def theirs(self: object) -> int:
        return 5

    package.module.A.run.__code__ = theirs.__code__
    package.module.A.added = theirs
    module = sys.modules["standin._plan"] = ModuleType("standin._plan")
    assert [installation.is_live(f"fix-{i}") for i in range(3)] == [False, False, False]
    installation.revert()
    assert (package.module.A().run(), package.module.A.added, package.module.run()) == (5, theirs, 1)
    assert sys.modules["standin._plan"] is module


def test_tracebacks_and_inspect_show_the_corrected_lines(standin: Callable[..., StandIn]) -> None:
    text = "class A:\n    x = 1\n\n    def run(self):\n        return 1\n\ndef fails():\n    return 1\n"
    package = standin(text)
    assert inspect.getsource(package.module.fails) == "def fails():\n    return 1\n"
    installation = package.install(
        package.edit("A.run", "return 1", "a = 1\nreturn [a]"),
        package.edit("fails", "return 1", "return {}['missing']"),
    )
    assert inspect.getsource(package.module.A.run) == "    def run(self):\n        a = 1\n        return [a]\n"
    assert inspect.getsource(package.module.A).startswith("class A:\n    x = 1\n")
    assert inspect.getsource(package.module.A.run) == "    def run(self):\n        a = 1\n        return [a]\n"
    with pytest.raises(KeyError) as failure:
        package.module.fails()
    shown = "".join(traceback.format_exception(failure.value))
    assert "File \"<te_graph_fixes>/standin/code.py\", line 9, in fails\n    return {}['missing']\n" in shown
    installation.revert()
    linecache.checkcache()
    assert inspect.getsource(package.module.fails) == "def fails():\n    return 1\n"
    assert inspect.getsource(package.module.A.run) == "    def run(self):\n        return 1\n"
