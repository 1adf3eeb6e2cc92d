"""Activates te_graph_fixes in every Python process below ``te-graph-fixes run``, which puts this folder on PYTHONPATH.

Runs at the start of any interpreter there, so it is quick, needs nothing but the standard library and keeps to syntax
that old interpreters know. The package is imported when TransformerEngine (TE) is.

`sitecustomize` imports this module. Another ``sitecustomize`` may stand before ours, as that of
``opentelemetry-instrument`` does: therefore PYTHONWARNINGS names a category of this module. Python imports the
categories of its warning filters before it looks for any ``sitecustomize``. If it does not find this one, because
PYTHONPATH was set anew, it says so on stderr: ``Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'``.
"""

import os
import sys

PACKAGE = "transformer_engine.pytorch"
FILTER = "ignore::te_graph_fixes_run.Started"
NAME = "te_graph_fixes_active"


class Started(Warning):
    """Nobody warns with it."""


def mark() -> object:
    """Show, by memory called `NAME`, that the hook is in this process and its forks, while what is returned lives."""
    import mmap

    file = os.memfd_create(NAME)
    os.ftruncate(file, mmap.PAGESIZE)
    page = mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)
    return page


class Activator:
    """Imports te_graph_fixes just before TE is imported, then steps aside."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name == "site":  # programs read this list to see whether somebody has chosen what to do with warnings
            sys.warnoptions[:] = [option for option in sys.warnoptions if option != FILTER]
        if name != PACKAGE or self not in sys.meta_path:  # type: ignore[comparison-overlap]
            return None
        import importlib.util

        try:
            import te_graph_fixes  # noqa: F401
        except ImportError as error:
            # Not an ImportError: TE takes one to mean that there is no torch, and goes on without its layers.
            raise RuntimeError(
                "te-graph-fixes run: TransformerEngine's graphs would not be corrected here, because "
                + sys.executable
                + " cannot import te_graph_fixes ("
                + str(error)
                + "). Install te-graph-fixes for this interpreter, or start it without `te-graph-fixes run`"
            ) from error
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        return importlib.util.find_spec(name)


MARK = mark() if os.environ.get("TE_GRAPH_FIXES_REQUIRED") else None
if __name__ == "te_graph_fixes_run":  # `te_graph_fixes` imports this module by another name, for the mark
    sys.meta_path.insert(0, Activator())  # type: ignore[arg-type]
