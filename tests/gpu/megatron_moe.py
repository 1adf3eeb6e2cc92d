"""The MoE GPT of `examples/megatron_moe.py`, graphs of TransformerEngine (TE) against eager: gradients by group.

    python tests/gpu/megatron_moe.py fp8-delayed                         # prints a JSON line
    TE_GRAPH_FIXES=off python tests/gpu/megatron_moe.py fp8-delayed
    python tests/gpu/megatron_moe.py table LINES                         # JSON lines as a table

For each group of parameters and step: the norm of ``main_grad`` with graphs over that without, and the norm of the
difference over that without. Norms alone do not tell: they can be near 1.0 while the gradients are wrong.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import te_graph_fixes

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_moe.py"
GROUPS = {
    "attention": "self_attention",
    "router": "router",
    "experts fc1": "experts.linear_fc1",
    "experts fc2": "experts.linear_fc2",
    "norms": "layernorm",
    "embedding and output": "",
}


def measure(recipe: str) -> dict[str, Any]:
    import torch

    example = runpy.run_path(str(EXAMPLE))
    example["start"]()
    train = example["train"]
    eager_losses, eager_grads = train(recipe, graphs=False)
    again_losses, again_grads = train(recipe, graphs=False)
    graph_losses, graph_grads = train(recipe, graphs=True)
    torch.distributed.destroy_process_group()
    return {
        "eager_repeats": again_losses == eager_losses
        and all(
            torch.equal(again[name], once[name])
            for again, once in zip(again_grads, eager_grads, strict=True)
            for name in once
        ),
        "steps": [compare(found, wanted) for found, wanted in zip(graph_grads, eager_grads, strict=True)],
        "losses": graph_losses,
        "eager_losses": eager_losses,
    }


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, list[float]]:
    """For each group: the norm found over the norm wanted, and the norm of the difference over the norm wanted."""
    squares = {group: [0.0, 0.0, 0.0] for group in GROUPS}
    for name, expected in wanted.items():
        group = next(group for group, part in GROUPS.items() if part in name)
        values = found[name].double(), expected.double(), found[name].double() - expected.double()
        squares[group] = [total + float(value.norm()) ** 2 for total, value in zip(squares[group], values, strict=True)]
    return {
        group: [(have / want) ** 0.5, (difference / want) ** 0.5] for group, (have, want, difference) in squares.items()
    }


def table(lines: list[str]) -> str:
    """The JSON lines as Markdown, a table for each TE: norm ratio and error of each group, first and last step."""
    columns = [json.loads(line) for line in lines if line.startswith("{")]
    columns = [column for column in columns if "steps" in column]
    columns.sort(key=lambda column: (column["recipe"], bool(column["applied"])))
    return "\n\n".join(
        _table(te, [column for column in columns if column["te"] == te])
        for te in sorted({column["te"] for column in columns})
    )


def _table(te: str, columns: list[dict[str, Any]]) -> str:
    head = [f"{column['recipe']}, {'with' if column['applied'] else 'without'}" for column in columns]
    rows = [[f"TE {te}", *head], ["---"] * (len(columns) + 1)]
    for when, step in (("first step", 0), ("last step", -1)):
        for group in GROUPS:
            cells = ["x{:.3f}, {:.3g}".format(*column["steps"][step][group]) for column in columns]
            rows.append([f"{group}, {when}", *cells])
    rows.append(["largest difference of a loss", *(f"{drift(column):.3g}" for column in columns)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def drift(column: dict[str, Any]) -> float:
    steps = zip(column["losses"], column["eager_losses"], strict=True)
    return max(abs(a - b) for found, wanted in steps for a, b in zip(found, wanted, strict=True))


def main() -> None:
    if sys.argv[1] == "table":
        print(table(Path(sys.argv[2]).read_text().splitlines()))
        return
    (recipe,) = sys.argv[1:]
    try:
        result = measure(recipe)
    except Exception as failure:
        result = {"failed": f"{type(failure).__name__}: {failure}"}
        traceback.print_exc()
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    found = {"te": report.te_version, "megatron": version("megatron-core"), "recipe": recipe, "applied": applied}
    print(json.dumps({**found, **result}))


if __name__ == "__main__":
    main()
