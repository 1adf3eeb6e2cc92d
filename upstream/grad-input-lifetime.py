"""A grad input must not be overwritten while it is sent."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_keeps_sent_grad_inputs() -> None:
    """If each layer is a chunk, a sent gradient must survive the next model chunk's backward.

    Megatron-Core passes this order with ``overlap_moe_expert_parallel_comm``, on stage 0 of 2 and
    with two model chunks of two layers. This stage sends the gradients of layer 3. The test
    treats those of layer 1 as sent too, because other stages send them. A send may last until
    the end of the next model chunk's backward, which runs together with a forward.
    """
    # fmt: off
    order = [1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, -4, 2, -3, 3, -4, 4, -3, 3, -2, 4, -1, -2, -1,
             -4, -3, -4, -3, -2, -1, -2, -1]
    # fmt: on
    layers, microbatches, shape = 4, 4, (512, 256)

    def random() -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    graphs = make_graphed_callables(
        tuple(
            Linear(shape[1], shape[1], bias=False, params_dtype=torch.bfloat16)
            for _ in range(layers)
        ),
        [(random(),) for _ in range(layers * microbatches)],
        sample_kwargs=[{} for _ in range(layers * microbatches)],
        _order=order,
        _num_layers_per_chunk=[1] * layers,
        _reuse_graph_input_output_buffers=True,
    )
    forwards, dgrads = [0] * layers, [0] * layers
    saved, in_flight, overwritten = {}, None, []
    for position, entry in enumerate(order):
        layer = abs(entry) - 1
        if entry > 0:
            inp = random()
            out = graphs[layer * microbatches + forwards[layer]](inp)
            saved[layer, forwards[layer]] = inp, out
            forwards[layer] += 1
            continue
        inp, out = saved.pop((layer, dgrads[layer]))
        (grad,) = torch.autograd.grad(out, inp, torch.randn_like(out))
        dgrads[layer] += 1
        if layer in (0, 2):  # The gradient is sent. The previous send is complete.
            if in_flight is not None and not torch.equal(in_flight[0], in_flight[1]):
                overwritten.append(in_flight[2])
            in_flight = grad, grad.clone(), position
    assert not overwritten
