"""Updates of FP8 scales that are omitted in warmup and capture, because the replays do them."""

from __future__ import annotations

import threading

import torch
from torch._C import _current_graph_task_id


class ScaleUpdates:
    """The ``kinds`` of updates (``forward``, ``backward``) that occurred in a warmup or capture on this stream."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream()

    def leave_to_replays(self, kind: str) -> bool:
        """Note an update of the capture, and return True. Return False for updates by other threads of the program."""
        is_of_capture = threading.get_ident() == self._thread or self._is_in_backward()
        if is_of_capture:
            self.kinds.add(kind)
        return is_of_capture

    def _is_in_backward(self) -> bool:
        """Return whether this thread of autograd runs a backward of the capture, on the capture's stream."""
        return _current_graph_task_id() != -1 and bool(torch.cuda.current_stream() == self._stream)
