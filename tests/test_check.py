"""``te_graph_fixes.check``: graph against eager in a training of the user's own, on the simulator."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from te_graph_fixes.checking import DIFFERENT, Options
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from te_graph_fixes.verdicts import verdicts
from tests.child import on_simulator, python, simulate

ROOT = Path(__file__).parent.parent
PROGRAM = "tests/check_training.py"
PIPELINED = (1, 2, -2, 1, 2, -2, -1, -1)
CORRECT: list[dict[str, Any]] = [
    {"module": "Linear", "recipe": "fp8-delayed", "bias": True},
    {"module": "LayerNormLinear", "fused": False, "bias": True, "order": PIPELINED, "reuse": True},
    {"module": "GroupedLinear", "recipe": "fp8-current", "delay": True, "order": PIPELINED, "reuse": True},
    {"module": "LayerNormMLP", "recipe": "fp8-delayed", "bias": True, "order": (1, -1) * 2, "mark_first": False},
    {"recipe": "fp8-current", "fp8_params": True},
    {"delay": True, "fused": False, "bias": True, "mark_first": False},
]
DEFECTS = {
    "grouped-linear-skip-flag": "experts-fp8-delayed",
    "warmup-reset": "linear-bf16",
    "backward-dw-order": "two-chunks-wgrads-last",
    "backward-dw-hooks": "hooks-after-wgrad",
    "delayed-wgrad-delivery": "delayed-unfused",
    "param-grad-lifetime": "plain-grad",
    "stale-fp8-weights": "other-module-first",
}
"""By a defect that a check can see, a case of `verify` which has it."""


def trainings(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in simulate(PROGRAM, *arguments, **environment).splitlines()]


def test_correct_graphs_are_equal_and_train_as_without_the_check() -> None:
    for options, line in zip(CORRECT, trainings(*map(json.dumps, CORRECT)), strict=True):
        assert line["found"] == [], options
        assert line["same"], options
        assert line["tensors"] > 10
        assert line["steps"] == 2


def test_each_defect_is_named() -> None:
    found = verdicts(Source.installed())
    needed = [fix for fix in DEFECTS if found[fix].verdict == "applicable"]
    for fix, line in zip(needed, trainings("--without", "all", *(DEFECTS[fix] for fix in needed)), strict=True):
        assert fix in line["hints"], (fix, line)
        assert line["same"], fix


def test_what_defects_look_like_is_in_the_words_of_the_check() -> None:
    from_file = (ROOT / "te_graph_fixes" / "checking" / "callables.py").read_text()
    from_file += (ROOT / "te_graph_fixes" / "checking" / "lifetimes.py").read_text()
    document = (ROOT / "docs" / "check.md").read_text()
    for fix in CATALOGUE.values():
        for look in fix.looks_like:
            word = look.partition(" of ")[0].removeprefix("fp8 ")
            assert f'"{word}"' in from_file, look
            assert f"`{word}`" in document, look


LOOP = """
import torch, te_graph_fixes
import transformer_engine.pytorch as te

options = {"params_dtype": torch.bfloat16, "device": "cuda"}
layers = torch.nn.ModuleList(te.Linear(32, 32, **options) for _ in range(4))
sample = lambda: torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
BEFORE
graphed = te.make_graphed_callables(tuple(layers), tuple((sample(),) for _ in layers))
for step in range(STEPS):
    x = sample()
    for layer in graphed:
        x = layer(x)
    x.sum().backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
print("trained")
"""


def loop(steps: int = 4, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(LOOP).replace("STEPS", str(steps)).replace("BEFORE", before)
    return on_simulator("-c", program, **environment)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [line for line in done.stderr.splitlines() if line.startswith("te-graph-fixes check: ")]
    return [line.removeprefix("te-graph-fixes check: ") for line in found]


def test_the_report_of_a_job() -> None:
    done = loop(TE_GRAPH_FIXES_CHECK="2")
    assert done.returncode == 0, done.stderr
    assert lines(done)[-1].startswith("2 steps, 4 callables, ")
    assert lines(done)[-1].endswith(" tensors compared: all equal")


def test_layers_take_turns() -> None:
    done = loop(steps=6, TE_GRAPH_FIXES_CHECK="2,layers=2")
    assert lines(done)[-1].startswith("4 steps, 4 callables, "), done.stderr


def test_a_job_that_ends_early_is_reported() -> None:
    assert lines(loop(steps=1, TE_GRAPH_FIXES_CHECK="2"))[-1].startswith("1 steps, 4 callables, ")


def test_te_imported_first() -> None:
    program = textwrap.dedent(LOOP).replace("STEPS", "3").replace("BEFORE", "te_graph_fixes.check(1)")
    program = "from transformer_engine.pytorch import make_graphed_callables as taken\n" + program
    done = on_simulator("-c", program.replace("te.make_graphed_callables", "taken"))
    assert lines(done)[-1].startswith("1 steps, 4 callables, "), done.stderr


BROKEN = """
import transformer_engine.pytorch.graph as graph
make = graph._make_graphed_callables
def make_broken(callables, *args, **kwargs):
    made = make(callables, *args, **kwargs)
    forward = made[0].forward
    def doubled(x):
        out = forward(x)
        out.detach().mul_(2)
        return out
    made[0].forward = doubled
    return made
