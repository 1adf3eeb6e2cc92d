"""The catalogue of fixes. Each fix has its own file, and `CATALOGUE` contains the ``FIX`` of every file."""

from __future__ import annotations

import importlib
import pkgutil

from ..fix import Fix


def _catalogue() -> dict[str, Fix]:
    modules = {name: importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
    fixes = (
        module.FIX.described_by(name, module.__doc__ or "")
        for name, module in modules.items()
        if hasattr(module, "FIX")
    )
    return {fix.id: fix for fix in sorted(fixes, key=lambda fix: fix.id)}


CATALOGUE = _catalogue()
"""Every fix of this package by its id."""
