"""Test, on the simulator, ``te_graph_fixes.check``, which compares graphs with eager runs in the user's training."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from te_graph_fixes.checking import EXIT_MISMATCH, Options
from te_graph_fixes.fixes import CATALOGUE, assess
from te_graph_fixes.patching.source import Source
from tests.support.child import ROOT, on_simulator, python, simulate
from tests.verify.cases import CASES

pytestmark = pytest.mark.te

PATIENCE = 60
"""The time in seconds that rank 0 waits for the other ranks when its process ends."""
PROGRAM = "tests/support/check_training.py"
PIPELINED = (1, 2, -2, 1, 2, -2, -1, -1)
PLAIN = {**CASES["plain-grad"].options, "bias": True}
FUSED = {**CASES["norm-and-bias"].options, "modules": ("linear",), "weights": "cached"}
CORRECT: dict[str, dict[str, Any]] = {
    "delayed scaling": {**FUSED, "recipe": "delayed"},
    "an order": {**PLAIN, "modules": ("layernorm_linear",) * 2, "weights": "marked", "order": PIPELINED, "reuse": True},
    "experts with delayed wgrads in an order": {
        **FUSED,
        "modules": ("grouped_linear",) * 2,
        "recipe": "current",
        "delay": True,
        "order": PIPELINED,
        "reuse": True,
    },
    "no marks": {**FUSED, "modules": ("layernorm_mlp",), "recipe": "delayed", "order": (1, -1) * 2, "weights": "plain"},
    "FP8 weights": {**FUSED, "recipe": "current", "fp8_params": True, "bias": False},
    "delayed wgrads of an MLP": {**PLAIN, "modules": ("layernorm_mlp",), "delay": True},
    "inputs without gradients": {**PLAIN, "modules": ("Sum",), "input_grads": False},
    "frozen parameters": {**PLAIN, "modules": ("layernorm_linear",), "freezes_first": True},
    "captured again": {**PLAIN, "order": (1, -1) * 2, "events": ("step", "step", "recapture", "step")},
    "a reentrant checkpoint": {**PLAIN, "checkpoints": ("reentrant",)},
    "a checkpoint": {**PLAIN, "checkpoints": ("not reentrant",)},
    "te.checkpoint": {**PLAIN, "modules": ("layernorm_mlp",), "recipe": "current", "checkpoints": ("te",)},
    "a recomputation after another graph": {**PLAIN, "modules": ("linear", "Recomputed"), "recipe": "delayed"},
    "operations in FP8": {**PLAIN, "modules": ("nested_operations",), "recipe": "delayed"},
    "two backwards of a forward": {
        **PLAIN,
        "modules": ("torch_linear",),
        "fused": False,
        "retain": True,
        "events": ("forward", "backward_and_keep", "backward", "update") * 3,
    },
    "a module that is copied": {**PLAIN, "events": (*("step",) * 3, "continue_with_a_copy")},
}
CHECKPOINTED = json.dumps({**CORRECT["te.checkpoint"], "recipe": "delayed"})
LEFT_OUT = {
    "left out a buffer": "its eager run changed buffer count, which the check restored",
    "left out a main grad in a closure": "its eager run changed main_grad of scale, which the check restored",
    "left out a fused module in a list": "it uses a parameter that has a main_grad but belongs to another module",
    "left out an fp8 module in a list": "it runs a module in delayed scaling that is not one of its submodules",
    "left out a parameter added afterwards": "parameters were added to it after its capture",
    CHECKPOINTED: "te.checkpoint runs it a second time, with the FP8 scales of an earlier step",
}
"""For each training, the reason why the check leaves out the module."""


def trainings(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in simulate(PROGRAM, *arguments, imported=(), **environment).splitlines()]


@pytest.mark.parametrize(
    ("chosen", "number"),
    [([*map(json.dumps, CORRECT.values())], len(CORRECT)), (["others"], 8), (["held by "], 15), (["written "], 6)],
    ids=["programs", "others", "held parameters", "written tensors"],
)
def test_a_correct_training_is_equal_and_unchanged(chosen: list[str], number: int) -> None:
    """The check must find no mismatch, leave out no module, change no result, and end after two steps."""
    lines = trainings(*chosen)
    assert len(lines) == number
    for line in lines:
        assert (line["same"], line["found"], line["refusals"]) == (True, [], []), line
        assert (line["ended"], line["steps"]) == (True, 2), line
        assert line["tensors"] > 1, line


def test_the_check_names_the_modules_that_it_leaves_out() -> None:
    lines = {line["name"]: line for line in trainings("left out ", CHECKPOINTED)}
    assert {name: line["refusals"] for name, line in lines.items()} == {name: [LEFT_OUT[name]] for name in LEFT_OUT}
    for line in lines.values():
        assert (line["same"], line["found"], line["left out"]) == (True, [], 1), line


ONE_RANK = """
import os
import torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", rank=0, world_size=1)
"""
DDP = f"""{ONE_RANK}
wrapped = [torch.nn.parallel.DistributedDataParallel(layer) for layer in layers]
"""


def test_hooks_of_torch_do_not_run() -> None:
    """The check must not run the hooks of DistributedDataParallel, which are in C++ and in no dictionary of hooks."""
    job = {"before": DDP, "after": "print([p.sum().item() for p in layers.parameters()])"}
    done = loop(**job)
    assert done.stdout == loop(**job, check="off").stdout
    assert re.fullmatch(EQUAL, lines(done)[-1]), done.stderr


MARKS = """
options["fuse_wgrad_accumulation"] = True
layers = torch.nn.ModuleList(te.Linear(32, 32, **options) for _ in layers)
for layer in layers:
    layer.weight.main_grad = torch.zeros(32, 32)
    layer.weight.grad_added_to_main_grad = False
