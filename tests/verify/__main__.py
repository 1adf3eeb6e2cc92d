"""``python -m tests.verify``, in a checkout: run test programs on a GPU, each without and with the fixes.

The command needs torch, TransformerEngine (TE), wrapt and packaging.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from te_graph_fixes.commands import NOT_USABLE
from te_graph_fixes.manifest import BakeError, read_manifest
from te_graph_fixes.patching.source import Source, TENotFoundError
from te_graph_fixes.settings import Settings, unknown_variables
from te_graph_fixes.text import print_stderr

from . import runner
from .cases import select

_EXIT_STATUS = """\
exit status: 0 with the fixes, every replay is bit-identical to eager training; 1 a replay differs or was not measured;
  2 no TE, no GPU, an invalid setting, or no such fix or case; 3 this TE cannot run some cases, and all other cases pass
example: python -m tests.verify --quick
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that ``arguments`` (by default, the command line) select, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.verify",
        description="Run test programs on a GPU, each without and with the fixes.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wanted", nargs="*", metavar="FIX", help="fixes or cases to run (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="run only one to four cases for each fix")
    parser.add_argument(
        "--limit",
        type=float,
        default=runner.LIMIT,
        metavar="SECONDS",
        help="time limit of a case (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    for text in unknown_variables():
        _note(text)
    try:
        Settings.read()  # an invalid setting is an error before any case runs
        cases = select(options.wanted, options.quick)
        is_baked = read_manifest(Source.installed()) is not None
    except (BakeError, TENotFoundError, ValueError) as error:
        _note(error)
        return 1 if isinstance(error, BakeError) else NOT_USABLE
    if reason := runner.no_gpu():
        _note(f"`verify` needs a GPU: {reason}")
        return NOT_USABLE
    return runner.verify(cases, options.json, options.limit, is_baked)


def _note(message: object) -> None:
    print_stderr(f"te-graph-fixes: {message}")


if __name__ == "__main__":
    sys.exit(main())
