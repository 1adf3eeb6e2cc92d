"""Functions that format parts of messages, and a function that prints a line."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MOST_NAMED = 5
"""A message names up to this number of fixes. If there are more, it contains only their number."""


def te_name(version: str | None) -> str:
    return f"TransformerEngine {version or '(version unknown)'}"


def by_value(items: Mapping[_Key, _Value]) -> dict[_Value, list[_Key]]:
    """Return, for each different value in ``items``, the keys with this value, or {} without items."""
    keys: dict[_Value, list[_Key]] = {}
    for key, value in items.items():
        keys.setdefault(value, []).append(key)
    return keys


def named(fixes: Sequence[str]) -> str:
    """Return the names of the fixes in one string if they are few, else their number, such as ``12 fixes``."""
    return ", ".join(fixes) if len(fixes) <= _MOST_NAMED else count(len(fixes), "fix")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun == 'fix' else 's'}"


def print_stderr(text: str) -> None:
    """Write a line to file descriptor 2. Ignore errors, because a full disk must not end a job."""
    if sys.__stderr__ is not None:  # else descriptor 2 may belong to another file
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
