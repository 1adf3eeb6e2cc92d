"""The second way into a Python process below ``te-graph-fixes run``: a category of PYTHONWARNINGS.

Another ``sitecustomize`` may stand before ours, as that of ``opentelemetry-instrument`` does. Python imports the
categories of its warning filters before it looks for any ``sitecustomize``. If it does not find this one, because
PYTHONPATH was set anew, it says so on stderr: ``Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'``.
"""

import os


class Started(Warning):
    """Nobody warns with it."""


def start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "sitecustomize.py")) as file:
        code = compile(file.read(), file.name, "exec")
    exec(code, {"__name__": __name__, "__file__": file.name})


start()
