"""TransformerEngine `make_graphed_callables`: a delayed wgrad reads inputs of a later microbatch.

With buffer reuse, the static inputs of the first microbatch are handed to the second at the first one's dgrad. The
first one's wgrad comes after the second one's forward and reads the wrong inputs (error 1.0).

Needs one GPU, torch and TransformerEngine 2.11 or later: python backward-dw-order-b.py
"""

import sys

import torch
import transformer_engine.pytorch as te

ORDER = [1, -1, 1, -1.5, -1, -1.5]
CHUNKS, MICROBATCHES, REUSE = 1, 2, True


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


def wgrads(linears, calls, has_backward_dw):
    """Run ORDER with the same data each time and return every main_grad."""
    torch.manual_seed(1)
    x = torch.randn(CHUNKS, MICROBATCHES, 64, 128, dtype=torch.bfloat16, device="cuda")
    grad = torch.randn_like(x)
    done, outputs = dict.fromkeys(ORDER, 0), {}
    for entry in ORDER:
        chunk, microbatch = int(abs(entry)) - 1, done[entry]
        done[entry] += 1
        index = chunk * MICROBATCHES + microbatch
        if entry > 0:
            outputs[index] = calls[index](x[chunk, microbatch].clone().requires_grad_())
        elif entry == int(entry):
            outputs[index].backward(grad[chunk, microbatch])
        elif has_backward_dw:
            calls[index].backward_dw()
    return torch.stack([linear.weight.main_grad for linear in linears])


eager = make_linears(delay_wgrad=False)
delayed = make_linears(delay_wgrad=True)
graphs = te.make_graphed_callables(
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
for linear in delayed:
    linear.weight.main_grad.zero_()
wanted = wgrads(eager, [linear for linear in eager for _ in range(MICROBATCHES)], has_backward_dw=False)
found = wgrads(delayed, graphs, has_backward_dw=True)
error = ((found - wanted).norm() / wanted.norm()).item()
print(f"order {ORDER}: error of the wgrads against eager {error:.3f}")
sys.exit(error != 0.0)