"""


@pytest.mark.parametrize("cleared", [True, False])
def test_marks_of_weights_are_compared(cleared: bool) -> None:
    """If a framework clears ``grad_added_to_main_grad``, the check must report a graph that does not set it again."""
    in_step = "for layer in layers: layer.weight.grad_added_to_main_grad = False"
    done = loop(MARKS, in_step=in_step * cleared, fixes="off")
    line = "(Linear), backward: mark grad_added_to_main_grad of weight is not set, unlike in the eager run"
    found = [each for each in lines(done) if line in each]
    assert bool(found) == cleared, done.stderr
    assert all(each.endswith("; likely cause: grad-added-mark") for each in found)


BUGS = {
    "grouped-linear-skip-flag": "experts-fp8-delayed",
    "warmup-reset": "linear-bf16",
    "backward-dw-order": "two-chunks-wgrads-last",
    "backward-dw-hooks": "hooks-after-wgrad",
    "delayed-wgrad-delivery": "delayed-unfused",
    "param-grad-lifetime": "plain-grad",
    "stale-fp8-weights": "other-module-first",
}
"""Fixes whose bugs the check can find, each with a case of `verify` in which the bug occurs."""
EARLIER_GRAD = {**PLAIN, "modules": ("layernorm_mlp",), "reuse": True}
"""The options of a program in which a replay overwrites the ``.grad`` of an earlier microbatch."""


def test_each_bug_is_named() -> None:
    found = assess(Source.installed())
    cases = [*BUGS.items(), ("param-grad-lifetime", json.dumps(EARLIER_GRAD | {"order": (1, -1) * 3}))]
    needed = {case: fix for fix, case in cases if found[fix].verdict == "applicable"}
    for fix, line in zip(needed.values(), trainings("--without", "all", *needed), strict=True):
        assert fix in line["hints"], (fix, line)
        assert line["same"], fix


def test_the_hints_of_fixes_are_words_of_the_check() -> None:
    said = set()
    for path in (ROOT / "te_graph_fixes" / "checking").glob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        said |= {word for text in texts if isinstance(text, str) for word in re.findall(r"[\w.]+", text)}
    rows = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "maintainers" / "adding-a-fix.md").read_text(), re.MULTILINE)
    documented = {words for row in rows for words in row.split("`, `")}
    for fix in CATALOGUE.values():
        for look in fix.check_hints:
            words = [word for word in look.removeprefix("fp8 ").split() if word != "GroupedLinear"]
            assert said.issuperset(words), look
            assert " ".join(words) in documented, look


LOOP = """
import torch, te_graph_fixes
import transformer_engine.pytorch as te

