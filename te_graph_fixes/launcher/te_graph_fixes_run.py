"""Activate te_graph_fixes in every Python process started by ``te-graph-fixes run``.

PYTHONPATH of these processes contains this folder, so each interpreter runs this module when it starts. The module is
therefore fast, needs only the standard library, and is valid in old interpreters. It imports te_graph_fixes when
TransformerEngine (TE) is imported.

Our `sitecustomize` imports this module. Because Python may find another ``sitecustomize`` first, PYTHONWARNINGS also
names a warning category of this module, and Python imports the category's module before any ``sitecustomize``.
"""

import os
import sys

PACKAGE = "transformer_engine.pytorch"  # this module cannot import it from te_graph_fixes
FILTER = "ignore::te_graph_fixes_run.Started"
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")  # the values of variables that mean yes and no


class Started(Warning):
    """The warning category that `FILTER` names. No warning uses it."""


class Activator:
    """An import finder that imports te_graph_fixes just before TE, and then removes itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name == "site":  # Programs expect only the user's filters in `sys.warnoptions`.
            sys.warnoptions[:] = [option for option in sys.warnoptions if option != FILTER]
        if name != PACKAGE or self not in sys.meta_path:  # type: ignore[comparison-overlap]
            return None
        import importlib.util

        try:
            import te_graph_fixes  # noqa: F401
        except Exception as error:
            if os.environ.get("TE_GRAPH_FIXES", "").strip().lower() not in OFF:
                if not isinstance(error, ImportError):
                    raise
                # After an ImportError, TE would assume that torch is missing, and continue without its layers.
                raise RuntimeError(
                    f"te-graph-fixes run: {sys.executable} cannot import te_graph_fixes ({error}), so "
                    "TransformerEngine would run without the fixes. Install te-graph-fixes for this interpreter, or "
                    "start it without `te-graph-fixes run`."
                ) from error
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        return importlib.util.find_spec(name)


def start() -> None:
    """Insert the finder, unless it is already in `sys.meta_path` or te_graph_fixes is already imported."""
    if "te_graph_fixes" not in sys.modules and not any(isinstance(finder, Activator) for finder in sys.meta_path):
        sys.meta_path.insert(0, Activator())  # type: ignore[arg-type]


if __name__ == "te_graph_fixes_run":  # false if `te-graph-fixes run` imports `FILTER`
    start()
