"""The catalogue of fixes. Each fix has its own file, and `CATALOGUE` contains the ``FIX`` of every file."""

import importlib
import os
import pkgutil

from packaging.version import Version

from ..fix import OLDEST, Assessment, Fix, parsed
from ..patching.source import Source
from ..status import Verdict


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


def assess(source: Source) -> dict[str, Assessment]:
    """Return the assessment of every fix, by its id, for the source of a TransformerEngine."""
    if not os.path.isdir(os.path.join(source.location, "pytorch")):
        without = Assessment(Verdict.NOT_APPLICABLE, "this TransformerEngine has no PyTorch modules")
        return dict.fromkeys(CATALOGUE, without)
    version = parsed(source.version)
    if version and version.release < Version(OLDEST).release:
        reason = f"version {source.version} is too old ({OLDEST} is the oldest tested); upgrade it, or turn graphs off"
        return dict.fromkeys(CATALOGUE, Assessment(Verdict.UNRECOGNIZED, reason))
    return {fix.id: fix.assess(source) for fix in CATALOGUE.values()}
