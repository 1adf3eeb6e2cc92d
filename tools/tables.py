"""The parts of the pages that are made: from the catalogue, TransformerEngine (TE) and pyproject.toml.

``python -m tools.tables`` writes them; ``tests/project/test_readme.py`` holds the pages against them. A part stands
between ``<!-- NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re

from te_graph_fixes.fix import GROUPS, Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.stamp import NAME as STAMP
from te_graph_fixes.status import Status
from tests.support.child import ROOT, python
from tests.support.published import source

PAGES = tuple(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/fixes.md"))
SHOWN = "2.14.0"
"""The version of TransformerEngine whose change README counts; NeMo 26.04 holds it."""


def fixes() -> str:
    """The catalogue by group, a line for each fix."""
    lines = ["| fix | what you see without it | TE with the defect | upstream |", "|---|---|---|---|"]
    for group in GROUPS:
        lines.append(f"| **{group}** | | | |")
        members = sorted(fix.id for fix in CATALOGUE.values() if fix.group == group)
        lines += [_row(CATALOGUE[fix_id]) for fix_id in members]
    return "\n".join(lines)


def _row(fix: Fix) -> str:
    links = ", ".join(f"[{_name(link)}]({link})" for link in fix.upstream)
    state = f"{f'fixed in {fix.merged}: ' if fix.merged else 'open, about it: '}{links}" if links else "open"
    return f"| `{fix.id}` | {fix.symptom} | {fix.versions} | {state} |"


def _name(link: str) -> str:
    _, repository, _, number = link.rsplit("/", 3)
    return f"#{number}" if repository == "TransformerEngine" else f"{repository} #{number}"


def size() -> str:
    """How much the fixes change one version of TransformerEngine."""
    path = source(SHOWN)
    diff = python("-m", "te_graph_fixes", "diff", "--source", path).stdout
    files = [text for text in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:] if STAMP not in text]
    new = [text for text in files if text.startswith("/dev/null")]
    changed = [text for text in files if text not in new]
    added, removed, own = _lines(changed, "+"), _lines(changed, "-"), _lines(new, "+")
    status = json.loads(python("-m", "te_graph_fixes", "status", "--source", path, "--json").stdout)
    needed = [fix for fix in status["fixes"].values() if fix["verdict"] == Status.APPLICABLE]
    return (
        f"TE {SHOWN} has {len(needed)} of the {len(CATALOGUE)} defects: some {round(added, -1)} lines are added and "
        f"{round(removed, -1)} removed in {len(changed)} of its modules, and {len(new)} new modules "
        f"of {round(own, -2):,} lines are added to it."
    )


def _lines(files: list[str], sign: str) -> int:
    return sum(len(re.findall(rf"^\{sign}", text.split("\n@@", 1)[1], re.MULTILINE)) for text in files)


def model() -> str:
    """The fix that CONTRIBUTING.md shows."""
    path = "te_graph_fixes/fixes/calibration_recipe.py"
    return f"```python\n# {path}\n{(ROOT / path).read_text()}```"


def address() -> str:
    """Where reports go."""
    url = urls()["Issues"]
    nowhere = "whoever gave you the package: the project has no public address yet"
    return f"Reports go to {nowhere if '.invalid/' in url else url}."


def urls() -> dict[str, str]:
    """The project's addresses: pyproject.toml is the only place that has them."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.urls]\n", 1)[1].split("\n[", 1)[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', section, re.MULTILINE))


PARTS = {"fixes": fixes, "size": size, "model": model, "address": address}


def with_parts(page: str) -> str:
    """``page`` with every part as it should be."""
    part = r"(<!-- (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(part, lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_parts(page.read_text()))
