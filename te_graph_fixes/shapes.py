"""What more than one fix looks for in the graph code of TransformerEngine (TE)."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from .evidence import undone
from .fix import Verdict, applicable, not_needed
from .source import Definition, Edit, ModuleSource, Node, Run, Source, UnrecognizedError, unrecognized

MODULES = {
    "linear": "Linear",
    "layernorm_linear": "LayerNormLinear",
    "layernorm_mlp": "LayerNormMLP",
    "grouped_linear": "GroupedLinear",
}
"""The classes of layers, by their files."""

BACKWARD_INDEX = """
per_callable_bwd_idx = (_prefix_num_layers[m_chunk] * num_microbatches) + (
    bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no
)
"""
"""The number of a dgrad among the static buffers: chunk by chunk, microbatch by microbatch, layer by layer."""

BACKWARD_CAPTURE = "_graph_context_wrapper(bwd_graph, pool=mempool)"

WARMUP_TO_2_11 = """
grad_inputs = torch.autograd.grad(
    outputs=ANY_OUTPUTS,
    inputs=tuple(i for i in static_input_surface if i.requires_grad),
    grad_outputs=ANY_GRADS,
    only_inputs=True,
    allow_unused=allow_unused_input,
)
"""

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
    return source.module("transformer_engine.pytorch.graph").definition("_make_graphed_callables")


def start_of_warmup(capture: Definition) -> Node:
    """The statement of a capture in front of which comes what it needs from its start."""
    return capture.one("visited_te_modules = ANY_EMPTY")


def warmup_backward(capture: Definition) -> ast.stmt:
    """The backward of warmup: a ``with`` statement, or, up to TE 2.11, an assignment that may be in one."""
    contexts = [capture.statement_with(node) for node in capture.all("_none_grad_context_wrapper(inputs)")]
    if not contexts:
        grads = cast(ast.stmt, capture.one(WARMUP_TO_2_11))
        return next((node for node in capture.nodes(ast.With) if node.body == [grads]), grads)
    captures = [capture.statement_with(node) for node in capture.all(BACKWARD_CAPTURE)]
    found = [node for node in contexts if node not in captures]
    if len(found) != 1:
        raise unrecognized("one backward of warmup", capture, f"{len(found)}")
    return found[0]


def graph_interface(source: Source) -> Definition:
    """The public function in front of `graph_capture`."""
    return source.module("transformer_engine.pytorch.graph").definition("make_graphed_callables")


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
    if name in function.parameters:
        return False
    if arguments.kwarg or function.node.decorator_list or name in function.module.text:
        raise unrecognized(f"a plain signature of {function.qualname}", function, "one that may take more")
    return True


def require_names(place: Definition, *names: str) -> None:
    """Raise `UnrecognizedError` unless ``place`` takes or sets all ``names``, which the text of an edit reads."""
    for name in sorted(set(names) - place.parameters):
        if all(isinstance(node.ctx, ast.Load) for node in place.nodes(ast.Name, name)):
            raise unrecognized(f"a parameter or variable {name}", place)


def lacks_quantization(source: Source) -> bool:
    """Whether this is TE before 2.9: fp8.py holds what quantization.py does since, captures take no cached weights."""
    if source.find("transformer_engine.pytorch.quantization") is not None:
        return False
    source.module("transformer_engine.pytorch.fp8").definition("FP8GlobalStateManager")
    return lacks_parameter(graph_interface(source), "cache_quantized_params")


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


def ahead(place: Definition, node: Any, text: str) -> Edit:
    """Put ``text`` right ahead of ``node``, on its line."""
    start, _ = place.module.span(node)
    return Edit(place.module.name, start, start, text)


def behind(place: Definition, node: Any, text: str) -> Edit:
    """Put ``text`` right behind ``node``, on its line."""
    _, end = place.module.span(node)
    return Edit(place.module.name, end, end, text)


def skip_flag_state(source: Source) -> str:
    """What holds the skip flag while the program runs."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    manager = quantization.definition("FP8GlobalStateManager")
    if manager.has("quantization_state = FP8GlobalState()"):
        quantization.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
        return "FP8GlobalStateManager.quantization_state"
    if any(node in manager.node.body for node in manager.all("skip_fp8_weight_update_tensor = None")):
        return "FP8GlobalStateManager"
    raise unrecognized("skip_fp8_weight_update_tensor = None", manager)


