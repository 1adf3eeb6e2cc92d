"""The second way into a Python process below ``te-graph-fixes run``: a category of PYTHONWARNINGS.

Another ``sitecustomize`` may stand before ours, as that of ``opentelemetry-instrument`` does. Python imports the
categories of its warning filters before it looks for any ``sitecustomize``. If it does not find this one, because
PYTHONPATH was set anew, it says so on stderr: ``Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'``.
"""

import os


class Started(Warning):
    """Nobody warns with it."""


def start() -> None:
    """Run our ``sitecustomize``, from its bytecode if there is any."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py")
    source = type(__spec__.loader)("sitecustomize", path)  # type: ignore[misc, call-arg]
    code = source.get_code("sitecustomize")  # type: ignore[union-attr]
    exec(code, {"__name__": __name__, "__file__": path})


start()
