"""``replay-arguments``: graphs take arguments that are not those of their samples, without a word.

Upstream: open, TE 2.7 to main (corrected from 2.10 on)

Symptom: ``graphed(inp=x)`` for a sample that was positional copies the first *weight* into the input (outputs off by
1.0); so does a missing argument. Dicts with their keys in another order exchange tensors (1.77). Inputs of another
shape are broadcast. What is in front of an input whose sample needs no gradient gets gradients of zero; a graph that
was captured under ``torch.no_grad()`` gives none to its parameters.

A replay flattens what it is given and copies it into the static inputs by position. It now compares number, shapes,
need of gradients and, where an argument is a dict or another container, its structure with the samples first, and
raises `TypeError` or `ValueError`; so does a backward of what has none, `RuntimeError`. Keywords that were not among
the samples are ignored as before: callers give ``is_first_microbatch``.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, lacks_delayed_wgrads, require_names
from ..source import Source

SPECS = """
None
if all(isinstance(arg, torch.Tensor) for arg in (*sample_args[i], *sample_kwargs[i].values()))
else (
    _tree_flatten(tuple(sample_args[i]))[1],
    _tree_flatten([sample_kwargs[i][key] for key in per_callable_kwargs_keys[i]])[1],
)
"""
SAMPLES = """
sample_shapes = [getattr(arg, "shape", None) for arg in static_input_surface[:len_user_args]]
sample_grads = [getattr(arg, "requires_grad", False) for arg in static_input_surface[:len_user_args]]
"""
FLATTEN = "flatten_user_{kind}, {spec} = _tree_flatten({given})"
FLATTENED = (
    {"kind": "args", "given": "user_args"},
    {"kind": "kwargs", "given": "[user_kwargs[key] for key in kwargs_keys]"},
)
FUNCTION_ARGS = "func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params"
CHECK = """
shapes = [getattr(arg, "shape", None) for arg in (*flatten_user_args, *flatten_user_kwargs)]
if shapes != sample_shapes:
    raise (ValueError if len(shapes) == len_user_args else TypeError)(
        "This graph was captured for positional arguments, then keywords "
        f"{kwargs_keys}, with tensors of shapes {[shape and tuple(shape) for shape in sample_shapes]}; "
        f"it was given shapes {[shape and tuple(shape) for shape in shapes]}"
    )
if sample_specs is not None and sample_specs != (args_spec, kwargs_spec):
    raise ValueError(
        f"This graph was captured for arguments in the structure {sample_specs}; "
        f"it was given {(args_spec, kwargs_spec)}. The keys of dicts must come in the same order"
    )
given_grads = [getattr(arg, "requires_grad", False) for arg in (*flatten_user_args, *flatten_user_kwargs)]
if is_training and torch.is_grad_enabled() and any(map(bool.__gt__, given_grads, sample_grads)):
    raise ValueError(
        f"This graph was captured for samples whose requires_grad is {sample_grads}; it was given {given_grads}. "
        "An input gets its gradient from a graph only if its sample had requires_grad=True"
    )
"""
NO_BACKWARD = """
if all(grad is None for grad in static_grad_outputs):
    raise RuntimeError(
        "This graph was captured for a forward alone: under torch.no_grad(), or with outputs that need no gradient"
    )
"""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    capture = module.definition("_make_graphed_callables")
    factory = capture.inner("make_graphed_autograd_function")
    require_names(factory, "kwargs_keys", "len_user_args", "static_input_surface", "static_grad_outputs")
    functionalized, backward = factory.inner("functionalized"), factory.inner("backward")
    require_names(capture, "sample_args", "sample_kwargs", "is_training")
    capture.one("per_callable_kwargs_keys = [list(kwargs.keys()) for kwargs in sample_kwargs]")
    changes = Changes()
    changes.graph_argument(capture, f"({' '.join(SPECS.split())})", "sample_specs")
    changes.before(factory, [functionalized.node], SAMPLES)
    for parts in FLATTENED:
        flatten = FLATTEN.format(spec=f"{parts['kind']}_spec", **parts)
        changes.replace(functionalized, FLATTEN.format(spec="_", **parts), flatten)
    changes.before(functionalized, [functionalized.one(FUNCTION_ARGS)], CHECK)
    changes.first(backward, NO_BACKWARD)
    return changes.verdict("a replay takes whatever it is given", "arguments are compared with the samples")


FIX = Fix(
    id="replay-arguments",
    summary="graphs take arguments that are not those of their samples, without a word",
    symptom="graphed(inp=x) computes with a weight in place of x; dicts with other key orders exchange tensors",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
