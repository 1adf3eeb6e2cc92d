"""What more than one fix looks for in the graph code of TransformerEngine (TE)."""

from __future__ import annotations

import ast
import hashlib
from typing import Any, cast

from .source import Definition, Edit, Run, Source, unrecognized

BACKWARD_INDEX = """
per_callable_bwd_idx = (_prefix_num_layers[m_chunk] * num_microbatches) + (
    bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no
)
"""
"""The number of a dgrad among the static buffers: chunk by chunk, microbatch by microbatch, layer by layer."""

RETURNED = """
ret = []
for i in range(len(sample_args)):
    graphed = ANY_GRAPHED
    func = ANY_FUNC
    if ANY_IS_MODULE:
        ...
    else:
        ret.append(graphed)
if just_one_callable:
    return ret[0]
return tuple(ret)
"""
"""How TE up to 2.9 ends: nothing is attached to a graphed callable, so that it has no ``backward_dw``."""


def graph_capture(source: Source) -> Definition:
    """The function that warms up, captures and puts together the graphed callables."""
    return source.definition("transformer_engine.pytorch.graph", "_make_graphed_callables")


def graph_interface(source: Source) -> Definition:
    """The public function in front of `graph_capture`."""
    return source.definition("transformer_engine.pytorch.graph", "make_graphed_callables")


def lacks_delayed_wgrads(source: Source) -> bool:
    """Whether graphed callables have no ``backward_dw``, the public sign that delayed wgrads are captured."""
    capture = graph_capture(source)
    if "backward_dw" in capture.module.text:
        return False
    capture.one(RETURNED)
    return True


def lacks_parameter(function: Definition, name: str) -> bool:
    """Whether a public function has no parameter ``name``, nor any way to take it."""
    arguments = cast(ast.FunctionDef, function.node).args
    if name in {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}:
        return False
    if arguments.kwarg or function.node.decorator_list or name in function.module.text:
        raise unrecognized(f"a plain signature of {function.qualname}", function, "one that may take more")
    return True


def require_digest(place: Definition, node: ast.AST, wanted: str) -> None:
    """Raise `UnrecognizedError` unless ``node``, which an edit replaces as a whole, is the text with that `digest`."""
    if digest(node) != wanted:
        raise unrecognized(f"the text with digest {wanted}", place, f"one with digest {digest(node)}")


def digest(node: ast.AST) -> str:
    """A short hash of the syntax of ``node``, the same on every Python for what is not a definition."""
    return hashlib.sha256(repr(_plain(node.body if isinstance(node, Run) else node)).encode()).hexdigest()[:16]


def _plain(node: Any) -> object:
    if isinstance(node, ast.AST):
        fields = (getattr(node, name, None) for name in node._fields if name not in ("ctx", "kind", "type_comment"))
        return type(node).__name__, *map(_plain, fields)
    return list(map(_plain, node)) if isinstance(node, list) else node


def graph_argument(capture: Definition, value: str, name: str) -> list[Edit]:
    """Give what makes the autograd function of graph ``i`` one more argument, before the forward's graph."""
    factory = cast(ast.FunctionDef, capture.inner("make_graphed_autograd_function").node)
    calls = [node for node in capture.nodes(ast.Call, factory.name) if isinstance(node.func, ast.Name)]
    graphs = [argument for call in calls for argument in call.args if ast.unparse(argument) == "fwd_graphs[i]"]
    parameters = [parameter for parameter in factory.args.args if parameter.arg == "fwd_graph"]
    if len(calls) != 1 or len(graphs) != 1 or len(parameters) != 1:
        raise unrecognized(f"one call {factory.name}(fwd_graphs[i], ...) for its fwd_graph", capture)
    edits = []
    for before, text in ((graphs[0], value), (parameters[0], name)):
        start = capture.module.offset(before.lineno, before.col_offset)
        edits.append(Edit(capture.module.name, start, start, f"{text},\n{' ' * before.col_offset}"))
    return edits
