"""``tests/gpu/megatron_pipeline.py`` with ``te_graph_fixes.check`` in each of its settings.

    python -m torch.distributed.run --nproc-per-node 2 tests/gpu/megatron_check.py

Without fixes it has to name `grad-input-lifetime`, with all of them to find nothing.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import te_graph_fixes  # noqa: E402

activate = te_graph_fixes.activate


def checked(**options: Any) -> None:
    activate(**options)
    te_graph_fixes.check(2)


te_graph_fixes.activate = checked
runpy.run_path(str(ROOT / "tests" / "gpu" / "megatron_pipeline.py"), run_name="__main__")
