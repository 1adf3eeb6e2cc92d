"""Options that select the tests to run, and the TransformerEngine (TE) that the tests use.

``--part te`` runs the modules with ``pytestmark = pytest.mark.te``, which need torch and TE. ``--part text`` runs all
other modules. The mark is read from the text of a module, without an import. Without ``--part``, all modules run, or
only the part ``text`` if torch is missing. ``--te VERSION``, which can be repeated, runs the tests that use the fixture
``tried_te`` on this published TE instead of the installed TE. ``--dist loadgroup`` (of pytest-xdist) runs all tests of
a version in one process, so that only this process reads the sources of the version.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import main
from tests.support import published
from tests.support.child import Cli

NEEDS_TE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.te\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("text", "te", "all"), help="te: tests that need TransformerEngine; text: rest")
    parser.addoption("--te", action="append", help="run tests on this published version of TransformerEngine")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried_te" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--te") or ["installed"]
        metafunc.parametrize("tried_te", versions, scope="session", indirect=True)


@pytest.fixture(scope="session")
def tried_te(request: pytest.FixtureRequest) -> published.TE:
    """Return the TE that a test runs on the simulator."""
    return published.te(request.param)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs `main` in this process, and returns the exit status, the output and the errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()  # discard the output of earlier child processes
        return main([*map(str, arguments)]), *capfd.readouterr()

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        version = parameters.get("version", parameters.get("tried_te"))
        if version:
            item.add_marker(pytest.mark.xdist_group(str(version)))


def _part(config: pytest.Config) -> str:
    return config.getoption("--part") or ("all" if importlib.util.find_spec("torch") else "text")


def pytest_report_header(config: pytest.Config) -> str:
    return f"part of the tests: {_part(config)}"


class OtherPart(pytest.File):
    """A test module that ``--part`` excludes. It is not imported, even if the command line names it."""

    def collect(self) -> list[pytest.Item]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    part, needs_te = _part(parent.config), bool(NEEDS_TE.search(module_path.read_text()))
    if part == "all" or needs_te == (part == "te"):
        return None
    return OtherPart.from_parent(parent, path=module_path)
