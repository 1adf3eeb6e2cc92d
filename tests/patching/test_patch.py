"""Test the edits and the errors of semantic patches."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_graph_fixes.fix import Assessment, Fix
from te_graph_fixes.patching import PACKAGE
from te_graph_fixes.patching.installation import Change, InstallationError, patched
from te_graph_fixes.patching.patch import edits, read
from te_graph_fixes.patching.rewriting import PatchError
from te_graph_fixes.patching.source import ModuleSource, Source, UnrecognizedError
from te_graph_fixes.status import Verdict

CODE = f"{PACKAGE}.code"


def source_of(text: str, version: str | None = None) -> Source:
    """Return the source of a TE that consists of one module with this ``text``."""
    return Source("nowhere", version, {CODE: ModuleSource(CODE, "code.py", text)})


def function(body: str) -> str:
    return "def run(a, b, c, *xs):\n" + textwrap.indent(textwrap.dedent(body), "    ")


def applied(text: str, *patches: str) -> str:
    """Return the text with the edits of independent patches."""
    source = source_of(text)
    changes = {str(number): Change(edits=tuple(edits(source, patch))) for number, patch in enumerate(patches)}
    return patched(source, changes)[CODE][1]


def hunk(change: str, notes: str = "") -> str:
    return f"@@ code.py run{notes}\n{change.rstrip()}\n"


# A marked line consists of a mark, an indent and a line of code. Before a patch, all assignments have different names.

Marked = tuple[str, int, str]
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "c", "1", "None"]),
    lambda part: st.one_of(
        st.tuples(part, part).map(lambda parts: f"run({', '.join(parts)})"),
        st.tuples(part, part).map(lambda parts: f"({parts[0]} and {parts[1]})"),
        st.tuples(part, part).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(part, part, part).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
        part.map(lambda each: f"-{each}" if each.startswith("(") else f"-({each} or a)"),
        part.map(lambda each: f"run(*xs, key={each})"),
    ),
    max_leaves=4,
)
HEADS = st.builds(
    lambda form, each: form.format(each), st.sampled_from(["if {}:", "for x in {}:", "with {}:"]), EXPRESSIONS
)


@st.composite
def blocks(draw: st.DrawFn, names: Iterator[int], depth: int = 0) -> list[Marked]:
    """Draw the marked lines of a block. The first and the last statement of the block are unchanged."""
    lines: list[Marked] = [(" ", depth, f"t{next(names)} = {draw(EXPRESSIONS)}")]
    kinds = ["keep", "insert", "delete", "change", "other"] + ["block", "new head", "new block"] * (depth < 2)
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=5)):
        name, first = f"t{next(names)}", draw(EXPRESSIONS)
        second = draw(EXPRESSIONS.filter(first.__ne__))
        if kind == "keep":
            lines.append((" ", depth, f"{name} = {first}"))
        if kind in ("delete", "change", "other"):
            lines.append(("-", depth, f"{name} = {first}"))
        if kind in ("insert", "change"):
            lines.append(("+", depth, f"{name} = {second}"))
        if kind == "other":
            lines += [("+", depth, "# It is deleted."), ("+", depth, f"del {name}")]
        if kind in ("block", "new head", "new block"):
            inner = draw(blocks(names, depth + 1))
            heads = {"block": " ", "new head": "-+", "new block": "+"}[kind]
            head = draw(HEADS)
            other_head = draw(HEADS.filter(head.__ne__))
            lines += [(mark, depth, other_head if mark == "+" else head) for mark in heads]
            lines += [("+", *rest) for mark, *rest in inner if mark != "-"] if kind == "new block" else inner  # type: ignore[misc]
    return [*lines, (" ", depth, f"t{next(names)} = {draw(EXPRESSIONS)}")]


def written(lines: list[Marked], marks: str, comments: bool = False) -> str:
    """Return the text of the lines that have one of the ``marks``.

    If ``comments`` is true, unchanged lines end with comments.
    """
    return "".join(
        f"{'    ' * indent}{text}{'  # a (comment' if comments and mark == ' ' else ''}\n"
        for mark, indent, text in lines
        if mark in marks
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_patch_makes_the_text_of_its_other_side(data: st.DataObject) -> None:
    lines = data.draw(blocks(iter(range(1000))))
    patch = hunk("".join(f"{mark}{'    ' * indent}{text}\n" for mark, indent, text in lines))
    before, after = (function(written(lines, marks, comments=True)) for marks in (" -", " +"))
    if before == after:
        assert edits(source_of(before), patch) == []
        return
    assert applied(before, patch) == after
    if "+" in {mark for mark, *_ in lines}:  # the patch must not edit its own result again
        with pytest.raises(UnrecognizedError):
            edits(source_of(after), patch)


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        (" a = 1\n", "line 1: expected a line that begins"),
        ("@@ code.py run\n a = 1\nx = 1\n", "line 3: expected a line that begins"),
        ("@@ code.py run\n a = 1\n@ run\n", "line 3: expected a line that begins"),
        ("@@\n a = 1\n", "line 1: expected `@@ FILE.py PLACE"),
        ("@@ code run\n a = 1\n", "line 1: expected `@@ FILE.py PLACE"),
        ("@@ code.py run (twice)\n a = 1\n", "line 1: expected `@@ FILE.py PLACE"),
        ("@@ code.py run\n\n@@ code.py run\n a = 1\n", "line 1: a pattern must not be empty"),
        ("@@ code.py run\n+a = 1\n", "line 1: a pattern must not be empty"),
        ("@@ code.py run\n # nothing\n", "line 1: a pattern must not be empty"),
        ("@@ code.py run\n if a:\n     ...\n+    b = 1\n c = 1\n", "line 4: no statement of the same block"),
        ("@@ code.py run\n f(\n     a,\n+)\n+g(\n     b,\n )\n", "line 4: no statement of the same block"),
        ("@@ code.py run\n-a = f(...)\n+a = f(*..., 1)\n", "line 3: `...` and `ANY` have no known text"),
    ],
)
def test_errors_of_a_patch_name_its_line(patch: str, error: str) -> None:
    with pytest.raises(PatchError, match=error):
        read(patch)


def test_the_examples_of_the_manual_can_be_read() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "maintainers" / "adding-a-fix.md").read_text()
    manual = manual.partition("## Semantic patches")[2]
    examples = re.findall(r"^```diff\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for example in [*examples, manual.partition('UPSTREAM = """')[2].partition('"""')[0]]:
        read(example)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ("x = f(a)", "-f(a)\n+f(a, b)", "x = f(a, b)"),
        ("x = f((b),  a)", "-f(b, ANY)\n+f(c, ANY)", "x = f(c,  a)"),
        ("x = f(a,  b)", "-x = f(a, ...)\n+x = f(a, ...) if (b) else a", "x = f(a,  b) if (b) else a"),
        ("x = (f(a))", "-x = f(...)\n+x = b or f(...)", "x = b or (f(a))"),
        ("x = c(a, k=1, n=2)", "-x = c(a, n=2, k=1)\n+x = c(b, n=2, k=1)", "x = c(b, k=1, n=2)"),
        ("x = not (a)", "-not a\n+not (a or b)", "x = not (a or b)"),
        ("x = a and (b or c)", "-a and (b or c)\n+a and (b or c) and a", "x = a and (b or c) and a"),
        ("with a: pass", "-with a:\n+with b, a:\n     ...", "with b, a: pass"),
        ("with b, a as x: pass", "-with ..., a as x:\n+with c, ..., a as x:\n     ...", "with c, b, a as x: pass"),
        ("with b, a as x: pass", "-with ..., a as x:\n+with ..., c, a as x:\n     ...", "with b, c, a as x: pass"),
        ("with b, (a): pass", "-with ..., a:\n+with ..., a, c as x:\n     ...", "with b, (a), c as x: pass"),
        ("x = a[b]", "-ANY_X[b]\n+ANY_X[b, ANY_X]", "x = a[b, a]"),
        ("x = a  # why", "-x = a\n+x = b", "x = b  # why"),
        ("x = a", "-x = a\n+x = b  # why", "x = b  # why"),
        ("x = a", "-x = a\n+# why\n+x = b", "# why\nx = b"),
        ("x = a", " x = a\n+\n+y = b", "x = a\n\ny = b"),
        ("x = 'ü', a", "-'ü', a\n+'ü', b", "x = 'ü', b"),
        (
            "if a:\n    x = 1\nelse:\n    x = 2",
            " if a:\n     ...\n else:\n+    y = 1\n     x = 2",
            "if a:\n    x = 1\nelse:\n    y = 1\n    x = 2",
        ),
        (
            "try:\n    x = 1\nexcept E:\n    x = 2",
            " try:\n     ...\n-except E:\n+except (E, F):\n     ...",
            "try:\n    x = 1\nexcept (E, F):\n    x = 2",
        ),
        (
            "if a:\n    x = 1\nelif (b):\n    x = 2  # why",
            "-if a:\n-    ...\n-elif b:\n+if c:\n     x = 2",
            "if c:\n    x = 2  # why",
        ),
        ("# why\nx = a\ny = b", "-x = a\n y = b", "y = b"),
        ("x = a or b", "-x = ANY_X\n+x = f(c, k=ANY_X)", "x = f(c, k=a or b)"),
        ("if a:\n    x = 1", " if a:\n+    y = 1\n     ...", "if a:\n    y = 1\n    x = 1"),
        ("x = f(\n    a,\n)", "-x = ANY_X\n+with b:\n+    x = ANY_X", "with b:\n    x = f(\n    a,\n)"),
        ("for x in (a)[0]:\n    pass", "-for x in a[0]:\n+for x, y in a[1]:\n     ...", "for x, y in a[1]:\n    pass"),
        ("x = -(a and b)", "-x = -(a and b)\n+x = -(-(a or b) or b)", "x = -(-(a or b) or b)"),
        ("x = (a + b) * c", "-a + b\n+a + b * c", "x = (a + b * c) * c"),
        ("x = (a + b)", "-x = a + b\n+x = (a + b) * c", "x = (a + b) * c"),
    ],
)
def test_only_what_differs_is_edited(before: str, change: str, after: str) -> None:
    text = "E = F = f = 1\n\n\n" + function(before + "\n")
    assert applied(text, hunk(change)) == "E = F = f = 1\n\n\n" + function(after + "\n")


@pytest.mark.parametrize("start", ["", '"""Zürich."""\n', "x = 'a\x0cb'\n", "# \u2028 separator\n\x0c\n"])
@pytest.mark.parametrize("indent", ["    ", "\t"])
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("-a = 1\n+del a\n+b = 3", "a = (\n{0}{0}1)  # why", "del a\n{0}b = 3"),
        ("+b = 3\n+c = 4\n a = 1", "# above\n{0}a = 1", "# above\n{0}b = 3\n{0}c = 4\n{0}a = 1"),
        (" a = 1\n+b = 3", "a = (\n{0}{0}1)  # why", "a = (\n{0}{0}1)  # why\n{0}b = 3"),
        ("-a = 1\n c = 2", "# above\n{0}# too\n{0}a = 1  # why\n{0}c = 2", "c = 2"),
        ("-'ü'\n+'ß'", "a = ('ä', 'ü', x)  # ö", "a = ('ä', 'ß', x)  # ö"),
    ],
)
def test_edits_keep_the_rest_of_the_text(start: str, indent: str, change: str, before: str, after: str) -> None:
    frame = start + "def run(x):\n" + indent + "é = 1\n" + indent + "{}\n" + indent + "return é\n"
    assert applied(frame.format(before.format(indent)), hunk(change)) == frame.format(after.format(indent))


@pytest.mark.parametrize("change", ["-a = 1\n+del a", "+b = 3\n a = 1", " a = 1\n+b = 3", "-a = 1"])
@pytest.mark.parametrize("line", ["a = 1; b = 2", "b = 2; a = 1", "if x: a = 1"])
def test_a_statement_that_shares_its_line_is_unrecognized(change: str, line: str) -> None:
    with pytest.raises(UnrecognizedError, match=f"statement on lines of its own in run .*, found `{line}`"):
        edits(source_of(f"def run(x):\n    {line}\n"), hunk(change))


def test_patches_are_composed_on_one_statement() -> None:
    text = function("with a, b as x:\n    y = run(a, b)\n")
    patches = [
        hunk("-with a, ...:\n+with c, a, ...:\n     ..."),
        hunk("-with ..., b as x:\n+with ..., run(b) as x:\n     ..."),
        hunk("-with ..., ANY as x:\n+with ..., ANY as x, d:\n     ..."),
        hunk("-y = run(a, ...)\n+y = run(a, ...) if c else b"),
        hunk("-run(ANY, b)\n+run(ANY, [b])"),
        hunk(" with ANY_A, ANY_B as x:\n+    z = ANY_A\n     y = ANY"),
    ]
    expected = function("with c, a, run(b) as x, d:\n    z = a\n    y = run(a, [b]) if c else b\n")
    assert applied(text, *patches) == applied(text, *reversed(patches)) == expected


TEXT = function("x = a\nfor y in b:\n    x = run(x)\n")


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        (hunk(" x = b"), r"looked for `x = b` in run \(code.py:1\), found none \(line 1 of the patch\)"),
        (hunk(" for y in b:\n     x = a"), "looked for `x = a` in run .*, found none"),
        (hunk(" x = a\n for y in c:\n     x = a"), "looked for `for y in c:` in run .*, found none"),
        (hunk(" x = ANY"), "looked for exactly 1 `x = ANY` in run .*, found 2 .lines 2, 4. .line 1 of the patch"),
        (hunk(" x = a", " (2 times)"), "exactly 2 `x = a` .*, found 1"),
        (hunk(" x = b", " (at least once)"), "found none"),
        (hunk(" x = a", " (0 times)"), "exactly 0 `x = a` .*, found 1"),
        (hunk("-b\n+x = run(x)"), "no `x = run.x.` in run .*, found it already"),
        (hunk(" for y in b:\n+    x = run(x)\n     ..."), "no `for y in b:` in run .*, found it already"),
        (hunk(" x = a") + "@@ (or)\n x = run(x)", "one of 2 hunks in run, found 2"),
        (hunk(" x = b") + "@@ (or)\n x = c", "line 1 of the patch.; or .*line 3 of the patch"),
        (hunk(" x = a") + "@@ code.py other\n x = c", "one definition of other .*line 3 of the patch"),
        (hunk(" x = a") + "@@ code.py run.other\n x = c", "one definition of run.other .*line 3 of the patch"),
        (hunk(" x = a").replace("code", "other"), "module .*other .*line 1 of the patch"),
    ],
)
def test_a_patch_that_does_not_fit_says_which_hunk(patch: str, error: str) -> None:
    source = source_of(TEXT)
    source._modules[f"{PACKAGE}.other"] = None
    with pytest.raises(UnrecognizedError, match=error):
        edits(source, patch)


def test_a_patch_cannot_edit_the_same_text_twice() -> None:
    with pytest.raises(InstallationError, match=r"0 and 0 edit the same text at code\.py:2"):
        applied(TEXT, hunk("-x = a\n+x = b") + "@@\n-a\n+c")


@pytest.mark.parametrize(
    ("patch", "count"),
    [
        (hunk("-run(x)\n+run(x, b)"), 1),
        (hunk("-x = ANY_X\n+x = [ANY_X]", " (2 times)"), 2),
        (hunk("-x = ANY_X\n+x = -ANY_X", " (at least once)"), 2),
        ("@@ code.py other (if there)\n+y = 1\n x = 1", 0),
        (hunk(" x = c\n+y = c") + "@@ (or)\n x = a\n+y = a", 1),
        (hunk(" x = a\n+new = x") + "@@ code.py run\n x = run(x)\n+y = new", 2),
        (hunk("+y = a", " (at its start)"), 1),
    ],
)
def test_notes_and_places(patch: str, count: int) -> None:
    assert len(edits(source_of(TEXT), patch)) == count


def test_lines_at_the_start_go_below_the_docstring() -> None:
    text = function('"""What it is."""\n# why\nx = a\n')
    assert applied(text, hunk("+y = a", " (at its start)")) == function('"""What it is."""\n# why\ny = a\nx = a\n')


def test_places_are_nested() -> None:
    text = "class A:\n    def f(self):\n        def g():\n            x = 1\n        return g\n\nx = 1\n"
    patched = applied(text, "@@ code.py A.f.g\n-x = 1\n+x = 2\n")
    assert patched == text.replace("            x = 1", "            x = 2")


def test_a_fix_is_a_patch_or_upstreams() -> None:
    defect, upstream = hunk("-x = a\n+x = b"), hunk(" x = c")
    fix = Fix("", defect, corrected=[(upstream, "c is right")])

    def verdict(text: str) -> Assessment:
        return fix.assess(source_of(function(text)))

    assert verdict("x = a\n").verdict == Verdict.APPLICABLE
    assert verdict("x = c\n").verdict == Verdict.NOT_NEEDED
    assert verdict("x = b\n").verdict == Verdict.UNRECOGNIZED
    both = verdict("x = a\nx = c\n")
    assert (both.verdict, "found both" in both.reason) == (Verdict.UNRECOGNIZED, True)
