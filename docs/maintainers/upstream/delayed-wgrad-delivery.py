"""Gradients that `backward_dw` computes and nobody gets, eagerly and under CUDA graphs: with any, exits with 1."""

import sys

import torch
import transformer_engine.pytorch as te

SIZE, MICROBATCHES = 128, 3


def train(kind: str, way: str) -> dict[str, torch.Tensor]:
    """Every ``.grad`` after three microbatches: ``direct`` without delay, ``eager`` or ``graph`` with delayed wgrad."""
    torch.manual_seed(1)
    options = {"bias": True, "delay_wgrad_compute": way != "direct", "params_dtype": torch.bfloat16, "device": "cuda"}
    if kind == "GroupedLinear":
        module = te.GroupedLinear(2, SIZE, SIZE, **options)
        forward = module.forward
        module.forward = lambda x: forward(x, [SIZE // 2] * 2)
    else:
        module = getattr(te, kind)(SIZE, SIZE, **options)
    batches = torch.randn(MICROBATCHES, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    runs = [module] * MICROBATCHES
    if way == "graph":
        runs = te.make_graphed_callables(
            (module,),
            [(batch.clone().requires_grad_(),) for batch in batches],
            _order=[1, -1, -1.5] * MICROBATCHES,
            _num_layers_per_chunk=[1],
            allow_unused_input=True,
        )
    for parameter in module.parameters():
        parameter.grad = None
    for run, batch in zip(runs, batches, strict=True):
        run(batch.clone().requires_grad_()).sum().backward()
        if way != "direct":
            run.backward_dw()
    torch.cuda.synchronize()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}


wrong = 0
for kind in ("Linear", "GroupedLinear", "LayerNormMLP"):
    wanted = train(kind, "direct")
    for way in ("eager", "graph"):
        try:
            found = train(kind, way)
        except Exception as failure:  # a capture that fails spoils the process
            sys.exit(f"{kind}, {way}: {type(failure).__name__}: {str(failure).splitlines()[0]}")
        for name, grad in wanted.items():
            error = float((found[name].float() - grad.float()).norm() / grad.float().norm())
            if error:
                wrong += 1
                print(f"{kind}, {way}: the gradient of {name} is off by {error:.2f} of its norm")
sys.exit(wrong > 0)
