"""Modules that the corrected source imports: they are shipped beside TransformerEngine's own, as text."""

from __future__ import annotations

import pkgutil
from typing import cast

from ..patching import PACKAGE

_NAME = f"{PACKAGE}._te_"


def new_module(name: str) -> dict[str, str]:
    """The ``new_modules`` of a verdict whose edits import module ``name`` of this package, which may be in a zip."""
    return {_NAME + name: cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()}
