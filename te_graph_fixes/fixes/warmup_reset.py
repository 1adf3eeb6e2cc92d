"""``warmup-reset``: the first microbatch's behaviour is captured into every graph.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2715 (TE 2.14)

Symptom: fused wgrad overwrites ``main_grad`` at every replay, so that only the last microbatch of a step counts
(wgrad at 0.577 of its norm for three microbatches).

After warmup, `_make_graphed_callables` sets ``is_first_microbatch = True`` on every module that has the attribute, as
Megatron's do. The capture that follows reads it and freezes "first microbatch" into the graph: no accumulation. The
loop is removed. Removing it where FP8 experts do not read the graph's skip flag would freeze their weights instead,
hence the requirement.

``not-needed``: all that warmup calls or sets is known; nothing in the module names the attribute but the check of a
replay's arguments, and what puts it back after a failure; and nothing there sets attributes by other names, or is a
function or method of another of TE's modules that might.
"""

from __future__ import annotations

import ast
import re
from typing import cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..shapes import MODULES, graph_capture, graph_interface
from ..source import Definition, ModuleSource, Run, Source, unrecognized

NAME = "is_first_microbatch"

ARGUMENT = (
    '"is_first_microbatch" in user_kwargs',
    '"is_first_microbatch" not in user_kwargs',
    'user_kwargs["is_first_microbatch"]',
)

PUT_BACK = (
    'first_microbatch = [(m, m.is_first_microbatch) for m in submodules if hasattr(m, "is_first_microbatch")]',
    "for m, value in first_microbatch: m.is_first_microbatch = value",
)
"""By capture-exception-safety, where a capture fails."""

RESET = """
for ANY_MODULE in func.modules():
    if hasattr(ANY_MODULE, "is_first_microbatch"):
        ANY_MODULE.is_first_microbatch = True
"""

WARMUP = """
visited_te_modules = ANY_EMPTY
ANY_WARMUP: ...
if _order is not None:
    ...
else:
    ...
"""

KNOWN_CALLS = {
    *("RuntimeError", "ceil", "enumerate", "hasattr", "isinstance", "len", "max", "range", "reversed", "set", "sum"),
    *("tuple", "zip", "add", "append", "get", "pop", "remove", "update"),
    *("Stream", "backward", "empty", "empty_like", "grad", "stream", "synchronize", "_tree_flatten"),
    *("func", "modules", "register_forward_hook", "backward_dw", "need_backward_dw", "take_grads", "visit_waiting"),
    *("_none_grad_context_wrapper", "_run_capture_time_hooks", "_run_warmup_backward", "_run_warmup_forward"),
    *("pre_warmup_hook", "post_warmup_hook", "any", "getattr", "is_fp8_enabled", "fp8_graph_capturing"),
    *("hooks_put_aside", "own_skip_flag", "parameters", "clone", "copy_"),
}
"""What the warmup of TE 2.5 to 2.20 calls, as it is and as corrected."""

KNOWN_METHODS = {
    *("CUDAGraph", "_load_fp8_metas", "_save_fp8_metas", "_trigger_wgrad_accumulation_and_reduce_hooks"),
    *("add_fp8_tensors_to_global_buffer", "adjust_amax_history_length", "apply", "assign_inputs", "buffers", "clear"),
    *("current_device", "current_stream", "data_ptr", "detach", "disable", "enable"),
    *("ensure_not_reset", "extend", "fill_", "get_fp8_group", "get_fp8_meta_tensors", "get_fp8_recipe"),
    *("get_rng_state", "get_state", "grad_output", "graph", "index", "is_autocast_cache_enabled"),
    *("is_autocast_enabled", "is_first_fp8_module", "isenabled", "items", "keys", "num_quantizers"),
    *("reduce_and_update_fp8_tensors", "refresh", "release_static_state", "replay", "reset"),
    *("reset_fp8_meta_tensors", "reset_recipe_state", "resume", "resume_alone", "set_rng_state"),
    *("set_skip_fp8_weight_update_tensor", "set_state", "values", "wait_event", "wait_stream", "warn"),
}
"""What else the module calls."""

PACKAGE = "transformer_engine.pytorch."
USED = ("module.base", "quantization", "ops.fuser")
"""The modules with the classes that it uses."""

