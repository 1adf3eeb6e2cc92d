"""``tuple-samples``: samples given as a tuple are refused where buffers are reused.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2426 (TE 2.12)

Symptom: ``AssertionError: sample_args must be a list for _reuse_graph_input_output_buffers``, or, without
``sample_kwargs``, ``TypeError: 'tuple' object does not support item assignment``.

Tuples are now made into lists.

``not-needed``: tuples are made into lists, and nothing refuses them. ``not-applicable``: there is no parameter
``_reuse_graph_input_output_buffers``.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import graph_capture, graph_interface, lacks_parameter
from ..source import Source

REFUSE = "assert isinstance(sample_args, list), ANY_TEXT"

CONVERT = """
if isinstance(sample_args, tuple):
    sample_args = list(sample_args)
if isinstance(sample_kwargs, tuple):
    sample_kwargs = list(sample_kwargs)
"""


def examine(source: Source) -> Verdict:
    if lacks_parameter(graph_interface(source), "_reuse_graph_input_output_buffers"):
        return not_applicable("static buffers are not reused")
    capture = graph_capture(source)
    if capture.has(CONVERT):
        capture.exactly(0, REFUSE)
        return not_needed("samples may be tuples")
    return applicable("samples have to be a list", [capture.replace(capture.one(REFUSE), CONVERT)])


FIX = Fix(
    id="tuple-samples",
    summary="samples given as a tuple are refused where buffers are reused",
    symptom="AssertionError: sample_args must be a list for _reuse_graph_input_output_buffers",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2426",),
    affected=">=2.6,<2.12",
    examine=examine,
)
