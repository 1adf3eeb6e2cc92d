"""The catalogue: one file a fix. Every module of this package that has a ``FIX`` is in `CATALOGUE`."""

from __future__ import annotations

import importlib
import pkgutil

from ..fix import Fix


def _catalogue() -> dict[str, Fix]:
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    fixes = [module.FIX for module in modules if hasattr(module, "FIX")]
    return {fix.id: fix for fix in sorted(fixes, key=lambda fix: fix.id)}


CATALOGUE = _catalogue()
"""Every fix of this package by its id."""