graph._make_graphed_callables = make_broken
"""
"""Lines for `LOOP` after which a graph doubles its outputs: a defect that is not in the catalogue."""


def test_a_defect_that_is_not_in_the_catalogue() -> None:
    done = loop(before=BROKEN, TE_GRAPH_FIXES_CHECK="2")
    assert done.stdout == "trained\n"
    assert any("forward: output 0 is off by 1 of its norm" in line for line in lines(done)), done.stderr
    assert " differ" in lines(done)[-1]


def test_a_strict_check_ends_the_process() -> None:
    done = loop(before=BROKEN, TE_GRAPH_FIXES_CHECK="2,strict")
    assert done.returncode == DIFFERENT, done.stderr
    assert done.stdout == ""
    assert "ends with status 86" in lines(done)[-1]


def test_what_eager_does_not_reproduce_is_named() -> None:
    before = """
import itertools
count = itertools.count()
forward = te.Linear.forward
def noisy(self, x, *args, **kwargs):
    again = 0 if torch.cuda.is_current_stream_capturing() else next(count) % 3
    return forward(self, x, *args, **kwargs) * (1 + again / 64)
te.Linear.forward = noisy
"""
    found = lines(loop(before=before, TE_GRAPH_FIXES_CHECK="2"))
    assert any("is not reproducible" in line and "two eager runs differ by" in line for line in found)
    assert "that eager itself does not reproduce" in found[-1]


def test_a_module_that_cannot_be_run_beside_its_graphs() -> None:
    before = """
forward = te.Linear.forward
def once(self, x, *args, **kwargs):
    if done:
        raise ValueError("only in a capture")
    return forward(self, x, *args, **kwargs)
te.Linear.forward, done = once, []
"""
    program = (
        textwrap.dedent(LOOP)
        .replace("STEPS", "3")
        .replace("BEFORE", before)
        .replace("for step", "done.append(1)\nfor step", 1)
    )
    done = on_simulator("-c", program, TE_GRAPH_FIXES_CHECK="2")
    assert done.stdout == "trained\n", done.stderr
    assert "callable 0 (Linear) is not compared, nor are others like it: run eagerly, it raised" in lines(done)[0]
    assert lines(done)[-1].endswith("4 callables are left out")


RECOMPUTED = """
class Recomputed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        return te.checkpoint(self.layer, x)
layers = torch.nn.ModuleList(map(Recomputed, layers))
"""
FUSED = """
options = {"dtype": torch.bfloat16, "device": "cuda"}
fused = lambda: te.ops.Sequential(te.ops.LayerNorm(32, **options), te.ops.Linear(32, 32, **options))
layers = torch.nn.ModuleList(fused() for _ in layers)
"""


@pytest.mark.parametrize("before", [RECOMPUTED, FUSED], ids=["recomputed", "te.ops"])
def test_layers_of_other_kinds(before: str) -> None:
    found = lines(loop(before=before, TE_GRAPH_FIXES_CHECK="2"))
    assert found[-1].startswith("2 steps, 4 callables, "), found
    assert found[-1].endswith(" tensors compared: all equal")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("off", None),
        ("0", None),
        ("on", Options()),
        ("3", Options(3)),
        ("3,layers=4", Options(3, 4)),
        ("strict", Options(strict=True)),
        ("1, layers=2, strict", Options(1, 2, True)),
    ],
)
def test_options(text: str, wanted: Options | None) -> None:
    assert Options.parse(text) == wanted


@pytest.mark.parametrize("text", ["two", "-1", "2;layers=3", "layers", "0,strict", "chunks=2"])
def test_options_that_are_not_understood(text: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)check"):
        Options.parse(text)


def test_run_hands_the_options_on() -> None:
    code = "import os; print(os.environ['TE_GRAPH_FIXES_CHECK'])"
    for option, wanted in (("--check", "on"), ("--check=3,layers=2", "3,layers=2"), ("--check-strict=1", "1,strict")):
        done = python("-m", "te_graph_fixes", "run", option, sys.executable, "-c", code)
        assert done.stdout.strip() == wanted, done.stderr
    done = python("-m", "te_graph_fixes", "run", "--check=x", sys.executable, "-c", code)
    assert done.returncode == 2
    assert "valid: on, off, N" in done.stderr


def test_nothing_is_imported_where_it_is_off() -> None:
    heavy = "te_graph_fixes.checking.", "torch", "wrapt"
    code = f"import sys, te_graph_fixes; print([name for name in sys.modules if name.startswith({heavy})])"
    assert python("-c", code).stdout == "[]\n"
    assert "'torch'" not in python("-c", code, TE_GRAPH_FIXES_CHECK="2").stdout


RANKS = """
import torch, te_graph_fixes
import torch.distributed as dist
import transformer_engine.pytorch as te

