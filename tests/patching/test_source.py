"""Test `Source`: the folder and version of TransformerEngine (TE), modules, definitions, and matches of patterns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from te_graph_fixes.fix import Fix
from te_graph_fixes.patching.matching import Pattern
from te_graph_fixes.patching.source import Definition, ModuleSource, Source, UnrecognizedError
from te_graph_fixes.status import Verdict

CODE = "transformer_engine.pytorch.code"


def tree(folder: Path, version: str = "2.12.0+5671fd36", name: str = "transformer_engine") -> Path:
    """Write a source tree with one module and the metadata of a distribution to ``folder``, and return ``folder``."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text("def run(x):\n    return x\n")
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def definition(text: str, qualname: str = "run") -> Definition:
    return ModuleSource(CODE, "code.py", text).definition(qualname)


def as_pattern(text: str) -> Pattern:
    return Pattern(text, ast.parse(text).body)


def test_a_tree_is_named_by_its_parent_or_itself(tmp_path: Path) -> None:
    folder = tree(tmp_path)
    assert Source.at(folder) == Source.at(folder / "transformer_engine")
    assert Source.at(folder).module(CODE).text == "def run(x):\n    return x\n"


@pytest.mark.parametrize("name", ["transformer_engine", "transformer_engine_rocm7", "transformer_engine_rocm_torch"])
@pytest.mark.parametrize("version", ["2.14.0+71bbefbf", "2.20.0.dev0+abc", "2.16.1"])
def test_the_version_is_that_of_the_metadata(tmp_path: Path, name: str, version: str) -> None:
    assert Source.at(tree(tmp_path, version, name)).version == version


def test_the_metadata_of_te_precedes_that_of_its_parts(tmp_path: Path) -> None:
    for name, version in (("transformer_engine_cu12", "2.11.0"), ("transformer_engine_torch", "2.10.0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    assert Source.at(tree(tmp_path)).version == "2.12.0+5671fd36"


def test_the_version_of_a_checkout_is_in_its_version_file(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert Source.at(tmp_path).version is None
    (tmp_path / "build_tools").mkdir()
    (tmp_path / "build_tools" / "VERSION.txt").write_text("2.21.0.dev0\n")
    assert Source.at(tmp_path).version == "2.21.0.dev0"


@pytest.mark.parametrize("content", [b"Version: \xff\xfe\n", b""])
def test_metadata_that_cannot_be_read_has_no_version(tmp_path: Path, content: bytes) -> None:
    next(tree(tmp_path).glob("*.dist-info/METADATA")).write_bytes(content)
    assert Source.at(tmp_path).version is None


def test_a_module_that_is_missing(tmp_path: Path) -> None:
    source = Source.at(tree(tmp_path))
    assert source.find("transformer_engine.pytorch.other") is None
    with pytest.raises(
        UnrecognizedError, match=r"looked for module transformer_engine\.pytorch\.other in .*, found none"
    ):
        source.module("transformer_engine.pytorch.other")


@pytest.mark.parametrize(
    "content", [b"def run(:\n", b"\xff\xfe bad", b"# coding: no-such\nx = 1\n", b"def run(x): return 1\0\n"]
)
def test_a_module_that_cannot_be_read_or_parsed_is_unrecognized(tmp_path: Path, content: bytes) -> None:
    (tree(tmp_path) / "transformer_engine" / "pytorch" / "code.py").write_bytes(content)
    found = Fix("", "@@ code.py run\n return x\n").assess(Source.at(tmp_path))
    assert found.verdict == Verdict.UNRECOGNIZED
    assert found.reason.startswith("reading the source failed: ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("@d\n# why\n@e\ndef f(\n    x,\n) -> int:\n    return x\n# after\n", "f"),
        ("class A:\n    def f(self):\n        '''\n  x\n        '''\n        return 1\n", "A.f"),
        ("class A:\n    @d(\n        1,\n    )\n    def f(self): pass\n", "A.f"),
        ("class A:\n    x = '''\n    def f(self): pass\n'''\n    def f(self): return 2\n", "A.f"),
        ("class A:\n    x = 1; f = 2\n\n    def f(self): return 2\n\n    f = property(f)\n", "A.f"),
        ("if x:\n    def f(): pass\n", None),
        ("class A:\n    if x:\n        def f(self): pass\n", None),
        ("class A:\n    def f(self): pass\nclass A:\n    def f(self): pass\n", None),
        ("class A:\n    @property\n    def f(self): pass\n    @f.setter\n    def f(self, x): pass\n", None),
        ("async def f(): pass\n", None),
    ],
)
def test_what_counts_as_a_definition(text: str, found: str | None) -> None:
    module = ModuleSource(CODE, "code.py", text)
    assert [name for name in ("f", "A.f") if name in module.definitions] == ([found] if found else [])


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a = ANY", "a = 1\n    a = 2", 2),
        ("a = None", "a = (\n        None  # a comment\n    )", 1),
        ("f(ANY, k=1)", "x = f(g(2), k=1)", 1),
        ("f(ANY, k=1)", "x = f(g(2), 3, k=1)", 0),
        ("f(ANY)", "x = f(f(1))", 2),
        ("a = 1", "a = True", 0),
        ("a = 'x'", 'a = "x"', 1),
        ("if x: ...", "if x:\n        a = 1\n        b = 2", 1),
        ("if x: ...", "if x:\n        a = 1\n    else:\n        b = 2", 0),
        ("if x:\n    ...\n    b = 2", "if x:\n        b = 2\n        a = 1", 0),
        ("a = 1\nb = 2", "a = 1\n    b = 2\n    c = 3", 1),
        ("a = 1\nb = 2", "a = 1\n    c = 3\n    b = 2", 0),
        ("a = 1\n...\nb = 2", "a = 1\n    c = 3\n    d = 4\n    e = 5\n    b = 2\n    f = 6", 1),
        ("a = 1\n...\nb = 2", "a = 1\n    b = 2", 1),
        ("a = 1\n...\nb = 2", "a = 1\n    b = 2\n    b = 2", 2),
        ("f(ANY)", "x = f(*args)", 0),
        ("f(*ANY)", "x = f(*args)", 1),
        ("f(ANY)", "x = f(**args)", 0),
        ("ANY_A = ANY_A + 1", "x[i] = x[i] + 1", 1),
        ("ANY_A = ANY_A + 1", "x[i] = x[j] + 1", 0),
        ("ANY = ANY + 1", "x[i] = x[j] + 1", 1),
        ("a = ANY_A\n...\nb = ANY_A", "a = 1\n    b = 2\n    a = 2\n    b = 1", 1),
        ("if x:\n    ...\n    a = ANY_A\n    ...", "if x:\n        a = 1\n        a = 2", 2),
        ("if x:\n    ...\n    a = ANY\n    ...", "if x:\n        a = 1\n        a = 2", 1),
        ("a = 1", "try:\n        pass\n    except E:\n        a = 1\n    finally:\n        a = 1", 2),
        ("a = 1", "with f() as g:\n        a = 1", 1),
    ],
)
def test_patterns_match_by_syntax(pattern: str, text: str, matches: int) -> None:
    assert len(definition(f"def run(x):\n    {text}\n").matches(as_pattern(pattern))) == matches
