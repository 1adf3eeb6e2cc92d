"""Support modules, imported by the fixed source. They are added, as text, next to TransformerEngine's own modules."""

from __future__ import annotations

import pkgutil
from typing import cast

from ..patching import PACKAGE

_NAME = f"{PACKAGE}._te_"


def new_module(name: str) -> dict[str, str]:
    """Return the full name and the text of support module ``name``, even if this package is in a zip file."""
    return {_NAME + name: cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()}
