"""Remove unused code from patches: parts of support modules and of the *spine* (replay.py and edits that call it)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace

from te_graph_fixes.fix import Assessment
from te_graph_fixes.fixes.shapes import REPLAY_STEPS
from te_graph_fixes.patching import PACKAGE
from te_graph_fixes.patching.patch import edits as edits_of
from te_graph_fixes.patching.source import Edit, Source, first_line
from te_graph_fixes.support import PREFIX

SPINE = f"{PACKAGE}.{PREFIX}replay"
ADDED = re.compile(r'(\.add\(\s*"(\w+ \w+)", )"([^"]+)", ')
"""A pattern of calls that add a step. Its second and third groups are the phase and the name of the step."""
REGISTRATION = "forward prepare", "register states of TE"
BEFORE_REGISTRATION = "forward prepare", "resume recipe states"
"""The only step that must run before steps that are added earlier.

Patches without this step omit the names and the order of all steps.
"""
FACTS = ("inputs", "specs", "keywords", "reuses_weights", "takes_grads")
"""The attributes of a `Call` that patches omit if no step reads them."""
SUMMARY = "Steps that run at each replay of a graphed callable, in these phases:"
APPENDING = '''    def add(self, phase: str, step: Callable[..., Any]) -> None:
        """Add a step. It runs after the earlier steps of its phase."""
        self._steps[phase].append(step)

'''


def reduced(source: Source, changes: Mapping[str, Assessment]) -> dict[str, Assessment]:
    """Return the changes without unused edits of the spine and without unused definitions of support modules."""
    shared = edits_of(source, REPLAY_STEPS)
    modules = {name: text for change in changes.values() for name, text in change.new_modules.items()}
    spine = modules.pop(SPINE, "")
    code = "".join(edit.text for change in changes.values() for edit in change.edits if edit not in shared)
    modules = _without_unused(modules, code)
    code += "".join(modules.values())
    steps = {(phase, name) for _, phase, name in ADDED.findall(code)}
    unused = {fact for fact in FACTS if not re.search(rf"\bcall\.{fact}\b", code)}
    if is_ordered := BEFORE_REGISTRATION in steps:
        steps.add(REGISTRATION)
    else:
        unused.add("register_states")
    kinds = {phase.split()[0] for phase, _ in steps}
    used = {edit: _used(edit, kinds, unused) for edit in shared}
    edits = {
        name: [used.get(edit, edit) for edit in change.edits if edit not in shared or used[edit].text]
        for name, change in changes.items()
    }
    if spine:
        code += "".join(edit.text for edit in used.values())
        modules |= _without_unused({SPINE: _with_steps(spine, steps, unused, is_ordered)}, code)

    def named(text: str) -> str:
        return text if is_ordered else ADDED.sub(r"\1", text)

    return {
        name: replace(
            change,
            edits=tuple(edit._replace(text=named(edit.text)) for edit in edits[name]),
            new_modules={module: named(modules[module]) for module in change.new_modules},
        )
        for name, change in changes.items()
    }


def _used(edit: Edit, kinds: set[str], unused: set[str]) -> Edit:
    """Return an edit of the spine without the lines for unused parts. Its text is empty if no line is left."""
    omitted = {
        r"replay\.check|^call$": "forward" not in kinds,
        r"_spec$": "specs" in unused,
        r"^(?!.*replay\.check).*register_states": "register_states" in unused,
        r"graph_idx|replay\.wgrad": "wgrad" not in kinds,
        r"replays\.of": kinds == {"wgrad"},
    }
    if any(is_omitted and re.search(pattern, edit.text, re.DOTALL) for pattern, is_omitted in omitted.items()):
        return edit._replace(text="")
    parts = [r"replay\.reset", *(f"{fact}=" for fact in unused)] + [
        rf"replay\.surround_{kind}" for kind in {"forward", "backward"} - kinds
    ]
    text = re.sub(rf"^ *(?:{'|'.join(parts)}).*\n", "", edit.text, flags=re.MULTILINE)
    return edit._replace(text=text if text.strip() else "")


def _with_steps(text: str, steps: set[tuple[str, str]], unused: set[str], is_ordered: bool) -> str:
    """Return the text of the spine with only these ``steps``, and without the ``unused`` attributes of a `Call`."""
    (order,) = re.findall(r"^ORDER: .*?^}\n", text, re.MULTILINE | re.DOTALL)
    declared = ""
    used = []
    for phase, listed in re.findall(r'^    "(\w+ \w+)": \((.*?)\),$', order, re.MULTILINE | re.DOTALL):
        found = re.findall(r'"([^"]+)",?(  # .*)?', listed)
        if names := "".join(f'        "{name}",{reason}\n' for name, reason in found if (phase, name) in steps):
            used.append(phase)
            declared += f'    "{phase}": (\n{names}    ),\n'
        else:
            text = re.sub(rf'^ *for step in self\._steps\["{phase}"\]:\n.*\n', "", text, flags=re.MULTILINE)
            text = re.sub(rf'self\._replay\("{phase}", \w+, (\w+)(?:, )?(.*)\)', r"\1(\2)", text)
    if is_ordered:
        text = text.replace(order, f"{order.splitlines()[0]}\n{declared}}}\n")
    else:
        lists = "".join(f'            "{phase}": [],\n' for phase in used)
        text = text.replace(order, "").replace("{phase: [] for phase in ORDER}", f"{{\n{lists}        }}", 1)
        text = re.sub(r'^"""The steps of each.*?"""\n', "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"^ +self\.(?:_ranks: |add\().*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"    def add\(.*?\n\n", APPENDING, text, flags=re.DOTALL)
    table = re.findall(rf"^(?:===|phase|{'|'.join(used)}).*\n", text.split("\n\n")[2] + "\n", re.MULTILINE)
    text = re.sub(r'\A""".*?^"""', f'"""{SUMMARY}\n\n{"".join(table)}"""', text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r'(class Replay:\n.*?)\n\n.*?"""', r'\1"""', text, flags=re.DOTALL)
    text = re.sub(r"    def reset\(.*?\n\n", "", text, flags=re.DOTALL)
    return re.sub(rf"^ +(?:self\.|call\.)?(?:{'|'.join(unused) or '$.'})(?: =|: ).*\n", "", text, flags=re.MULTILINE)


def _without_unused(modules: Mapping[str, str], code: str) -> dict[str, str]:
    """Return the modules without the definitions and imports that neither they nor ``code`` mention."""
    texts, before = dict(modules), dict[str, str]()
    while texts != before:
        before = dict(texts)
        for name in texts:
            others = "".join([code, *(text for module, text in texts.items() if module != name)])
            texts[name] = _without_imports(_without_definition(texts[name], others))
    return texts


def _without_definition(text: str, others: str) -> str:
    """Return a module without the first definition that neither its other lines nor ``others`` mention, if any."""
    tree, lines = ast.parse(text), text.splitlines(True)
    plain = [node for node in tree.body if isinstance(node, ast.ClassDef) and not [*node.bases, *node.decorator_list]]
    for scope in (tree, *plain):
        for node in scope.body:
            target = getattr(node, "target", None) or [*getattr(node, "targets", []), None][0]
            name = getattr(node, "name", getattr(target, "id", "__"))
            rest = "".join([*lines[: first_line(node) - 1], *lines[node.end_lineno :]])
            mention = rf"\b{name}\b" if scope is tree else rf"\.{name}\b"
            if not name.startswith("__") and not re.search(mention, rest + others):
                return re.sub(r"\n{3,}(?= )", "\n\n", re.sub(r"\n{4,}", "\n\n\n", rest)).rstrip() + "\n"
    return text


def _without_imports(text: str) -> str:
    """Return a module without the imported names that it does not mention."""
    lines = text.splitlines(True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            rest = "".join([*lines[: node.lineno - 1], *lines[node.end_lineno :]])
            names = [alias for alias in node.names if re.search(rf"\b{alias.asname or alias.name}\b", rest)]
            if getattr(node, "module", "") != "__future__" and len(names) < len(node.names):
                lines[node.lineno - 1 : node.end_lineno] = [import_of(node, names)] if names else []
    return re.sub(r"\n{3,}(?=import |from )", "\n\n", "".join(lines))


def import_of(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> str:
    """Return an import statement as a line of text, with only these ``names``."""
    return ast.unparse(type(node)(**{**vars(node), "names": names})) + "\n"
