"""Activates te_graph_fixes in every Python process below ``te-graph-fixes run``, which puts this folder on PYTHONPATH.

Runs at the start of any interpreter there, so it is quick, needs nothing but the standard library and keeps to syntax
that old interpreters know. The package is imported when TransformerEngine (TE) is. The ``sitecustomize`` that Python
would have found without this folder is run as Python would have. `te_graph_fixes_run` runs this file earlier still.
"""

import os
import sys

PACKAGE = "transformer_engine.pytorch"
FILTER = "ignore::te_graph_fixes_run.Started"


def page() -> object:
    """What `te_graph_fixes.required` looks for in a process: memory with this name."""
    import mmap

    file = os.memfd_create("te_graph_fixes_active")
    os.ftruncate(file, mmap.PAGESIZE)
    mapped = mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)
    return mapped


class Activator:
    """Imports te_graph_fixes just before TE is imported, then steps aside."""

    page = page() if os.environ.get("TE_GRAPH_FIXES_REQUIRED") else None

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name == "site":  # what brought us here is no choice of warnings, and programs ask whether there is one
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


def chain(folder: str) -> None:
    """Run the ``sitecustomize`` that comes after ``folder`` on ``sys.path``, if there is one."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if not any(type(finder).__name__ == "Activator" for finder in sys.meta_path):
    sys.meta_path.insert(0, Activator())  # type: ignore[arg-type]
if __name__ == "sitecustomize":
    chain(os.path.dirname(__file__))