options = {"params_dtype": torch.bfloat16, "device": "cuda"}
layers = torch.nn.ModuleList(te.Linear(32, 32, **options) for _ in range(4))
sample = lambda: torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
BEFORE
graphed = te.make_graphed_callables(tuple(layers), tuple((sample(),) for _ in layers))
for step in range(STEPS):
    IN_STEP
    x = sample()
    for layer in graphed:
        x = layer(x)
    x.sum().backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
AFTER
print("trained")
"""


def loop(
    before: str = "",
    steps: int = 4,
    in_step: str = "",
    after: str = "",
    first: str = "",
    check: str = "2",
    fixes: str = "on",
) -> subprocess.CompletedProcess[str]:
    """Run `LOOP`, which trains four layers, with the given lines and settings. Return the completed process."""
    program = first + LOOP
    for place, text in {"BEFORE": before, "STEPS": str(steps), "IN_STEP": in_step, "AFTER": after}.items():
        program = program.replace(place, text)
    imported = () if first else ("te_graph_fixes", "transformer_engine.pytorch")
    return on_simulator("-c", program, imported=imported, TE_GRAPH_FIXES_CHECK=check, TE_GRAPH_FIXES=fixes)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^te-graph-fixes check(?:: |, (?=fixes|error))(.*)", done.stderr, re.MULTILINE)


AGAIN = "for _ in range(2): te.make_graphed_callables(te.Linear(32, 32, **options), (sample(),))\n"
EQUAL = "fixes on: 2 steps, 4 callables, .* tensors: all equal"
ONE_STEP = "all equal; one step cannot reveal stale weights: check at least 2"


@pytest.mark.parametrize(
    ("job", "last"),
    [
        ({}, EQUAL),
        ({"check": "2,layers=2", "steps": 6}, "fixes on: 4 steps, 4 callables, .*all equal"),
        ({"check": "2,layers=2", "steps": 2}, "fixes on: 2 steps, 2 callables, .*all equal; 2 callables not reached"),
        ({"check": "1"}, f"fixes on: 1 step, 4 callables, .*{ONE_STEP}"),
        ({"steps": 1}, f"fixes on: 1 step, 4 callables, .*{ONE_STEP}"),
        ({"first": "import transformer_engine.pytorch\n"}, EQUAL),
        ({"before": "sys.exit()"}, ".*, as no graph of TransformerEngine's make_graphed_callables was replayed"),
        ({"after": AGAIN}, "rank 0, graphs captured from now on are not compared, because the checked steps are over"),
    ],
    ids=["all", "layers", "too few steps", "one step", "an early end", "TE first", "no graphs", "late graphs"],
)
def test_the_last_line_of_a_job(job: dict[str, Any], last: str) -> None:
    done = loop(**{"first": "import sys\n", **job})
    assert re.fullmatch(last, lines(done)[-1]), done.stderr


@pytest.mark.parametrize(("fixes", "said"), [("off", "off"), ("replay-arguments", r"\d of \d\d")])
def test_the_last_line_names_the_fixes(fixes: str, said: str) -> None:
    assert re.match(f"fixes {said}: 2 steps, 4 callables, ", lines(loop(first="import sys\n", fixes=fixes))[-1])


def test_ranks_with_different_fixes_are_an_error() -> None:
    from te_graph_fixes.checking.findings import _summary

    totals = [Counter(steps=2, callables=8, tensors=100)] * 3
    same, other = ("on", "1a2b3c4d"), ("off", "00000000")
    assert _summary(totals, [same] * 3).endswith(
        "check, fixes on: 2 steps, 24 callables, 300 tensors on 3 ranks: all equal"
    )
    for states in ([same, same, other], [same, same, ("on", "ffffffff")]):
        line = _summary(totals, states)
        assert re.search(r"check, error: the ranks differ .* fixes on .* on ranks 0-1, fixes .* on rank 2; ", line)
        assert "all equal" not in line


def test_a_process_that_the_job_starts_prints_no_result_of_its_own() -> None:
    """Such a process, for example one that writes checkpoints, may import TE."""
    program = "from tests.simulator import install; install(); import te_graph_fixes, transformer_engine.pytorch"
    done = loop(first="import subprocess\n", after=f"subprocess.run({[sys.executable, '-c', program]}, check=True)")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EQUAL, lines(done)[-1]), done.stderr


def test_parameters_with_the_same_kind_of_mismatch_share_a_line() -> None:
    broken = BROKEN.replace("forward(x)", "forward(x.roll(1, -1))").replace("out.detach().mul_(2)", "")
    broken += "layers = torch.nn.ModuleList([te.LayerNormMLP(32, 64, **options)])\n"
    found = [line for line in lines(loop(broken)) if ", backward: .grad of " in line]
    assert len(found) == 1, found
    assert re.search(
        r"\.grad of \w+ differs from the eager run \(relative error \S+\) \(4 more like it: \w+, \w+, \w+, \.\.\.\)",
        found[0],
    )


SHARDED = f"""{ONE_RANK}
from torch.distributed.tensor import Shard, distribute_tensor
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
for layer in layers:
    shards = distribute_tensor(torch.ones(4, dtype=torch.bfloat16), mesh, [Shard(0)])
    shards._is_param = True  # torch.nn.Parameter would set this, but the simulator lacks the dispatch that it needs
    layer.register_parameter("shards", shards)
