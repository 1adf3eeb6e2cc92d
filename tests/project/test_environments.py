"""Test that tox.ini selects every test, because a module that no environment runs would never fail."""

from __future__ import annotations

import re

from tests.conftest import NEEDS_TE
from tests.support.child import ROOT


def test_an_environment_names_the_folder_of_each_module_that_needs_te() -> None:
    """tox.ini must name each module that needs TE, or its folder. All other modules run in the `text` environment."""
    named = {*re.findall(r"tests/[\w/.]+", re.sub(r"--ignore \S+", "", (ROOT / "tox.ini").read_text()))}
    modules = [path for path in (ROOT / "tests").rglob("test_*.py") if NEEDS_TE.search(path.read_text())]
    assert len(modules) > 30
    for module in modules:
        path = module.relative_to(ROOT)
        assert named & {str(path), *map(str, path.parents)}, path
