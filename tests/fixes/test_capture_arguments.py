"""Test rare arguments that frameworks pass to `make_graphed_callables` and to graphed callables."""

from __future__ import annotations

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import START, on_simulator, run_program

pytestmark = pytest.mark.te

GRAPH = Source.installed().module("transformer_engine.pytorch.graph").text

PROGRAM = """
kind, recipe = "KIND", RECIPE
ORDER, MICROBATCHES, called = [1, 1, -1, -1], 2, []

def train(graphed):
    torch.manual_seed(1)
    module = te.LayerNormLinear(32, 32, params_dtype=torch.bfloat16, device="cuda")
    runs, options, given = [module] * MICROBATCHES, {}, {}
    if kind == "warmup hooks":
        options = {"pre_warmup_hook": lambda: called.append("pre"), "post_warmup_hook": lambda: called.append("post")}
    if kind == "capture hooks":
        names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
        options = {"capture_time_hooks": [{name: {0: lambda m, name=name: called.append(name)} for name in names}]}
    if kind == "retained":
        options = {"retain_graph_in_backward": True}
    if kind in ("stream", "stream and event"):
        given = {"cuda_graph_stream": torch.cuda.Stream()}
    if kind == "stream and event":
        given["cuda_graph_event"] = torch.cuda.Event(external=True)
    if graphed:
        runs = te.make_graphed_callables(
            (module,), [(random(),) for _ in runs], sample_kwargs=[{} for _ in runs], _order=ORDER,
            _num_layers_per_chunk=[1], _reuse_graph_input_output_buffers=True, allow_unused_input=True,
            enabled=recipe is not None, recipe=recipe, **options,
        )
    torch.manual_seed(2)
    for step in range(3):
        inputs, outs = [random() for _ in runs], []
        for run, x in zip(runs, inputs):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                outs.append(run(x, **(given if graphed else {})))
            if "cuda_graph_event" in given:
                given["cuda_graph_event"].record(given["cuda_graph_stream"])
        yield from outs
        for out, x in zip(outs, inputs):
            out.backward(torch.randn_like(out))
            yield x.grad
        for p in module.parameters():
            yield p.grad
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

compare(train)
print(sorted(set(called)))
"""

SINCE = {
    "warmup hooks": "pre_warmup_hook",
    "capture hooks": "capture_time_hooks",
    "retained": "retain_graph_in_backward",
    "stream": "cuda_graph_stream",
    "stream and event": "cuda_graph_event",
}
CALLED = {
    "warmup hooks": "['post', 'pre']",
    "capture hooks": "['backward_hooks', 'backward_pre_hooks', 'forward_hooks', 'forward_pre_hooks']",
}
KINDS = [kind for kind, name in SINCE.items() if name in GRAPH]


def program(kind: str, recipe: str = "None") -> str:
    return PROGRAM.replace("KIND", kind).replace("RECIPE", recipe)


@pytest.mark.parametrize("recipe", ["None", "DelayedScaling()"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_eager_training(kind: str, recipe: str) -> None:
    assert run_program(program(kind, recipe)).strip() == CALLED.get(kind, "[]")


@pytest.mark.parametrize("kind", ["warmup hooks", "capture hooks"])
def test_what_this_te_lacks_is_refused(kind: str) -> None:
    if kind in KINDS:
        pytest.skip(f"this TransformerEngine has {SINCE[kind]}")
    assert "unexpected keyword argument" in on_simulator("-c", START + program(kind)).stderr


IN_INFERENCE_MODE = """
layer = te.Linear(32, 32, device="cuda")
with torch.inference_mode():
    sample, x = torch.randn(2, 32, 32, device="cuda")
    wanted = layer(x)
    graphed = te.make_graphed_callables(layer, (sample.requires_grad_(),), allow_unused_input=True)
    assert torch.equal(graphed(x), wanted)
"""


def test_modules_in_training_are_captured_in_inference_mode() -> None:
    run_program(IN_INFERENCE_MODE)
