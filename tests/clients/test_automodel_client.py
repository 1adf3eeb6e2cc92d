"""A client that captures attention as NeMo Automodel's reference of its partial graphs describes it.

After an eager step, each attention is captured by itself, through an adapter with no parameters of its own: they are
inputs of the graph. The gradients of the inputs, which are leaves then, add up in ``.grad`` over the microbatches.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.child import simulate

UNFUSED = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_MASKED_SOFTMAX_FUSION": "0"}
"""The attention that the simulator has."""
STEPS, MICROBATCHES, HIDDEN, TOKENS = 3, 3, 64, 16


def main() -> None:
    import torch
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401

    class Attention(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        """Torch's projections and norm around TransformerEngine's attention."""

        def __init__(self) -> None:
            super().__init__()
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            self.norm = torch.nn.RMSNorm(HIDDEN, **options)
            self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, **options)
            self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **options)
            self.attention = te.DotProductAttention(4, HIDDEN // 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.qkv(self.norm(x)).view(TOKENS, 1, 3, 4, HIDDEN // 4).unbind(2)
            return x + self.out(self.attention(*(each.contiguous() for each in heads)))

    class Adapter(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        """A call of a module with its parameters as inputs. Neither the module nor a parameter is found in it."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.call = lambda x, given: torch.func.functional_call(module, given, (x,))
            self.names = [name for name, _ in module.named_parameters()]

        def forward(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            return self.call(x, dict(zip(self.names, parameters, strict=True)))

    def captured(module: torch.nn.Module) -> torch.nn.Module:
        sample = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        parameters = [each.detach().clone().requires_grad_() for each in module.parameters()]
        (graphed,) = te.make_graphed_callables(
            (Adapter(module),),
            ((sample, *parameters),),
            allow_unused_input=True,
            enabled=(False,),
            retain_graph_in_backward=True,
        )
        assert not list(graphed.parameters())
        return graphed

    def train(graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [Attention() for _ in range(2)]
        parameters = [each for layer in layers for each in layer.parameters()]
        found, called = [], layers
        for step in range(STEPS):
            if graphs and step == 1:
                called = [captured(layer) for layer in layers]
            for _ in range(MICROBATCHES):
                x = out = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                for layer, call in zip(layers, called, strict=True):
                    out = call(out) if call is layer else call(out, *layer.parameters())
                out.square().sum().backward()
                found += [out.detach().clone(), x.grad.clone()]
            with torch.no_grad():
                for parameter in parameters:
                    found.append(parameter.grad.clone())
                    parameter -= 0.001 * parameter.grad
                    parameter.grad = None
        for call in called if graphs else ():
            call.reset()
        return found

    eager, again, replayed = train(False), train(False), train(True)
    assert all(map(torch.equal, eager, again))
    print(json.dumps([not torch.equal(a, b) for a, b in zip(eager, replayed, strict=True)].count(True)))


@pytest.mark.parametrize("choice", ["on", "off"])
def test_parameters_that_are_inputs_get_eager_gradients(choice: str) -> None:
    different = json.loads(simulate(__file__, TE_GRAPH_FIXES=choice, **UNFUSED).splitlines()[-1])
    assert (different == 0) == (choice == "on"), different


if __name__ == "__main__":
    sys.exit(main())
