"""Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and what
is being sent, from the send until the wait for it. Order decides, not time: a send that happens to be over counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import wrapt

from .findings import Findings, Place

SYMPTOMS = {"grad-overwritten": "is in use", "sent-overwritten": "is being sent"}


class Lifetimes:
    """What is in use in this process. Sends are seen in the process group: torch compares `isend` by identity."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._returned: dict[int, Place] = {}
        self._grads: dict[torch.Tensor, tuple[int, Place]] = {}
        self._sent: list[tuple[Place, torch.Tensor]] = []  # by sends that have no handle: the batch goes on
        self._sends: list[tuple[weakref.ref[Any], Any, list[tuple[Place, torch.Tensor]]]] = []
        self._before: dict[Place, torch.Tensor] = {}
        wrappers: dict[str, Any] = {"Work.wait": self._wait}
        wrappers |= dict.fromkeys(("ProcessGroup.send", "ProcessGroup._end_coalescing"), self._send)
        for name, wrapper in wrappers.items():
            wrapt.wrap_function_wrapper(torch.distributed.distributed_c10d, name, wrapper)
        self._wrapped = list(wrappers)

    def stop(self) -> None:
        """Watch nothing any more."""
        for name in self._wrapped:
            owner, attribute, wrapper = wrapt.resolve_path(torch.distributed.distributed_c10d, name)
            setattr(owner, attribute, wrapper.__wrapped__)  # type: ignore[attr-defined]
        self._returned, self._grads, self._sends, self._wrapped = {}, {}, [], []

    def returned(self, tensor: torch.Tensor, place: Place, parameter: torch.Tensor | None = None) -> None:
        """A graph has returned a tensor, which is in its memory, as the ``.grad`` of ``parameter`` may be now."""
        if parameter is None:
            self._returned[tensor.data_ptr()] = place
        else:
            self._grads[parameter] = tensor.data_ptr(), replace(place, symptom="grad-overwritten")

    def before_replay(self) -> None:
        """What the program itself writes before this is no defect."""
        self._before = {place: _checksum(tensor) for place, tensor in self._in_use()}

    def after_replay(self, by: str) -> None:
        for place, tensor in self._in_use():
            if place in self._before:
                text = f"{SYMPTOMS[place.symptom]} and overwritten by {by}"
                self._findings.add(replace(place, text=text), _checksum(tensor) != self._before[place])

    def _in_use(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for parameter, (address, place) in self._grads.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                yield place, parameter.grad
        for work, _, sent in self._sends:
            yield from sent if work() is not None else ()

    def _send(self, send: Any, group: Any, args: Any, kwargs: Any) -> Any:
        """Send tensors; or end a batch, all of which has one handle."""
        work = send(*args, **kwargs)
        for tensor in args[0] if isinstance(args[0], list) else ():
            place = self._returned.get(tensor.data_ptr())
            if place is not None:
                self._sent.append((replace(place, symptom="sent-overwritten"), tensor))
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
