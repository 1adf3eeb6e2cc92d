"""TransformerEngine `make_graphed_callables`: an order with a wgrad before its dgrad is a KeyError.

The order is illegal and should be refused with an error that says why, before anything runs on the GPU. It is
KeyError: -1, after the warmup.

Needs one GPU, torch and TransformerEngine 2.11 or later: python backward-dw-order-d.py
"""

import sys

import torch
import transformer_engine.pytorch as te

ORDER = [1, -1.5, -1]
CHUNKS, MICROBATCHES, REUSE = 1, 1, False


def make_linears(delay_wgrad):
    torch.manual_seed(0)
    linears = []
    for _ in range(CHUNKS):
        linear = te.Linear(
            128,
            128,
            bias=False,
            params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True,
            delay_wgrad_compute=delay_wgrad,
        )
        linear.weight.main_grad = torch.zeros(128, 128, device="cuda")
        linear.weight.grad_added_to_main_grad = False
        linears.append(linear)
    return tuple(linears)


delayed = make_linears(delay_wgrad=True)
try:
    te.make_graphed_callables(
        delayed,
        [
            (torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True),)
            for _ in range(CHUNKS * MICROBATCHES)
        ],
        sample_kwargs=[{} for _ in range(CHUNKS * MICROBATCHES)],
        allow_unused_input=True,
        _order=ORDER,
        _num_layers_per_chunk=[1] * CHUNKS,
        _reuse_graph_input_output_buffers=REUSE,
    )
except ValueError as failure:
    print("refused:", failure)
else:
    sys.exit("captured, though no replay of this order can be right")
