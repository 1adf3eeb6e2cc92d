"""Check that all ranks of a job have the same fixes, and that no rank misses a fix."""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .activation import report
from .messages import FixNotAppliedError, status_line
from .status import Status
from .text import by_value, named

_MOST_DESCRIBED = 8
"""The error describes up to this number of groups of ranks with equal fixes, and as many ranges of ranks in each."""


def require_same_on_all_ranks(group: Any = None, digest: str | None = None) -> None:
    """Raise `FixNotAppliedError` on every rank of a group unless all ranks have the same fixes and none misses a fix.

    Call it on all ranks, after the import of TransformerEngine and ``init_process_group``. A rank without fixes, as
    with ``TE_GRAPH_FIXES=off``, misses all of them. If ``digest`` is not None, it is the `Report.digest` that each rank
    must have. ``group`` is a process group of torch, or None for the default group. Each rank sends 8 bytes. Before an
    error, some ranks also send details.

    Raise ValueError if there is no process group, if this process is outside ``group``, or if ``digest`` is malformed.
    """
    if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{8}", digest)):
        raise ValueError(f"digest={digest!r} is malformed. Pass the eight digits after `digest=` in the status line.")
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("There is no process group. Call torch.distributed.init_process_group() first.")
    if distributed.get_rank(group) < 0:
        raise ValueError("This process does not belong to the group. Pass a group that contains it.")
    own = report()
    missing = own.missing | own.having(Status.PENDING, Status.REVERTED)
    problems = [f"{named(ids)} missing: {reason}" for reason, ids in by_value(missing).items()]
    if own.mode == "off":
        problems = ["all fixes are off"]
    if digest not in (None, own.digest):
        problems.append(f"expects digest {digest}")
    numbers = _gathered(2 * int(own.digest, 16) + bool(problems), group)
    ranks = sorted(by_value(dict(enumerate(numbers))).values(), key=len, reverse=True)  # most ranks first
    if not problems and len(ranks) == 1:
        return
    if group is not None:
        ranks = [[distributed.get_global_rank(group, rank) for rank in same] for same in ranks]
    line = status_line(own).removeprefix("te-graph-fixes: ")
    details = {"line": line, "active": own.active, "problems": problems}
    described = [_details_of(same[0], details, group) for same in ranks[:_MOST_DESCRIBED]]
    raise FixNotAppliedError(_difference(ranks, described))


def _gathered(number: int, group: Any) -> list[int]:
    """Return the 8-byte ``number`` of every rank of ``group``, in the order of the ranks."""
    import torch
    from torch import distributed

    backend = str(distributed.get_backend(group))
    device = "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"
    numbers = torch.empty(distributed.get_world_size(group), dtype=torch.int64, device=device)
    distributed.all_gather([*numbers.split(1)], numbers.new_tensor([number]), group)
    return list(numbers.tolist())


def _details_of(rank: int, details: dict[str, Any], group: Any) -> dict[str, Any]:
    """Broadcast the ``details`` of the global ``rank`` to the group, and return them on every rank."""
    from torch import distributed

    sent = [details if distributed.get_rank() == rank else None]
    distributed.broadcast_object_list(sent, rank, group)
    return dict(sent[0] or {})


def _difference(ranks: Sequence[Sequence[int]], details: Sequence[Mapping[str, Any]]) -> str:
    """Return the error text: a heading, and for each group of ranks a line with its differences from the first."""
    usual = {*details[0]["active"]}
    lines = [f"The fixes are not the same, or not complete, on all ranks ({sum(map(len, ranks))} in the group):"]
    for same, found in zip(ranks, details, strict=False):
        words = [found["line"]]
        if lacking := sorted(usual - {*found["active"]}):
            words.append(f"without {named(lacking)}")
        if extra := sorted({*found["active"]} - usual):
            words.append(f"{named(extra)} in addition")
        lines.append(f"  {numbered_ranks(same)}: {'; '.join([*words, *found['problems']])}")
    return "\n".join(lines)


def numbered_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3", or a list such as "ranks 0-3, 7". A long list is cut off, and ends with the number of ranks."""
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after > before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after > before + 1), numbers[-1]]
    ranges = [f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True)]
    few = ", ".join(ranges[:_MOST_DESCRIBED])
    if len(numbers) == 1:
        return f"rank {few}"
    return f"ranks {few}" + (f", ... ({len(numbers)} in all)" if len(ranges) > _MOST_DESCRIBED else "")
