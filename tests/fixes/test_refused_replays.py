"""Test that failed replays change no state, and that only the pairs of steps in `DECLARED` must keep their order."""

from __future__ import annotations

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

PROGRAM = """
from transformer_engine.pytorch import _te_replay
from tests.support.snapshot import changes, snapshot

RECIPE = DelayedScaling(amax_history_len=4)
add, refused, checks, replays, faults = _te_replay.Replay.add, None, set(), {}, []

def add_refusable(replay, phase, name, step):
    def check(*arguments):
        step(*arguments)
        if refused == (phase, name):
            raise RuntimeError("refused")
    if phase.endswith("check"):
        checks.add((phase, name))
        replays.setdefault(replay, set()).add((phase, name))
    add(replay, phase, name, check if phase.endswith("check") else step)

_te_replay.Replay.add = add_refusable

class Layer(torch.nn.Module):
    is_first_microbatch = True

    def __init__(self, kind):
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": kind != "own autocasts"}
        self.kind = kind
        self.first = te.Linear(32, 32, **options)
        self.second = te.LayerNormLinear(32, 32, delay_wgrad_compute=kind == "plain", **options)
        for weight in (self.first.weight, self.second.weight):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        self.is_first_microbatch = kind != "plain"

    def forward(self, x, is_first_microbatch=None):
        if self.kind == "own autocasts":
            with te.autocast(enabled=True, recipe=RECIPE):
                x = self.first(x)
            with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPE):
                y = self.first(x)
            return self.second(x + y)
        mark = is_first_microbatch
        if self.kind in ("plain", "kept mark"):
            mark = self.is_first_microbatch
            self.is_first_microbatch = self.kind == "kept mark"
        x = torch.nn.functional.dropout(self.first(x, is_first_microbatch=mark), 0.1)
        if self.kind in ("cached", "kept mark"):
            return te.checkpoint(self.second, x, is_first_microbatch=mark)
        return self.second(x, is_first_microbatch=mark)

def train(kind, refuses):
    torch.manual_seed(1)
    replays.clear()
    layer, outputs = Layer(kind), []
    options = {"fp8_weight_caching": True} if kind == "cached" else {}
    run = te.make_graphed_callables(
        layer.train(kind != "inference"), (random(),), enabled=True, recipe=RECIPE, num_warmup_iters=1, **options
    )

    def state():
        return snapshot(layer, Manager, outputs, str(torch.cuda.get_rng_state().tolist()), *replays)

    def refusing(phase, call):
        global refused
        for check in sorted(check for each in replays.values() for check in each if refuses and check[0] == phase):
            before, refused = state(), check
            try:
                call()
            except RuntimeError as error:
                faults.extend(f"{kind}, {check}: {path}" for path in changes(before, state()))
            else:
                faults.append(f"{kind}, {check}: not refused")
            refused = None
        return call()

    def forward(x):
        mark = {"is_first_microbatch": step == 0} if kind == "cached" else {}
        return refusing("forward check", lambda: run(x, **mark))

    torch.manual_seed(2)
    for step in range(3):
        layer.is_first_microbatch = True if kind == "kept mark" else step == 0
        for weight in (layer.first.weight, layer.second.weight):
            weight.grad_added_to_main_grad = False
        x = random()
        with te.autocast(enabled=True, recipe=RECIPE):
            y = te.checkpoint(forward, x) if kind == "recomputed" else forward(x)
        outputs.append(y)
        if kind == "inference":
            assert "This graph has no backward" in error_of(lambda: refusing("backward check", y.sum().backward))
            continue
        if kind == "recomputed":
            y.sum().backward()
        else:
            refusing("backward check", lambda: y.sum().backward(retain_graph=True))
        if kind == "plain":
            refusing("wgrad check", run.backward_dw)
        yield from (y, x.grad, layer.first.weight.main_grad, layer.second.weight.main_grad)
        outputs.pop()

ORDER = _te_replay.ORDER
DECLARED = [
    ("resume recipe states", "register states of TE"),
    ("register states of TE", "register states of capture"),
    ("register states of capture", "use copied scales"),
    ("resume recipe states", "refresh cached weights"),
    ("fill flags of modules", "refresh cached weights"),
    ("note replay", "copy input gradients"),
]

def reordered(names):
    # Reverse the steps of a phase, but keep each pair of DECLARED in its order.
    pending, result = [*reversed(names)], []
    while pending:
        result.append(next(n for n in pending if not any(n == last and first in pending for first, last in DECLARED)))
        pending.remove(result[-1])
    return result

for kind in ("plain", "recomputed", "kept mark", "own autocasts", "cached", "inference"):
    def numbers(refuses):
        return [tensor.detach().clone() for tensor in train(kind, refuses)]

    expected = numbers(refuses=False)
    if not all(map(torch.equal, expected, numbers(refuses=True))):
        faults.append(f"{kind}: other numbers after refusals")
    _te_replay.ORDER = {phase: reordered(names) for phase, names in ORDER.items()}
    if not all(map(torch.equal, expected, numbers(refuses=False))):
        faults.append(f"{kind}: other numbers in another order")
    _te_replay.ORDER = ORDER
declared = {(phase, name) for phase, names in _te_replay.ORDER.items() for name in names if phase.endswith("check")}
print(sorted(declared - checks), faults)
"""


def test_refusals_and_other_orders_of_steps_change_nothing() -> None:
    assert run_program(PROGRAM, TE_GRAPH_FIXES="on").splitlines()[-1] == "[] []"