"""
OVERLAPPED = """
for layer in layers:
    layer.idle = te.Linear(32, 32, **options).requires_grad_(False)  # never runs, as its buffers need several GPUs
    layer.idle.ub_bulk_wgrad = True
"""


RAISING = """
forward = te.Linear.forward
def once(self, x, *args, **kwargs):
    if done:
        raise ValueError("only in a capture")
    return forward(self, x, *args, **kwargs)
te.Linear.forward, done = once, []
"""


@pytest.mark.parametrize(
    ("before", "in_step", "reason"),
    [
        (SHARDED, "", "its parameters are sharded (DTensor)"),
        (OVERLAPPED, "", "it shares communication buffers (userbuffers)"),
        (RAISING, "done.append(1)", "its eager run raised"),
    ],
    ids=["sharded", "overlapped", "raising"],
)
def test_modules_that_are_left_out(before: str, in_step: str, reason: str) -> None:
    done = loop(before, in_step=in_step)
    assert done.stdout == "trained\n", done.stderr
    assert f"callable 0 and others of class Linear are not compared: {reason}" in lines(done)[0]
    last = r"fixes .*: \d steps?, 0 callables, 0 tensors: nothing .*; 4 callables left out.*"
    assert re.fullmatch(last, lines(done)[-1])


MEGATRON = """
import sys, types
client = sys.modules[CLIENT] = types.ModuleType(CLIENT)
client.FLAG = False
class Layer(te.Linear):
    __module__ = "megatron.core.transformer.transformer_layer"
    def forward(self, x):
        return super().forward(x) if client.FLAG else super().forward(x) * 2
layers = torch.nn.ModuleList(Layer(32, 32, **options) for _ in layers)
make = te.make_graphed_callables
def capture(*args):
    client.FLAG = True
    made = make(*args)
    client.FLAG = False
    return made
