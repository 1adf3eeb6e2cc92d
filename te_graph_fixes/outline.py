"""Functions and classes by the lines that they stand in, as it is slow to parse or compile whole modules.

Lines do not always tell: those of a string may begin anywhere. What is cut out is no Python then, and one takes the
whole module.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

_GOES_ON = r"(?:{}[ \t)\]}}#]|[ \t\f]*(?:#|\n|\Z))"
"""How a line begins that does not end what has begun above it with an indent."""
_ENDS = {indent: re.compile(rf"\n(?!{_GOES_ON.format(indent)})") for indent in ("", "    ")}
_HEADS = re.compile(r"\n(?:(    )?(def|class) (\w+)[(:]|\w)")


def heads(text: str) -> Mapping[str, list[int]]:
    """Where the lines stand that begin functions and classes, line breaks first, by qualified name."""
    found = defaultdict[str, list[int]](list)
    owner = ""
    for head in _HEADS.finditer("\n" + text):
        if not head[1]:
            owner = head[3] if head[2] == "class" else ""
        found[f"{owner}.{head[3]}" if head[1] else head[3] or ""].append(head.start())
    return found


def parsed(text: str, starts: Mapping[str, list[int]], qualname: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The function or class of that name (``name`` or ``Class.name``), parsed by itself; ``starts`` are the `heads`.

    None where the lines do not tell which it is, or where it ends.
    """
    owner, _, name = qualname.rpartition(".")
    if not len(starts[qualname]) == 1 == len(starts[owner or qualname]):
        return None
    start, end = _around("\n" + text, starts[qualname][0], "    " if owner else "")
    above = f"class {owner}:" if owner else ""
    try:
        body: Any = ast.parse(above + "\n" * text.count("\n", 0, start) + text[start:end]).body
    except (SyntaxError, ValueError):  # ValueError: Python 3.10 for null bytes
        return None
    nodes = body[0].body if above else body
    is_one = len(nodes) == 1 and isinstance(nodes[0], (ast.FunctionDef, ast.ClassDef)) and nodes[0].name == name
    return nodes[0] if is_one else None


def _around(text: str, head: int, indent: str) -> tuple[int, int]:
    """Where a definition begins and ends, line breaks first; empty where its decorators do not tell."""
    ending = _ENDS[indent].search(text, head + 1)
    start = head
    while (above := text.rfind("\n", 0, len(text[:start].rstrip()))) >= 0:
        if text.startswith((f"\n{indent})", f"\n{indent}]"), above):  # it may be the end of a decorator
            return head, head
        if not text.startswith((f"\n{indent}@", f"\n{indent}#"), above):
            break
        start = above
    return start, ending.start() if ending else len(text)


def cut_down(text: str, functions: Mapping[str, tuple[int, int]]) -> str:
    """A module with no functions and classes but these ``functions``, which are named with their first and last line.

    All that stays is in the lines that it was in. A method is below a line ``class NAME:`` in place of its class.
    """
    lines, is_inside = text.split("\n"), False
    kept = []
    for line in lines:
        if line and line[0] not in " \t\f)]}#":
            is_inside = line.startswith(("@", "def ", "class ", "async def "))
        kept.append("" if is_inside else line)
    above = set()
    for qualname, (first, last) in sorted(functions.items(), key=lambda item: item[1]):
        owner = qualname.rpartition(".")[0]
        if owner and owner not in above:
            above.add(owner)
            kept[first - 2] = f"class {owner}:"
        kept[first - 1 : last] = lines[first - 1 : last]
    return "\n".join(kept)


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
