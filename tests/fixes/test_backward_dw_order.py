"""``backward-dw-order`` on the simulator: inputs that need no gradient. `test_graph_order.py` tests the plan."""

from __future__ import annotations

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

TABLE = """
import torch, te_graph_fixes
import transformer_engine.pytorch as te

MICROBATCHES, LAYERS, SHAPE = 4, 3, (48, 32)
ORDER = [1, 2, 3, 1, 2, 3, -3, 1, -3.5, -2, 2, -2.5, -1, 3, -1.5, -3, 1, -3.5, -2, 2, -2.5, -1, 3, -1.5]
ORDER += [-3, -3.5, -2, -2.5, -1, -1.5] * 2

class Rotated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = te.Linear(32, 32, bias=False, delay_wgrad_compute=True, device="cuda")

    def forward(self, x, table):
        return self.linear(x * table)

    def backward_dw(self):
        self.linear.backward_dw()

def tensor():
    return torch.randn(SHAPE, device="cuda", requires_grad=True)

table = torch.randn(SHAPE, device="cuda")
layers = [Rotated() for _ in range(LAYERS)]
samples = [(tensor(), table) for _ in range(LAYERS * MICROBATCHES)]
copies = []
for name in ("clone", "copy_"):
    def counted(self, *args, real=getattr(torch.Tensor, name), **kwargs):
        if not self.requires_grad and self.shape == SHAPE:
            copies.append(self)
        return real(self, *args, **kwargs)
    setattr(torch.Tensor, name, counted)

graphs = te.make_graphed_callables(
    tuple(layers), samples, _order=ORDER, _num_layers_per_chunk=[1] * LAYERS, allow_unused_input=True,
    _reuse_graph_input_output_buffers=REUSE,
)
in_capture = sum(each.data_ptr() == table.data_ptr() for each in copies)
shared = {sample[1].data_ptr() for sample in samples} == {table.data_ptr()}
before = table.clone()

def train(call, backward_dw):
    for layer in layers:
        layer.zero_grad()
    inputs = [tensor() for _ in range(MICROBATCHES)]
    forwards, dgrads, wgrads = ([0] * LAYERS for _ in range(3))
    saved, sums = {}, [0] * LAYERS
    for entry in ORDER:
        layer, kind = int(abs(entry)) - 1, forwards if entry > 0 else wgrads if entry % 1 else dgrads
        microbatch = kind[layer]
        kind[layer] += 1
        if entry > 0:
            x = saved[layer - 1, microbatch][1].detach().requires_grad_() if layer else inputs[microbatch]
            saved[layer, microbatch] = x, call(layer, microbatch)(x, table)
        elif kind is dgrads:
            x, output = saved[layer, microbatch]
            grad = saved[layer + 1, microbatch][0].grad.clone() if layer + 1 < LAYERS else torch.ones_like(output)
            output.backward(grad)
        else:
            backward_dw(layer, microbatch)()
            if layers[layer].linear.weight.grad is not None:
                sums[layer] = sums[layer] + layers[layer].linear.weight.grad
                layers[layer].linear.weight.grad = None
    return sums

copies.clear()
torch.manual_seed(1)
replayed = train(
    lambda layer, number: graphs[layer * MICROBATCHES + number],
    lambda layer, number: graphs[layer * MICROBATCHES + number].backward_dw,
)
written = sum(each.data_ptr() == table.data_ptr() for each in copies)
torch.manual_seed(1)
expected = train(
    lambda layer, _: lambda x, table: torch.nn.functional.linear(x * table, layers[layer].linear.weight),
    lambda *_: lambda: None,
)
errors = [float((a - b).norm() / b.norm()) for a, b in zip(replayed, expected)]
print(in_capture, shared, written, torch.equal(table, before), max(errors) < 1e-6)
"""


@pytest.mark.parametrize("reuse", [False, True])
def test_a_constant_of_all_microbatches_is_shared(reuse: bool) -> None:
    """Such a constant, like Megatron-Core's rotary table, is copied neither in the capture nor at a replay."""
    assert simulate("-c", TABLE.replace("REUSE", str(reuse))) == "0 True 0 True True\n"
