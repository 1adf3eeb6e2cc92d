"""Support modules, imported by the fixed source. They are added, as text, next to TransformerEngine's own modules."""

from __future__ import annotations

import pkgutil
from typing import cast

from ..patching import PACKAGE

_NAME = f"{PACKAGE}._te_"


def new_module(name: str) -> dict[str, str]:
    """Return the ``new_modules`` of a verdict with edits that import module ``name``. This package may be in a zip."""
    return {_NAME + name: cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()}
