"""``skip-flag-accessors``: Megatron-Core calls a setter which TE 2.15 and 2.16 removed.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3015 (TE 2.17), reported as
https://github.com/NVIDIA/Megatron-LM/issues/4707

Symptom: ``AttributeError: type object 'FP8GlobalStateManager' has no attribute 'set_skip_fp8_weight_update_tensor'``
at the first step of Megatron-Core 0.14 to 0.17 with FP8 and graphs.

TE 2.15 moved the skip tensor from the class into ``quantization_state`` and dropped its accessors. They are added
again, reading and writing the tensor where it lives now.

``not-needed``: one accessor returns the flag, the other fills it.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_needed
from ..source import Source

ACCESSORS = """
@classmethod
def set_skip_fp8_weight_update_tensor(cls, skip):
    \"\"\"Set, in place, the flag that makes graphs keep the quantized weights (True) or renew them (False).\"\"\"
    state = cls.quantization_state
    if state.skip_fp8_weight_update_tensor is None:
        state.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
    state.skip_fp8_weight_update_tensor.fill_(skip)

@classmethod
def get_skip_fp8_weight_update_tensor(cls):
    \"\"\"The flag tensor of shape [1], or None before the first capture with weight caching.\"\"\"
    return cls.quantization_state.skip_fp8_weight_update_tensor
"""


def examine(source: Source) -> Verdict:
    fp8 = "transformer_engine.pytorch.fp8"  # the home of the class up to TE 2.8
    module = source.find("transformer_engine.pytorch.quantization") or source.module(fp8)
    getter, setter = (f"FP8GlobalStateManager.{verb}_skip_fp8_weight_update_tensor" for verb in ("get", "set"))
    if module.find(getter) or module.find(setter):
        module.definition(getter).one("return ANY_STATE.skip_fp8_weight_update_tensor")
        module.definition(setter).one("ANY_STATE.skip_fp8_weight_update_tensor.fill_(skip)")
        return not_needed("FP8GlobalStateManager has both accessors")
    module.definition("FP8GlobalStateManager").one("quantization_state = FP8GlobalState()")
    module.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
    reset = module.definition("FP8GlobalStateManager.reset")
    return applicable(
        "the skip tensor moved into quantization_state without its accessors",
        [reset.insert_after(reset.node, "\n" + ACCESSORS)],
    )


FIX = Fix(
    id="skip-flag-accessors",
    summary="the accessors of the FP8 skip flag, which Megatron-Core 0.14 to 0.17 calls, are missing",
    symptom="AttributeError: ... no attribute 'set_skip_fp8_weight_update_tensor' (Megatron-LM #4707)",
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/pull/3015",
        "https://github.com/NVIDIA/Megatron-LM/issues/4707",
    ),
    affected=">=2.15,<2.17",
    examine=examine,
)
