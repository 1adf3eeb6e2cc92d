"""Test calls of `make_graphed_callables` that pull requests of training frameworks describe, on the simulator.

A program has two or four layers, and runs three microbatches in each step. A part of each layer (`part`) is captured,
and the rest runs eagerly. The outputs, gradients and parameters of three steps must equal eager training.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from typing import Any

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

TOKENS, HIDDEN, STEPS, PAGES = 32, 64, 3, 4
ORDER = (1, 1, -1, 1, -1, -1)


def main(shape: str, recipe: str) -> None:
    import torch
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401
    from tests.verify.driver.setting import make_recipe

    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    plain = {"dtype": torch.bfloat16, "device": "cuda"}

    class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        """One layer of a framework. After a capture, `runs` contains its graph for each microbatch."""

        capturing, microbatch = False, 0

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.runs: list[Any] = []
            self.build()

        def forward(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
            if Layer.capturing:
                return self.part(x, *given)
            run = self.runs[Layer.microbatch] if self.runs else self.part
            return self.rest(x, run(x, *self.inputs()))

        def callable(self) -> Any:
            return self

        def inputs(self) -> list[torch.Tensor]:
            return []

        def rest(self, x: torch.Tensor, out: Any) -> torch.Tensor:
            return x + out

        def before_step(self) -> None:
            pass

        def after_backward(self) -> None:
            pass

        @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
        def update(self) -> list[torch.Tensor]:
            grads = [each.grad.clone() for each in self.parameters()]
            for parameter in self.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
            return [*grads, *(each.clone() for each in self.parameters())]

    class Tail(Layer):
        """A layer whose graph runs its attention and the next layer's router, although the router is no submodule."""

        def build(self) -> None:
            self.head = te.LayerNormLinear(HIDDEN, HIDDEN, **options)
            self.tail = [te.LayerNormLinear(HIDDEN, HIDDEN, **options), te.Linear(HIDDEN, 16, **options)]

        def parameters(self, recurse: bool = True) -> Any:
            yield from super().parameters(recurse)
            for module in self.tail:
                yield from module.parameters()

        def part(self, x: torch.Tensor) -> Any:
            x = x + self.head(x)
            routed = self.tail[0](x)
            return x, routed, self.tail[1](routed).float().softmax(-1)

        def rest(self, x: torch.Tensor, out: Any) -> torch.Tensor:
            residual, routed, scores = out
            return residual + routed * scores.amax(-1, keepdim=True).to(x.dtype)

    class Experts(Layer):
        """A layer whose graph has the experts' parameters as inputs, because FSDP2 moves them (in NeMo Automodel)."""

        def build(self) -> None:
            self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN, **options)

        def callable(self) -> Any:
            adapter = torch.nn.Module()
            adapter.forward = self.part
            return adapter

        def inputs(self) -> list[torch.Tensor]:
            if Layer.capturing:
                return [each.detach().clone().requires_grad_() for each in self.parameters()]
            return [*self.parameters()]

        def part(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
            names = [name for name, _ in self.experts.named_parameters()]
            splits = [TOKENS // 2] * 2
            return torch.func.functional_call(self.experts, dict(zip(names, given, strict=True)), (x, splits))

        def before_step(self) -> None:
            for parameter in self.parameters():
                before, parameter.data = parameter.data, parameter.data.clone()
                before.fill_(torch.nan)

    class Pages:
        """Memory outside the graphs for tensors saved by autograd, with a list of free pages on the device."""

        def __init__(self) -> None:
            self.memory = torch.zeros(PAGES, TOKENS, HIDDEN, **plain)
            self.free = torch.arange(PAGES, device="cuda")
            self.taken, self.given_back = torch.zeros(2, 1, dtype=torch.long, device="cuda")
            self.stream = torch.cuda.Stream()

        def reset(self) -> None:
            self.free.copy_(torch.arange(PAGES))
            self.taken.zero_()
            self.given_back.zero_()

        def pack(self, saved: torch.Tensor) -> torch.Tensor:
            if saved.shape != (TOKENS, HIDDEN):
                return saved
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                page = self.free[self.taken % PAGES]
                self.taken += 1
                self.memory.index_copy_(0, page, saved.detach()[None])
            torch.cuda.current_stream().wait_stream(self.stream)
            return page

        def unpack(self, page: torch.Tensor) -> torch.Tensor:
            if page.shape != (1,):
                return page
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                saved = self.memory[page][0]
                self.free.index_copy_(0, self.given_back % PAGES, page)
                self.given_back += 1
            torch.cuda.current_stream().wait_stream(self.stream)
            return saved

    class Stash(Layer):
        """A layer whose graph contains all experts. All layers share the `Pages` for tensors saved for the backward."""

        pages: Any = None

        def build(self) -> None:
            self.first, self.second = (te.GroupedLinear(2, HIDDEN, HIDDEN, **options) for _ in range(2))
            if self.number == 0:
                Stash.pages = Pages()

        def part(self, x: torch.Tensor) -> Any:
            splits = [TOKENS // 2] * 2
            x = self.first(x, splits)
            with torch.autograd.graph.saved_tensors_hooks(self.pages.pack, self.pages.unpack):
                x = torch.nn.functional.gelu(x)
            return self.second(x, splits)

        def before_step(self) -> None:
            self.pages.reset()

    class Sharded(Layer):
        """A layer that gathers its weight before each forward and backward, into a buffer shared with other layers."""

        shared: list[torch.Tensor] = []  # noqa: RUF012
        fused = "fused" in shape

        def build(self) -> None:
            self.linear = te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=self.fused, **options)
            self.weight = self.linear.weight
            self.shard = self.weight.detach().clone()
            self.total = torch.zeros(HIDDEN, HIDDEN, device="cuda")
            self.fixed = torch.zeros_like(self.total)
            if self.number == 0:
                Sharded.shared = [torch.empty(HIDDEN, HIDDEN, **plain) for _ in range(2)]
            self.gather()
            if self.fused:
                setattr(self.weight, "__fsdp_param__", True)  # noqa: B010  # with this attribute, TE calls `get_main_grad`
                self.weight.get_main_grad = lambda: self.fixed
                self.weight.grad_added_to_main_grad = False
            self.add_hooks()

        def add_hooks(self) -> None:
            self.register_forward_pre_hook(lambda *_: self.gather())
            self.register_forward_hook(lambda *given: given[2].register_hook(lambda _: self.gather()) and None)

        def remove_hooks(self) -> dict[str, Any]:
            for hooks in (self._forward_pre_hooks, self._forward_hooks):
                hooks.clear()
            return {name: {0: lambda *_: self.gather()} for name in ("forward_pre_hooks", "backward_pre_hooks")}

        def before_step(self) -> None:
            self.fixed.zero_()

        def gather(self) -> None:
            buffer = self.shared[self.number % 2]
            buffer.data.copy_(self.shard)
            self.weight.data = buffer

        def part(self, x: torch.Tensor) -> Any:
            return self.linear(x)

        def after_backward(self) -> None:
            grad = self.weight.main_grad if self.fused else self.weight.grad
            self.total += grad
            self.fixed.zero_()
            self.weight.grad = None
            self.weight.grad_added_to_main_grad = False

        def update(self) -> list[torch.Tensor]:
            self.shard -= (0.01 * self.total).to(self.shard.dtype)
            grads = self.total.clone()
            self.total.zero_()
            return [grads, self.shard.clone()]

    kinds = {"tail": Tail, "experts": Experts, "stash": Stash, "sharded": Sharded}
    kind = kinds[shape.partition("-")[0]]
    fp8 = recipe != "bf16"
    in_order = kind is not Experts  # if false, one graph serves all microbatches of a layer
    order = ORDER if in_order else (1, -1) * ORDER.count(1)

    def capture(layers: list[Any]) -> None:
        hooks = [layer.remove_hooks() for layer in layers if kind is Sharded]
        takes_hooks = "capture_time_hooks" in inspect.signature(te.make_graphed_callables).parameters
        of_order = {
            "_order": [*order],
            "_num_layers_per_chunk": [len(layers)],
            "_reuse_graph_input_output_buffers": True,
        }
        Layer.capturing = True
        samples = [
            (torch.zeros(TOKENS, HIDDEN, **plain).requires_grad_(), *layer.inputs())
            for _, layer in itertools.product(range(ORDER.count(1) if in_order else 1), layers)
        ]
        runs = te.make_graphed_callables(
            tuple(layer.callable() for layer in layers),
            samples if in_order else tuple(samples),
            allow_unused_input=True,
            enabled=(fp8,) * len(layers),
            recipe=make_recipe(recipe),
            retain_graph_in_backward=not in_order,
            **(of_order if in_order else {}),
            **({"capture_time_hooks": hooks} if hooks and takes_hooks else {}),
        )
        Layer.capturing = False
        for number, layer in enumerate(layers):
            layer.runs = [*runs[number :: len(layers)]] * (1 if in_order else ORDER.count(1))
            if kind is Sharded:
                layer.add_hooks()

    def train(graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [kind(number) for number in range(4 if kind is Sharded else 2)]
        seen = []
        for step in range(STEPS):
            if graphs and step == 1:
                capture(layers)
            for layer in layers:
                layer.before_step()
            under_way, microbatches = [], itertools.count()
            for entry in order:
                if entry > 0:
                    Layer.microbatch = next(microbatches)
                    x = out = torch.randn(TOKENS, HIDDEN, **plain).requires_grad_()
                    with te.autocast(enabled=fp8, recipe=make_recipe(recipe)):
                        for layer in layers:
                            out = layer(out)
                    under_way.append((x, out))
                    seen.append(out.detach().clone())
                else:
                    x, out = under_way.pop(0)
                    out.backward(torch.randn_like(out))
                    seen.append(x.grad.clone())
                    for layer in layers:
                        layer.after_backward()
            for layer in layers:
                seen += layer.update()
        return seen

    eager, again, replayed = train(False), train(False), train(True)
    assert all(map(torch.equal, eager, again))
    assert all(each.isfinite().all() for each in eager)
    print(json.dumps([not torch.equal(a, b) for a, b in zip(eager, replayed, strict=True)].count(True)))


CASES = ["tail bf16", "tail delayed", "experts bf16", "stash bf16", "sharded bf16", "sharded-fused bf16"]


@pytest.mark.parametrize("case", CASES)
def test_graphs_equal_eager_runs(case: str) -> None:
    """Each case names a kind of layer and a recipe."""
    assert json.loads(simulate(__file__, *case.split())) == 0


def test_parameters_as_inputs_get_wrong_gradients_without_the_fix() -> None:
    assert json.loads(simulate(__file__, "experts", "bf16", TE_GRAPH_FIXES_DISABLE="leaf-grad-lifetime")) > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