te.make_graphed_callables = capture
"""
"""Lines for `LOOP` with layers that run other code in a capture, like layers of Megatron-Core."""


@pytest.mark.parametrize(
    ("client", "flag", "last"),
    [
        ("megatron.core.transformer.cuda_graphs", "_IS_GRAPH_CAPTURING", EQUAL),
        ("megatron.core.extensions.te_cuda_graphs", "_IS_GRAPH_CAPTURING", EQUAL),
        ("megatron.core.elsewhere", "_IS_GRAPH_CAPTURING", ".*; 4 callables left out"),
        ("megatron.core.transformer.cuda_graphs", "capturing", ".*; 4 callables left out"),
    ],
)
def test_layers_of_megatron_run_as_in_a_capture(client: str, flag: str, last: str) -> None:
    done = loop(MEGATRON.replace("CLIENT", repr(client)).replace("FLAG", flag))
    assert done.stdout == "trained\n", done.stderr
    assert re.fullmatch(last, lines(done)[-1]), done.stderr
    assert ("_IS_GRAPH_CAPTURING in none of megatron.core." in done.stderr) == (last != EQUAL)


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
"""Lines for `LOOP` with a graph that doubles its outputs. No fix removes this bug."""


@pytest.mark.parametrize(
    ("job", "status", "line", "last"),
    [
        ({"before": BROKEN}, 0, "forward: output 0 differs from the eager run (relative error 1)", " differ$"),
        (
            {"before": BROKEN, "check": "2,strict"},
            EXIT_MISMATCH,
            "forward: output 0 differs from the eager run (relative error 1)",
            "ending with status 86",
        ),
        (
            {"before": BROKEN, "check": "2,strict", "first": "import sys; sys.stdout = None\n"},
            EXIT_MISMATCH,
            "forward: output 0 differs from the eager run (relative error 1)",
            "ending with status 86",
        ),
        ({"in_step": "if step == 2: raise SystemError", "check": "3"}, 1, "", "^fixes on: 2 steps, 4 callables, "),
    ],
    ids=["a bug", "a strict check", "a strict check without stdout", "an error"],
)
def test_how_a_job_ends(job: dict[str, str], status: int, line: str, last: str) -> None:
    done = loop(**job)
    assert (done.returncode, done.stdout) == (status, "trained\n" * (status == 0)), done.stderr
    assert any(line in each for each in lines(done))
    assert re.search(last, lines(done)[-1])
    assert ("SystemError" in done.stderr) == (status == 1)


@pytest.mark.parametrize("eager", [(1 + 1 / 64, 1 + 2 / 64), (1e-6, 3e-6)], ids=["noise", "anything"])
def test_tensors_that_eager_runs_do_not_reproduce_are_named(eager: tuple[float, float]) -> None:
    before = f"""
import itertools
factors = itertools.cycle({eager})
forward = te.Linear.forward
def noisy(self, x, *args, **kwargs):
    return forward(self, x, *args, **kwargs) * (1 if torch.cuda.is_current_stream_capturing() else next(factors))
te.Linear.forward = noisy
"""
    found = lines(loop(before))
    assert any("is not reproducible" in line and "two eager runs differ (relative error " in line for line in found)
    assert "all equal, except" in found[-1]
    assert "that two eager runs do not reproduce" in found[-1]


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
def test_invalid_options(text: str) -> None:
    with pytest.raises(ValueError, match=f"^TE_GRAPH_FIXES_CHECK={text} is invalid"):
        Options.parse(text)


def test_an_invalid_option_leaves_te_unchanged() -> None:
    program = (
        "import sys\ntry:\n    import te_graph_fixes\nexcept ValueError as error:\n    print(error)\n"
        "print([name for name in sys.modules if '._te_' in name])"
    )
    done = on_simulator("-c", program, imported=("transformer_engine.pytorch",), TE_GRAPH_FIXES_CHECK="two")
    assert re.fullmatch(r"TE_GRAPH_FIXES_CHECK=two is invalid.*\n\[\]\n", done.stdout), done


def test_without_a_check_nothing_is_imported() -> None:
    heavy = "te_graph_fixes.checking.", "torch"
    code = f"import sys, te_graph_fixes; print([name for name in sys.modules if name.startswith({heavy})])"
    assert python("-c", code).stdout == "[]\n"
    assert "'torch'" not in python("-c", code, TE_GRAPH_FIXES_CHECK="2").stdout


SETUP = """
from tests.simulator import install; install()
import time, torch, te_graph_fixes
import torch.distributed as dist
import transformer_engine.pytorch as te

