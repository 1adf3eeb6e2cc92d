"""Activate te_graph_fixes in every Python process below ``te-graph-fixes run``. This folder is in their PYTHONPATH.

Every interpreter there runs this module when it starts. So the module is fast, needs only the standard library, and is
valid in old interpreters. It imports the package when TransformerEngine (TE) is imported.

`sitecustomize` imports this module. Another ``sitecustomize`` may come before ours, for example the one of
``opentelemetry-instrument``. Therefore PYTHONWARNINGS names a category of this module: Python imports the categories of
its warning filters before it looks for a ``sitecustomize``. If PYTHONPATH was replaced, Python cannot find the module
and prints: ``Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'``.
"""

import sys

PACKAGE = "transformer_engine.pytorch"  # this module cannot import it from te_graph_fixes
FILTER = "ignore::te_graph_fixes_run.Started"


class Started(Warning):
    """The warning category that `FILTER` names. No warning uses it."""


class Activator:
    """Imports te_graph_fixes just before TE is imported, then removes itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name == "site":  # programs inspect this list for warning filters set by the user
            sys.warnoptions[:] = [option for option in sys.warnoptions if option != FILTER]
        if name != PACKAGE or self not in sys.meta_path:  # type: ignore[comparison-overlap]
            return None
        import importlib.util

        try:
            import te_graph_fixes  # noqa: F401
        except ImportError as error:
            # Not an ImportError: TE would assume that torch is missing, and continue without its layers.
            raise RuntimeError(
                "te-graph-fixes run: "
                + str(sys.executable)
                + " cannot import te_graph_fixes ("
                + str(error)
                + "), so TransformerEngine would run without the fixes. Install te-graph-fixes for this interpreter, "
                + "or start it without `te-graph-fixes run`."
            ) from error
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        return importlib.util.find_spec(name)


if __name__ == "te_graph_fixes_run":  # not if `te-graph-fixes run` imports `FILTER`
    sys.meta_path.insert(0, Activator())  # type: ignore[arg-type]
