"""First microbatches in graphs that are not told of them: the modules say themselves, as Megatron-Core's do.

Such a module has ``is_first_microbatch``, which is set before a step. Its forward passes that on to TransformerEngine
and clears it: weights are quantized at the first microbatch, and kept for the others. A replay runs no Python, so the
attribute is read and cleared before it, and a flag tells the graph what it said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Marks:
    """The marks of one graph's modules for its next replay; ``flag`` is 1.0 where weights are kept."""

    of_capture: Marks | None = None
    """Those of the graph that is being captured, if it does not cache weights for its caller."""

    def __init__(self, flag: torch.Tensor, module: Any = None) -> None:
        modules: Iterable[Any] = getattr(module, "modules", tuple)()
        self._modules = [marked for marked in modules if hasattr(marked, "is_first_microbatch")]
        self.flag = flag
        self.are_read = False

    def take(self) -> bool:
        """Whether the next replay keeps the weights that it finds. Where no module can say so, it does not."""
        keep = bool(self._modules) and not any(module.is_first_microbatch for module in self._modules)
        for module in self._modules:
            module.is_first_microbatch = False
        self.flag.fill_(keep)
        return keep


def flag_of_capture() -> torch.Tensor | None:
    """The flag for a module that is not at its first microbatch, if a graph is being captured that has one."""
    marks = Marks.of_capture
    if marks is None:
        return None
    marks.are_read = True
    return marks.flag
