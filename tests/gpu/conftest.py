"""Everything here is marked ``gpu`` and skipped, with the reason, where there is no GPU or no TransformerEngine.

The cases run in a child process for each worker, with the fixes that the environment asks for
(``TE_GRAPH_FIXES=off python -m pytest tests/gpu`` shows the defects).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_graph_fixes.patching.source import Source, TENotFoundError
from te_graph_fixes.verify.runner import Child, no_gpu


def _missing() -> str | None:
    try:
        Source.installed()
    except TENotFoundError as error:
        return str(error)
    return no_gpu()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = _missing()
    for item in items:
        if here in item.path.parents:
            item.add_marker("gpu")
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    """A process with the fixes that the environment asks for."""
    process = Child(os.environ)
    yield process
    process.close()
