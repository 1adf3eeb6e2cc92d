"""``nested-autocast``: modules inside a captured one lose FP8 where their class, or a base of it, is captured as well.

Upstream: open, TE 2.8 to main (https://github.com/NVIDIA/TransformerEngine/issues/1207 was closed without this case)

Symptom: ``Sequential(Sequential(te.Linear), te.Linear)``, or a `te.Linear` that is captured next to a layer which holds
one: the inner modules run in bf16 (outputs off by 0.06 to 1.47, any recipe); with `te.ops.Sequential` a crash.

For the capture, ``make_graphed_callables`` replaces ``__call__`` on the class of each module. The replacement looks an
instance up by its ``id`` and gives FP8 to those that are captured; all others, those inside of captured modules too,
run in ``autocast(enabled=False)``. They now run in the autocast that they are called in.

``not-needed``: the one context of the original call asks whether the module is captured. ``not-applicable``: one
autocast holds for all modules of a capture, as in TE 2.7.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import behind, graph_interface
from ..source import Definition, Source, unrecognized

CALL = "outputs = old_call_funcs[block_cls](self, *args, **kwargs)"
BY_MODULE = tuple(
    f"ANY_FUNCTION(enabled=module_uses_fp8.get(id(self), False), calibrating=ANY_C, {recipe}=ANY_R, {group}=ANY_G, "
    "_graph=True)"
    for recipe, group in (("recipe", "amax_reduction_group"), ("fp8_recipe", "fp8_group"))
)
FOR_ALL = """
def call_func(*args, **kwargs):
    with fp8_autocast(enabled=fp8_enabled, calibrating=ANY_C, fp8_recipe=ANY_R, fp8_group=ANY_G, _graph=True):
        outputs = old_call_funcs[block_cls](*args, **kwargs)
    return outputs
"""
CAPTURED_ONLY = " if id(self) in module_uses_fp8 else contextlib.nullcontext()"


def examine(source: Source) -> Verdict:
    public = graph_interface(source)
    if public.has(FOR_ALL):
        public.inner("call_func").one("old_call_funcs[block_cls]")
        public.exactly(0, "module_uses_fp8")
        return not_applicable("all modules of a capture use FP8, or none")
    context = _context(public.inner("call_func"))
    public.one("module_uses_fp8 = dict(zip((id(m) for m in modules), ANY_ENABLED))")
    if _is_by_module(public, context):
        return applicable(
            "modules that are not captured themselves run without FP8",
            [behind(public, context, CAPTURED_ONLY)],
        )
    if (
        isinstance(context, ast.IfExp)
        and public.text(context).endswith(CAPTURED_ONLY)
        and _is_by_module(public, context.body)
    ):
        return not_needed("modules that are not captured themselves are left alone")
    raise unrecognized("an autocast with `module_uses_fp8.get(id(self), False)`", public, f"`{public.text(context)}`")


def _context(call_func: Definition) -> ast.expr:
    """The context in which the original ``__call__`` is run, the last one if there are more."""
    found = [node for node in call_func.nodes(ast.With) if call_func.has(CALL, within=node)]
    call_func.one(CALL)
    if len(found) != 1:
        raise unrecognized(f"`{CALL}` in one context", call_func, f"it in {len(found)}")
    return found[0].items[-1].context_expr


def _is_by_module(public: Definition, context: ast.expr) -> bool:
    return any(context in public.all(pattern, within=context) for pattern in BY_MODULE)


FIX = Fix(
    id="nested-autocast",
    summary="modules inside a captured one lose FP8 where their class is captured as well",
    symptom="outputs off by 0.06 to 1.47: nested Sequentials, a Linear next to a layer; te.ops.Sequential crashes",
    upstream=("https://github.com/NVIDIA/TransformerEngine/issues/1207",),
    affected=">=2.8",
    examine=examine,
    looks_like=("fp8 output", "fp8 gradient"),
)
