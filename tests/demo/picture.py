"""The picture of the README, from what the demo has recorded. Needs matplotlib.

python -m tests.demo --steps 16 --json demo.json
python -m tests.demo.picture demo.json docs/gradient-norms.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LINES = {
    "graphs off": {"color": "black", "linewidth": 4, "alpha": 0.35},
    "TE's graphs": {"color": "tab:red", "marker": "o"},
    "with te-graph-fixes": {"color": "tab:green", "linestyle": "--"},
}


def main(recorded: str, png: str) -> None:
    ways = json.loads(Path(recorded).read_text())
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    for panel, quantity in zip(panels, ("gradient norm", "loss"), strict=True):
        for way, look in LINES.items():
            values = ways[way][quantity]
            panel.plot(range(1, len(values) + 1), values, markersize=4, label=way, **look)
        panel.set_title(f"{quantity}{' of the experts' * (quantity != 'loss')}")
        panel.set_xlabel("step")
        panel.set_yscale("log")
    panels[0].legend()
    figure.suptitle("Two MoE layers in FP8, TransformerEngine on a CPU simulator")
    figure.savefig(png, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
