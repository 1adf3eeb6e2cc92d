"""Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and what
is being sent, from the send until the wait for it. Order decides, not time: a send that happens to be over counts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from .findings import Findings, Place

GROUP = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(eq=False)
class Watched:
    """``get`` gives the tensor for as long as it is in use."""

    get: Callable[[], torch.Tensor | None]
    place: Place
    symptom: str
    use: str
    before: torch.Tensor | None = None


class Send(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The handle of a send; what is sent is in use until somebody waits for it, or lets go of the handle."""

    def __init__(self, work: Any, watched: list[Watched]) -> None:
        super().__init__(work)
        self._self_watched = watched

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        self._self_watched.clear()
        return result


class Lifetimes:
    """What is in use in this process."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._returned: dict[int, Place] = {}
        self._grads: dict[int, Watched] = {}
        self._sends: list[weakref.ref[Send]] = []
        self._batch: list[Watched] | None = None
        self._replaced: dict[str, Any] = {}
        if GROUP is not None:  # `isend` itself is compared by identity in torch
            for name, wrapper in (
                ("send", self._send),
                ("_start_coalescing", self._start),
                ("_end_coalescing", self._over),
            ):
                self._replaced[name] = getattr(GROUP, name)
                setattr(GROUP, name, wrapper(self._replaced[name]))

    def stop(self) -> None:
        """Watch nothing any more."""
        for name, original in self._replaced.items():
            setattr(GROUP, name, original)
        self._returned, self._grads, self._sends = {}, {}, []

    def returned(self, tensor: torch.Tensor, place: Place) -> None:
        """A graph has returned a tensor, which is in its memory."""
        self._returned[tensor.data_ptr()] = place

    def grad(self, parameter: torch.Tensor, returned: torch.Tensor, place: Place) -> None:
        """A graph has returned a gradient, whose memory may become the ``.grad`` of a parameter."""
        reference, address = weakref.ref(parameter), returned.data_ptr()

        def get() -> torch.Tensor | None:
            owner = reference()
            found = None if owner is None else owner.grad
            return found if found is not None and found.data_ptr() == address else None

        self._grads[id(parameter)] = Watched(get, place, "grad-overwritten", "is in use")

    def before_replay(self) -> None:
        """What the program itself writes before this is no defect."""
        self._grads = {key: each for key, each in self._grads.items() if each.get() is not None}
        for each in self._watched():
            tensor = each.get()
            each.before = None if tensor is None else _sum(tensor)

    def after_replay(self, by: str) -> None:
        for each in self._watched():
            tensor = each.get()
            if tensor is not None and each.before is not None:
                note = f"{each.use} and overwritten by {by}"
                self._findings.overwritten(each.place, _sum(tensor) != each.before, each.symptom, note)

    def _watched(self) -> list[Watched]:
        sends = [send for send in (reference() for reference in self._sends) if send is not None]
        return [*self._grads.values(), *(each for send in sends for each in send._self_watched)]

    def _send(self, original: Any) -> Any:
        def send(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            work = original(group, tensors, *args, **kwargs)
            places = [(each, self._returned.get(each.data_ptr())) for each in tensors]
            watched = [
                Watched(functools.partial(_same, each), place, "sent-overwritten", "is being sent")
                for each, place in places
                if place is not None
            ]
            if self._batch is not None:
                self._batch += watched
                return work
            return self._handle(work, watched)

        return send

    def _start(self, original: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            self._batch = []
            return original(*args, **kwargs)

        return start

    def _over(self, original: Any) -> Any:
        def over(*args: Any, **kwargs: Any) -> Any:
            watched, self._batch = self._batch or [], None
            return self._handle(original(*args, **kwargs), watched)

        return over

    def _handle(self, work: Any, watched: list[Watched]) -> Any:
        if work is None or not watched:
            return work
        handle = Send(work, watched)
        self._sends = [*(each for each in self._sends if each() is not None), weakref.ref(handle)]
        return handle
