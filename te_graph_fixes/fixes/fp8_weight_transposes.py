"""``fp8-weight-transposes``: replays compute dgrads with transposes of FP8 primary weights from before the last update.

Upstream: open, TE 2.7 to main

Symptom: with FP8 parameters (``quantized_model_init``) dgrads are those of the weights at capture (error 1.0 to 1.4),
or come from memory that is somebody else's by then. It happens

1. after ``quantize_master_weights`` (``cast_master_weights_to_fp8``) with its default arguments, as ZeRO optimizers
   call it: it marks the transposes invalid, or drops the columnwise data of block scaling; the next forward makes them;
2. to modules that were built under ``torch.no_grad()``: the weights' quantizers are made without columnwise use, and
   each ``copy_`` by an optimizer drops the transpose, for the next backward to make.

A replay runs no Python that could make them. The graph now holds the transposes that it reads, and before its replay
those are made again that are invalid, gone or elsewhere (`te_graph_fixes/provided/fp8_weights.py`).

``not-needed``: all of the changes below stand where they would be made.
"""

from __future__ import annotations

from ..fix import Fix, Verdict
from ..provided import new_module
from ..shapes import Changes, graph_capture, require_names
from ..source import Definition, Source, unrecognized

CAPTURED = "graph_callables[ANY_INDEX] = func"

HOLD = """
from ._te_fp8_weights import PrimaryWeights

fwd_graph.primary_weights = PrimaryWeights(func if is_training else None)
"""

COPY_INPUTS = """
for i in range(len_user_args):
    if ANY_OTHER:
        static_input_surface[i].copy_(inputs[i])
"""

REPLAY = "fwd_graph.replay()"

REFRESH = "fwd_graph.primary_weights.refresh()"


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    forward = replay(capture)
    require_names(capture, "is_training")
    changes = Changes()
    changes.after(capture, [match.node for match in capture.exactly(2, CAPTURED)], HOLD)
    changes.after(forward, [forward.one(COPY_INPUTS)], REFRESH)
    return changes.verdict(
        "nothing makes the transposes of FP8 primary weights between an update and a replay",
        "a graph holds the transposes that it reads, and has them made before its replay",
        new_module(source, "fp8_weights"),
    )


def replay(capture: Definition) -> Definition:
    """``Graphed.forward``, which copies a graph's inputs and replays it."""
    forward = capture.inner("make_graphed_autograd_function").inner("Graphed").inner("forward")
    forward.one(COPY_INPUTS)
    if not forward.has(REPLAY):
        raise unrecognized(f"`{REPLAY}`", forward)
    return forward


FIX = Fix(
    id="fp8-weight-transposes",
    summary="replays use transposes of FP8 primary weights from before the last update",
    symptom="dgrads off by 1.0 with FP8 parameters, after quantize_master_weights or where built under no_grad",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
