"""Hooks of a graph's backward_dw run in the order of memory addresses: exits with 1 if that is not the layers'."""

import sys

import torch
import transformer_engine.pytorch as te

SIZE, LAYERS = 64, 8
OPTIONS = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True}


class Layers(torch.nn.Sequential):
    def backward_dw(self) -> None:
        for layer in self:
            layer.backward_dw()


layers = Layers(*(te.Linear(SIZE, SIZE, delay_wgrad_compute=True, **OPTIONS) for _ in range(LAYERS)))
order: list[int] = []
for number, layer in enumerate(layers):
    layer.weight.main_grad = torch.zeros(SIZE, SIZE, device="cuda")
    layer.weight.grad_added_to_main_grad = False
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: order.append(number))
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").requires_grad_()
graphed = te.make_graphed_callables(layers, (x,))
order.clear()
graphed(x).sum().backward()
graphed.backward_dw()
print(f"the hooks of layers 0 to {LAYERS - 1} ran in this order: {order}")
sys.exit(order != list(range(LAYERS)))
