"""Prove that all ranks of a job have the same fixes, and miss none."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .activation import report
from .messages import FixNotAppliedError
from .status import Report, Status
from .text import by_reason, named

_RECORD = "<4si4s?3x"
"""The record of a rank: its digest, the number of missing fixes, the expected digest, and whether there is one."""
_MOST_STATES = 8
"""The error describes up to this number of different states, each by the details of one rank."""


def require_same_on_all_ranks(group: Any = None, digest: str | None = None) -> None:
    """Raise `FixNotAppliedError` on every rank of a group unless all have the same fixes and none misses a fix.

    Call it on all ranks, after the import of TransformerEngine and ``init_process_group``. A rank without fixes, as
    with ``TE_GRAPH_FIXES=off``, misses all of them. If ``digest`` is not None, it is the `Report.digest` that each rank
    must have. ``group`` is a process group of torch; None is the default group. Each rank sends 16 bytes, and details
    only before an error.

    Raise ValueError without a process group, outside the group, and for a digest that is malformed.
    """
    if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{8}", digest)):
        raise ValueError(f"digest={digest!r} is malformed. Pass the eight digits after `digest=` in the status line.")
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("There is no process group. Call torch.distributed.init_process_group() first.")
    if distributed.get_rank(group) < 0:
        raise ValueError("This process does not belong to the group. Pass a group that contains it.")
    own = report()
    states = _states(_gathered(_record(own, digest), group))
    if group is not None:
        states = {
            state: [distributed.get_global_rank(group, rank) for rank in ranks] for state, ranks in states.items()
        }
    if problems := _wrong(states):
        usual = next((state for state in states if state not in problems), None)
        described = [*problems][:_MOST_STATES]
        details = [_details_of(states[state][0], own, group) for state in filter(None, [usual, *described])]
        text = _difference(states, described, details, digest if usual is None else None)
        raise FixNotAppliedError(text)


def _record(own: Report, expected: str | None) -> bytes:
    return struct.pack(
        _RECORD, bytes.fromhex(own.digest), len(_missing(own)), bytes.fromhex(expected or ""), expected is not None
    )


def _missing(own: Report) -> dict[str, str]:
    """Return the reasons of the fixes that are missing. Without any fix in this process, all of them are."""
    if own.mode == "off":
        return {fix_id: fix.reason for fix_id, fix in own.fixes.items()}
    return own.missing | own.having(Status.PENDING, Status.REVERTED)


def _gathered(record: bytes, group: Any) -> bytes:
    """Return the records of all ranks, in their order."""
    import torch
    from torch import distributed

    size = distributed.get_world_size(group)
    records = torch.empty((size, len(record)), dtype=torch.uint8, device=_device(group))
    distributed.all_gather([*records.unbind()], records.new_tensor([*record]), group)
    return bytes(records.flatten().tolist())


def _device(group: Any) -> str:
    """Return the device on which the group communicates."""
    from torch import distributed

    backend = str(distributed.get_backend(group))
    return "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"


def _states(records: bytes) -> dict[bytes, list[int]]:
    """Group the ranks by their records. The state of most ranks comes first."""
    ranks: dict[bytes, list[int]] = {}
    size = struct.calcsize(_RECORD)
    for rank in range(len(records) // size):
        ranks.setdefault(records[rank * size : (rank + 1) * size], []).append(rank)
    return dict(sorted(ranks.items(), key=lambda item: -len(item[1])))


def _wrong(states: Mapping[bytes, Sequence[int]]) -> list[bytes]:
    """Return the states that miss a fix, differ from the expected digest, or differ from the first right state."""
    right, wrong = b"", []
    for state in states:
        digest, missing, expected, is_expected = struct.unpack(_RECORD, state)
        if missing or (is_expected and digest != expected) or right:
            wrong.append(state)
        else:
            right = state
    return wrong


def _details_of(rank: int, own: Report, group: Any) -> dict[str, Any]:
    """Return the details of one rank, on every rank."""
    from torch import distributed

    reasons = by_reason(_missing(own))
    details = {
        "host": os.uname().nodename,
        "te": own.te_version,
        "package": own.version,
        "mode": own.mode,
        "digest": own.digest,
        "active": own.active,
        "missing": [f"{named(ids)} missing: {reason}" for reason, ids in reasons.items()],
    }
    sent = [details if distributed.get_rank() == rank else None]
    distributed.broadcast_object_list(sent, rank, group)
    return dict(sent[0] or {})


def _difference(
    states: Mapping[bytes, Sequence[int]],
    described: Sequence[bytes],
    details: Sequence[Mapping[str, Any]],
    expected: str | None,
) -> str:
    """Describe the ranks of each wrong state, and their differences from the right state.

    ``details`` begin with those of the right state if there is one. ``expected`` is the digest that no rank has, or
    None.
    """
    size, right = sum(map(len, states.values())), {"digest": expected} if expected else {}
    if len(details) > len(described):
        right, details = dict(details[0]), details[1:]
    lines = [f"The fixes are not the same, or not complete, on all ranks ({size} in the group):"]
    for state, found in zip(described, details, strict=True):
        values = [
            f"{name}={found[name]}" + (f" instead of {right[name]}" if name in right else "")
            for name in ("te", "package", "mode", "digest")
            if name not in right or found[name] != right[name]
        ]
        if extra := sorted({*found["active"]} - {*right.get("active", found["active"])}):
            values.append(f"{named(extra)} in addition")
        if lacking := sorted({*right.get("active", ())} - {*found["active"]}):
            values.append(f"without {named(lacking)}")
        _, _, asked, is_asked = struct.unpack(_RECORD, state)
        values += [f"expects digest {asked.hex()}"] if is_asked else []
        lines.append(
            f"  {numbered_ranks(states[state])} (host {found['host']}): {'; '.join([*values, *found['missing']])}"
        )
    return "\n".join(lines)


def numbered_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3", or a list such as "ranks 0-3, 7"; of many ranges, the first and the total number of ranks."""
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after > before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after > before + 1), numbers[-1]]
    ranges = [f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True)]
    few = ", ".join(ranges[:_MOST_STATES])
    if len(numbers) == 1:
        return f"rank {few}"
    return f"ranks {few}" + (f", ... ({len(numbers)} in all)" if len(ranges) > _MOST_STATES else "")
