"""Modules with outputs of many memory layouts and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

from ..cases import DTYPES
from .modules import MODULES
from .program import Skipped
from .setting import OPTIONS, TOKENS

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda y: y,
    "transposed": lambda y: y.t(),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "steps": lambda y: y[1:, ::2],
    "expanded": lambda y: y[:, None].expand(-1, 3, -1),
    "permuted": lambda y: y.view(y.shape[0], 4, -1).permute(1, 2, 0),
    "number": lambda y: y[2, 3],
    "negative": lambda y: conjugate(y).imag,
    "conjugate": lambda y: conjugate(y),
}


def conjugate(y: torch.Tensor) -> torch.Tensor:
    return torch.complex(y.float(), y.float() + 1).conj()


class Viewed(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection of the transposed input that returns a view of its output. Its dgrad is transposed, too."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(TOKENS, TOKENS, **OPTIONS)
        self.view_of = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view_of(super().forward(x.t()))


class Typed(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection that returns a tensor of a given dtype: as its second output if the dtype supports no gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(TOKENS, TOKENS, **OPTIONS)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x.t())
        if self.dtype.is_complex or (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            return out.to(self.dtype)
        return out, out.detach() > 0 if self.dtype == torch.bool else out.detach().view(self.dtype)


def typed(name: str) -> Typed:
    if not hasattr(torch, name):
        raise Skipped(f"this torch has no {name}")
    return Typed(getattr(torch, name))


MODULES.update({f"{name} output": functools.partial(Viewed, view) for name, view in VIEWS.items()})
MODULES.update({f"{name} output": functools.partial(typed, name) for name in DTYPES})
