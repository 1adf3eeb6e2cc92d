"""A source that has a defect is never said to be well, however the defect is written: see `tests.evasions`.

Every kind of edit is made at what a fix edits and in what it reads, on every published TransformerEngine (TE) where the
fix applies. A source that holds all of a correction but one edit is not said to be corrected, nor is one in which
something else runs than the correction: see `tests.replacements`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from te_graph_fixes.engine import patched
from te_graph_fixes.fix import APPLICABLE, NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Edit, ModuleSource, Source
from tests.evasions import DEFINITIONS, STATEMENTS, Place, first_line, places
from tests.published import VERSIONS, examined, needed
from tests.replacements import MIXTURES, REPLACEMENTS
from tests.test_drift import unset_names

KINDS = {**STATEMENTS, **DEFINITIONS}
FEW = ("2.12.0", VERSIONS[-1])
"""Versions with other layouts of the source; the rest is slow."""
SHARE = 6
"""Of a fix, a version and the kinds of edits, what is not slow tries one kind in as many."""


@functools.cache
def published(version: str) -> tuple[Source, Mapping[str, Verdict]]:
    """A published TE, and the fixes that apply to it."""
    return examined(version)[0], needed(version)


def with_texts(tree: Source, texts: Mapping[str, str]) -> Source:
    result = Source(tree.location, tree.version, tree.consulted)
    result._modules.update(tree._modules)
    for name, text in texts.items():
        result._modules[name] = ModuleSource(name, name, text, consulted=tree.consulted)
    return result


@functools.cache
def edited(version: str, fix_id: str) -> tuple[Place, ...]:
    """The statements that a fix edits, each with those around it, the inmost first."""
    tree, needed = published(version)
    found: dict[tuple[str, int], Place] = {}
    for edit in needed[fix_id].edits:
        module = tree.module(edit.module)
        for place in [*places(module, edit.start)] or places(module, edit.start - 2):  # what is added after a method
            found.setdefault((edit.module, id(place.statement)), place)
    return tuple(found.values())


@functools.cache
def read(version: str, fix_id: str) -> tuple[Place, ...]:
    """The functions and classes that a fix edits or reads, each as a place in it."""
    tree, needed = published(version)
    found: dict[tuple[str, str], Place] = {}
    for place in edited(version, fix_id):
        found.setdefault((place.module.name, ".".join(owner.name for owner in place.owners)), place)
    for name, qualname in sorted(needed[fix_id].rests_on):
        module = tree.find(name)
        known = module.find(qualname) if module else None
        if module and known:
            for place in places(module, module.starts[known.node.body[-1].lineno]):
                found.setdefault((name, ".".join(owner.name for owner in place.owners)), place)
    return tuple(found.values())


def evasions(version: str, fix_id: str, every: bool) -> Iterator[tuple[str, Place, dict[str, str]]]:
    """The edited texts; without ``every`` of some kinds, at one place each, another one for each."""
    first = [*CATALOGUE].index(fix_id) + FEW.index(version) if not every else 0
    for number, (kind, edit) in enumerate(KINDS.items()):
        if not every and number % SHARE != first % SHARE:
            continue
        there = edited(version, fix_id) if kind in STATEMENTS else read(version, fix_id)
        turned = [*there[number % len(there) :], *there[: number % len(there)]]
        made = ((kind, place, texts) for place in turned if (texts := edit(place)) and is_python(texts, every))
        yield from made if every else itertools.islice(made, 1)


def is_python(texts: Mapping[str, str], surely: bool) -> bool:
    """Whether the texts can be parsed, and ``surely`` compiled, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            for name, text in texts.items():
                compile(text, name, "exec", 0 if surely else ast.PyCF_ONLY_AST, dont_inherit=True)
        except SyntaxError:
            return False
    return True


