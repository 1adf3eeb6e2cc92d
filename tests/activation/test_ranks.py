"""Many ranks: two processes of ``torchrun`` below ``te-graph-fixes run``, with TransformerEngine (TE) simulated."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import te_graph_fixes
from te_graph_fixes.patching.source import Source

pytestmark = pytest.mark.te

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gather_reports.py"
RUN = [sys.executable, "-m", "te_graph_fixes", "run"]


def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def torchrun(tmp_path: Path) -> list[str]:
    """The command that starts the example on two ranks; the variable OTHER_TE names where rank 1 finds its TE."""
    job = tmp_path / "job.py"
    job.write_text(
        textwrap.dedent(
            f"""
            import logging, os, runpy, sys

            rank = os.environ["RANK"]
            logging.basicConfig(level=logging.INFO, format=f"rank {{rank}} %(levelname)s %(name)s %(message)s")
            logging.captureWarnings(True)
            if rank == "1" and "OTHER_TE" in os.environ:
                sys.path.insert(0, os.environ["OTHER_TE"])
            from tests.simulator import install

            install()
            runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
            """
        )
    )
    return [*RUN, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]


@pytest.fixture
def other_te(tmp_path: Path) -> Path:
    """A copy of TE whose `_make_graphed_callables` is defined twice, so that it is not recognised."""
    copied = tmp_path / "other" / "transformer_engine"
    shutil.copytree(Source.installed().location, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    metadata = next(Path(Source.installed().location).parent.glob("transformer_engine-*.dist-info"))
    shutil.copytree(metadata, copied.parent / metadata.name)
    with open(copied / "pytorch" / "graph.py", "a") as graph:
        graph.write("\n\ndef _make_graphed_callables(*args, **kwargs):\n    raise NotImplementedError\n")
    return copied.parent


@pytest.mark.full
def test_ranks_that_agree(torchrun: list[str]) -> None:
    found = start(*torchrun)
    assert found.returncode == 0, found.stderr
    assert "2 ranks, 0 differ from rank 0" in found.stdout
    ours = [line for line in found.stderr.splitlines() if " te_graph_fixes " in line]
    assert len(ours) == 1, ours
    assert re.match(r"rank 0 INFO te_graph_fixes \d+ fixes applied to TransformerEngine ", ours[0])


def test_a_rank_with_another_te(torchrun: list[str], other_te: Path) -> None:
    found = start(*torchrun, OTHER_TE=str(other_te), TE_GRAPH_FIXES_STRICT="0")
    assert found.returncode == 1
    assert "2 ranks, 1 differ from rank 0" in found.stdout
    assert ", unrecognized" in found.stdout
    ours = [line for line in found.stderr.splitlines() if " INFO te_graph_fixes " in line]
    assert [line.split(" te_graph_fixes ")[0] for line in ours] == ["rank 0 INFO"]
    warned = [line for line in found.stderr.splitlines() if "TEGraphFixesWarning" in line]
    assert all(line.startswith("rank 1 WARNING py.warnings") for line in warned)
    assert len(warned) == 1
    assert re.search(r"\d+ fixes that TransformerEngine \S+ needs cannot be applied", warned[0])


def test_reports_can_be_sent_and_compared() -> None:
    report = te_graph_fixes.report()
    assert pickle.loads(pickle.dumps(report)) == report == copy.deepcopy(report)
    other = copy.deepcopy(report)
    fix_id, status = next(iter(other.fixes.items()))
    other.fixes[fix_id] = te_graph_fixes.FixStatus("failed", status.reason, status.upstream, status.targets)
    assert other != report
