"""Marks of threads. Autograd's threads inherit the marks of the thread that starts a backward."""

from __future__ import annotations

from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls


def mark_thread(name: str, mark: object) -> None:
    """Mark the current thread. A later mark of the same name replaces this one."""
    _stash_obj_in_tls(name, mark)


def has_mark(name: str, mark: object) -> bool:
    """Return whether the current thread, or the thread that started its backward, has this very mark."""
    return _is_key_in_tls(name) and _get_obj_in_tls(name) is mark
