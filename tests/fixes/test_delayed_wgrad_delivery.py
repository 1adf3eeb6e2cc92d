"""``delayed-wgrad-delivery``: recognised on every TransformerEngine (TE); on the simulator, no gradient is lost.

Run as a program it says of each captured forward whether autograd nodes of the warmup are still alive then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.shipped.delayed_wgrad import accumulate_grads, deliver_grads, take_grads
from tests.support.child import simulate
from tests.support.published import source

FIX = CATALOGUE["delayed-wgrad-delivery"]
ALONE = f"{FIX.id},{','.join(FIX.requires)}"
LEAKS = "2.13" <= ".".join((Source.installed().version or "").split(".")[:2]) <= "2.18"
ORDER = [1, 1, -1, -1] if (Source.installed().version or "").startswith("2.10.") else [1, 1, -1, -1.5, -1, -1.5]
"""TE 2.10 takes whole numbers only, and captures each wgrad right after its dgrad."""
PARTS = (
    "__init__.py",
    "pytorch/__init__.py",
    "pytorch/graph.py",
    "pytorch/module/base.py",
    "pytorch/module/grouped_linear.py",
    "pytorch/module/layernorm_mlp.py",
    "pytorch/ops/basic/grouped_linear.py",
)
MUTATIONS = {
    "another warmup": ("graph.py", "need_backward_dw = True", "need_backward_dw = 1"),
    "another capture": (
        "graph.py",
        "_graph_context_wrapper(bwd_dw_graph, pool",
        "_graph_context_wrapper(bwd_graph, pool",
    ),
    "other grads": ("module/base.py", "bgrad.to(bias_tensor.dtype)", "bgrad.clone()"),
    "other weights": ("module/base.py", "noop_cat(self._get_weight_tensors())", "self._get_weight_tensors()[0]"),
    "an MLP that adds": ("module/layernorm_mlp.py", "self.fc1_weight.grad = ", "self.fc1_weight.grad += "),
    "other experts": ("module/grouped_linear.py", "weight_params[i].grad = ", "weight_params[i].main_grad = "),
    "another bias": ("module/grouped_linear.py", "bias_params[i].grad is None", "bias_params[0].grad is None"),
    "another return": ("module/grouped_linear.py", "elif ctx.fuse_wgrad_accumulation:", "elif ctx.use_bias:"),
}
ONLY_2_20 = {
    "another op": ("ops/basic/grouped_linear.py", "w.grad = ", "w.main_grad = "),
    "other op hooks": ("graph.py", "isinstance(module, TransformerEngineBaseModule)\n", "module is not None\n"),
}


def copy(version: str, folder: Path) -> Path:
    """The part of a TE that the fix looks at, in ``folder``."""
    for part in PARTS:
        path = source(version) / "transformer_engine" / part
        if path.is_file():
            target = folder / "transformer_engine" / part
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return folder / "transformer_engine" / "pytorch"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        *((version, name) for version in ("2.10.0", "2.12.0", "2.15.0", "2.20.2") for name in MUTATIONS),
        *(("2.20.2", name) for name in ONLY_2_20),
    ],
)
def test_another_shape_is_unrecognized(version: str, name: str, tmp_path: Path) -> None:
    part, old, new = (MUTATIONS | ONLY_2_20)[name]
    path = copy(version, tmp_path) / part
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    verdict = FIX.verdict_on(Source.at(tmp_path))
    assert (verdict.state, verdict.edits) == ("unrecognized", ())


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_grads_are_added_to_the_parameters_that_they_are_cut_for() -> None:
    first, frozen, last = parameters((1, 2), (2, 2), (1, 2))
    frozen.requires_grad_(False)
    last.grad = torch.ones(1, 2)
    accumulate_grads([first, frozen, last], torch.arange(8.0, dtype=torch.float64).view(4, 2))
    assert first.grad is not None
    assert first.grad.tolist() == [[0, 1]]
    assert first.grad.dtype == torch.float32
    assert frozen.grad is None
    assert last.grad.tolist() == [[7, 8]]


@pytest.mark.parametrize("grad", [None, torch.empty(0)])
def test_nothing_is_added_where_there_is_no_grad(grad: torch.Tensor | None) -> None:
    (bias,) = parameters((2,))
    accumulate_grads([bias], grad)
    assert bias.grad is None


def test_delivered_grads_are_the_parameters_own() -> None:
    (weight,) = parameters((2,))
    static = torch.ones(2)
    deliver_grads([(weight, static)])
    static.fill_(5)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]
    deliver_grads([(weight, static)])
    assert weight.grad.tolist() == [6, 6]


class Delayed(torch.nn.Linear):
    """A module whose `backward_dw` gives its bias a gradient, and fails where it is told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__(2, 2)
        self.fails = fails
        self.hooks_run = 0
        self.wgrad_accumulation_and_reduce_hooks = [self.count]

    def count(self) -> None:
        self.hooks_run += 1

    def backward_dw(self) -> None:
        accumulate_grads([self.bias], torch.ones(2))
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
        if self.fails:
            raise RuntimeError("no wgrad")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_grads_and_hooks_as_they_were(fails: bool) -> None:
    module = Delayed(fails)
    kept = module.bias.grad = torch.full((2,), 7.0)
    if fails:
        with pytest.raises(RuntimeError, match="no wgrad"):
            take_grads(module)
    else:
        ((parameter, grad),) = take_grads(module)
        assert parameter is module.bias
        assert grad.tolist() == [1, 1]
    assert module.bias.grad is kept
    assert kept.tolist() == [7, 7]
    assert (module.hooks_run, module.wgrad_accumulation_and_reduce_hooks) == (0, [module.count])


