"""Test delayed scaling on the simulator: eager training, recomputation, first modules of autocasts, other threads."""

from __future__ import annotations

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

SETUP = """
from transformer_engine.pytorch.graph import restore_fp8_tensors, save_fp8_tensors

DELAYED, OPTIONS = DelayedScaling(amax_history_len=4), {"params_dtype": torch.bfloat16, "device": "cuda"}

def autocast(recipe=DELAYED):
    return te.autocast(enabled=True, recipe=recipe)

def scales(model):
    found = []
    for module in model.modules():
        metas = [getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()]
        for meta in metas:
            for key in ("scaling_fwd", "scaling_bwd"):
                state = (meta or {}).get(key)
                if hasattr(state, "amax_history"):
                    found += [state.scale.clone(), state.amax_history.clone()]
    return found
"""

EAGER = """
def entries():
    buffers = getattr(Manager, "quantization_state", Manager)
    return sorted(len(values) for values in buffers.global_amax_buffer.values())

torch.manual_seed(0)
operations = te.ops.Sequential(te.ops.Linear(32, 32, dtype=torch.bfloat16, device="cuda"))
models = [linear(), operations, te.LayerNormMLP(32, 32, **OPTIONS)]
for step in range(4):
    for model in models:
        x = random()
        with autocast():
            y = model(x)
        y.sum().backward()
        with torch.no_grad(), autocast(Float8CurrentScaling()):
            z = model(x)
        print(step, y.sum().item(), x.grad.sum().item(), z.sum().item(), [s.tolist() for s in scales(model)], entries())
saved = save_fp8_tensors(models[1:2], DELAYED)
with autocast():
    operations(10 * random()).sum().backward()
restore_fp8_tensors(models[1:2], saved)
fresh = te.ops.Sequential(te.ops.Linear(32, 32, dtype=torch.bfloat16, device="cuda"))
saved = save_fp8_tensors([fresh], DELAYED)
with autocast():
    fresh(10 * random()).sum().backward()
restore_fp8_tensors([fresh], saved)
print([s.tolist() for s in scales(operations) + scales(fresh)], entries())
"""

REUSED = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return self.inner(self.inner(x))

def train(graph):
    torch.manual_seed(3)
    layer = Layer()
    if graph:
        te.make_graphed_callables(layer, (random(),), enabled=True, recipe=DELAYED)
    torch.manual_seed(4)
    for _ in range(3):
        x = random()
        with autocast():
            y = te.checkpoint(layer, x) if graph else layer(x)
        (y.float() ** 2).mean().backward()
        yield from scales(layer)
        layer.zero_grad()

compare(train)
"""

THREAD = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.eager = linear(), [linear()]
        self.steps = []

    def step(self, _):
        def run():
            with torch.enable_grad(), autocast():
                self.eager[0](torch.ones(32, 32, dtype=torch.bfloat16, device="cuda"))
            self.steps.append(self.eager[0].fp8_meta["scaling_fwd"].scale.clone())

        if not torch.cuda.is_current_stream_capturing():  # on the simulator, a capture includes all threads
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    def forward(self, x):
        y = self.inner(x)
        y.register_hook(self.step)
        return y

layer = Layer()
te.make_graphed_callables(layer, (random(),), enabled=True, recipe=DELAYED)
print([bool((scale != 1).any()) for scale in layer.steps])
"""


FIRST_MODULE = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.plain = linear(), torch.nn.Linear(32, 32, **BF16)
        if Layer.forward is Layer.operation_without_fp8:
            self.operation = te.ops.Sequential(te.ops.Linear(32, 32, **BF16))
        self.hidden = [linear().requires_grad_(False)]
        self.frozen = linear().requires_grad_(False)

    def tied(self, x):
        y = self.inner(x)
        with te.autocast(enabled=False):
            return self.inner(y)

    def listed(self, x):
        return self.plain(self.hidden[0](x))

    def operation_without_fp8(self, x):
        with te.autocast(enabled=False):
            return self.operation(x)

    def eager_branch(self, x):
        return self.plain(x) if self.ran else self.inner(x)

    def frozen_inside(self, x):
        with autocast():
            y = self.frozen(x.detach())
        return self.plain(x) + y

    def trained(self, x):
        return self.inner(x)

    def detached(self, x):
        return self.inner(x).detach()

