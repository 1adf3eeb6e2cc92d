"""Test ranks of ``torchrun`` under ``te-graph-fixes run``, with TransformerEngine (TE) on the simulator."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import te_graph_fixes
from tests.support.child import python, simulate

pytestmark = pytest.mark.te

JOB = """
import os, sys

rank = os.environ["RANK"]
for assignment in os.environ.get(f"OF_RANK_{rank}", "").split():
    name, _, value = assignment.partition("=")
    os.environ[name] = value
from tests.simulator import install

install()
import te_graph_fixes
import transformer_engine.pytorch
import torch.distributed as distributed

distributed.init_process_group("gloo")
group = distributed.new_group([1, 2]) if os.environ.get("GROUP") else None
if rank == "0" and group is not None:
    sys.exit()
try:
    te_graph_fixes.require_same_on_all_ranks(group, os.environ.get("DIGEST"))
    text = f"same {te_graph_fixes.report().digest}"
except te_graph_fixes.FixNotAppliedError as error:
    text = str(error).replace("\\n", " |")
os.write(1, f"rank {rank} {text}\\n".encode())
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> list[str]:
    """Return the arguments with which Python starts two ranks. The variable OF_RANK_N sets variables of rank N."""
    (tmp_path / "job.py").write_text(JOB)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "job.py")]
    return ["-m", "te_graph_fixes", "run", *launch]


LINE = re.compile(
    r"te-graph-fixes: host=\S+ rank=\S+ te=\S+ package=\S+ mode=(?:memory|baked|off|failed) applied=\d+ missing=\d+ "
    r"digest=[0-9a-f]{8}"
)


def status_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if LINE.fullmatch(line)]


def test_ranks_that_agree(torchrun: list[str]) -> None:
    found = python(*torchrun)
    assert found.returncode == 0, found.stderr
    assert re.fullmatch(r"rank \d same (\w{8})\nrank \d same \1\n", found.stdout)
    (line,) = status_lines(found.stderr)
    assert re.search(r" rank=0 .* mode=memory applied=\d\d missing=0 digest=", line)
    digest = line.rpartition("=")[2]
    assert digest in found.stdout
    found = python(*torchrun, DIGEST="1a2b3c4d")
    assert re.findall(rf"rank \d The fixes .* ranks 0-1: .*digest={digest}; expects digest 1a2b3c4d", found.stdout)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("TE_GRAPH_FIXES=off", "mode=off .*; without 3. fixes; all fixes are off$"),
        pytest.param("TE_GRAPH_FIXES_DISABLE=replay-arguments", "without replay-arguments", marks=pytest.mark.full),
        ("DIGEST=1a2b3c4d", "expects digest 1a2b3c4d"),
    ],
)
def test_a_rank_with_other_settings(torchrun: list[str], other: str, difference: str) -> None:
    torchrun[torchrun.index("2")] = "3"
    found = python(*torchrun, OF_RANK_2=other, GROUP="1")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 2, lines  # the group consists of ranks 1 and 2
    assert all(re.search(rf"  rank 2: host=.*{difference}", line[6:]) for line in lines), lines


def test_no_group_or_a_malformed_digest() -> None:
    for digest in ("1A2B3C4D", "1a2b", 5, "1a2b3c4d\n"):
        with pytest.raises(ValueError, match="is malformed"):
            te_graph_fixes.require_same_on_all_ranks(digest=digest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no process group"):
        te_graph_fixes.require_same_on_all_ranks(digest="1a2b3c4d")


TEN_THOUSAND = """
import time, tracemalloc
import torch.distributed as distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_graph_fixes, transformer_engine.pytorch
from te_graph_fixes import agreement

distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=10_000)
te_graph_fixes.require_same_on_all_ranks()
gathered, details_of = agreement._gathered, agreement._details_of
others = 3, *range(17, 40), 9999

def received(number, group):
    assert gathered(number, group) == [number] * 10_000
    return [0 if rank in others else number for rank in range(10_000)]

def measure(call):
    tracemalloc.start()
    begin = time.process_time()
    call()
    print(time.process_time() - begin, tracemalloc.get_traced_memory()[1] / 1e6)
    tracemalloc.stop()

def fail():
    try:
        te_graph_fixes.require_same_on_all_ranks()
    except te_graph_fixes.FixNotAppliedError as error:
        print(error)

measure(te_graph_fixes.require_same_on_all_ranks)
agreement._gathered = received
agreement._details_of = lambda rank, *rest: details_of(0, *rest)  # the simulated ranks send nothing
measure(fail)
"""


def test_ten_thousand_ranks() -> None:
    """Comparing 10,000 simulated ranks must take less than one second of CPU time and 4 MB of Python memory."""
    same, *error, different = simulate("-c", TEN_THOUSAND, imported=()).splitlines()
    for seconds, megabytes in (same.split(), different.split()):
        assert float(seconds) < 1  # 0.06 s on an idle computer
        assert float(megabytes) < 4
    assert "(10000 in the group)" in error[0]
    assert error[1].startswith("  ranks 0-2, 4-16, 40-9998: host=")
