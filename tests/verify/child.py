"""``python -m tests.verify.child [CASE ...]``: run cases in this process, and print a JSON line for each.

A CASE is the name of a registered case, or a `Case` as JSON. Without arguments, cases come from standard input, one per
line. Each line of output contains ``case``, ``last`` and the fields of an `Outcome`. If the process may be damaged
after a case, ``last`` is true, and the process exits with status 1. The environment selects the fixes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

import te_graph_fixes

from .cases import CASES, Case
from .driver.program import Skipped


def main(arguments: list[str]) -> int:
    """Run the cases in ``arguments`` or from standard input. Return 0, or 1 at once if the process may be damaged."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to stderr
    broken = _broken()
    for text in arguments or map(str.strip, sys.stdin):
        case = Case.from_json(text) if text.startswith("{") else CASES[text]
        start = time.perf_counter()
        result: dict[str, Any] = broken or _measure(case)
        damaged = result["outcome"] in ("failed", "unmeasured") or result.get("measures", {}).get("damaged", False)
        last = bool(damaged and not broken)
        seconds = round(time.perf_counter() - start, 3)
        report = te_graph_fixes.report()
        applied = [*report.having("applied")]
        about = {"case": case.name, "last": last, "te": report.te_version, "applied": applied, "seconds": seconds}
        print(json.dumps({**about, **result}), file=results)
        if last:
            return 1
    return 0


def _broken() -> dict[str, Any] | None:
    """Return None if this process can run cases. Otherwise return a result with the reason, for every case."""
    try:
        import torch
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        return {"outcome": "unmeasured", "detail": f"transformer_engine cannot be imported: {_one_line(error)}"}
    if not torch.cuda.is_available():
        return {"outcome": "unmeasured", "detail": "torch sees no GPU"}
    return None


def _measure(case: Case) -> dict[str, Any]:
    import torch

    gpu = None
    try:
        gpu = torch.cuda.get_device_name()
        measures = case.measure()
        gc.collect()
        torch.cuda.empty_cache()
    except Skipped as why:
        return {"outcome": "skipped", "detail": str(why), "gpu": gpu}
    except Exception as error:
        outcome = "unmeasured" if "out of memory" in str(error) else "unable" if _in_the_case(error) else "failed"
        return {"outcome": outcome, "detail": _one_line(error), "gpu": gpu}
    errors = [number for numbers in measures["errors"].values() for number in numbers]
    return {"outcome": "measured", "error": max(errors), "measures": measures, "gpu": gpu}


def _in_the_case(error: Exception) -> bool:
    """Return whether ``error`` is a failed import in a case, not one in TransformerEngine or in the fixes."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ImportError) and frame.f_globals["__name__"].startswith(f"{__package__}.")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
