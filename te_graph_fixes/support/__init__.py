"""Support modules, whose text the fixes add next to TransformerEngine's own modules. The fixed source imports them."""

import pkgutil
import re
from typing import cast

from ..patching import PACKAGE

PREFIX = "_te_"
"""The first letters of a support module's name in TransformerEngine's package."""


def imported_modules(text: str) -> dict[str, str]:
    """Return the source texts, by full name, of the support modules that ``text`` imports, directly or indirectly.

    A module comes after the modules that it imports. The result is {} if ``text`` imports none.
    """
    modules: dict[str, str] = {}
    for name in re.findall(rf"from \.+{PREFIX}(\w+) import", text):
        module = _read(name)
        modules |= imported_modules(module) | {f"{PACKAGE}.{PREFIX}{name}": module}
    return modules


def _read(name: str) -> str:
    """Return the text of a support module, even if this package is in a zip file."""
    return cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()
