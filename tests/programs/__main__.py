"""Print a line of JSON that maps the name of each program to its outcome and its expected outcome."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

from tests import programs

if __name__ == "__main__":
    names = [found.name for found in pkgutil.iter_modules(programs.__path__) if found.name != "__main__"]
    for name in sys.argv[1:] or names:
        importlib.import_module(f"tests.programs.{name}")
    found = {name: (programs.outcome(function), wanted) for name, (function, wanted) in programs.PROGRAMS.items()}
    print(json.dumps(found))