class Changes:
    """The changes of one correction, each of which has been made in a source, or is to be made.

    It has been made where its text stands in all its places and nowhere else, and is to be made where its text is
    nowhere. Anything else is an `UnrecognizedError`, and so is a correction that is made in part, or that other text
    may undo: see `require_own`. ``known`` are the variables that it sets and TE sets too.
    """

    def __init__(self, *known: str) -> None:
        self._made: list[bool] = []
        self._edits: list[Edit] = []
        self._texts: list[tuple[Definition, str, bool]] = []
        self._known = known

    def verdict(self, wrong: str, right: str, new_modules: Mapping[str, str] | None = None) -> Verdict:
        """``not-needed`` because of what is ``right`` where all are made, ``applicable`` where none is."""
        if not any(self._made):
            return applicable(wrong, self._edits, new_modules)
        if not all(self._made) or new_modules:
            made = f"{sum(self._made)} of {len(self._made)} changes"
            raise UnrecognizedError(f"looked for all of a correction or none, found a mixture: {made}")
        require_own(self._texts, self._known)
        return not_needed(right)

    def add(self, made: bool, edits: Callable[[], Iterable[Edit]]) -> None:
        """A change that is ``made``, or that ``edits`` make."""
        self._made.append(made)
        self._edits += [] if made else edits()

    def text(self, place: Definition, text: str, count: int = 1, brings: bool = True) -> None:
        """What stands ``count`` times in ``place`` where a change is made: see `require_own`. `add` has to be told."""
        self._texts += [(place, text, brings)] * count

    def before(self, place: Definition, anchors: Sequence[Node], text: str) -> None:
        """Statements in front of each of the statements ``anchors``; others may stand between."""
        self.text(place, text, len(anchors))
        self.add(_stands(place, text, anchors, 1), lambda: [place.insert_before(node, text) for node in anchors])

    def after(self, place: Definition, anchors: Sequence[Node], text: str) -> None:
        """Statements behind each of the statements ``anchors``; others may stand between."""
        self.text(place, text, len(anchors))
        self.add(_stands(place, text, anchors, -1), lambda: [place.insert_after(node, text) for node in anchors])

    def first(self, function: Definition, text: str) -> None:
        """Statements at the start of a function, below its docstring."""
        found = [getattr(node, "body", [node])[0] if isinstance(node, Run) else node for node in function.all(text)]
        if len(found) > 1 or not all(node in function.node.body for node in found):
            raise unrecognized(f"`{text}` at the start or nowhere", function, "it elsewhere")
        first = function.node.body[ast.get_docstring(function.node) is not None]
        self.text(function, text)
        self.add(bool(found), lambda: [function.insert_before(first, text)])

    def replace(self, place: Definition, old: str, new: str, count: int = 1) -> None:
        """``new`` for each of ``count`` times ``old``."""
        made = place.all(new)
        inside = [node for each in made for node in place.all(old, within=each)]
        left = [node for node in place.all(old) if node not in inside]
        if sorted((len(made), len(left))) != [0, count]:
            found = f"{len(left)} and {len(made)}"
            raise unrecognized(f"{count} of `{' '.join(old.split())}` or `{' '.join(new.split())}`", place, found)
        self.text(place, new, count, brings=False)
        self.add(bool(made), lambda: [place.replace(node, new) for node in left])

    def enter(self, place: Definition, context: str, text: str, count: int = 1) -> None:
        """A context manager in front of each of ``count`` that are entered."""
        statements = [place.statement_with(match.node) for match in place.exactly(count, context)]
        entered = [text in map(ast.unparse, node.items) for node in statements]
        if any(entered) != all(entered):
            raise unrecognized(f"`with {text}, {context}` everywhere or nowhere", place, "it in some places")
        self.text(place, text, count)
        self.add(all(entered), lambda: [ahead(place, node.items[0].context_expr, f"{text}, ") for node in statements])

    def graph_argument(self, capture: Definition, value: str, name: str) -> None:
        """One more argument of what makes the autograd function of graph ``i``, before the forward's graph."""
        function = cast(ast.FunctionDef, capture.inner("make_graphed_autograd_function").node)
        given = [node.args for node in capture.nodes(ast.Call, function.name) if isinstance(node.func, ast.Name)]
        graphs = [argument for args in given for argument in args if ast.unparse(argument) == "fwd_graphs[i]"]
        parameters = [parameter for parameter in function.args.args if parameter.arg == "fwd_graph"]
        if len(given) != 1 or len(graphs) != 1 or len(parameters) != 1:
            raise unrecognized(f"one call {function.name}(fwd_graphs[i], ...) for its fwd_graph", capture)
        wanted = ast.unparse(ast.parse(value, mode="eval"))
        made = [wanted in map(ast.unparse, given[0]), name in [each.arg for each in function.args.args]]
        if any(made) != all(made):
            raise unrecognized(f"{name} as an argument and as a parameter, or neither", capture, "one of them")
        texts: list[tuple[ast.expr | ast.arg, str]] = [(graphs[0], value), (parameters[0], name)]
        self.text(capture, f"lambda {name}: {value}")
        self.add(all(made), lambda: [ahead(capture, n, f"{text},\n{' ' * n.col_offset}") for n, text in texts])


