"""Shorten the texts of errors, and compute digests of the results of programs."""

from __future__ import annotations

import hashlib
import traceback
from pathlib import Path
from typing import Any

import torch


def said(error: BaseException) -> str:
    frames = [f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({' < '.join(frames[:-6:-1])})"


def digest(found: dict[str, list[Any]]) -> str:
    total = hashlib.sha256()
    for name, values in found.items():
        total.update(name.encode())
        for value in values:
            if value is None:
                total.update(b"None")
                continue
            total.update(str((value.dtype, value.shape)).encode())
            total.update(value.contiguous().view(torch.uint8).cpu().numpy().tobytes() if value.numel() else b"")
    return total.hexdigest()[:16]
