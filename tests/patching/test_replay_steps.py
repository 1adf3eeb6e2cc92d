"""Test that the fixes add exactly the declared steps of a replay."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from te_graph_fixes import support
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.fixes.shapes import REPLAY_STEPS

FOLDER = Path(support.__file__).parent


def declared() -> set[tuple[str, str]]:
    tree = ast.parse((FOLDER / "replay.py").read_text())
    [order] = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value]
    return {(phase, name) for phase, names in ast.literal_eval(order).items() for name in names}


def test_each_declared_step_is_added_by_a_fix() -> None:
    texts = [fix.patch for fix in CATALOGUE.values()] + [file.read_text() for file in FOLDER.glob("*.py")]
    added = {step for text in texts for step in re.findall(r'\.add\("([\w ]+)", "([\w ]+)"', text)}
    assert added == declared()


def test_each_fix_with_steps_adds_their_calls() -> None:
    users = [fix.id for fix in CATALOGUE.values() if re.search(r"\breplays(\[|\.of)|\breplay\.add", fix.patch)]
    assert users
    assert [fix_id for fix_id in users if not CATALOGUE[fix_id].patch.startswith(REPLAY_STEPS)] == []