def require_own(texts: Iterable[tuple[Definition, str, bool]], known: Iterable[str] = ()) -> None:
    """Raise `UnrecognizedError` where other text undoes, or names and so may undo, what a correction's ``texts`` bring.

    Variables and functions may not be named elsewhere in the function, nor attributes in the module. A text stands in
    a definition, and brings what it sets or not; what is ``known`` is TE's.
    """
    named: dict[tuple[ModuleSource, ast.AST], Counter[str]] = {}
    brought: set[str] = set()
    functions: dict[Any, ModuleSource] = {}
    for place, text, brings in texts:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
        for node in nodes:
            scope = place.module.tree if isinstance(node, ast.Attribute) else _outermost(place)
            named.setdefault((place.module, scope), Counter())[_name(node)] += 1
        if brings:
            targets = [part for node in nodes if isinstance(node, ast.Assign) for part in map(ast.walk, node.targets)]
            stored = (node for node in chain(*targets) if not isinstance(getattr(node, "ctx", None), ast.Load))
            others = (node for node in nodes if isinstance(node, (ast.alias, ast.FunctionDef)))
            lambdas = (arg for node in nodes if isinstance(node, ast.Lambda) for arg in node.args.args)
            brought |= set(map(_name, chain(stored, others, lambdas)))
        functions[_outermost(place)] = place.module
    for function, module in functions.items():
        definition = Definition(module, function.name, function)
        if variable := next(undone(definition), None):
            raise unrecognized("text whose effect stays", definition, f"another value for {variable.id}")
    for (module, scope), wanted in named.items():
        found = Counter(_name(nodes[at]) for kind in _NAMED for nodes, at in module.places(scope, kind))
        other = [name for name in sorted(brought & wanted.keys() - {"", *known}) if found[name] != wanted[name]]
        if other:
            raise unrecognized(f"{other[0]} in the correction alone", module.path, "it elsewhere too")


_NAMED = {ast.Name: "id", ast.arg: "arg", ast.alias: "name", ast.FunctionDef: "name", ast.Attribute: "attr"}


def _name(node: Any) -> str:
    """The name that a node is, sets or defines, that of an attribute with a dot, or ""."""
    name = getattr(node, "asname", None) or getattr(node, _NAMED.get(type(node), ""), "")
    return f".{name}" if isinstance(node, ast.Attribute) else str(name)


def _outermost(place: Definition) -> Any:
    """The function or method of the module's or a class's level that ``place`` is in, or is."""
    parts = place.qualname.split(".")
    names = (".".join(parts[:number]) for number in range(1, len(parts) + 1))
    found = (place.module.definitions[name] for name in names if name in place.module.definitions)
    return next((node for node in found if isinstance(node, ast.FunctionDef)), place.node)


def _stands(place: Definition, text: str, anchors: Sequence[Node], side: int) -> bool:
    """Whether ``text`` is once for each anchor, in the same body, before it (``side`` 1) or behind it (-1)."""
    texts = sorted(_position(place, node) for node in place.all(text))
    pairs = list(zip(texts, sorted(_position(place, node) for node in anchors), strict=False))
    if texts and not (len(texts) == len(anchors) and all(a == b and side * (j - i) > 0 for (a, i), (b, j) in pairs)):
        line = " ".join(text.split())[:80]
        raise unrecognized(f"`{line}` beside {len(anchors)} statements or nowhere", place, f"it {len(texts)} times")
    return bool(texts)


def _position(place: Definition, node: Node) -> tuple[int, int]:
    """The body that a statement, or an expression that is one, is in, and its place there."""
    first = node.body[0] if isinstance(node, Run) else node
    every = [position for kind in (ast.Expr, type(first)) for position in place.module.places(place.node, kind)]
    return next((id(body), at) for body, at in every if first in (body[at], getattr(body[at], "value", None)))
