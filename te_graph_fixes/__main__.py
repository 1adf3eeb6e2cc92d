"""``python -m te_graph_fixes``: the same as the command ``te-graph-fixes``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
