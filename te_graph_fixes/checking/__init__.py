"""Graph against eager in a job of your own: `check`, ``te-graph-fixes run --check`` and ``TE_GRAPH_FIXES_CHECK``.

`twins` runs modules eagerly beside their graphs, `findings` compares, watches graph memory that is in use, and
reports. Neither is imported unless a check is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..activation import active_settings
from ..importing import PACKAGE
from ..settings import CHECK, Settings

DIFFERENT = 86  # the exit status of a process that a strict check has ended


@dataclass(frozen=True)
class Options:
    """Every module is checked in ``steps`` steps, ``layers`` modules at a time (0: all at once)."""

    steps: int = 2  # one cannot show that a graph computes with old weights
    layers: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.layers < 0:
            raise ValueError(f"check: steps must be 1 or more and layers 0 or more, not {self.steps} and {self.layers}")

    @classmethod
    def parse(cls, text: str) -> Options | None:
        """``N``, ``N,layers=K``, ``N,strict``, ``on``; None for ``off``; ValueError for anything else."""
        text = text.lower().replace(" ", "")
        if text in ("", "0", "off"):
            return None
        words = re.fullmatch(r"(?:(on|\d+)(?:,|$))?(?:layers=(\d+)(?:,|$))?(strict)?", text)
        if words is None:
            raise ValueError(f"{text!r} is not understood by {CHECK}; valid: on, off, N, N,layers=K, N,strict")
        steps, layers, strict = words.groups()
        return cls(cls.steps if steps in (None, "on") else int(steps), int(layers or 0), bool(strict))


def check(steps: int = Options.steps, *, layers: int = 0, strict: bool = False) -> None:
    """Compare the graphs that are captured after this call with eager, in their first ``steps`` steps, and report it.

    With ``layers``, that many modules are checked at a time, each in ``steps`` steps, which takes less memory. With
    ``strict`` the process ends with status 86 after a step that has a mismatch. Training goes on as it would without.
    docs/check.md says what is seen, what is not, and what it costs. ValueError for numbers that make no sense, and
    where the settings that are active leave out fixes that are in TransformerEngine's files.
    """
    options = Options(steps, layers, strict)
    require_comparable(active_settings())
    from wrapt import when_imported

    @when_imported(PACKAGE)
    def start(_: object) -> None:
        from .twins import start

        start(options)


def require_comparable(settings: Settings) -> None:
    """Raise ValueError where TransformerEngine's files hold other fixes than the settings ask for."""
    from ..decision import disagreement
    from ..stamp import installed

    if problem := disagreement(settings, installed()):
        raise ValueError(f"{problem}, so a check would not show what TransformerEngine does without them")
