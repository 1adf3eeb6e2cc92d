"""Correct, in memory, the CUDA-graph defects of the installed TransformerEngine (TE).

Import this package before or after TE, but before TE's graphs are captured: they then give the eager numbers.

    import te_graph_fixes
    te_graph_fixes.report()

Environment: ``TE_GRAPH_FIXES`` = ``on`` (default), ``off``, ``upstream`` (what upstream has merged since), or a comma
list of ids; ``TE_GRAPH_FIXES_DISABLE`` = ids; ``TE_GRAPH_FIXES_STRICT=1`` raises `FixNotAppliedError` where a needed
fix cannot be applied, instead of warning;
``TE_GRAPH_FIXES_VERBOSE`` = ``1``: every process says on stderr what was applied, not only that of rank 0; ``0``: none.
``TE_GRAPH_FIXES_CHECK=N`` compares graphs with eager in the first N steps of training (`check`).
"""

from __future__ import annotations

import os

from .activation import activate, deactivate, report
from .checking import Options, check
from .report import FixNotAppliedError, FixStatus, Report, TEGraphFixesWarning
from .settings import CHECK, STARTED_AS
from .version import __version__

__all__ = [
    "FixNotAppliedError",
    "FixStatus",
    "Report",
    "TEGraphFixesWarning",
    "__version__",
    "activate",
    "check",
    "deactivate",
    "report",
]


if not STARTED_AS:  # a command needs no fixes, and says itself which settings are bad
    _asked = Options.parse(os.environ.get(CHECK, ""))
    activate()
    if _asked:
        check(**vars(_asked))
