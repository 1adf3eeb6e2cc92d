"""Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and what
is being sent, from the send until the wait for it. Order decides, not time: a send that happens to be over counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import wrapt

from .findings import Findings, Place


@dataclass(eq=False)
class Watched:
    """``get`` gives the tensor for as long as it is in use."""

    get: Callable[[], torch.Tensor | None]
    place: Place
    before: torch.Tensor | None = None

    def sum(self) -> torch.Tensor | None:
        tensor = self.get()
        if tensor is None:
            return None
        words = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if words.numel() % 8 == 0:
            words = words.view(torch.int64)
        return words.sum(dtype=torch.int64)


class Send(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The handle of a send. What is sent is in use until somebody waits for it, or lets go of the handle."""

    def __init__(self, work: Any, watched: list[Watched], to: Any, over: Callable[[Send], None]) -> None:
        super().__init__(work)
        self._self_watched, self._self_to, self._self_over = watched, to, over

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        self._self_over(self)
        return result


class Lifetimes:
    """What is in use in this process. Sends are seen in the process group: torch compares `isend` by identity."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._returned: dict[int, Place] = {}
        self._grads: dict[int, Watched] = {}
        self._sends: list[weakref.ref[Send]] = []
        self._batch: list[Watched] | None = None
        self._group: Any = getattr(torch.distributed, "ProcessGroup", None)
        names = [name for name in ("send", "_start_coalescing", "_end_coalescing") if hasattr(self._group, name)]
        self._replaced = {name: vars(self._group)[name] for name in names}  # not `getattr`, which would lose its self
        for name in names:
            setattr(self._group, name, self._wrapped(name))

    def stop(self) -> None:
        """Watch nothing any more."""
        for name, original in self._replaced.items():
            setattr(self._group, name, original)
        self._returned, self._grads, self._sends = {}, {}, []

    def returned(self, tensor: torch.Tensor, place: Place) -> None:
        """A graph has returned a tensor, which is in its memory."""
        self._returned[tensor.data_ptr()] = place

    def grad(self, parameter: torch.Tensor, returned: torch.Tensor, place: Place) -> None:
        """A graph has returned a gradient, whose memory may become the ``.grad`` of a parameter."""
        reference, address = weakref.ref(parameter), returned.data_ptr()

        def get() -> torch.Tensor | None:
            grad = getattr(reference(), "grad", None)
            return grad if grad is not None and grad.data_ptr() == address else None

        self._grads[id(parameter)] = Watched(get, replace(place, symptom="grad-overwritten", text="is in use"))

    def before_replay(self) -> None:
        """What the program itself writes before this is no defect."""
        self._grads = {key: each for key, each in self._grads.items() if each.get() is not None}
        for each in self._watched():
            each.before = each.sum()

    def after_replay(self, by: str) -> None:
        for each in self._watched():
            before, now = each.before, each.sum()
            if before is not None and now is not None:
                text = f"{each.place.text} and overwritten by {by}"
                self._findings.wrong(replace(each.place, text=text), now != before)

    def _watched(self) -> list[Watched]:
        sends = [send for send in (reference() for reference in self._sends) if send is not None]
        return [*self._grads.values(), *(each for send in sends for each in send._self_watched)]

    def _wrapped(self, name: str) -> Callable[..., Any]:
        original = self._replaced[name]

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "_start_coalescing":
                self._batch = []
            work = original.__get__(group)(*args, **kwargs)
            watched = self._sent(*args, **kwargs) if name == "send" else []
            to = id(group), args[1] if name == "send" and len(args) > 1 else None
            if name == "_end_coalescing":
                watched, self._batch = self._batch or [], None
            elif self._batch is not None:
                self._batch += watched
                return work
            if work is None:
                return None
            handle = Send(work, watched, to, self._over)
            self._sends = [*(each for each in self._sends if each() is not None), weakref.ref(handle)]
            return handle

        return call

    def _over(self, handle: Send) -> None:
        """Somebody has waited for a send, and with it for the earlier ones to the same rank: they go in order."""
        for send in [reference() for reference in self._sends]:
            if send is not None and send._self_to == handle._self_to:
                send._self_watched.clear()
            if send is handle:
                return

    def _sent(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> list[Watched]:
        places = [(each, self._returned.get(each.data_ptr())) for each in tensors]
        return [
            Watched(lambda each=each: each, replace(place, symptom="sent-overwritten", text="is being sent"))  # type: ignore[misc]
            for each, place in places
            if place is not None
        ]
