"""Functions and classes by the lines that they stand in, as it is slow to parse or compile whole modules.

Lines do not always tell: those of a string may begin anywhere. What is cut out is no Python then, and one takes the
whole module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

_GOES_ON = r"(?:{}[ \t)\]}}#]|[ \t\f]*(?:#|\n|\Z))"
"""How a line begins that does not end what has begun above it with an indent."""
_DEFINITIONS = re.compile(rf"^(?:@|def |class |async def ).*(?:\n(?={_GOES_ON.format('')}).*)*", re.MULTILINE)
_ENDS = {indent: re.compile(rf"\n(?!{_GOES_ON.format(indent)})") for indent in ("", "    ")}


def parsed(text: str, qualname: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The only function or class of that name (``name`` or ``Class.name``); None if the lines do not tell."""
    *owners, name = qualname.split(".")
    lines, above = "\n" + text, ""
    start, end = 0, len(lines)
    for owner in owners:
        start, end = _span(lines, owner, "", start, end)
        above = f"class {owner}:"
    start, end = _span(lines, name, "    " * len(owners), start, end)
    try:
        body: Any = ast.parse(above + "\n" * lines.count("\n", 0, start) + lines[start + 1 : end]).body
    except (SyntaxError, ValueError):  # ValueError: Python 3.10 for null bytes
        return None
    nodes = body[0].body if above else body
    is_one = len(nodes) == 1 and isinstance(nodes[0], (ast.FunctionDef, ast.ClassDef)) and nodes[0].name == name
    return nodes[0] if is_one else None


def _span(text: str, name: str, indent: str, start: int, end: int) -> tuple[int, int]:
    """Where a definition with an indent begins and ends, line breaks first; empty unless there is exactly one."""
    heads = [f"\n{indent}{head}" for head in (f"def {name}(", f"class {name}(", f"class {name}:")]
    if sum(text.count(head, start, end) for head in heads) != 1:
        return start, start
    first = max(text.find(head, start, end) for head in heads)
    ending = _ENDS[indent].search(text, first + 1, end)
    while (above := text.rfind("\n", start, len(text[:first].rstrip()))) >= 0:
        if text.startswith((f"\n{indent})", f"\n{indent}]"), above):  # it may be the end of a decorator
            return start, start
        if not text.startswith((f"\n{indent}@", f"\n{indent}#"), above):
            break
        first = above
    return first, ending.start() if ending else end


def cut_down(text: str, functions: Mapping[str, tuple[int, int]]) -> str:
    """The text of a module without its functions and classes, but for these ``functions``, by first and last line.

    All that stays is in the lines that it was in.
    """
    every = text.split("\n")
    lines = _DEFINITIONS.sub(lambda found: "\n" * found.group().count("\n"), text).split("\n")
    above = set()
    for qualname, (first, last) in sorted(functions.items(), key=lambda item: item[1]):
        owner = qualname.rpartition(".")[0]
        if owner and owner not in above:
            above.add(owner)
            lines[first - 2] = f"class {owner}:"
        lines[first - 1 : last] = every[first - 1 : last]
    return "\n".join(lines)


def global_names(text: str) -> set[str]:
    """What a module defines, imports or sets, in conditions too."""
    found = set(re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE))
    try:
        pending: list[ast.AST] = [ast.parse(cut_down(text, {}))]
    except SyntaxError:
        pending = [ast.parse(text)]
    for node in pending:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((name.asname or name.name).partition(".")[0] for name in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        else:
            found.update([node.id] if isinstance(node, ast.Name) else ())
            pending += ast.iter_child_nodes(node)
    return found
