"""Graph replay against eager for many orders on a GPU; JSON lines on standard output, a summary last.

    TE_GRAPH_FIXES=backward-dw-order python tests/gpu/order_sweep.py Linear --random 50 --seconds 90
    TE_GRAPH_FIXES=off python tests/gpu/order_sweep.py Linear --random 0

Each order runs with and without buffer reuse, in bf16 and FP8. Orders that TransformerEngine refuses count as failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time

import torch

import te_graph_fixes
from tests.order_cases import compare, train
from tests.orders import NAMED, random_orders

SEED = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("Linear", "LayerNormLinear", "GroupedLinear"))
    parser.add_argument("--random", type=int, default=50, help="number of random orders")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8-delayed"])
    parser.add_argument("--seconds", type=float, default=600.0, help="stop before the first order after this time")
    options = parser.parse_args()
    orders = {**NAMED, **{f"random {i}": order for i, order in enumerate(random_orders(SEED, options.random))}}
    start = time.monotonic()
    summary = {"cases": 0, "bit-identical": 0, "different": 0, "failed": 0, "orders": 0, "orders wanted": len(orders)}
    for name, order in orders.items():
        if time.monotonic() - start > options.seconds:
            break
        summary["orders"] += 1
        for recipe in options.recipes:
            eager = train(options.kind, recipe, order, graphed=False)
            for reuse in (False, True):
                try:
                    result: dict[str, object] = dict(
                        compare(train(options.kind, recipe, order, graphed=True, reuse=reuse), eager)
                    )
                except Exception as failure:
                    result = {"failed": f"{type(failure).__name__}: {failure}"}
                    gc.enable()
                outcome = "failed" if "failed" in result else "different" if any(result.values()) else "bit-identical"
                summary["cases"] += 1
                summary[outcome] += 1
                if outcome != "bit-identical" or name in NAMED:
                    print(json.dumps({"order": name, "recipe": recipe, "reuse": reuse, **result}), flush=True)
            gc.collect()
    report = te_graph_fixes.report()
    print(
        json.dumps(
            {
                "te": report.te_version,
                "fixes": os.environ.get("TE_GRAPH_FIXES", "on"),
                "applied": [fix for fix, status in report.fixes.items() if status.status == "applied"],
                "kind": options.kind,
                "recipes": options.recipes,
                **summary,
                "seconds": round(time.monotonic() - start, 1),
                "device": torch.cuda.get_device_name(),
            }
        )
    )


if __name__ == "__main__":
    main()
