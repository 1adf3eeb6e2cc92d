"""Support modules, imported by the fixed source. They are added, as text, next to TransformerEngine's own modules."""

from __future__ import annotations

import pkgutil
import re
from typing import cast

from ..patching import PACKAGE

PREFIX = "_te_"
"""The first letters of a support module's name in TransformerEngine's package."""


def imported_modules(text: str) -> dict[str, str]:
    """Return the full name and the text of each support module that ``text`` imports, directly or indirectly."""
    modules: dict[str, str] = {}
    pending = _imports(text)
    while pending:
        name = pending.pop()
        if f"{PACKAGE}.{PREFIX}{name}" not in modules:
            module = _read(name)
            modules[f"{PACKAGE}.{PREFIX}{name}"] = module
            pending += _imports(module)
    return dict(sorted(modules.items()))


def _imports(text: str) -> list[str]:
    return re.findall(rf"from \.+{PREFIX}(\w+) import", text)


def _read(name: str) -> str:
    """Return the text of a support module, even if this package is in a zip file."""
    return cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()
