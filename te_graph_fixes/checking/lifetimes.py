"""Detection of replays that overwrite tensors in graph memory while they are in use."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import wrapt
from torch.distributed import distributed_c10d

PARAMETER = re.compile(r"(?<=grad of )[\w.]+")
"""The name of a parameter in the ``kind`` of a `Subject`."""


class Subject(NamedTuple):
    """The subject of a comparison: a tensor or mark of a callable in a step.

    ``kind`` is, for example, ``(Linear), forward: output 0``. Each kind is reported once.
    """

    step: int
    callable: int
    kind: str
    reference: Any


class Lifetimes:
    """The tensors in use in graph memory, and the detection of replays that overwrite them.

    Two kinds of tensors are in use: a parameter's ``.grad`` that is in graph memory, and a tensor that is being sent,
    until the program has waited for the send. Sends are detected in methods of the process group. `isend` itself cannot
    be wrapped, because `batch_isend_irecv` compares the function of each operation with `isend` by identity.
    """

    def __init__(self, compare: Callable[..., None]) -> None:
        self._compare = compare
        self.returned: dict[int, Subject] = {}
        """The tensors returned by graphs, by address. A ``.grad`` may be one of them."""
        self._batch: list[tuple[Subject, torch.Tensor]] = []
        """The sends of a batch. They have no handle before the end of the batch."""
        self._sends: WeakKeyDictionary[Any, tuple[Any, list[tuple[Subject, torch.Tensor]]]] = WeakKeyDictionary()
        """The receiver (of a batch: the group) and the tensors being sent, by handle, in the order of the sends."""
        self._sums: list[tuple[Subject, torch.Tensor, torch.Tensor]] = []
        self.undo = ExitStack()
        for name in ("Work.wait", "ProcessGroup.send", "ProcessGroup._end_coalescing"):
            self.undo.callback(setattr, *wrapt.resolve_path(distributed_c10d, name))
            wrapt.wrap_function_wrapper(distributed_c10d, name, self._wait if name == "Work.wait" else self._send)

    def before_replay(self) -> None:
        """Record the sums of the tensors in use, so that only writes by the replay are reported."""
        used = [pair for _, sent in self._sends.values() for pair in sent]
        for address, subject in self.returned.items():
            parameter = subject.reference.parameters.get("".join(PARAMETER.findall(subject.kind)))
            if (grad := getattr(parameter, "grad", None)) is not None and grad.data_ptr() == address:
                used.append((subject._replace(kind=f"{subject.kind} is in use and overwritten"), grad))
        self._sums = [(subject, tensor, tensor.sum(dtype=torch.float64)) for subject, tensor in used]

    def after_replay(self, by: str) -> None:
        for subject, tensor, total in self._sums:
            self._compare(subject, tensor.sum(dtype=torch.float64), total, total, f"by {by}")
        self._sums = []

    def _send(self, send: Any, group: Any, args: Any, kwargs: Any) -> Any:
        """Send tensors or end a batch, and track the sent tensors by handle. A batch has one handle."""
        work = send(*args, **kwargs)
        for tensor in args[0] if isinstance(args[0], list) else ():
            if subject := self.returned.get(tensor.data_ptr()):
                subject = subject._replace(kind=f"{subject.kind} is being sent and overwritten")
                self._batch.append((subject, tensor.detach()))
        if work is not None:
            self._sends[work], self._batch = ((group, args[1:2]), self._batch), []
        return work

    def _wait(self, wait: Any, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a send or batch. Forget it and the earlier sends to its receiver, because they complete in order."""
        result = wait(*args, **kwargs)
        if work in self._sends:
            handles, (receiver, _) = list(self._sends), self._sends[work]
            for handle in handles[: handles.index(work) + 1]:
                if self._sends[handle][0] == receiver:
                    del self._sends[handle]
        return result