def check(version: str, fix_id: str, every: bool) -> dict[str, str]:
    """The words that the fix says, by the kind of edit."""
    tree, _ = published(version)
    said, wrong = {}, []
    for kind, place, texts in evasions(version, fix_id, every):
        found = CATALOGUE[fix_id].verdict(with_texts(tree, texts))
        said[kind] = found.verdict
        if found.verdict not in (APPLICABLE, UNRECOGNIZED):
            where = f"{place.module.name}:{place.statement.lineno} `{ast.unparse(place.statement)[:60]}`"
            wrong.append(f"{kind} at {where}: {found.verdict}: {found.reason}")
    assert not wrong, "\n".join(wrong)
    return said


def pairs(versions: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(version, fix_id) for version in versions for fix_id in published(version)[1]]


@pytest.mark.parametrize(("version", "fix_id"), pairs(FEW))
def test_no_evasion_is_said_to_be_well(version: str, fix_id: str) -> None:
    assert check(version, fix_id, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fix_id", CATALOGUE)
def test_no_evasion_at_any_place_is_said_to_be_well(version: str, fix_id: str) -> None:
    if fix_id not in published(version)[1]:
        pytest.skip("this TransformerEngine is without the defect")
    check(version, fix_id, every=True)


@pytest.mark.parametrize(("version", "fix_id"), pairs(FEW))
def test_a_part_of_a_correction_is_not_said_to_be_all(version: str, fix_id: str) -> None:
    tree, needed = published(version)
    whole, _ = corrected(version, fix_id)  # its other modules are parsed once
    verdict = needed[fix_id]
    for left_out in verdict.edits if len(verdict.edits) > 1 else ():
        rest = replace(verdict, edits=tuple(edit for edit in verdict.edits if edit is not left_out))
        _, text = patched(tree, [rest]).get(left_out.module, ("", tree.module(left_out.module).text))
        found = CATALOGUE[fix_id].verdict(with_texts(whole, {left_out.module: text}))
        assert found.verdict in (APPLICABLE, UNRECOGNIZED), f"without {left_out}: {found.verdict}"


UNDONE = ("{name} = None", "{name}.clear()", "del {name}")


def undone(version: str, fix_id: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The corrected source where a statement behind one of the edits takes back what that sets."""
    tree, needed = published(version)
    for edit in needed[fix_id].edits:
        if not edit.text.endswith("\n"):
            continue
        body = ast.parse(textwrap.dedent(edit.text)).body
        names = [ast.unparse(each.targets[0]) for each in body if isinstance(each, ast.Assign)]
        indent = edit.text[: len(edit.text) - len(edit.text.lstrip(" "))]
        for name, text in itertools.product(names, UNDONE):
            its = replace(edit, text=f"{edit.text}{indent}{text.format(name=name)}\n")
            edits = tuple(its if each is edit else each for each in needed[fix_id].edits)
            _, made = patched(tree, [replace(needed[fix_id], edits=edits)])[edit.module]
            if is_python({edit.module: made}, surely=True):
                yield text.format(name=name), {edit.module: made}


UNDONE_FIXES = (
    *("backward-amax-reduction", "cached-weight-lifetime", "fp8-weight-transposes"),
    *("recompute-in-graphs", "replay-arguments", "state-after-evaluation", "static-buffer-reuse", "wgrad-memory-reuse"),
)


@pytest.mark.parametrize("version", FEW)
@pytest.mark.parametrize("fix_id", UNDONE_FIXES)
def test_what_is_taken_back_is_not_said_to_be_well(version: str, fix_id: str) -> None:
    tree, _ = corrected(version, fix_id)
    said = {text: CATALOGUE[fix_id].verdict(with_texts(tree, texts)) for text, texts in undone(version, fix_id)}
    assert said
    assert not [text for text, found in said.items() if found.verdict not in (APPLICABLE, UNRECOGNIZED)]


@functools.cache
def corrected(version: str, fix_id: str) -> tuple[Source, Verdict]:
    """A published TE with the correction of a fix in it, and what the fix says of that."""
    tree, needed = published(version)
    if fix_id in needed:
        tree = with_texts(tree, {name: after for name, (_, after) in patched(tree, [needed[fix_id]]).items()})
    return tree, CATALOGUE[fix_id].verdict(tree)


def replaced(version: str, fix_id: str, kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The corrected source with another function in the place of one that the verdict rests on, for each of these."""
    tree, verdict = corrected(version, fix_id)
    assert verdict.verdict in (NOT_NEEDED, NOT_APPLICABLE), verdict.reason
    for name, qualname in sorted(verdict.rests_on):
        module = tree.find(name)
        if module and qualname in module.definitions:
            text = REPLACEMENTS[kind](module, qualname)
            if text and is_python({name: text}, surely=True):
                yield qualname, {name: text}


GRAPH, BASE = "transformer_engine.pytorch.graph", "transformer_engine.pytorch.module.base"
EXPERTS = "transformer_engine.pytorch.module.grouped_linear"
NOT_QUITE = [
    (*("backward-dw-hooks", "2.20.2", GRAPH), r"(?<=isinstance\(module, )\w+(?=\)\s+and module.need_b)", "str"),
    (*("backward-dw-hooks", "2.20.2", BASE), r"wgrad_accumulation_and_reduce_hook\(\)", "pass"),
    (*("backward-dw-hooks", "2.20.2", GRAPH), r"(?<=te_modules = )visited_te_modules.get\(graph_idx, set\(\)\)", "()"),
    (*("capture-without-warmup", "2.12.0", GRAPH), r"(range\(.*num_warmup_iters.*\)):", r"\1[:num_warmup_iters]:"),
    (
        *("rng-states-at-replay", "2.12.0", GRAPH, r"\n    fwd_graphs = "),
        "\n    new_graph = torch.cuda.CUDAGraph\n    fwd_graphs = ",
    ),
    (*("none-outputs", "2.20.2", GRAPH), r"o for o in outputs if .*(?=\))", "x for x in outputs if x.requires_grad"),
    (*("param-grad-lifetime", "2.20.2", GRAPH), r"per_callable_returned_param_grad_clone_slots\[i\]", "[False] * 99"),
    (*("backward-dw-hooks", "2.20.2", GRAPH), r"visited_te_modules\[func_idx\] = modules", "pass"),
    (*("grouped-linear-skip-flag", "2.20.2", EXPERTS), r"(?<=skip_update_flag=)skip_fp8_weight_update", "None"),
    (*("param-grad-lifetime", "2.20.2", GRAPH), r"(?<=\"skip_backward_post_hook\", )False", "True"),
    (*("grad-input-lifetime", "2.12.0", GRAPH), r"(?<=user_args = \[)len\(args\)", "0"),
    (*("fp8-weight-transposes", "2.20.2", GRAPH), r"\bis_training\b", "training"),
    (*("fused-dummy-copies", "2.20.2", GRAPH), r"\bis_training\b", "training"),
    (*("parameter-hooks", "2.12.0", GRAPH), r"\bgraph_callables\b", "functions"),
    (*("backward-amax-reduction", "2.12.0", GRAPH), r"\bfunc\b", "function"),
    (*("delayed-wgrad-delivery", "2.12.0", GRAPH), r"\bfunc\b", "function"),
    (*("warmup-main-grads", "2.12.0", GRAPH), r"\bfunc\b", "function"),
    (*("delayed-wgrad-delivery", "2.20.2", BASE), r"for name in self.(weight_names|bias_names)", "for name in ()"),
    (
        *("warmup-reset", "2.20.2", GRAPH, r"(?=\n    graphed_callables = )"),
        "\n    post_warmup_hook = lambda: [setattr(m, 'is_first_microbatch', True) for m in modules]",
    ),
    (*("unreached-wgrads", "2.12.0", GRAPH), r"\bnum_required_grad_sample_args\b", "number"),
    (
        *("nvfp4-weight-preswizzle", "2.17.1", "transformer_engine.pytorch.module.linear"),
        *(r"(?<=input_quantizer\.optimize_for_gemm = True)", "; setattr(weight_quantizer, 'optimize_for_gemm', True)"),
    ),
]
"""Edits after which a correction does not do its work, or would not: text in the place of what a pattern matches."""


@pytest.mark.parametrize(("fix_id", "version", "module", "pattern", "text"), NOT_QUITE)
def test_what_a_correction_needs_is_required(fix_id: str, version: str, module: str, pattern: str, text: str) -> None:
    tree, verdict = corrected(version, fix_id)
    assert verdict.verdict == NOT_NEEDED
    for each in (tree, published(version)[0]):
        before = each.module(module).text
        after = with_texts(each, {module: re.sub(pattern, text, before)})
        assert after.module(module).text != before
        found = CATALOGUE[fix_id].verdict(after)
        assert found.verdict in (UNRECOGNIZED, APPLICABLE), found.reason
        for old, new in patched(after, [found]).values():
            assert unset_names(new) <= (unset_names(old) if old else set())


RESET = r"\n +for module in func\.modules\(\):\n.*\n +module\.is_first_microbatch = True"
CAPTURES = r"(?=\n    if _order is not None:  # pylint)"
NAMED_OTHERWISE = [
    (
        *(
            "grouped-linear-skip-flag",
            EXPERTS,
            r"(?=\n +non_tensor_args = )",
            "\n        skip_fp8_weight_update = None",
        ),
        *(r"None(?=,  # skip_fp8_weight_update)", "skip_fp8_weight_update"),
    ),
    *(
        ("warmup-reset", GRAPH, RESET, "", CAPTURES, f"\n    {text}")
        for text in (
            "from ._elsewhere import reset; reset(callables)",
            "[setattr(m, 'is_first_' + 'microbatch', True) for func in callables for m in func.modules()]",
            "[m.__dict__.update(_CHANGES) for func in callables for m in func.modules()]",
        )
    ),
]
"""Defects of TE 2.12.0 in another place or form: two patterns, each with the text for what it matches."""


@pytest.mark.parametrize(("fix_id", "module", "first", "text", "second", "other"), NAMED_OTHERWISE)
def test_a_defect_elsewhere_is_not_said_to_be_well(
    fix_id: str, module: str, first: str, text: str, second: str, other: str
) -> None:
    tree, _ = published("2.12.0")
    after, count = re.subn(first, text, tree.module(module).text)
    after, more = re.subn(second, other, after)
    assert (count, more) == (1, 1)
    assert CATALOGUE[fix_id].verdict(with_texts(tree, {module: after})).verdict == UNRECOGNIZED


RESETS = {
    "transformer_engine.pytorch.quantization": (r"(?=\n    @classmethod\n    def is_fp8_enabled)", "@classmethod"),
    BASE: (r"(?=\n    def prepare_forward\()", ""),
}


@pytest.mark.parametrize("module", RESETS)
def test_a_reset_by_a_method_of_another_module_is_not_said_to_be_well(module: str) -> None:
    tree, _ = published("2.20.2")
    place, decorator = RESETS[module]
    method = (
        f"\n    {decorator}\n    def begin_anew(self, m=None):\n        setattr(m, 'is_first' + '_microbatch', True)\n"
    )
    called = "\n    [m.begin_anew(m) for func in forward_funcs for m in func.modules()]"
    texts = {
        module: re.sub(place, method, tree.module(module).text),
        GRAPH: re.sub(r"(?=\n    graphed_callables = )", called, tree.module(GRAPH).text),
    }
    assert CATALOGUE["warmup-reset"].verdict(with_texts(tree, {module: texts[module]})).verdict == NOT_NEEDED
    assert CATALOGUE["warmup-reset"].verdict(with_texts(tree, texts)).verdict == UNRECOGNIZED


def test_a_third_reduction_of_amaxes_is_not_said_to_be_well() -> None:
    tree, verdict = corrected("2.20.2", "grouped-linear-amax-reduction")
    assert verdict.verdict == NOT_NEEDED
    text = tree.module(EXPERTS).text.replace("_backward_grouped_tensor", "_backward_of_grouped_tensors")
    assert CATALOGUE[verdict.fix].verdict(with_texts(tree, {EXPERTS: text})).verdict == UNRECOGNIZED


def test_a_name_that_another_fix_brings_proves_nothing() -> None:
    tree, _ = published("2.20.2")
    text = tree.module(GRAPH).text.replace(
        "\n    visited_te_modules", "\n    copied_grads = ()\n    visited_te_modules"
    )
    assert CATALOGUE["fused-dummy-copies"].verdict(with_texts(tree, {GRAPH: text})).verdict == APPLICABLE


@pytest.mark.parametrize("version", FEW)
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_what_is_replaced_is_not_said_to_be_well(version: str, kind: str) -> None:
    ids = [*CATALOGUE]
    first = [*REPLACEMENTS].index(kind)
    for fix_id in [*ids[first % len(ids) :], *ids[: first % len(ids)]]:
        for qualname, texts in replaced(version, fix_id, kind):
            found = CATALOGUE[fix_id].verdict(with_texts(corrected(version, fix_id)[0], texts))
            assert found.verdict == UNRECOGNIZED, f"{qualname} for {fix_id}: {found.verdict}"
            return
    raise AssertionError("nothing to replace")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fix_id", CATALOGUE)
def test_nothing_that_is_replaced_is_said_to_be_well(version: str, fix_id: str) -> None:
    for kind in REPLACEMENTS:
        for qualname, texts in replaced(version, fix_id, kind):
            found = CATALOGUE[fix_id].verdict(with_texts(corrected(version, fix_id)[0], texts))
            assert found.verdict in (APPLICABLE, UNRECOGNIZED), f"{kind}, {qualname}: {found.verdict}"


def mixtures(version: str, fix_id: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The corrected source where at one of the edits the statement with the defect is there as well."""
    tree, needed = published(version)
    edits = needed[fix_id].edits
    for edit in edits:
        module = tree.module(edit.module)
        inside = [each for each in edits if each.module == edit.module]
        place = next(iter(places(module, edit.start)), None)
        if place is None or isinstance(place.statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        start = module.starts[first_line(place.statement)]
        end = module.starts[place.statement.end_lineno + 1]
        its = [each for each in inside if start <= each.start and each.end <= end]
        _, changed = patched(tree, [replace(needed[fix_id], edits=tuple(its))]).get(edit.module, ("", module.text))
        old, new = module.text[start:end], changed[start : len(changed) - len(module.text) + end]
        if not new.strip() or any(each.start < end and start < each.end for each in inside if each not in its):
            continue
        for kind, mixed in MIXTURES.items():
            if kind == "twice" and all(each.start == each.end for each in its):
                continue  # what is inserted stands there all the same
            text = mixed(textwrap.dedent(new).rstrip(), textwrap.dedent(old).rstrip())
            whole = Edit(edit.module, start, end, textwrap.indent(text, " " * place.statement.col_offset) + "\n")
            rest = (*(each for each in inside if each not in its), whole)
            texts = {edit.module: patched(tree, [replace(needed[fix_id], edits=rest)])[edit.module][1]}
            if is_python(texts, surely=True):
                yield f"{kind} at `{old.strip()[:60]}`", texts


@pytest.mark.slow
@pytest.mark.parametrize(("version", "fix_id"), pairs(FEW))
def test_a_correction_with_the_defect_beside_it_is_not_said_to_be_all(version: str, fix_id: str) -> None:
    tree, verdict = corrected(version, fix_id)
    assert verdict.verdict == NOT_NEEDED
    said = {kind: CATALOGUE[fix_id].verdict(with_texts(tree, texts)) for kind, texts in mixtures(version, fix_id)}
    assert not [kind for kind, found in said.items() if found.verdict not in (APPLICABLE, UNRECOGNIZED)]
