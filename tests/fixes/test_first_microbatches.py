"""Test on the simulator the skip flag that TE's graphs share, and captures while another thread runs a module."""

from __future__ import annotations

import json

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

FILLS = """
from tests.verify.driver.setting import make_recipe

recipe = make_recipe("current")
layers = tuple(linear(64) for _ in range(6))
eager = linear(64)
x = random(64, 64)
options = {"enabled": True, "recipe": recipe, "cache_quantized_params": True}
if TOGETHER:
    te.make_graphed_callables(layers, ((x,),) * 6, **options)
else:
    for layer in layers:
        te.make_graphed_callables(layer, (x,), **options)
flag = getattr(Manager, "quantization_state", Manager).skip_fp8_weight_update_tensor
fills = []
for step in range(2):
    for first in (True, False):
        before, out = flag._version, x
        with te.autocast(enabled=True, recipe=recipe):
            out = eager(out) if EAGER else out
            for layer in layers:
                out = layer(out, is_first_microbatch=first)
        fills.append(flag._version - before)
        assert bool(flag) is not first or OFF
print(json.dumps(fills))
"""


@pytest.mark.parametrize("together", [True, False])
def test_graphs_fill_the_shared_skip_flag_once_in_an_autocast(together: bool) -> None:
    program = f"TOGETHER, EAGER, OFF = {together}, False, False{FILLS}"
    assert json.loads(run_program(program)) == [1, 1, 1, 1]
    assert json.loads(run_program(program, TE_GRAPH_FIXES="off")) == [1, 1, 1, 1]


def test_behind_an_eager_module_graphs_fill_the_flag_once_instead_of_never() -> None:
    assert json.loads(run_program(f"TOGETHER, EAGER, OFF = True, True, False{FILLS}")) == [1, 1, 1, 1]
    off = run_program(f"TOGETHER, EAGER, OFF = True, True, True{FILLS}", TE_GRAPH_FIXES="off")
    assert json.loads(off) == [0, 0, 0, 0]


IN_ANOTHER_THREAD = """
from tests.verify.driver.comparison import error
from tests.verify.driver.setting import make_recipe

recipe = make_recipe("current")
other = linear(64, bias=False)
x = random(64, 64, grad=False)
found = []

def infer(first):
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        found.append(other(x, is_first_microbatch=first).clone())

infer(True)
with torch.no_grad():
    other.weight.mul_(-1)

class Layer(te.Linear):
    is_first_microbatch = True

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing() and len(found) == 1:
            thread = threading.Thread(target=infer, args=(False,))
            thread.start()
            thread.join()
        out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out

layer = Layer(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda").eval()
te.make_graphed_callables(layer, (x.clone(),), enabled=True, recipe=recipe)
infer(False)
assert len(found) == 3
print(error([found[0]] * 2, found[1:]))
"""


def test_an_eager_module_in_another_thread_keeps_its_weights_during_a_capture() -> None:
    assert float(run_program(IN_ANOTHER_THREAD)) == 0.0


IN_THREAD_OF_AUTOGRAD = """
from concurrent.futures import ThreadPoolExecutor
from tests.programs import PROGRAMS, marks, outcome

backward = torch.autograd.backward

def run_in_thread(*arguments, **options):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, *arguments, **options).result()

torch.autograd.backward = run_in_thread
print(outcome(PROGRAMS["kept_mark, (None, 'itself', True, True, 3)"][0]))
"""


def test_a_recomputation_in_a_thread_of_autograd_is_part_of_its_capture() -> None:
    """On a GPU, autograd uses its own threads. If a capture ignored them, a replay would overwrite ``main_grad``."""
    assert "captured with is_first_microbatch=True and is replayed with False" in run_program(IN_THREAD_OF_AUTOGRAD)
