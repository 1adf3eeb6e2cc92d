"""``weak-reference-layout`` on the simulator: weak references by themselves. `verify` has graphs that need them."""

from __future__ import annotations

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import ModuleSource, Source
from te_graph_fixes.status import Status
from tests.support.child import simulate

pytestmark = pytest.mark.te

FIX = "weak-reference-layout"
UTILS = "transformer_engine.pytorch.utils"

REFERENCES = """
import itertools, torch, te_graph_fixes
from transformer_engine.pytorch.utils import make_weak_ref

VIEWS = {
    "all": lambda t: t,
    "transposed": lambda t: t.t(),
    "part": lambda t: t[1:, 2:],
    "steps": lambda t: t[::2, 1::2],
    "expanded": lambda t: t[0].expand(5, -1),
    "number": lambda t: t[2, 3],
    "empty": lambda t: t[:, :0].t(),
}
DTYPES = (
    "float64 float32 float16 bfloat16 complex128 complex64 int64 int32 int16 int8 bool uint8 uint16 uint32 uint64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
for name, (view, of) in itertools.product(DTYPES, VIEWS.items()):
    dtype = getattr(torch, name)
    made = torch.arange(24 * dtype.itemsize, dtype=torch.uint8, device="cuda").view(4, -1) % 2
    tensor = of(made.view(dtype))
    found = make_weak_ref(tensor)
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride()), (name, view)
    assert found.data_ptr() == tensor.data_ptr(), (name, view)
    assert found.is_cuda and not found.requires_grad
    assert torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (found, tensor))), (name, view)

number = torch.tensor([1 + 2j, 3 - 4j], device="cuda")
for tensor in (number.conj(), number.conj().imag):
    assert make_weak_ref(tensor).tolist() == tensor.tolist()
    assert make_weak_ref(tensor).data_ptr() == tensor.data_ptr()

host = torch.ones(2, device="cpu")
found = make_weak_ref({"a": [host, None, 2], "b": (number,)})
assert found["a"][0] is host and found["a"][1:] == [None, 2] and found["b"][0].tolist() == number.tolist()
"""


def test_a_weak_reference_is_the_tensor_itself() -> None:
    simulate("-c", REFERENCES, TE_GRAPH_FIXES=FIX)
    with pytest.raises(AssertionError, match="Could not infer dtype of _WeakRefTensor"):
        simulate("-c", REFERENCES, TE_GRAPH_FIXES="off")


def test_another_way_to_make_them_is_not_recognized() -> None:
    tree = Source.installed()
    assert CATALOGUE[FIX].verdict_on(tree).status == Status.APPLICABLE
    module = tree.module(UTILS)
    text = module.text.replace("x.dtype, x.shape)", "x.dtype, x.shape, x.stride())")
    assert text != module.text
    tree._modules[UTILS] = ModuleSource(UTILS, module.path, text)
    assert CATALOGUE[FIX].verdict_on(tree).status == Status.UNRECOGNIZED
