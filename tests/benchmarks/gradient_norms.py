"""The picture of docs/results/verify.md: gradient norms relative to eager by TE version, from ``verify --json``.

te-graph-fixes verify --json > verify-2.12.0.json     # once for each TE
python tests/benchmarks/gradient_norms.py docs/results/gradient-norms-h200.png verify-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from packaging.version import Version

matplotlib.use("Agg")
from matplotlib import pyplot

CASES = {
    "experts-fp8-fit": "FP8 experts, fused wgrad",
    "plain-grad-fit": "Linear in bf16, plain .grad",
    "weights-not-cached": "Linear in FP8, weights not cached",
}


def main(png: str, files: list[str]) -> None:
    found = {Version(run["te_version"]): run for run in (json.loads(Path(name).read_text()) for name in files)}
    versions = sorted(found)
    figure, panels = pyplot.subplots(1, len(CASES), figsize=(14, 4), sharey=True, constrained_layout=True)
    for panel, (name, title) in zip(panels, CASES.items(), strict=True):
        for switch, color, label in (
            ("without", "tab:red", "without the package"),
            ("with", "tab:green", "with the package"),
        ):
            norms = [_norms(found[version], name, switch) for version in versions]
            offset = -0.18 if switch == "without" else 0.18
            for x, values in enumerate(norms):
                xs = [x + offset + 0.045 * (i - (len(values) - 1) / 2) for i in range(len(values))]
                panel.plot(xs, values, "o-", color=color, markersize=3, linewidth=1, label=None if x else label)
        panel.axhline(1.0, color="gray", linewidth=1, linestyle=":")
        panel.set_xticks(range(len(versions)), [str(version) for version in versions])
        panel.set_xlabel("TransformerEngine")
        panel.set_title(title)
    panels[0].set_ylabel("gradient norm / eager, steps 1 to 6")
    panels[0].legend()
    figure.suptitle(f"Training through CUDA graphs, three microbatches a step ({next(iter(found.values()))['gpu']})")
    figure.savefig(png, dpi=120)


def _norms(run: dict[str, Any], case: str, switch: str) -> list[float]:
    (row,) = (row for row in run["cases"] if row["case"] == case)
    return [float(norm) for norm in row[switch]["measures"]["wgrad_norm"]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
