"""Training programs as plain data. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


class Skipped(Exception):
    """The error of a program that this GPU or this TE cannot run."""


@dataclass(frozen=True)
class Program:
    """A training program. By default, it has two steps of two microbatches, with one `te.Linear` in bf16."""

    modules: tuple[str, ...] = ("linear",)  # the layers in execution order; "again" repeats the previous layer
    recipe: str = "bf16"
    other: str = "bf16"  # the second recipe, for some events and autocasts
    bias: bool = False
    fused: bool = False  # wgrads are added to ``main_grad``
    flat_main_grads: bool = False  # the ``main_grad``s of a layer are views of one buffer, alternately in fp32 and bf16
    fp8_params: bool = False  # weights are in FP8
    fp8_attention: bool = False  # attention is in FP8 too; torch operations emulate its rounding
    built_without_grad: bool = False
    # The use of `is_first_microbatch`. "plain": none. "marked": modules have this attribute, and a forward clears it.
    # "cached": in addition, graphs cache weights. "set": the training loop sets the attribute for each microbatch, and
    # no forward clears it. "class": like "set", but the attribute belongs to the class, and is False in the capture.
    # "property": like "set", but the attribute is a property without a setter, so the loop sets the value that it
    # returns. "own": modules always use the FP8 weights of their first forward.
    weights: str = "plain"
    frozen: tuple[int, ...] = ()  # the numbers of layers that are not trained
    in_bf16: tuple[int, ...] = ()  # the numbers of layers without FP8
    not_captured: tuple[int, ...] = ()  # the indices of the layers without a graph
    together: bool = False  # all layers are captured in one call, not in one call for each layer
    order: tuple[float, ...] = ()  # TE's ``_order``; without it, microbatches run one after the other
    microbatches: int = 2  # the number of microbatches in a step without an order
    layers_as_chunks: bool = False  # each layer is a chunk of the order
    reuse: bool = False  # graphs of an order share static buffers
    tuples: bool = False  # the sample arguments of an order are in a tuple, not in a list
    delay: bool = False  # wgrads are delayed: they run at their entries of the order or, without any, after the dgrad
    warmup: int = 3  # the number of warmup iterations
    warmup_hook: str = ""  # the hook between warmup and capture "zeroes" or "replaces" each ``main_grad``
    own_pool: bool = False  # each capture has its own memory pool
    inference: str = ""  # a graph of the first layer for inference is captured "first", or "after" other graphs
    inference_mode: bool = False  # the capture for inference runs under ``torch.inference_mode()``
    calibrating: bool = False  # FP8 is calibrated, not used
    sets_flag: bool = False  # the caller sets TE's skip flag, as Megatron-Core does
    # The kind of an extra layer that runs before the layers. "distillation": instead of an extra layer, the first layer
    # runs without gradients. "cached": instead, another model, whose graph caches weights, runs before each step.
    first: str = ""
    # The autocasts: "one" around all layers, "each" around each layer, "nested" around each layer inside an autocast of
    # `other`, or "none".
    autocasts: str = "one"
    residual: bool = False  # the input is added to the output
    input_grads: bool = True
    # The action of the parameters' hooks. "of the node": hooks of the gradient's `AccumulateGrad` node take the
    # gradients, as in Megatron-Core's DDP.
    hooks: str = ""
    wgrad_hooks: bool = False  # modules with delayed wgrads call hooks after each wgrad
    clears_marks: bool = False  # ``grad_added_to_main_grad`` of weights is cleared after a step, as Megatron-FSDP does
    drops_dummies: bool = False  # the ``.grad`` of a weight with a ``main_grad`` is dropped after each dgrad
    keeps_grads: bool = False  # after a step, each ``.grad`` is zeroed, not dropped, unless the wgrad is fused
    sends: tuple[int, ...] = ()  # the chunks that begin a model chunk and send their input grads
    tracker: bool = False  # dropout draws from an RNG tracker
    fit: bool = False  # every step has the same inputs and targets, and a squared-error loss
    optimizer: str = ""  # "" updates the parameters; "master weights" are updated as in ZeRO
    ranks: bool = False  # two processes train and reduce amaxes; some ``hooks`` also reduce gradients
    inside: bool = False  # of each layer with a submodule ``first``, only this submodule is captured
    strided: bool = False  # inputs and output grads are not contiguous
    in_place: bool = False  # the input is added to the output, in place
    offload: bool = False  # autograd saves copies of tensors, as in activation offloading
    late_hooks: bool = False  # parameters get their hooks after the capture
    fp8_mha: bool = False  # with ``fp8_attention``, the inputs of attention are in FP8 too
    same_input: bool = False  # every microbatch is copied into one tensor, the sample argument of the first layer
    module_hooks: bool = False  # layers have hooks, registered after the capture
    clean_start: bool = False  # before the first event, ``main_grad`` and recorded hook calls are cleared
    takes_grads: bool = False  # like ``clean_start``, and each ``.grad`` is removed before the next one is computed
    freezes_first: bool = False  # the first parameter of each layer is not trained
    hidden: int = 0  # the hidden size; 0 selects the default of the device
    retain: bool = False  # each backward can be replayed more than once
    one_pool: bool = False  # all captures share one memory pool
    one_sample: bool = False  # all layers have the same tensor as their sample argument
    checkpoints: tuple[str, ...] = ()  # the checkpoint around each layer: "te", or a kind of torch's checkpoint
    events: tuple[str, ...] = ("step", "step")  # the events, in order