def losses(graph, forward, inside, in_autocast):
    Manager.reset()
    torch.manual_seed(3)
    Layer.forward, Layer.ran = getattr(Layer, forward), False
    layer, before, after = Layer(), linear(), linear()
    if forward == "eager_branch":
        with autocast():
            layer(random()).sum().backward()
        Layer.ran = True
        layer.zero_grad()
    with autocast() if in_autocast else contextlib.nullcontext():
        if in_autocast:
            before(random())
        options = {"enabled": True, "recipe": DELAYED} if inside else {}
        run = te.make_graphed_callables(layer, (random(),), allow_unused_input=True, **options) if graph else layer
    torch.manual_seed(4)
    for _ in range(4):
        x = random()
        if inside:
            with autocast():
                y = after(x + run(x))
        else:
            with autocast():
                y = before(x)
            y = run(y)
            with autocast():
                y = after(y)
        (y.float() ** 2).mean().backward()
        yield from (y, x.grad, *scales(before), *scales(layer), *scales(after))

for case in CASES:
    compare(losses, *case)
"""
FIRST_MODULE_CASES = [
    ("tied", True, False),
    ("listed", True, False),
    ("operation_without_fp8", True, False),
    ("eager_branch", True, False),
    ("frozen_inside", False, False),
    ("frozen_inside", True, False),
    ("trained", True, True),
]


IN_ONE_AUTOCAST = """
class Layer(torch.nn.Module):
    def __init__(self, recomputed):
        super().__init__()
        self.first, self.second, self.recomputed = linear(), linear(), recomputed

    def forward(self, x):
        if self.recomputed == "both":
            return te.checkpoint(lambda x: self.second(self.first(x)), x)
        x = te.checkpoint(self.first, x) if self.recomputed == "first" else self.first(x)
        return te.checkpoint(self.second, x) if self.recomputed == "second" else self.second(x)

def train_in_one_autocast(graph, recomputed, order, runs_before):
    torch.manual_seed(1)
    layer, before = Layer(recomputed), linear()
    modules, runs = [layer.first, layer.second, *[before] * runs_before], [layer] * 2
    if graph:
        samples = [(random(),), (random(),)]
        runs = te.make_graphed_callables((layer,), samples, enabled=True, recipe=DELAYED, _order=list(order))
        layer.zero_grad()
    torch.manual_seed(2)
    for _ in range(3):
        forwards, outputs = iter(runs), []
        with autocast():
            for entry in order:
                if entry > 0:
                    x = random()
                    outputs.append(next(forwards)(before(x) if runs_before else x))
                    yield outputs[-1]
                else:
                    outputs.pop(0).float().square().mean().backward()
        for module in modules:
            yield from (module.weight.grad, *scales(module)[::2])
            module.zero_grad()

for case in itertools.product(("first", "second", "both"), ((1, -1, 1, -1), (1, 1, -1, -1)), (False, True)):
    if case != ("first", (1, 1, -1, -1), False):  # this case differs (docs/limits.md)
        compare(train_in_one_autocast, *case)
"""


def test_eager_training_is_that_of_te() -> None:
    assert run_program(SETUP + EAGER, TE_GRAPH_FIXES="on") == run_program(SETUP + EAGER, TE_GRAPH_FIXES="off")


def test_a_recomputed_module_that_runs_twice_keeps_its_newer_scales() -> None:
    """After each step, the scales must equal the scales of eager training without checkpoints.

    Eager training with checkpoints is no reference, because its recomputation rounds gradients differently.
    """
    run_program(SETUP + REUSED)


def test_a_recomputation_inside_the_autocast_of_the_program_updates_no_forward_scales() -> None:
    """A whole step runs in one autocast. Only the end of this autocast may update the forward scales."""
    run_program(SETUP + IN_ONE_AUTOCAST)


@pytest.mark.parametrize("fixes", ["on", "backward-amax-reduction"])
def test_graphs_take_the_flag_of_the_first_module_as_their_forward_does(fixes: str) -> None:
    # Without `replay-arguments`, detached outputs of a graph require gradients, so eager and graph differ.
    cases = FIRST_MODULE_CASES + [("detached", True, False)] * (fixes == "on")
    run_program(f"{SETUP}CASES = {cases}{FIRST_MODULE}", TE_GRAPH_FIXES=fixes)


def test_another_thread_updates_its_scales_during_a_capture() -> None:
    for switch in ("off", "on"):
        assert run_program(SETUP + THREAD, TE_GRAPH_FIXES=switch).splitlines()[-1] == "[True, True, True]"
