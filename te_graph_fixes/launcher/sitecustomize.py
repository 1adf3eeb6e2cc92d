"""Import `te_graph_fixes_run`, and then the user's ``sitecustomize``, which this module hides."""

import os
import sys

import te_graph_fixes_run  # type: ignore[import-not-found]

folder = os.path.dirname(__file__)
sys.path[:] = [entry for entry in sys.path if entry != folder]
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = ours
te_graph_fixes_run.start()  # The user's module may have replaced `sys.meta_path`.
