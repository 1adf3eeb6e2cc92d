"""Convert a program to a script that a person can edit and run again."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from tests.verify.driver.program import Program

TEXT = '''"""{title}"""

from tests.verify.driver.program import Program
from tests.explore.scripts import run

run({program})
'''


def as_python(program: Program) -> str:
    """Return a program as Python code, without the fields that have default values."""
    plain = Program()
    values = {field.name: getattr(program, field.name) for field in fields(program)}
    changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)]
    return f"Program({', '.join(changed)})"


def script(program: Program, title: str = "") -> str:
    """Return the text of a script that runs one program."""
    return TEXT.format(title=title, program=as_python(program))


def run(program: Program) -> None:
    """Train eagerly and with graphs, and print the differences. Exit with 1 if there are any, else with 0."""
    import te_graph_fixes  # noqa: F401  # TE_GRAPH_FIXES=off turns the fixes off
    from tests.verify.driver import setting
    from tests.verify.driver.comparison import differences
    from tests.verify.driver.events import train

    from .kinds import connect

    setting.use(program)
    if program.ranks:
        connect()
    eager = train(graphed=False)
    assert not differences(train(graphed=False), eager), "two eager runs differ"
    sizes = differences(train(graphed=True), eager)
    if program.ranks:
        of_ranks: list[Any] = [{}, {}]
        setting.dist.all_gather_object(of_ranks, sizes)
        sizes = {f"rank {rank}: {name}": size for rank in (0, 1) for name, size in of_ranks[rank].items()}
    for name, size in sizes.items():
        print(f"{name}: {size:.3g}")
    sys.exit("graphs and eager training differ" if sizes else 0)
