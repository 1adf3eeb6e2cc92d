"""Activates te_graph_fixes in every Python process below ``te-graph-fixes run``, which puts this folder on PYTHONPATH.

Runs at the start of any interpreter there, so it is quick, needs nothing but the standard library and keeps to syntax
that old interpreters know. The package is imported when TransformerEngine (TE) is.

`sitecustomize` imports this module. Another ``sitecustomize`` may stand before ours, as that of
``opentelemetry-instrument`` does: therefore PYTHONWARNINGS names a category of this module. Python imports the
categories of its warning filters before it looks for any ``sitecustomize``. If it does not find this one, because
PYTHONPATH was set anew, it says so on stderr: ``Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'``.
"""

import sys

PACKAGE = "transformer_engine.pytorch"
FILTER = "ignore::te_graph_fixes_run.Started"


class Started(Warning):
    """A category for `FILTER` to name; no warning has it."""


class Activator:
    """Imports te_graph_fixes just before TE is imported, then steps aside."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name == "site":  # programs read this list to see whether somebody has chosen what to do with warnings
            sys.warnoptions[:] = [option for option in sys.warnoptions if option != FILTER]
        if name != PACKAGE or self not in sys.meta_path:  # type: ignore[comparison-overlap]
            return None
        import importlib.util
        from types import TracebackType

        show = sys.excepthook

        def in_short(kind: type, error: BaseException, traceback: TracebackType) -> None:
            """Print without its traceback the error which says that fixes are missing."""
            if kind.__name__ == "FixNotAppliedError":
                sys.stderr.write("te-graph-fixes run: " + str(error) + "\n")
            else:
                show(kind, error, traceback)

        sys.excepthook = in_short  # type: ignore[assignment]
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


if __name__ == "te_graph_fixes_run":  # not where `te-graph-fixes run` imports `FILTER`
    sys.meta_path.insert(0, Activator())  # type: ignore[arg-type]
