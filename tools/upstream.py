"""Write the reports to TransformerEngine (TE), ready to send: ``python -m tools.upstream CHECKOUT FOLDER [FIX ...]``.

The tool creates in FOLDER a folder for each report that applies to the checkout, with the text (``report.md``), the
patch of the fix (``fix.patch``), and a patch that adds its test to tests/pytorch/test_cuda_graphs.py (``test.patch``).
``git apply`` applies these patches. ``fix.patch`` does not contain the fixes that its fix requires. They are in
``required.patch``, and the first line of the report names them. New modules get the header of the checkout's graph.py.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from te_graph_fixes.decision import with_required
from te_graph_fixes.fix import Assessment
from te_graph_fixes.fixes import assess
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.source import Source

from .reduced import import_of, reduced

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "upstream"
TEST_FILE = "tests/pytorch/test_cuda_graphs.py"
GRAPH_FILE = "transformer_engine/pytorch/graph.py"


def main(arguments: list[str]) -> None:
    """Write the reports for the fixes in ``arguments``, by default all. For a fix without edits, print the reason."""
    checkout, folder, *names = arguments
    reports = sorted(path.stem for path in REPORTS.glob("*.md") if path.stem != "README")
    if unknown := sorted({*names} - {*reports}):
        sys.exit(f"There is no report about {', '.join(unknown)}.")
    source = Source.at(Path(checkout))
    found = assess(source)
    for fix in names or reports:
        if not found[fix].edits:
            print(f"{fix}: {found[fix].reason}")
            continue
        write_report(fix, found, source, Path(checkout), folder=Path(folder, fix))


def write_report(fix: str, found: Mapping[str, Assessment], source: Source, checkout: Path, folder: Path) -> None:
    """Write the text and the patches of the report about ``fix`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    # A fix has more required fixes than each fix that it requires, so it comes after them.
    names = sorted(with_required([fix]) - {fix}, key=lambda name: (len(with_required([name])), name))
    required = {name: found[name] for name in names if found[name].edits}
    header = license_header((checkout / GRAPH_FILE).read_text())
    before = changed_files(source, required, header)
    after = changed_files(source, {**required, fix: found[fix]}, header)
    originals = {path: (checkout / path).read_text() for path in after if (checkout / path).exists()}
    before = originals | before
    (folder / "fix.patch").write_text(diffs(before, after))
    tests = (checkout / TEST_FILE).read_text()
    (folder / "test.patch").write_text(diff(TEST_FILE, tests, with_test(tests, (REPORTS / f"{fix}.py").read_text())))
    text = re.sub(r"\s\(\[details\]\([^)]*\)\)", "", (REPORTS / f"{fix}.md").read_text())
    note = f"*Apply after required.patch, the fixes {', '.join(required)}.*\n\n" if required else ""
    if required:
        (folder / "required.patch").write_text(diffs(originals, before))
    (folder / "report.md").write_text(note + text)


def license_header(text: str) -> str:
    """Return the license header of a file: its text before the first blank line."""
    return text.partition("\n\n")[0] + "\n\n"


def changed_files(source: Source, changes: Mapping[str, Assessment], header: str) -> dict[str, str]:
    """Return the text of each file that the fixes change or add, by its path in the checkout."""
    changes, files = reduced(source, changes), {}
    for name, (old, new) in patched(source, changes).items():
        path = f"{name.replace('.', '/')}.py"
        module = source.find(name)
        if module and module.path.endswith("__init__.py"):
            path = f"{name.replace('.', '/')}/__init__.py"
        files[path] = with_imports_at_top(new, changes) if old else header + new
    return dict(sorted(files.items()))


def with_imports_at_top(text: str, changes: Mapping[str, Assessment]) -> str:
    """Return the text with the imports of support modules moved from functions to the top, as in TE's own code.

    An import stays in its function if the support module imports TE, because a cycle of imports is possible.
    """
    independent = [
        name.rpartition(".")[2]
        for change in changes.values()
        for name, new in change.new_modules.items()
        if not re.search(r"^\s*from (transformer_engine|\.)", new, re.MULTILINE)
    ]
    local = re.compile(rf"^ +(from \.+(?:{'|'.join(independent)}) import [^(\n]+)\n(?: *\n)?", re.MULTILINE)
    imports = dict.fromkeys(local.findall(text)) if independent else {}
    anchor = [*re.finditer(r"^from \.[\w.]* import (?:\([^)]*\)|.*)\n", text, re.MULTILINE)]
    if not imports or not anchor:
        return text
    end = anchor[-1].end()
    return text[:end] + "".join(f"{line}\n" for line in imports) + local.sub("", text[end:])


def with_test(tests: str, test: str) -> str:
    """Return the text ``tests`` of a test file with ``test`` appended, and with the imports that ``test`` needs."""
    tree, theirs = ast.parse(test), ast.parse(tests)
    known = {name.asname or name.name for node in theirs.body for name in getattr(node, "names", ())}
    imports = [
        import_of(node, missing)
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and (missing := [name for name in node.names if (name.asname or name.name) not in known])
    ]
    lines = test.splitlines()
    definitions = [
        "\n".join(lines[min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1 : node.end_lineno])
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    anchor = "from utils import"
    tests = tests.replace(anchor, "".join(imports) + anchor, 1)
    return "\n\n\n".join([tests.rstrip("\n"), *definitions]) + "\n"


def diffs(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the unified diffs of all files in ``after``. Files that are not in ``before`` are new."""
    return "".join(diff(path, before.get(path, ""), text) for path, text in after.items())


def diff(path: str, before: str, after: str) -> str:
    """Return a unified diff with git's headers, or an empty text if the texts are equal."""
    if before == after:
        return ""
    old = f"a/{path}" if before else "/dev/null"
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, f"b/{path}")
    return "".join([f"diff --git a/{path} b/{path}\n", *(["" if before else "new file mode 100644\n"]), *lines])


if __name__ == "__main__":
    main(sys.argv[1:])
