"""Training programs as plain data. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


class Skipped(Exception):
    """This GPU or this TE cannot run a program."""


@dataclass(frozen=True)
class Program:
    """A training program. By default, it has two steps of two microbatches, with one `te.Linear` in bf16."""

    modules: tuple[str, ...] = ("linear",)  # the layers in execution order; "again" repeats the layer before
    recipe: str = "bf16"
    other: str = "bf16"  # the second recipe, for some events and autocasts
    bias: bool = False
    fused: bool = False  # wgrads are added to ``main_grad``
    flat_main_grads: bool = False  # the ``main_grad``s of a layer are views of one buffer, in turn in fp32 and bf16
    fp8_params: bool = False  # weights are in FP8
    fp8_attention: bool = False  # attention is in FP8 too, emulated by torch operations with its rounding
    built_without_grad: bool = False
    weights: str = "plain"  # "marked": modules mark first microbatches; "cached": graphs also cache weights;
    # "set": the training loop sets the mark of each microbatch, and no forward clears it; "class": as "set", but the
    # mark is an attribute of the class, which is False in the capture; "property": as "set", but the mark is a property
    # that cannot be set, and the loop sets the value that it returns;
    # "own": modules always use the FP8 weights of their first forward
    frozen: tuple[int, ...] = ()  # numbers of the layers that are not trained
    in_bf16: tuple[int, ...] = ()  # numbers of layers without FP8
    not_captured: tuple[int, ...] = ()  # numbers of layers without a graph
    together: bool = False  # one capture for all layers, instead of one for each
    order: tuple[float, ...] = ()  # TE's ``_order``; by default, one microbatch after the other
    microbatches: int = 2  # per step without an order
    layers_as_chunks: bool = False  # each layer is a chunk of the order
    reuse: bool = False  # graphs of an order share static buffers
    tuples: bool = False  # the sample arguments of an order are in a tuple, not in a list
    delay: bool = False  # graphs delay wgrads until their entries in the order, or until after the dgrad
    warmup: int = 3  # the number of warmup iterations
    warmup_hook: str = ""  # the hook between warmup and capture "zeroes" or "replaces" each ``main_grad``
    own_pool: bool = False  # each capture has its own memory pool
    inference: str = ""  # "first" or "after": when a graph of the first layer for inference is captured
    inference_mode: bool = False  # this capture runs under ``torch.inference_mode()``, not ``torch.no_grad()``
    calibrating: bool = False  # FP8 is calibrated, not used
    sets_flag: bool = False  # the caller sets TE's skip flag, as Megatron-Core does
    first: str = ""  # runs before the layers: an extra layer, or "distillation": the first layer without gradients;
    # "cached": a model whose graph caches weights
    autocasts: str = "one"  # "one" for all layers; "each" for each; "nested": each inside one of ``other``; "none"
    residual: bool = False  # the input is added to the output
    input_grads: bool = True
    hooks: str = ""  # the action of parameter hooks; "of the node": they take the grads, as in Megatron-Core's DDP
    wgrad_hooks: bool = False  # modules with delayed wgrads call hooks after each wgrad
    clears_marks: bool = False  # ``grad_added_to_main_grad`` of weights is cleared after a step, as Megatron-FSDP does
    drops_dummies: bool = False  # the ``.grad`` of a weight with a ``main_grad`` is dropped after each dgrad
    keeps_grads: bool = False  # after a step each ``.grad`` is zeroed, not dropped
    sends: tuple[int, ...] = ()  # chunks of the order that start a model chunk and send input grads
    tracker: bool = False  # dropout draws from an RNG tracker
    fit: bool = False  # every step has the same inputs and targets, and a squared-error loss
    optimizer: str = ""  # by default, plain updates; "master weights": as in ZeRO
    ranks: bool = False  # two processes reduce amaxes, and gradients if ``hooks`` do
    inside: bool = False  # only the first projection of a layer is captured, if it has one
    strided: bool = False  # inputs and output grads are not contiguous
    in_place: bool = False  # the input is added to the output, in place
    offload: bool = False  # tensors saved by autograd are copied
    late_hooks: bool = False  # parameters get their hooks after the capture
    fp8_mha: bool = False  # with ``fp8_attention``: the inputs of attention are in FP8 too
    same_input: bool = False  # every microbatch is copied into one tensor, the sample argument of the first layer
    module_hooks: bool = False  # layers have hooks, registered after the capture
    clean_start: bool = False  # before the first event, ``main_grad`` and recorded hook calls are cleared
    takes_grads: bool = False  # as ``clean_start``, and each ``.grad`` is moved away before another is added to it
    freezes_first: bool = False  # the first parameter of each layer is not trained
    hidden: int = 0  # the hidden size; 0: the default of the device
    retain: bool = False  # each backward can be replayed more than once
    one_pool: bool = False  # all captures share one memory pool
    one_sample: bool = False  # all layers have the same tensor as their sample argument
    checkpoints: tuple[str, ...] = ()  # around each layer; "te" for `te.checkpoint`, else a kind of torch's
    events: tuple[str, ...] = ("step", "step")  # the events, in order
