"""Programs for child processes in which TransformerEngine (TE) runs on the simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

INSTALL = "from tests import simulator\nsimulator.install()\n"


def python(*arguments: str | Path, path: str | Path = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository, with ``path`` first in its path and no settings but those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TE_GRAPH_FIXES")}
    paths = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def simulate(program: str, path: str | Path = "", **environment: str) -> str:
    """What ``program`` prints on the simulator; it must end well."""
    done = python("-c", INSTALL + program, path=path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
