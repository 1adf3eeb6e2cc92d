"""A training with graphs as plain data. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


class Skipped(Exception):
    """This GPU or this TE cannot run a program."""


@dataclass(frozen=True)
class Program:
    """A training with graphs. The defaults are the simplest: two steps, two microbatches, one `te.Linear` in bf16."""

    modules: tuple[str, ...] = ("linear",)  # the layers, in the order in which they run; "again" is the one before
    recipe: str = "bf16"
    other: str = "bf16"  # the recipe of `switch_recipe`, and of evaluations and autocasts in another one
    bias: bool = False
    fused: bool = False  # wgrads are added to ``main_grad``
    fp8_params: bool = False  # weights are in FP8
    fp8_attention: bool = False  # attention is in FP8 too, in torch operations that round as it does
    built_without_grad: bool = False
    weights: str = "plain"  # or "marked": modules mark first microbatches; "cached": graphs cache weights too; or
    # "own": modules use the FP8 weights of one early forward for good
    frozen: tuple[int, ...] = ()  # numbers of layers that are not trained
    in_bf16: tuple[int, ...] = ()  # numbers of layers without FP8
    not_captured: tuple[int, ...] = ()  # numbers of layers without a graph
    together: bool = False  # all layers in one capture, else each by itself
    order: tuple[float, ...] = ()  # TE's ``_order``, else one microbatch after the other
    microbatches: int = 2  # of a step without an order
    layers_as_chunks: bool = False  # each layer is a chunk of the order
    reuse: bool = False  # graphs of an order share buffers
    tuples: bool = False  # the samples of an order are in a tuple, not in a list
    delay: bool = False  # graphs delay their wgrads, to right after their dgrad if the order has none
    warmup: int = 3  # iterations
    warmup_hook: str = ""  # the hook between warmup and capture "zeroes" or "replaces" each ``main_grad``
    own_pool: bool = False  # each capture has a memory pool of its own
    inference: str = ""  # "first" or "after": the first layer has a graph for inference, captured before or after
    calibrating: bool = False  # FP8 is calibrated, not used
    sets_flag: bool = False  # the caller sets TE's flag that says whether weights are new, as Megatron-Core does
    first: str = ""  # what else runs first in the autocast; "cached" is a model of its own whose graph caches weights
    autocasts: str = "one"  # around all layers; or "each"; or "nested": each inside another one; or "none"
    residual: bool = False  # the input is added to the output
    input_grads: bool = True
    hooks: str = ""  # what those of parameters do; "of the node": take grads, as those of Megatron-Core's DDP do
    wgrad_hooks: bool = False  # modules that delay wgrads have hooks, which are called after each wgrad
    clears_marks: bool = False  # ``grad_added_to_main_grad`` of weights is cleared after a step, as Megatron-FSDP does
    drops_dummies: bool = False  # the ``.grad`` of a weight with a ``main_grad`` is dropped after each dgrad
    keeps_grads: bool = False  # a ``.grad`` is zeroed after a step, not dropped
    sends: tuple[int, ...] = ()  # chunks of the order, the first of their model chunks, whose input grads are sent
    tracker: bool = False  # dropout draws from an RNG tracker
    fit: bool = False  # each step has the same inputs, and squared distances to targets as its loss
    optimizer: str = ""  # what changes parameters; "master weights" as ZeRO's optimizers do
    ranks: bool = False  # in two processes, which reduce amaxes and, as ``hooks`` may say, gradients; simulator only
    inside: bool = False  # only the first projection of a layer is captured, where it has one
    strided: bool = False  # inputs and output grads are not contiguous
    in_place: bool = False  # the input is added to the output, in place
    offload: bool = False  # what autograd saves is copied
    late_hooks: bool = False  # parameters get their hooks after the capture
    fp8_mha: bool = False  # with ``fp8_attention``: its inputs are in FP8 too
    same_input: bool = False  # one tensor, that of the capture if there is one, gets the values of every microbatch
    module_hooks: bool = False  # layers have hooks, registered after the capture
    clean_start: bool = False  # the caller zeroes ``main_grad`` after a capture, and forgets earlier calls of hooks
    takes_grads: bool = False  # the same, and the caller takes each ``.grad`` at once, so that none is added to another
    freezes_first: bool = False  # the first parameter of each layer is not trained
    hidden: int = 0  # how many values a token has, 0 for as few as the device takes
    retain: bool = False  # backwards can be replayed more than once
    one_pool: bool = False  # all captures have the same memory pool
    one_sample: bool = False  # all layers are captured with the same tensor
    checkpoints: tuple[str, ...] = ()  # the kind of checkpoint that each layer is in, `te.checkpoint` for "te"
    events: tuple[str, ...] = ("step", "step")  # what happens, in order