def run(setting: str) -> list[list[bool]]:
    """What `main` prints in a child process on the simulator."""
    return [json.loads(line) for line in simulate(__file__, TE_GRAPH_FIXES=setting).splitlines() if line[0] == "["]


def test_no_autograd_node_of_the_warmup_is_left_for_a_capture() -> None:
    assert run(ALONE) == [[False, False]]


@pytest.mark.skipif(not LEAKS, reason="this TE keeps no output of the warmup")
def test_without_the_fix_autograd_nodes_of_the_warmup_are_left() -> None:
    assert run("off") == [[True, True]]


BIAS_TAKEN = """
import torch, te_graph_fixes
import transformer_engine.pytorch as te
from te_graph_fixes.verify.driver.comparison import error
from te_graph_fixes.verify.driver.setting import make_recipe
found = []
for delay in (False, True):
    recipe, x = make_recipe("current"), torch.ones(64, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    torch.manual_seed(1)
    layer = te.LayerNormMLP(64, 64, delay_wgrad_compute=delay, params_dtype=torch.bfloat16, device="cuda")
    taken = {}
    def take(parameter):
        if parameter.grad is not None:
            taken[parameter] = taken.get(parameter, 0) + parameter.grad
        parameter.grad = None
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=recipe):
            out = layer(x)
        out.backward(x.detach())
        if delay:
            layer.backward_dw()
    kept = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    found.append([grad + taken.get(p, 0) for grad, p in zip(kept, layer.parameters())])
print(error(found[1], found[0]))
"""


def test_biases_arrive_where_a_hook_takes_their_grad() -> None:
    assert float(simulate("-c", BIAS_TAKEN)) == 0.0
    with pytest.raises(AssertionError, match="'NoneType' object has no attribute 'to'"):
        simulate("-c", BIAS_TAKEN, TE_GRAPH_FIXES="off")


def main() -> None:
    """Capture two forwards of a module whose parameter gets no gradient from the dgrad."""
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401

    options = {"bias": False, "delay_wgrad_compute": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = te.Linear(32, 32, **options)
    plain_forward = module.forward
    left = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        node = module.weight.expand_as(module.weight).grad_fn.next_functions[0][0]
        if torch.cuda.is_current_stream_capturing():
            left.append("warmup" in node.metadata)
        else:
            node.metadata["warmup"] = True
        return plain_forward(x)

    module.forward = forward
    samples = [(torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True),) for _ in range(2)]
    te.make_graphed_callables((module,), samples, _order=ORDER, _num_layers_per_chunk=[1], allow_unused_input=True)
    print(json.dumps(left))


if __name__ == "__main__":
    main()
