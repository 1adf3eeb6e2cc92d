"""``delayed-wgrad-delivery`` on the simulator: no gradient is lost.

Run as a program it says of each captured forward whether autograd nodes of the warmup are still alive then.
"""

from __future__ import annotations

import json

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support import published
from tests.support.child import simulate

FIX = CATALOGUE["delayed-wgrad-delivery"]
ALONE = f"{FIX.id},{','.join(FIX.requires)}"
MINOR = published.te("installed").minor
ORDER = [1, 1, -1, -1] if MINOR == 10 else [1, 1, -1, -1.5, -1, -1.5]
"""TE 2.10 takes whole numbers only, and captures each wgrad right after its dgrad."""
SHIPPED = """
import te_graph_fixes, torch
from te_graph_fixes.shipped.delayed_wgrad import accumulate_grads, deliver_grads, take_grads

first, frozen, last = (torch.nn.Parameter(torch.zeros(rows, 2)) for rows in (1, 2, 1))
frozen.requires_grad_(False)
last.grad = torch.ones(1, 2)
accumulate_grads([first, frozen, last], torch.arange(8.0, dtype=torch.float64).view(4, 2))
assert first.grad.tolist() == [[0, 1]] and first.grad.dtype == torch.float32
assert frozen.grad is None and last.grad.tolist() == [[7, 8]]
for nothing in (None, torch.empty(0)):
    accumulate_grads([frozen], nothing)
    assert frozen.grad is None

weight, static = torch.nn.Parameter(torch.zeros(2)), torch.ones(2)
deliver_grads([(weight, static)])
static.fill_(5)
assert weight.grad.tolist() == [1, 1]
deliver_grads([(weight, static)])
assert weight.grad.tolist() == [6, 6]

class Delayed(torch.nn.Linear):
    # its `backward_dw` gives its bias a gradient, and fails where it is told to
    fails, hooks_run = False, 0

    def count(self):
        self.hooks_run += 1

    def backward_dw(self):
        accumulate_grads([self.bias], torch.ones(2))
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
        if self.fails:
            raise ZeroDivisionError

for fails in (False, True):
    module = Delayed(2, 2)
    module.fails, module.wgrad_accumulation_and_reduce_hooks = fails, [module.count]
    kept = module.bias.grad = torch.full((2,), 7.0)
    try:
        ((parameter, grad),) = take_grads(module)
        assert not fails and parameter is module.bias and grad.tolist() == [1, 1]
    except ZeroDivisionError:
        assert fails
    assert module.bias.grad is kept and kept.tolist() == [7, 7]
    assert (module.hooks_run, module.wgrad_accumulation_and_reduce_hooks) == (0, [module.count])
"""


def test_gradients_are_added_delivered_and_taken() -> None:
    """To and from the parameters that they are of; a capture leaves gradients and hooks as they were."""
    simulate("-c", SHIPPED)


def run(setting: str) -> list[list[bool]]:
    """What `main` prints in a child process on the simulator."""
    return [json.loads(line) for line in simulate(__file__, TE_GRAPH_FIXES=setting).splitlines() if line[0] == "["]


def test_no_autograd_node_of_the_warmup_is_left_for_a_capture() -> None:
    assert run(ALONE) == [[False, False]]


@pytest.mark.skipif(not 13 <= MINOR <= 18, reason="this TE keeps no output of the warmup")
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
    import torch
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
