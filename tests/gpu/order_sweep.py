"""Graph replay against eager for many orders on a GPU; JSON lines on standard output, a summary last.

    TE_GRAPH_FIXES=backward-dw-order python tests/gpu/order_sweep.py Linear --random 50 --seconds 90
    TE_GRAPH_FIXES=off python tests/gpu/order_sweep.py Linear

Each order runs in bf16 and FP8, with and without buffer reuse; with ``--share`` the caller shares static inputs as
Megatron-Core does; with ``--whole`` the orders lack their wgrad entries, so that wgrads run right after their dgrads.
``--illegal N`` gives N illegal orders instead: each must be a ValueError that names the place in the order.
``inference`` in the summary is the error of graphs captured in an order in evaluation mode.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import sys
import time
from typing import Any

import torch

import te_graph_fixes
from tests.order_cases import Values, compare, inference_error, train
from tests.orders import NAMED, illegal_orders, random_orders

SEED = 4


def outcome(kind: str, recipe: str, order: list[float], eager: Values, **options: Any) -> dict[str, object]:
    """The errors against ``eager``, or how it failed."""
    try:
        return dict(compare(train(kind, recipe, order, graphed=True, **options), eager))
    except Exception as failure:
        gc.enable()  # TransformerEngine leaves it off where a capture fails
        return {"failed": f"{type(failure).__name__}: {failure}"}


def refused(kind: str, order: list[float]) -> bool:
    """Whether graphs in this order are refused at once, with one line that says where it is wrong."""
    result = outcome(kind, "bf16", order, Values())
    return re.fullmatch(r"ValueError: _order\[\d+\] = \S+ \(chunk \d+\): [^\n]+", str(result.get("failed"))) is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=("Linear", "LayerNormLinear", "GroupedLinear"))
    parser.add_argument("--random", type=int, default=0, help="number of random orders beside the named ones")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8-delayed"])
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--layers", type=int, default=1, help="layers of each chunk, with --whole")
    parser.add_argument("--illegal", type=int, default=0)
    parser.add_argument("--longest", type=int, default=1000, help="leave out orders of more entries")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop before the first order after this time")
    options = parser.parse_args()
    orders = {**NAMED, **{f"random {i}": order for i, order in enumerate(random_orders(SEED, options.random))}}
    start = time.monotonic()
    counts = {"orders": 0, "cases": 0, "bit-identical": 0, "different": 0, "failed": 0}
    for name, order in {} if options.illegal else orders.items():
        if time.monotonic() - start > options.seconds:
            break
        if len(order) > options.longest:
            continue
        counts["orders"] += 1
        run = [entry for entry in order if entry == int(entry)] if options.whole else order
        for kind, recipe in itertools.product(options.kinds, options.recipes):
            eager = train(kind, recipe, run, graphed=False, layers=options.layers)
            for reuse in (False, True):
                variant = {"reuse": reuse, "shared": options.share, "layers": options.layers}
                result = outcome(kind, recipe, run, eager, **variant)
                key = "failed" if "failed" in result else "different" if any(result.values()) else "bit-identical"
                counts["cases"] += 1
                counts[key] += 1
                if key != "bit-identical" or name in NAMED:
                    case = {"order": name, "kind": kind, "recipe": recipe, "reuse": reuse}
                    print(json.dumps({**case, **result}), flush=True)
        gc.collect()
    illegal = [order for order in illegal_orders(SEED, options.illegal) if refused(options.kinds[0], order)]
    try:
        inference: object = inference_error(options.kinds[0], [1, 2, -2, -1])
    except Exception as failure:
        inference = f"{type(failure).__name__}: {failure}"
    report = te_graph_fixes.report()
    summary = {
        "te": report.te_version,
        "fixes": os.environ.get("TE_GRAPH_FIXES", "on"),
        "applied": [fix for fix, status in report.fixes.items() if status.status == "applied"],
        "run": sys.argv[1:],
        **counts,
        "illegal": options.illegal,
        "refused": len(illegal),
        "inference": inference,
        "seconds": round(time.monotonic() - start, 1),
        "device": torch.cuda.get_device_properties(0).name,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
