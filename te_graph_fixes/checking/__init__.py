"""The check: a comparison of graphs with eager runs in the user's own job.

`check`, ``te-graph-fixes run --check`` and ``TE_GRAPH_FIXES_CHECK`` start it. `callables` and `reference` run modules
eagerly next to their graphs. `isolation` protects the job from these runs. `findings` compares the results and reports
mismatches. `lifetimes` detects replays that overwrite graph memory in use. These modules are imported only if a check
starts.
"""

import os
import re
from dataclasses import dataclass

from ..activation import require_wrapt
from ..patching import PACKAGE
from ..settings import CHECK, is_off
from ..text import print_stderr

EXIT_MISMATCH = 86
"""The exit status of a process that a strict check has ended."""


@dataclass(frozen=True)
class Options:
    """The options of a check.

    Every module is checked in ``steps`` steps, ``layers`` modules at a time (0: all at once). If ``strict`` is true, a
    mismatch ends the process.
    """

    steps: int = 2  # a single step cannot reveal that a graph uses old weights
    layers: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.layers < 0:
            raise ValueError(f"check: steps must be 1 or more and layers 0 or more, not {self.steps} and {self.layers}")

    @classmethod
    def parse(cls, text: str, name: str = CHECK) -> "Options | None":
        """Parse a text such as ``on`` or ``N,layers=K,strict``. Return None for ``off``, ``0`` and an empty text.

        Each part is optional. Raise ValueError for any other text. ``name`` is the variable or option that contains it.
        """
        words = text.lower().replace(" ", "")
        if words in ("", "0", "off"):
            return None
        match = re.fullmatch(r"(?:(on|[1-9]\d*)(?:,|$))?(?:layers=(\d+)(?:,|$))?(strict)?", words)
        if match is None:
            raise ValueError(f"{name}={text} is invalid. Valid values: on, off, N, N,layers=K, N,strict")
        steps, layers, strict = match.groups()
        return cls(cls.steps if steps in (None, "on") else int(steps), int(layers or 0), bool(strict))


def environment_options() -> Options | None:
    """Return the options in the variable `CHECK`, or None if it requests no check.

    Raise ValueError if the variable is invalid, and ImportError if it requests a check but wrapt is missing or too old.
    If all fixes are turned off, print the error instead, and return None.
    """
    try:
        options = Options.parse(os.environ.get(CHECK, ""))
        if options:
            require_wrapt()
    except (ValueError, ImportError) as error:
        if not is_off():
            raise
        print_stderr(f"te-graph-fixes: {error}")
        return None
    return options


def check(steps: int = Options.steps, *, layers: int = 0, strict: bool = False) -> None:
    """Compare the graphs that are captured after this call with eager runs, and print mismatches and a summary.

    The check does not change the training. docs/check.md describes its coverage and cost.

    The check ends after ``steps`` steps. With ``layers=K``, it compares K modules at a time, each group in ``steps``
    steps. This needs less memory. With ``strict``, the process exits with status 86 after the first step with a
    mismatch. Raise ValueError for invalid numbers.
    """
    options = Options(steps, layers, strict)
    from wrapt import when_imported

    @when_imported(PACKAGE)
    def start(_: object) -> None:
        try:
            from .callables import start
        except ImportError as error:
            if not is_off():
                raise
            print_stderr(f"te-graph-fixes check: This TransformerEngine cannot be checked: {error}")
        else:
            start(options)
