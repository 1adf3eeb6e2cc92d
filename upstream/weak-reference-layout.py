"""Weak references must have the strides and the dtype of their tensor."""

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


class _View(Linear):
    """A linear layer that transposes its input, and applies ``view_of`` to its output."""

    view_of = None

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.view_of(super().forward(inp.t()))


@pytest.mark.parametrize(
    "view_of",
    (
        lambda out: out,
        lambda out: out.t(),
        lambda out: out.chunk(2, 1)[1],
        lambda out: out[:, ::2],
        lambda out: out[:, None].expand(-1, 3, -1),
        lambda out: out.double(),
    ),
    ids=("contiguous", "transposed", "chunk", "strided", "expanded", "float64"),
)
def test_make_graphed_callables_reused_buffers_keep_layout(view_of) -> None:
    """Outputs and gradients of inputs must be the same as in eager training."""

    def random() -> torch.Tensor:
        return torch.randn(256, 128, dtype=torch.bfloat16, device="cuda").t().requires_grad_()

    results = []
    for graphed in (False, True):
        torch.manual_seed(1)
        module = _View(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
        module.view_of = view_of
        runs = [module, module]
        if graphed:
            runs = make_graphed_callables(
                (module,),
                [(random(),) for _ in runs],
                sample_kwargs=[{}] * 2,
                _order=[1, 1, -1, -1],
                _num_layers_per_chunk=[1],
                _reuse_graph_input_output_buffers=True,
            )
        torch.manual_seed(2)
        inputs = [random() for _ in runs]
        outputs = [run(inp) for run, inp in zip(runs, inputs)]
        results.append([out.detach().clone() for out in outputs])
        for out, inp in zip(outputs, inputs):
            (grad,) = torch.autograd.grad(out, inp, torch.randn_like(out))
            results[-1].append(grad.clone())
    assert all(map(torch.equal, *results))
