"""``grouped-linear-skip-flag``: under graphs, FP8 experts ignore the flag that says when weights are new.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3051, /3052 and /3065 (TE 2.17)

Symptom: with FP8 weight caching, outputs of a graphed `GroupedLinear` are off by about 1.0 after the first optimizer
step (its weights are never quantized again), or its weights are quantized at every microbatch and its wgrad is
overwritten (x0.577 for three microbatches).

`GroupedLinear.forward` hands a literal ``None`` to `_GroupedLinear` in the slot ``skip_fp8_weight_update``. It becomes
what `Linear` does: under capture read the graph's skip tensor and, where there is one, pass it on and force
``is_first_microbatch=False``. The slot differs by version (16, 18 or 19), so it is found by its name.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, applicable, not_needed
from ..source import Definition, Source, UnrecognizedError

SLOT = "skip_fp8_weight_update"

READ_FLAG = """
skip_fp8_weight_update = None
if FP8GlobalStateManager.fp8_graph_capturing():
    skip_fp8_weight_update = {tensor}
    if skip_fp8_weight_update is not None:
        is_first_microbatch = False
"""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.module.grouped_linear")
    forward = module.definition("GroupedLinear.forward")
    names = _tuple(module.definition("_GroupedLinear.forward"), "ANY = non_tensor_args", "targets")
    slots = [index for index, name in enumerate(names) if isinstance(name, ast.Name) and name.id == SLOT]
    values = _tuple(forward, "non_tensor_args = ANY", "value")
    if len(slots) != 1 or len(values) != len(names):
        raise UnrecognizedError(
            f"looked for the slot {SLOT} of non_tensor_args in {module.path}, found it {len(slots)} times among "
            f"{len(names)} names for {len(values)} values"
        )
    value = values[slots[0]]
    if isinstance(value, ast.Name) and value.id == SLOT:
        forward.one("is_first_microbatch = False", within=_first_guard(forward))
        return not_needed(f"GroupedLinear passes {SLOT} on")
    if not (isinstance(value, ast.Constant) and value.value is None) or forward.has(SLOT):
        raise UnrecognizedError(
            f"looked for a literal None in the slot {SLOT} of {forward.qualname} ({module.path}), "
            f"found `{forward.text(value)}`"
        )
    statements = forward.node.body[1 if ast.get_docstring(forward.node) is not None else 0 :]
    return applicable(
        f"GroupedLinear passes None as {SLOT}",
        [
            forward.insert_before(statements[0], READ_FLAG.format(tensor=_skip_tensor(source)) + "\n"),
            forward.replace(value, SLOT),
        ],
    )


def _tuple(definition: Definition, pattern: str, field: str) -> list[ast.expr]:
    assignment = getattr(definition.one(pattern), field)
    found = assignment[0] if isinstance(assignment, list) else assignment
    if not isinstance(found, ast.Tuple):
        raise UnrecognizedError(f"looked for a tuple in `{pattern}` of {definition.qualname}, found {found}")
    return found.elts


def _first_guard(forward: Definition) -> ast.AST:
    guards = forward.all(f"if {SLOT} is not None: ...")
    if not guards:
        raise UnrecognizedError(f"{forward.qualname} passes {SLOT} on, but does not force is_first_microbatch=False")
    return guards[0]


def _skip_tensor(source: Source) -> str:
    """How this TE reads the graph's skip tensor."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    if quantization.find("FP8GlobalStateManager.get_skip_fp8_weight_update_tensor"):
        return "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()"
    quantization.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
    return "FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor"


FIX = Fix(
    id="grouped-linear-skip-flag",
    summary="FP8 GroupedLinear ignores the graph's skip flag",
    symptom="outputs off by about 1.0 after the first optimizer step, or wgrad x0.577 for three microbatches",
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/pull/3051",
        "https://github.com/NVIDIA/TransformerEngine/pull/3052",
        "https://github.com/NVIDIA/TransformerEngine/pull/3065",
    ),
    affected=">=2.10,<2.17",
    examine=examine,
)
