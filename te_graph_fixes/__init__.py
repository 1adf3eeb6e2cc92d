"""Correct, in memory, the CUDA-graph defects of the installed TransformerEngine (TE).

Import this package before or after TE, anywhere in a program: from then on TE's graphs give the eager numbers.

    import te_graph_fixes
    te_graph_fixes.report()

Environment: ``TE_GRAPH_FIXES`` = ``on`` (default), ``off``, or a comma list of fix ids; ``TE_GRAPH_FIXES_DISABLE`` =
ids; ``TE_GRAPH_FIXES_STRICT=1`` raises `FixNotAppliedError` where a needed fix cannot be applied, instead of warning.
"""

from __future__ import annotations

from .activation import activate, deactivate, report
from .status import FixNotAppliedError, FixStatus, Report, TEGraphFixesWarning

__version__ = "0.1.0"
__all__ = [
    "FixNotAppliedError",
    "FixStatus",
    "Report",
    "TEGraphFixesWarning",
    "activate",
    "deactivate",
    "report",
]

activate()
