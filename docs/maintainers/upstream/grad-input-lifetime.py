"""A replayed backward's grad input is overwritten while the caller still uses it.

One GPU, TransformerEngine and torch only. Two model chunks of two layers, four microbatches, the order of stage 0 of 2
with every layer passed as a chunk, as Megatron-Core's overlap_moe_expert_parallel_comm passes it. What leaves a model
chunk (layers 3 and 1) is sent to the previous stage; Megatron-Core waits for that send once the next model chunk's
backward and the forward beside it have been issued. Exits with 1 if such a gradient changes before that.
"""

import sys

import torch
import transformer_engine.pytorch as te

# fmt: off
ORDER = [1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, -4, 2, -3, 3, -4, 4, -3, 3, -2, 4, -1, -2, -1,
         -4, -3, -4, -3, -2, -1, -2, -1]
# fmt: on
LAYERS, MICROBATCHES, SHAPE = 4, 4, (2048, 1024)


def tensor() -> torch.Tensor:
    return torch.randn(SHAPE, dtype=torch.bfloat16, device="cuda", requires_grad=True)


layers = tuple(te.Linear(SHAPE[1], SHAPE[1], bias=False, params_dtype=torch.bfloat16) for _ in range(LAYERS))
graphs = te.make_graphed_callables(
    layers,
    [(tensor(),) for _ in range(LAYERS * MICROBATCHES)],
    sample_kwargs=[{} for _ in range(LAYERS * MICROBATCHES)],
    _order=ORDER,
    _num_layers_per_chunk=[1] * LAYERS,
    _reuse_graph_input_output_buffers=True,
)

forwards, dgrads = [0] * LAYERS, [0] * LAYERS
saved = {}
in_flight = []  # (name, the gradient that is being sent, a copy of it as the send started)
sent = wrong = 0
for position, entry in enumerate(ORDER):
    layer = abs(entry) - 1
    if entry > 0:
        x = tensor()
        saved[layer, forwards[layer]] = x, graphs[layer * MICROBATCHES + forwards[layer]](x)
        forwards[layer] += 1
        continue
    x, out = saved.pop((layer, dgrads[layer]))
    (grad,) = torch.autograd.grad(out, x, torch.randn_like(out))
    dgrads[layer] += 1
    if layer not in (0, 2):
        continue
    # The next model chunk's backward is complete, so that Megatron-Core waits for the previous send now.
    while in_flight:
        name, tensor_sent, copy = in_flight.pop()
        changed = (tensor_sent != copy).sum().item()
        sent, wrong = sent + 1, wrong + bool(changed)
        print(f"{name}: {changed} of {copy.numel()} elements changed before the wait at entry {position}")
    in_flight.append((f"entry {position}, layer {layer + 1}, microbatch {dgrads[layer]}", grad, grad.clone()))

print(f"{wrong} of {sent} sent gradients were overwritten")
sys.exit(wrong > 0)
