"""A training with graphs as plain data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, fields


class Skipped(Exception):
    """This GPU or this TE lacks what a program needs."""


@dataclass(frozen=True)
class Program:
    """A training with graphs. The defaults are the plainest: two steps of two microbatches of one `te.Linear` in bf16.

    What is trained:

    - ``modules``: the layers, in the order in which they run, each captured by itself or ``together``; ``again`` is the
      one before once more
    - ``hidden``: how many values a token has, 0 for as few as the device takes
    - ``recipe``: that of training; ``other``: that of `switch_recipe`, and of evaluations and autocasts in another one
    - ``bias``: projections have one; ``fused``: wgrads are added to ``main_grad``; ``fp8_params``: weights are in FP8
    - ``fp8_attention``: attention is in FP8 too, in torch operations that round as it does, with ``fp8_mha`` its inputs
    - ``built_without_grad``: modules are made without gradients
    - ``weights``: ``plain``, ``marked`` (modules mark first microbatches) or ``cached`` (and graphs cache weights)
    - ``frozen``, ``in_bf16``, ``not_captured``: numbers of layers that are not trained, are without FP8, have no graph
    - ``freezes_first``: the first parameter of each layer is not trained
    - ``tracker``: dropout draws from an RNG tracker

    How it is captured:

    - ``order``: TE's ``_order``, else one microbatch after the other, ``microbatches`` of them
    - ``layers_as_chunks``: each layer is a chunk of the order; ``reuse``: graphs of an order share buffers
    - ``tuples``: the samples of an order are in a tuple, not in a list
    - ``delay``: graphs delay their wgrads; without wgrads in the order each comes right after its dgrad
    - ``warmup``: the iterations before a capture; ``retain``: backwards can be replayed more than once
    - ``own_pool``: each capture has a memory pool of its own; ``one_pool``: all have the same
    - ``one_sample``: all layers are captured with the same tensor
    - ``inference``: the first layer has a graph for inference too, captured ``first`` or ``after`` those for training
    - ``calibrating``: FP8 is calibrated, not used
    - ``inside``: only the first projection of a layer is captured, where it has one

    How it runs:

    - ``sets_flag``: the caller sets TE's flag that says whether weights are new, as Megatron-Core does
    - ``first``: what else runs first in the autocast, or is a model of its own whose graph caches weights (``cached``)
    - ``autocasts``: around all layers, each, or inside another
    - ``recompute``: each layer is in `te.checkpoint`; ``checkpoints``: each is in one of these
    - ``residual`` and ``in_place``: input is added to output
    - ``input_grads``: inputs have gradients
    - ``late_reads``: input grads are read at the end of the next dgrad, as a send to another rank does
    - ``strided``: inputs and output grads are not contiguous
    - ``same_input``: one tensor, that of the capture if there is one, gets the values of every microbatch
    - ``fit``: each step has the same inputs, and squared distances to targets as its loss; else output grads are given
    - ``hooks``: what those of parameters do; ``of the node`` they take grads as those of Megatron-Core's DDP do
    - ``wgrad_hooks``: modules that delay wgrads have hooks, which are called after each wgrad
    - ``module_hooks``: layers have hooks, registered after the capture
    - ``late_hooks``: parameters get their hooks after the capture
    - ``offload``: what autograd saves is copied
    - ``drops_dummies``: the ``.grad`` of a weight with a ``main_grad`` is dropped after each dgrad
    - ``keeps_grads``: a ``.grad`` is zeroed after a step, not dropped
    - ``clean_start``: the caller zeroes each ``main_grad`` after a capture, and forgets what hooks it has called
    - ``takes_grads``: the same, and the caller takes each ``.grad`` once it is there, so that none is added to another
    - ``optimizer``: what changes parameters; ``master weights`` as ZeRO's optimizers do
    - ``ranks``: in two processes, which reduce amaxes, and, as ``hooks`` may say, gradients; on the simulator only
    - ``model_chunks``, ``first_stage``: for `step_with_sends`, the number of layers of each, and which stage this is
    - ``events``: what happens, in order
    """

    modules: tuple[str, ...] = ("linear",)
    recipe: str = "bf16"
    other: str = "bf16"
    bias: bool = False
    fused: bool = False
    fp8_params: bool = False
    fp8_attention: bool = False
    built_without_grad: bool = False
    weights: str = "plain"
    frozen: tuple[int, ...] = ()
    in_bf16: tuple[int, ...] = ()
    not_captured: tuple[int, ...] = ()
    together: bool = False
    order: tuple[float, ...] = ()
    microbatches: int = 2
    layers_as_chunks: bool = False
    reuse: bool = False
    tuples: bool = False
    delay: bool = False
    warmup: int = 3
    own_pool: bool = False
    inference: str = ""
    calibrating: bool = False
    sets_flag: bool = False
    first: str = ""
    autocasts: str = "one"
    recompute: bool = False
    residual: bool = False
    input_grads: bool = True
    hooks: str = ""
    wgrad_hooks: bool = False
    drops_dummies: bool = False
    keeps_grads: bool = False
    late_reads: bool = False
    tracker: bool = False
    fit: bool = False
    optimizer: str = ""
    ranks: bool = False
    inside: bool = False
    strided: bool = False
    in_place: bool = False
    offload: bool = False
    late_hooks: bool = False
    fp8_mha: bool = False
    same_input: bool = False
    module_hooks: bool = False
    clean_start: bool = False
    takes_grads: bool = False
    freezes_first: bool = False
    hidden: int = 0
    retain: bool = False
    one_pool: bool = False
    one_sample: bool = False
    checkpoints: tuple[str, ...] = ()
    model_chunks: tuple[int, ...] = ()
    first_stage: bool = False
    events: tuple[str, ...] = ("step", "step")

    def __str__(self) -> str:
        plain = Program()
        said = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return f"Program({', '.join(f'{name}={value!r}' for name, value in said if value != getattr(plain, name))})"