dist.init_process_group("gloo")
rank = dist.get_rank()
options = {"params_dtype": torch.bfloat16, "device": "cuda"}
sample = lambda: torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
"""


def on_two_ranks(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in two ranks of torchrun under `run --check=2`, and return the completed process."""
    job = folder / "job.py"
    job.write_text(SETUP + program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", job]
    return python("-m", "te_graph_fixes", "run", "--check=2", *torchrun)


RANKS = """
order = [1, 2, 1, 2, -2, -1, -2, -1]
reuse = {"_order": order, "_num_layers_per_chunk": [1, 1], "_reuse_graph_input_output_buffers": True}

def train(wait, later):
    # Rank 0 sends a gradient to the other rank after the backward of callable 2. It waits for this send after the
    # backward of callable `wait`. If `later` is true, it also waits for a later send.
    layers = [te.Linear(32, 32, **options) for _ in range(2)]
    samples = [(sample(),) for _ in range(4)]
    graphed = te.make_graphed_callables(tuple(layers), samples, sample_kwargs=[{} for _ in range(4)], **reuse)
    for step in range(3):
        outs = {}
        for i in (0, 2, 1, 3):
            outs[i] = leaf, out = (leaf := sample()), graphed[i](leaf)
        for i in (2, 0, 3, 1):
            leaf, out = outs.pop(i)
            out.backward(torch.ones_like(out))
            if rank == 0 and i == 2:
                batch = [dist.P2POp(dist.isend, leaf.grad, 1)]
                work = dist.isend(leaf.grad, 1) if step % 2 else dist.batch_isend_irecv(batch)[0]
            if rank == 0 and i == 0 and later:
                dist.isend(torch.ones(4), 1).wait()
            if rank == 0 and i == wait:
                work.wait()
        if rank == 1:
            dist.recv(torch.empty(16, 32, dtype=torch.bfloat16), 0)
            if later:
                dist.recv(torch.empty(4), 0)
        with torch.no_grad():
            for layer in layers:
                for parameter in layer.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

train(0, False)  # TE_GRAPH_FIXES_CHECK has started the first check.
te_graph_fixes.check(2)
train(1, True)
te_graph_fixes.deactivate()
te_graph_fixes.activate(disable=["grad-input-lifetime", "leaf-grad-lifetime"])
te_graph_fixes.check(3)
train(1, False)
dist.destroy_process_group()  # The check is still in its last step.
"""


@pytest.mark.full
def test_one_report_for_all_ranks(tmp_path: Path) -> None:
    """Two ranks of torchrun under `run --check` exchange results through gloo. Each check must print one summary."""
    done = on_two_ranks(RANKS, tmp_path)
    assert done.returncode == 0, done.stderr
    ends = [i for i, line in enumerate(lines(done)) if " tensors on 2 ranks" in line]
    reports = [lines(done)[i] for i in ends]
    assert len(reports) == 3, lines(done)
    for report, steps in zip(reports, (2, 2, 3), strict=True):
        assert re.match(rf"fixes (on|\d+ of \d+): {steps} steps, 8 callables, ", report)
        assert " tensors on 2 ranks: " in report
    assert reports[0].endswith(": all equal")
    assert reports[1].endswith(": all equal")
    assert reports[2].endswith(" differ, on rank 0")
    sent = [line for line in lines(done) if "is being sent and overwritten by" in line]
    assert "rank 0, step 1, callable 2 (Linear), backward: gradient of input 0" in sent[0]
    assert sent[0].endswith("likely cause: grad-input-lifetime")


FAILING = """
x = sample()
graphed = te.make_graphed_callables(te.Linear(32, 32, **options), (x,))
graphed(x).sum().backward()
if rank == 0:
    raise SystemError
time.sleep(100)
"""


@pytest.mark.full
def test_a_failed_rank_does_not_wait(tmp_path: Path) -> None:
    start = time.monotonic()
    done = on_two_ranks(FAILING, tmp_path)
    assert time.monotonic() - start < PATIENCE - 10
    assert "SystemError" in done.stderr
    assert re.search(
        "1 step, 1 callable, .*; this counts only rank 0, because the ranks could not exchange ", done.stderr
    )
