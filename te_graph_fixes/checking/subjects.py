"""Subjects of comparisons: tensors and flags of graphed callables in a step."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

PARAMETER = re.compile(r"(?<=grad of )[\w.]+")  # in the kind of a `Subject`


class Subject(NamedTuple):
    """A tensor or mark of a callable in a step.

    ``kind`` is, for example, ``(Linear), forward: output 0``. Each kind is reported once.
    """

    step: int
    callable: int
    kind: str
    reference: Any
