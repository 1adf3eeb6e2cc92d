"""Fix, in memory, the CUDA-graph bugs of the installed TransformerEngine (TE).

Import this package before or after TE, but before capturing TE's graphs. Replays then compute the same numbers as eager
training.

    import te_graph_fixes
    te_graph_fixes.report()

Environment variables:

- ``TE_GRAPH_FIXES``: the fixes to apply: ``on`` (all, the default), ``off``, ``upstream`` (fixes for bugs that a later
  release of TE fixes), or the ids of fixes, separated by commas
- ``TE_GRAPH_FIXES_DISABLE``: the ids of fixes to disable, separated by commas
- ``TE_GRAPH_FIXES_STRICT=1``: raise `FixNotAppliedError` if a needed fix cannot be applied, instead of warning
- ``TE_GRAPH_FIXES_VERBOSE``: ``1`` prints the status line on every rank, not only on the first of each host; ``0``
  prints it only if a fix is missing
- ``TE_GRAPH_FIXES_CHECK=N``: compare graphs with eager runs in the first N training steps (see `check`)
"""

import os
import sys

from .activation import activate, deactivate, report
from .agreement import require_same_on_all_ranks
from .checking import check, environment_options
from .messages import FixNotAppliedError, TEGraphFixesWarning
from .status import FixStatus, Report
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
    "require_same_on_all_ranks",
]


def _is_own_command() -> bool:
    """Return whether this process is ``te-graph-fixes`` or ``python -m te_graph_fixes``."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    # Python sets sys.argv[0] to "-m" while it searches for the module.
    return name == "te-graph-fixes" or (
        name == "-m" and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "te_graph_fixes"
    )


if not _is_own_command():  # a command needs no fixes, and reports invalid settings without a traceback
    _options = environment_options()
    activate()
    if _options:
        check(**vars(_options))
