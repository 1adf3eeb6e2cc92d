"""Write the generated parts of the pages, from the catalogue, TransformerEngine (TE) and pyproject.toml.

``python -m tools.tables`` writes these parts, and ``tests/project/test_readme.py`` compares them with the pages. A part
is between ``<!-- NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re

from te_graph_fixes.fix import Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.manifest import NAME as MANIFEST
from tests.support.child import ROOT, python
from tests.support.published import needed, source

PAGES = tuple(ROOT / name for name in ("README.md", "SECURITY.md", "docs/symptoms.md", "docs/images.md", "docs/how.md"))
SHOWN = "2.14.0"
"""The version of TE in NeMo 26.04. docs/how.md counts the changes of the fixes to this version."""

CONTAINERS = (
    ("NeMo 26.02", "2.12.0+5671fd36", "Megatron-Bridge's page of software versions"),
    ("NeMo 26.04", "2.14.0+71bbefbf", "Megatron-Bridge's page of software versions"),
    ("NeMo 26.06, 26.06.01", "2.16.0+b9d690e0", "users of the container"),
    ("NeMo 26.08", "2.17.1+4329ff84", "users of the container"),
    ("NeMo 26.08.01", "2.18.0+15288857", "Megatron-Bridge #6038"),
    ("NeMo 26.04.01, 26.10, 26.10.01", "", "not known in November 2026"),
    ("NGC PyTorch", "2.10 and later, by month", "release notes of the containers"),
)
"""Containers, the version of their TE ("" if unknown), and the source of the version."""


def upstream() -> str:
    """Return, as Markdown, the fixes of bugs that TE has fixed itself, and of other bugs with public reports."""
    fixed = [f"`{fix.id}` in {fix.merged} ({_links(fix)})" for fix in CATALOGUE.values() if fix.merged]
    reported = [f"`{fix.id}` ({_links(fix)})" for fix in CATALOGUE.values() if fix.upstream and not fix.merged]
    others = len(CATALOGUE) - len(fixed) - len(reported)
    return (
        f"TE has fixed {len(fixed)} of these {len(CATALOGUE)} bugs itself: {', '.join(fixed)}.\n\n"
        f"Public reports exist for {len(reported)} more bugs: {', '.join(reported)}. "
        f"We know no report of the other {others}."
    )


def _links(fix: Fix) -> str:
    return ", ".join(f"[{_name(link)}]({link})" for link in fix.upstream)


def containers() -> str:
    """Return a table of containers with the number of fixes that PyPI's release of their TE needs."""
    lines = ["| container | TE | needed fixes | source of the version |", "|---|---|---|---|"]
    for name, version, known_from in CONTAINERS:
        release = version.partition("+")
        count = f"{len(needed(release[0]))} of {len(CATALOGUE)}" if release[1] else ""
        lines.append(f"| {name} | {version} | {count} | {known_from} |")
    return "\n".join(lines)


def _name(link: str) -> str:
    _, repository, _, number = link.rsplit("/", 3)
    return f"#{number}" if repository == "TransformerEngine" else f"{repository} #{number}"


def size() -> str:
    """Return two sentences with the numbers of lines and modules that the fixes change in the version `SHOWN`."""
    path = source(SHOWN)
    diff = python("-m", "te_graph_fixes", "diff", "--source", path).stdout
    files = [text for text in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:] if MANIFEST not in text]
    new = [text for text in files if text.startswith("/dev/null")]
    changed = [text for text in files if text not in new]
    added, removed, own = _lines(changed, "+"), _lines(changed, "-"), _lines(new, "+")
    return (
        f"TE {SHOWN} needs {len(needed(SHOWN))} of the {len(CATALOGUE)} fixes. They add about {round(added, -1)} lines "
        f"to {len(changed)} of its modules, remove about {round(removed, -1)}, and add {len(new)} support modules "
        f"of {round(own, -2):,} lines."
    )


def _lines(files: list[str], sign: str) -> int:
    return sum(len(re.findall(rf"^\{sign}", text.split("\n@@", 1)[1], re.MULTILINE)) for text in files)


def address() -> str:
    """Return a sentence with the address for bug reports, or with a substitute if there is no public address."""
    url = urls()["Issues"]
    nowhere = "whoever gave you the package: the project has no public address yet"
    return f"Reports go to {nowhere if '.invalid/' in url else url}."


def urls() -> dict[str, str]:
    """Return the project's addresses by name, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.urls]\n", 1)[1].split("\n[", 1)[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', section, re.MULTILINE))


PARTS = {"upstream": upstream, "containers": containers, "size": size, "address": address}


def with_parts(page: str) -> str:
    """Return ``page`` with every part regenerated."""
    part = r"(<!-- (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(part, lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_parts(page.read_text()))
