"""Graph against eager in a job of your own: `check`, ``te-graph-fixes run --check`` and ``TE_GRAPH_FIXES_CHECK``.

`findings` collects comparisons and reports them, `twin` runs a module eagerly beside its graphs, `callables` wraps what
`make_graphed_callables` gives, `lifetimes` watches graph memory that is in use. Nothing of them is imported before
TransformerEngine (TE) is, and only where a check is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..activation import PACKAGE

VARIABLE = "TE_GRAPH_FIXES_CHECK"
STEPS = 2
"""One step cannot show that a graph computes with old weights."""
DIFFERENT = 86
"""The exit status of a process that a strict check has ended."""
_OFF = ("", "0", "off", "no", "false")
_ON = ("on", "yes", "true")


@dataclass(frozen=True)
class Options:
    """Check every module in ``steps`` steps, ``layers`` modules at a time (None: all); ``strict`` ends the process."""

    steps: int = STEPS
    layers: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("layers", self.layers)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"check: {name} must be a whole number from 1 on, not {value!r}")

    @classmethod
    def parse(cls, text: str) -> Options | None:
        """``N``, ``N,layers=K``, ``N,strict``, in any order; None for ``off``; ValueError for anything else."""
        words = [word.strip().lower() for word in text.split(",")]
        if words[0] in _OFF and len(words) == 1:
            return None
        found: dict[str, int] = {}
        for word in words:
            name, _, value = word.rpartition("=")
            if word == "strict":
                found["strict"] = True
            elif word not in _ON:
                if name not in ("", "layers") or not value.isdecimal():
                    raise ValueError(f"{VARIABLE}={text!r} is not understood; valid: N, N,layers=K, N,strict, on, off")
                found[name or "steps"] = int(value)
        return cls(found.get("steps", STEPS), found.get("layers"), bool(found.get("strict")))


def check(steps: int = STEPS, *, layers: int | None = None, strict: bool = False) -> None:
    """Compare graphs with eager in the first ``steps`` training steps of what is graphed from now on, and report it.

    With ``layers``, that many modules are checked at a time, each in ``steps`` steps, so that less memory is needed.
    With ``strict`` the process ends with the status 86 after the first step that has a mismatch. Training goes on as it
    would without: parameters, gradients, FP8 state, random states and hooks are left alone. docs/check.md says what is
    seen, what is not, and what it costs. Raises ValueError for numbers below 1.
    """
    options = Options(steps, layers, strict)
    from wrapt import when_imported

    def start(_: object) -> None:
        from .callables import start

        start(options)

    when_imported(PACKAGE)(start)


def check_as_asked(environ: Mapping[str, str] = os.environ) -> None:
    """Start the check that the environment asks for, if it does; ValueError where it is not understood."""
    options = Options.parse(environ.get(VARIABLE, ""))
    if options is not None:
        check(options.steps, layers=options.layers, strict=options.strict)
