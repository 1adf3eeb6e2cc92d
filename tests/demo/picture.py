"""The picture of the README, from what the demo has recorded. Needs matplotlib.

python -m tests.demo --gpu --steps 16 --json docs/results/gradient-norms.json           # TE 2.15.0 on a GPU
python -m tests.demo --steps 16 --json docs/results/gradient-norms.json 2.15.0
python -m tests.demo.picture docs/results/gradient-norms.json docs/gradient-norms.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LINES = {
    "eager": {"label": "graphs off", "color": "black", "linewidth": 4, "alpha": 0.35},
    "graphs": {"label": "TE's graphs", "color": "tab:red", "marker": "o"},
    "graphs with the fixes": {"label": "TE's graphs with te-graph-fixes", "color": "tab:green", "linestyle": "--"},
}


def main(recorded: str, png: str) -> None:
    ((where, ways),) = json.loads(Path(recorded).read_text()).items()
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    for panel, quantity in zip(panels, ("gradient norm", "loss"), strict=True):
        for way, look in LINES.items():
            values = ways[way][quantity]
            panel.plot(range(1, len(values) + 1), values, markersize=4, **look)
        panel.set_title(f"{quantity}{' of the experts' * (quantity != 'loss')}")
        panel.set_xlabel("step")
        panel.set_yscale("log")
    panels[0].legend()
    figure.suptitle(f"Two FP8 MoE layers on TransformerEngine {where}")
    figure.savefig(png, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
