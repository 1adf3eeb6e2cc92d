"""Which part of the tests runs: ``--part text`` needs neither torch nor TransformerEngine (TE), ``--part te`` both.

Without the option everything runs, less the part ``te`` where torch is missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TEXT = {
    "test_activation.py",
    "test_catalogue.py",
    "test_cli.py",
    "test_containers.py",
    "test_drift.py",
    "test_engine.py",
    "test_evasions.py",
    "test_foreign_text.py",
    "test_graph_order.py",
    "test_mutations.py",
    "test_readme.py",
    "test_release.py",
    "test_run.py",
    "test_settings.py",
    "test_source.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("text", "te", "all"), help="the tests that need TransformerEngine, or the rest")


def _part(config: pytest.Config) -> str:
    return config.getoption("--part") or ("all" if importlib.util.find_spec("torch") else "text")


def pytest_report_header(config: pytest.Config) -> str:
    return f"part of the tests: {_part(config)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = _part(config)
    if wanted == "all":
        return None
    if collection_path == Path(__file__).parent / "gpu":
        return True
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and (collection_path.name in TEXT) != (wanted == "text") else None
