"""Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and what
is being sent, from the send until the wait for it. Order decides, not time: a send that happens to be over counts.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import wrapt
from torch.distributed import distributed_c10d

from .findings import Findings, Place


class Lifetimes:
    """What is in use in this process. Sends are seen in the process group: torch compares `isend` by identity."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._returned: dict[int, Place] = {}
        self._grads: dict[torch.Tensor, tuple[int, Place]] = {}
        self._sent: list[tuple[Place, torch.Tensor]] = []  # by sends that have no handle: the batch goes on
        self._sends: list[tuple[weakref.ref[Any], Any, list[tuple[Place, torch.Tensor]]]] = []
        self._before: list[tuple[Place, torch.Tensor, torch.Tensor]] = []
        self._undo = ExitStack()
        for name in ("Work.wait", "ProcessGroup.send", "ProcessGroup._end_coalescing"):
            self._undo.callback(setattr, *wrapt.resolve_path(distributed_c10d, name))
            wrapt.wrap_function_wrapper(distributed_c10d, name, self._wait if name == "Work.wait" else self._send)

    def stop(self) -> None:
        """Watch nothing any more."""
        self._undo.close()
        self._returned, self._grads, self._sends = {}, {}, []

    def returned(self, tensor: torch.Tensor, place: Place, parameter: torch.Tensor | None = None) -> None:
        """A graph has returned a tensor, which is in its memory, as the ``.grad`` of ``parameter`` may be now."""
        if parameter is None:
            self._returned[tensor.data_ptr()] = place
        else:
            self._grads[parameter] = tensor.data_ptr(), replace(place, symptom="grad-overwritten", text="is in use")

    def before_replay(self) -> None:
        """What the program itself writes before this is no defect."""
        used = [each for work, _, sent in self._sends if work() is not None for each in sent]
        for parameter, (address, place) in self._grads.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                used.append((place, parameter.grad))
        self._before = [(place, tensor, _checksum(tensor)) for place, tensor in used]

    def after_replay(self, by: str) -> None:
        before, self._before = self._before, []
        for place, tensor, checksum in before:
            overwritten = replace(place, text=f"{place.text} and overwritten by {by}")
            self._findings.add(overwritten, _checksum(tensor) != checksum)

    def _send(self, send: Any, group: Any, args: Any, kwargs: Any) -> Any:
        """Send tensors; or end a batch, all of which has one handle."""
        work = send(*args, **kwargs)
        for tensor in args[0] if isinstance(args[0], list) else ():
            place = self._returned.get(tensor.data_ptr())
            if place is not None:
                self._sent.append((replace(place, symptom="sent-overwritten", text="is being sent"), tensor))
        if work is not None:
            self._sends.append((weakref.ref(work), (group, args[1:2]), self._sent))
            self._sent = []
        return work

    def _wait(self, wait: Any, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a send, and with it for the earlier ones to the same rank: they go in order."""
        result = wait(*args, **kwargs)
        for i, (reference, to, _) in enumerate(self._sends):
            if reference() is work:
                self._sends = [each for each in self._sends[:i] if each[1] != to] + self._sends[i + 1 :]
                break
        return result


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if words.numel() % 8 == 0:
        words = words.view(torch.int64)
    return words.sum(dtype=torch.int64)
