"""``grouped-linear-skip-flag``: under graphs, FP8 experts ignore the flag that says when weights are new.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3051, /3052 and /3065 (TE 2.17)

Symptom: with FP8 weight caching, outputs of a graphed `GroupedLinear` are off by about 1.0 after the first optimizer
step (its weights are never quantized again), or its weights are quantized at every microbatch and its wgrad is
overwritten (x0.577 for three microbatches).

`GroupedLinear.forward` hands a literal ``None`` to `_GroupedLinear` in the slot ``skip_fp8_weight_update``. It becomes
what `Linear` does: under capture read the graph's skip tensor and, where there is one, pass it on and force
``is_first_microbatch=False``; but not in captures by `torch.cuda.graph`, which the flag is not about.
The slot differs by version (16, 18 or 19), so it is found by its name. TE up to 2.9 passes the flag.

``not-needed``: the slot holds the flag's variable, which is set by one of the readings below and by nothing else,
and weights are quantized with it.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, not_needed
from ..shapes import Changes, require_names
from ..source import Definition, Source, unrecognized

SLOT = "skip_fp8_weight_update"
PASSED_ON = f"GroupedLinear passes {SLOT} on"

READ_FLAG = """
from ..graph import is_graph_capturing

skip_fp8_weight_update = None
if is_graph_capturing() and FP8GlobalStateManager.fp8_graph_capturing():
    skip_fp8_weight_update = {tensor}
    if skip_fp8_weight_update is not None:
        is_first_microbatch = False
"""

UPSTREAM_READS_FLAG = """
if FP8GlobalStateManager.fp8_graph_capturing():
    skip_fp8_weight_update = {tensor}
else:
    skip_fp8_weight_update = None
if skip_fp8_weight_update is not None:
    is_first_microbatch = False
"""

TENSORS = (
    "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()",
    "FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor",
)
"""How the graph's skip tensor is read, up to TE 2.14 and from 2.15 on."""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.module.grouped_linear")
    forward = module.definition("GroupedLinear.forward")
    value = _value_of_slot(module.definition("_GroupedLinear.forward"), forward)
    reads = [read.format(tensor=tensor) for read in (READ_FLAG, UPSTREAM_READS_FLAG) for tensor in TENSORS]
    if isinstance(value, ast.Name) and value.id == SLOT:
        found = sum(len(forward.all(read)) for read in reads)
        if not found:
            raise unrecognized(f"a {SLOT} that is read from the graph's skip tensor", forward)
        used = {module.text.count(f"skip_update_flag={flag}") for flag in ("", SLOT)}
        if len(used) != 1 or 0 in used:
            raise unrecognized(f"every `skip_update_flag={SLOT}`", module.path, "another value, or none")
        for tensor in TENSORS:
            Changes().first(forward, READ_FLAG.format(tensor=tensor))
        forward.exactly(2 * found, f"{SLOT} = ANY")
        return not_needed(PASSED_ON)
    if not (isinstance(value, ast.Constant) and value.value is None) or forward.has(SLOT):
        raise unrecognized(f"a literal None in the slot {SLOT}", forward, f"`{forward.text(value)}`")
    require_names(forward, "is_first_microbatch")
    changes = Changes()
    changes.first(forward, READ_FLAG.format(tensor=_skip_tensor(source)) + "\n")
    changes.add(False, lambda: [forward.replace(value, SLOT)])
    return changes.verdict(f"GroupedLinear passes None as {SLOT}", PASSED_ON)


def _value_of_slot(inner: Definition, forward: Definition) -> ast.expr:
    """What ``forward`` gives ``inner`` in the slot: an item of ``non_tensor_args``, or up to TE 2.9 an argument."""
    unpacking = inner.all("ANY = non_tensor_args")
    if unpacking:
        names = [getattr(name, "id", None) for name in _items(unpacking[0].targets[0])]  # type: ignore[union-attr]
        values = _items(forward.one("non_tensor_args = ANY").value)  # type: ignore[union-attr]
    else:
        names = [argument.arg for argument in inner.node.args.args[1:]]  # type: ignore[union-attr]
        given = _items(forward.one("args += ANY").value)  # type: ignore[union-attr]
        values = [item for item in given if not isinstance(item, ast.Starred)]
    if names.count(SLOT) != 1 or len(values) != len(names):
        found = f"it {names.count(SLOT)} times among {len(names)} names for {len(values)} values"
        raise unrecognized(f"the slot {SLOT}", inner, found)
    return values[names.index(SLOT)]


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else []


def _skip_tensor(source: Source) -> str:
    """How this TE reads the graph's skip tensor."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    if quantization.find("FP8GlobalStateManager.get_skip_fp8_weight_update_tensor"):
        return TENSORS[0]
    quantization.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
    return TENSORS[1]


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
    looks_like=("fp8 GroupedLinear output", "GroupedLinear backward main_grad"),
)
