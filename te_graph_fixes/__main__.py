"""``te-graph-fixes``, also ``python -m te_graph_fixes``."""

import sys


def main() -> int:
    """Run one command and return its exit status. ``run`` has to start fast, so it does without the other commands."""
    if sys.argv[1:2] == ["run"]:
        from .run import main as run

        return run(sys.argv[2:])
    from .cli import main as others

    return others()


if __name__ == "__main__":
    sys.exit(main())
