"""``capture-exception-safety``: a capture that fails leaves the process damaged, and hides why it failed.

Upstream: open

Symptom: after an exception in `make_graphed_callables` garbage collection stays off, sample inputs and parameters have
lost their grads, eager FP8 forwards and backwards still take the graph path, modules keep the capture's recipe and its
forward hooks, later wgrads come out of order, random numbers or FP8 scales differ from what they were. Where a
forbidden operation has spoiled the capture one sees "operation failed due to a previous error during capture" instead
of the error itself, work goes on in the capture's stream, and drawing random numbers raises "Offset increment outside
graph capture encountered unexpectedly".

What was done after ``yield`` or after the capture is now done in ``finally`` or ``except`` clauses, the first exception
is raised again, and a capture that PyTorch could not end is cleaned up.

``not-needed``: every text named ``SAFE_`` is there.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..shapes import require_names
from ..source import Definition, Edit, Source, unrecognized

CAPTURE = """
with torch.cuda.graph(*args, **kwargs):
    yield
if gc_is_enabled:
    gc.enable()
"""

SAFE_CAPTURE = """
stream = torch.cuda.current_stream()
failure = None
try:
    with torch.cuda.graph(*args, **kwargs):
        try:
            yield
        except BaseException as error:
            failure = error
            raise
except BaseException as error:
    if error is failure:
        raise
    # PyTorch could not end the capture, and has left its stream, its memory pool and the random
    # number generators in it. An empty capture brings the generators out.
    with contextlib.suppress(AttributeError, KeyError, RuntimeError):
        torch.cuda.set_stream(stream)
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), kwargs["pool"])
        torch._C._cuda_releasePool(torch.cuda.current_device(), kwargs["pool"])
    with contextlib.suppress(RuntimeError):
        empty_graph = torch.cuda.CUDAGraph()
        if graph_safe_rng_available():
            for state in get_all_rng_states().values():
                empty_graph.register_generator_state(state)
        with torch.cuda.graph(empty_graph):
            torch.zeros(1, device="cuda")
    if failure is None:
        raise
    # Show what went wrong in the capture last, where one looks for it.
    error.__context__ = failure.__context__
    raise failure
finally:
    failure = None
    if gc_is_enabled:
        gc.enable()
"""

GRADS = """
yield
for input_tensor, original_grad in zip(inputs, original_input_grads):
    input_tensor.grad = original_grad
"""

SAFE_GRADS = """
try:
    yield
finally:
    for input_tensor, original_grad in zip(inputs, original_input_grads):
        input_tensor.grad = original_grad
"""

BACKWARD = "torch.autograd.backward"

FORWARDS = {"outputs, _ = _tree_flatten(func(*args, **kwargs))": 1, "outputs = func(*args, **kwargs)": 3}
"""How the warmup runs a forward up to TE 2.18 and from 2.19 on, and how often the statement occurs then."""

REMOVE_HOOKS = """
for hook in hooks:
    hook.remove()
"""

SAFE_WARMUP = """
try:
    {forward}
finally:
    for hook in hooks:
        hook.remove()
"""

CAPTURE_LATER = "capture = lambda: ANY_CALL"

SAFE_CALL = """

# What the capture changes is put back where it fails, too, as far as the device still answers.
submodules = [m for module in modules for m in module.modules()]
first_microbatch = [
    (m, m.is_first_microbatch) for m in submodules if hasattr(m, "is_first_microbatch")
]
delayed_wgrads = [getattr(getattr(m, "wgrad_store", None), "context", None) for m in submodules]
delayed_wgrads = [(context, list(context.queue)) for context in delayed_wgrads if context]
try:
    set_capture_start()
    for module in modules:
        wrap_autocast(module)
    graphed_callables = capture()
except BaseException:
    for m, value in first_microbatch:
        m.is_first_microbatch = value
    for context, pending in delayed_wgrads:
        context.queue.clear()
        context.queue.extend(pending)
    with contextlib.suppress(Exception):
        restore_fp8_tensors(modules, saved_fp8_tensors)
    with contextlib.suppress(Exception):
        if graph_safe_rng_available():
            for gen, state in zip(generators, original_rng_states):
                gen.set_state(state)
        else:
            torch.cuda.set_rng_state(original_rng_states)
    raise
finally:
    set_capture_end()
    for module_cls, old_call in old_call_funcs.items():
        module_cls.__call__ = old_call
"""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    edits = [
        *_context(module.definition("_graph_context_wrapper"), CAPTURE, SAFE_CAPTURE),
        *_warmup(module.definition("_make_graphed_callables")),
        *_public(module.definition("make_graphed_callables")),
    ]
    # TE before 2.12 calls torch.autograd.grad, which leaves .grad alone.
    if module.find("_none_grad_context_wrapper") or module.definition("_make_graphed_callables").has(BACKWARD):
        edits += _context(module.definition("_none_grad_context_wrapper"), GRADS, SAFE_GRADS)
    if not edits:
        return not_needed("a capture that fails is undone")
    return applicable("what a capture changes is put back only where it succeeds", edits)


def _context(wrapper: Definition, plain: str, safe: str) -> list[Edit]:
    wrapper.one("yield")
    return [] if wrapper.has(safe) else [wrapper.replace(wrapper.one(plain), safe)]


def _warmup(capture: Definition) -> list[Edit]:
    capture.one(REMOVE_HOOKS)
    if any(capture.has(SAFE_WARMUP.format(forward=forward)) for forward in FORWARDS):
        return []
    for forward, count in FORWARDS.items():
        if capture.has(forward + REMOVE_HOOKS) and len(capture.all(forward)) == count:
            return [capture.replace(capture.one(forward + REMOVE_HOOKS), SAFE_WARMUP.format(forward=forward))]
    raise unrecognized("one forward of the warmup", capture, "none or several")


def _public(public: Definition) -> list[Edit]:
    start, wrap = public.one("set_capture_start()"), public.one("wrap_autocast(module)")
    call = cast(ast.Assign, public.one("graphed_callables = ANY"))
    if public.has(CAPTURE_LATER + SAFE_CALL):
        return []
    require_names(public, "modules")
    if not isinstance(call.value, ast.Call) or ast.unparse(call.value.func) != "_make_graphed_callables":
        raise unrecognized("a call of _make_graphed_callables", public, "another")
    public.one("saved_fp8_tensors = ANY")
    public.one("original_rng_states = [state.get_state() for state in generators]")
    public.one("for module_cls, old_call in old_call_funcs.items(): module_cls.__call__ = old_call")
    public.one("set_capture_end()")
    function = call.value.func
    return [
        public.delete(start),
        public.delete(wrap),
        Edit(public.module.name, public.module.span(call)[0], public.module.span(function)[0], "capture = lambda: "),
        public.insert_after(call, SAFE_CALL),
    ]


FIX = Fix(
    id="capture-exception-safety",
    summary="a capture that fails leaves the process damaged, and hides why it failed",
    symptom="after a failed capture: no garbage collection, lost grads, eager FP8 in the graph path, wrong recipe",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
