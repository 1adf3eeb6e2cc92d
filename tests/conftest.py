"""Which part of the tests runs, and with which TransformerEngine (TE).

``--part text`` needs neither torch nor TE, ``--part te`` both; without the option everything runs, less the part ``te``
where torch is missing. ``--te VERSION``, which may be given several times, has tests with ``tried_te`` use that
published TE instead of the installed one. ``--dist loadgroup`` leaves all tests of a version to one process, so that
each process reads other sources.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import main
from tests.support import published
from tests.support.child import Cli

TEXT = {
    "test_activation.py",
    "test_bake.py",
    "test_catalogue.py",
    "test_choices_of_fixes.py",
    "test_cli.py",
    "test_commits.py",
    "test_drift.py",
    "test_install.py",
    "test_installation.py",
    "test_foreign_text.py",
    "test_grad_input_lifetime.py",
    "test_graph_order.py",
    "test_harmful_edits.py",
    "test_harmless_edits.py",
    "test_megatron_lm_example.py",
    "test_messages.py",
    "test_other_patchers.py",
    "test_patch.py",
    "test_readme.py",
    "test_release.py",
    "test_run.py",
    "test_settings.py",
    "test_source.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("text", "te", "all"), help="the tests that need TransformerEngine, or the rest")
    parser.addoption("--te", action="append", help="a published TransformerEngine that tests use")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried_te" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--te") or ["installed"]
        metafunc.parametrize("tried_te", versions, scope="session", indirect=True)


@pytest.fixture(scope="session")
def tried_te(request: pytest.FixtureRequest) -> published.TE:
    """The TE that a test runs on the simulator."""
    return published.te(request.param)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""
    return lambda *arguments: (main([*map(str, arguments)]), *capsys.readouterr())


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = _part(config)
    if wanted == "all":
        return None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and (collection_path.name in TEXT) != (wanted == "text") else None
