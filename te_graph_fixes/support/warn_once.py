"""Warn once, at the line of the user's program that caused the warning."""

import contextlib
import sys
import warnings

_SKIPPED = ("te_graph_fixes", "te_graph_fixes_run", "transformer_engine", "torch", "wrapt", "importlib")
"""The packages whose frames are skipped to find the user's line."""
_warned: set[str] = set()


def warn_once(text: str, key: str = "", category: type[Warning] = UserWarning) -> None:
    """Warn once in a process for each ``key``, which is the text by default."""
    if (key or text) in _warned:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # `warnings` skips these frames
        frame = frame.f_back
    with contextlib.suppress(ValueError):  # raised if the program has closed sys.stderr
        warnings.warn(text, category, stacklevel=level)
    _warned.add(key or text)  # only now, so that a warning that is turned into an error is raised each time
