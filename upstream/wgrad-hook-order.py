"""The gradient hooks of a graph's backward_dw must run in the order of the modules."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


class _Layers(torch.nn.Sequential):
    def backward_dw(self) -> None:
        for layer in self:
            layer.backward_dw()


def test_make_graphed_callables_order_of_wgrad_hooks() -> None:
    """The hooks must run in the same order on all ranks, which is the order of the modules."""
    layers = _Layers(
        *(
            Linear(
                64,
                64,
                bias=False,
                params_dtype=torch.bfloat16,
                device="cuda",
                fuse_wgrad_accumulation=True,
                delay_wgrad_compute=True,
            )
            for _ in range(8)
        )
    )
    order = []
    for number, layer in enumerate(layers):
        layer.weight.main_grad = torch.zeros(64, 64, device="cuda")
        layer.weight.grad_added_to_main_grad = False
        layer.register_wgrad_accumulation_and_reduce_hooks(
            lambda number=number: order.append(number)
        )
    inp = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = make_graphed_callables(layers, (inp,))
    order.clear()
    graphed(inp).sum().backward()
    graphed.backward_dw()
    assert order == list(range(8))
