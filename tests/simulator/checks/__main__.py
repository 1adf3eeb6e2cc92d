"""Run the checks of the modules that the command line names, and print a JSON line for each check."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import traceback

if __name__ == "__main__":
    for part in sys.argv[1:]:
        module = importlib.import_module(f"tests.simulator.checks.{part}")
        for name, check in vars(module).items():
            if name.startswith("check_"):
                gc.collect()
                error = None
                try:
                    check()
                except BaseException:
                    error = traceback.format_exc()
                print(json.dumps({"check": f"{part}.{name}", "error": error}), flush=True)
