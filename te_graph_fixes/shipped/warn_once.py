"""A warning that is given once, at the line of the program that led to it."""

from __future__ import annotations

import sys
import warnings

_BELOW = ("te_graph_fixes", "te_graph_fixes_run", "transformer_engine", "torch", "importlib")
"""The packages that stand between the user's line and a warning."""
_said: set[str] = set()


def warn_once(text: str, about: str = "", category: type[Warning] = UserWarning) -> None:
    """Warn, once in a process for all that is ``about`` the same, by default for each text."""
    if (about or text) in _said:
        return
    _said.add(about or text)
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BELOW:
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # `warnings` does not count these
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)