KNOWN_FUNCTIONS = {
    *("autocast", "fp8_autocast", "get_default_fp8_recipe", "dist_group_type"),
    *("get_all_rng_states", "graph_safe_rng_available", "make_weak_ref"),
}
"""What the module imports of TE's others beside classes, and what fixes add beside modules of this package."""

REACH: dict[str, tuple[str, ...]] = {
    "setattr": ('setattr(ret[-1], "', "setattr(ret[-1], '"),
    "vars(": ("vars(cls)",),  # by subclass-autocast
    **dict.fromkeys(
        ("exec(", "eval(", "globals(", "locals(", "delattr(", "import_module", "__import__", "__dict__"), ()
    ),
}
"""What can set an attribute without its name, and how it is used."""

IMPORT = r"^ *from (\.[\w.]*|transformer_engine\b[\w.]*) import (\([^)]*\)|.*)"


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    if capture.has(RESET):
        return applicable(
            "modules are reset to the first microbatch after warmup", [capture.delete(capture.one(RESET))]
        )
    for node in cast(Run, capture.exactly(1, WARMUP)[0]["ANY_WARMUP"]).body:
        for part in ast.walk(node):
            _require_known(capture, part)
    public = graph_interface(source)
    known = [node for argument in ARGUMENT for node in capture.all(argument)]
    known += [node for statement in PUT_BACK for node in public.all(statement)]
    if _names_it(capture.module.tree) != sum(map(_names_it, known)):
        raise unrecognized(f"{NAME} among a replay's arguments only", capture.module.path, "it elsewhere too")
    _require_within_reach(capture.module)
    _require_elsewhere(source, capture.module)
    return not_needed("warmup leaves is_first_microbatch alone")


def _require_known(capture: Definition, node: ast.AST) -> None:
    """Raise `UnrecognizedError` for what could set an attribute of a module."""
    if isinstance(node, ast.Call):
        known = getattr(node.func, "attr", getattr(node.func, "id", "")) in KNOWN_CALLS
    elif isinstance(node, ast.Attribute):
        known = isinstance(node.ctx, ast.Load) and not node.attr.startswith("__")
    elif isinstance(node, ast.withitem):
        known = isinstance(node.context_expr, ast.Call)
    else:
        known = not getattr(node, "decorator_list", [])
    if not known:
        raise unrecognized("a warmup that sets nothing", capture, f"`{ast.unparse(node)}`")


def _require_within_reach(module: ModuleSource) -> None:
    """Raise `UnrecognizedError` for what could set an attribute that the module does not name."""
    functions = {
        name
        for where, names in re.findall(IMPORT, module.text, re.MULTILINE)
        if not where.startswith("._te_")
        for name in re.findall(r"\w+", re.sub("#.*", "", names))
        if name[0].islower() or f"{name}(" in module.text
    }
    found = [word for word, known in REACH.items() if module.text.count(word) != sum(map(module.text.count, known))]
    found += functions - KNOWN_FUNCTIONS
    if found:
        raise unrecognized("a module that sets what it names", module.path, ", ".join(found))


def _require_elsewhere(source: Source, module: ModuleSource) -> None:
    """Raise `UnrecognizedError` for a method of TE's other modules that is not known, or may set the attribute."""
    unknown = set(re.findall(r"\.(\w+)\(", module.text)) - KNOWN_CALLS - KNOWN_METHODS
    for name in (*USED, *(f"module.{name}" for name in MODULES)):
        other = source.find(PACKAGE + name)
        found = NAME if other and name in USED and NAME in other.text else ""
        found = found or next((each for each in unknown if other and f"def {each}(" in other.text), "")
        if found:
            raise unrecognized(f"a module that uses what is known of {PACKAGE}{name}", module.path, found)


def _names_it(root: ast.AST) -> int:
    """How often a name, or a text without blanks, is or holds that of the attribute."""
    count, pending = 0, list[object]([root])
    for part in pending:
        if isinstance(part, ast.AST):
            pending += map(vars(part).get, part._fields)
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, str):
            count += NAME in part and not any(map(str.isspace, part))
    return count


FIX = Fix(
    id="warmup-reset",
    summary="warmup resets modules to the first microbatch, which the graph then repeats",
    symptom="fused wgrad overwrites main_grad on every replay: wgrad x0.577 for three microbatches",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2715",),
    affected="<2.14",
    examine=examine,
    requires=("grouped-linear-skip-flag",),
    looks_like=("backward main_grad",),
)