dist.init_process_group("gloo")
rank = dist.get_rank()
options = {"params_dtype": torch.bfloat16, "device": "cuda"}
layers = [te.Linear(32, 32, **options) for _ in range(2)]
sample = lambda: torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
order = [1, 2, 1, 2, -2, -1, -2, -1]
reuse = {"_order": order, "_num_layers_per_chunk": [1, 1], "_reuse_graph_input_output_buffers": True}
samples = [(sample(),) for _ in range(4)]
graphed = te.make_graphed_callables(tuple(layers), samples, sample_kwargs=[{} for _ in range(4)], **reuse)
for step in range(3):
    outs = {}
    for i in (0, 2, 1, 3):
        outs[i] = leaf, out = (leaf := sample()), graphed[i](leaf)
    work = None
    for i in (2, 0, 3, 1):
        leaf, out = outs.pop(i)
        out.backward(torch.ones_like(out))
        if rank == 0 and i == 2:
            batch = [dist.P2POp(dist.isend, leaf.grad, 1)]
            work = dist.isend(leaf.grad, 1) if step % 2 else dist.batch_isend_irecv(batch)[0]
        if rank == 0 and i == 0 and LATER:
            dist.isend(torch.ones(4), 1).wait()
        if rank == 0 and i == WAIT:
            work.wait()
    if rank == 1:
        dist.recv(torch.empty(16, 32, dtype=torch.bfloat16), 0)
        if LATER:
            dist.recv(torch.empty(4), 0)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
dist.barrier()
dist.destroy_process_group()
"""


def on_two_ranks(wait: int, later: bool = False, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TE_GRAPH_FIXES_CHECK": "2"}
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    code = "from tests.simulator import install; install()\n" + RANKS.replace("WAIT", str(wait)).replace(
        "LATER", str(later)
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **variables, "RANK": str(rank), "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess([], code, out, err) for out, err, code in ended]


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "later"), [(0, False), (1, True)], ids=["in time", "for a later one"])
def test_one_report_for_all_ranks(wait: int, later: bool) -> None:
    first, second = on_two_ranks(wait, later)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert lines(first)[-1].startswith("2 steps, 8 callables, "), first.stderr
    assert "on 2 ranks: all equal" in lines(first)[-1]
    assert lines(second) == []


def test_a_send_that_is_overwritten() -> None:
    first, second = on_two_ranks(wait=1, TE_GRAPH_FIXES_DISABLE="grad-input-lifetime")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    sent = [line for line in lines(first) if "is being sent and overwritten by" in line]
    assert sent, first.stderr
    assert "rank 0, step 1, callable 2 (Linear), backward: gradient of input 0" in sent[0]
    assert sent[0].endswith("looks like grad-input-lifetime")
    assert "on 2 ranks: " in lines(first)[-1]
    assert "differ, on rank 0" in lines(first)[-1]


@pytest.mark.slow
def test_edits_left_out() -> None:
    """Every single edit of a fix left out: the check finds something wherever graph and eager differ."""
    source = Source.installed()
    changed = 0
    for fix, case in DEFECTS.items():
        for number in range(len(CATALOGUE[fix].verdict(source).edits)):
            line = json.loads(simulate("tests/check_breakage.py", fix, str(number), case).splitlines()[-1])
            if line.get("error"):
                changed += 1
                assert line["found"], (fix, number, line)
            elif line["status"] == "applied" and "raised" not in line:
                assert line["found"] == [], (fix, number, line)
    assert changed > 5
