"""The memory of CUDA graphs: pools that reuse a block once the tensors in it are deleted.

The rules and sizes are the same as in torch's caching allocator. A block is cut from a larger segment. The smallest
free block that is large enough is used, and neighboring free blocks are joined. Small and large blocks have separate
segments. A block is free as soon as the last tensor that owns it is deleted. A reader that has only the address of the
block (a weak reference of TE, or a captured graph) then reads the values of the next owner.

Memory outside of pools stays allocated while a graph or a weak reference has its address. On a GPU, such memory could
have other content once no tensor owns it, so `overwrite_freed` overwrites it.

`peak` returns the peak memory in pools and outside of them since `reset_peak`, like
``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PoolId = tuple[int, int]

BLOCK = 512
"""The unit of block sizes, in bytes. Sizes are rounded up to a multiple of this unit."""

SMALL = 1 << 20
"""The largest size of a small block, in bytes. A large block is split only if the rest is larger than this size."""

POISON = 0xFF
"""The byte in memory that no graph has written yet: NaN in floating-point types, -1 in signed integers."""


@dataclass
class _Block:
    offset: int
    size: int
    free: bool = True


class _Segment:
    """A range of memory and its blocks, in the order of their addresses."""

    def __init__(self, block_size: int) -> None:
        """Create a segment that is large enough for a block of ``block_size`` bytes.

        If this size is at most `SMALL`, the segment has only small blocks, and otherwise only large blocks.
        """
        self.small = block_size <= SMALL
        size = _segment_size(block_size)
        raw = np.full(size + BLOCK, POISON, dtype=np.uint8)
        start = -raw.ctypes.data % BLOCK
        self.memory = raw[start : start + size]
        self.storage = torch.from_numpy(self.memory).untyped_storage()
        self.address = self.memory.ctypes.data
        self.end = self.address + size
        self.blocks = [_Block(0, size)]

    def take(self, block: _Block, size: int) -> None:
        block.free = False
        left = block.size - size
        if left >= BLOCK if self.small else left > SMALL:
            self.blocks.insert(self.blocks.index(block) + 1, _Block(block.offset + size, block.size - size))
            block.size = size

    def release(self, block: _Block) -> None:
        block.free = True
        at = self.blocks.index(block)
        if at + 1 < len(self.blocks) and self.blocks[at + 1].free:
            block.size += self.blocks.pop(at + 1).size
        if at and self.blocks[at - 1].free:
            self.blocks[at - 1].size += block.size
            del self.blocks[at]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _segment_size(block_size: int) -> int:
    if block_size <= SMALL:
        return 2 << 20
    if block_size < 10 << 20:
        return 20 << 20
    return -(-block_size // (2 << 20)) * (2 << 20)


class Pool:
    """The memory that all captures with the same pool handle share."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self.graphs = 0

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of ``nbytes`` bytes. Its block becomes free when no tensor owns the storage any more."""
        size = _rounded(nbytes)
        fitting = [
            (block.size, segment.address + block.offset, segment, block)
            for segment in self._segments
            if segment.small == (size <= SMALL)
            for block in segment.blocks
            if block.free and block.size >= size
        ]
        if fitting:
            _, _, segment, block = min(fitting, key=lambda found: found[:2])
        else:
            segment = _Segment(size)
            self._segments.append(segment)
            _SEGMENTS.add(segment)
            block = segment.blocks[0]
        segment.take(block, size)
        # torch.from_numpy keeps this array alive until the storage is deleted. Then the finalizer frees the block.
        array = segment.memory[block.offset : block.offset + nbytes]
        weakref.finalize(array, segment.release, block).atexit = False
        if _is_counting and _count is not None:
            _count.note()
        return torch.from_numpy(array).untyped_storage()

    def allocated(self) -> int:
        """Return the number of bytes in blocks that have an owner."""
        return sum(block.size for segment in self._segments for block in segment.blocks if not block.free)

    def reserved(self) -> int:
        """Return the number of bytes in all segments of the pool."""
        return sum(segment.end - segment.address for segment in self._segments)


_SEGMENTS: weakref.WeakSet[_Segment] = weakref.WeakSet()
_POOLS: dict[PoolId, Pool] = {}
_ids = itertools.count(1)

address = torch.Tensor.data_ptr
"""The function that returns the address of a tensor's first element, without a call of `address_taken`."""


def new_pool_id() -> PoolId:
    """Return a handle for a pool, like ``torch.cuda.graph_pool_handle``."""
    return (0, next(_ids))


def enter_pool(pool_id: PoolId) -> Pool:
    """Return the pool of a handle, and count one more graph that uses it."""
    pool = _POOLS.setdefault(pool_id, Pool())
    pool.graphs += 1
    return pool


def leave_pool(pool_id: PoolId) -> None:
    """Count one graph less that uses the pool of a handle. After the last graph, delete the pool."""
    _POOLS[pool_id].graphs -= 1
    if not _POOLS[pool_id].graphs:
        del _POOLS[pool_id]


def pools() -> list[Pool]:
    """Return all pools in use by graphs, or []."""
    return list(_POOLS.values())


def allocated() -> int:
    """Return the number of bytes in blocks that have an owner, in all pools."""
    return sum(pool.allocated() for pool in pools())


class _Count(TorchDispatchMode):
    """A dispatch mode that counts the bytes in pools, and the bytes of tensors that operations create elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._outside: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = allocated()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(
            "__torch_dispatch__" in vars(base) for kind in types for base in kind.__mro__ if base is not torch.Tensor
        ):
            return NotImplemented  # the subclass calls operations with plain tensors, which are counted
        for tensor in tree_iter((args, kwargs)):
            self._see(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            self._see(tensor, is_new=True)
        self.note()
        return result

    def _see(self, tensor: Any, is_new: bool) -> None:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._outside:
                size = _rounded(storage.nbytes()) if is_new else 0
                self._outside[storage._cdata] = StorageWeakRef(storage), size

    def note(self) -> None:
        """Raise the peak if more memory is in use now."""
        self._outside = {key: found for key, found in self._outside.items() if not found[0].expired()}
        self.peak = max(self.peak, allocated() + sum(size for _, size in self._outside.values()))


_count: _Count | None = None
_is_counting = False


def reset_peak() -> None:
    """Start to count memory, until a call of `peak`. Existing memory outside of pools is not counted."""
    global _count, _is_counting
    peak()
    _count, _is_counting = _Count(), True
    _count.__enter__()


def peak() -> int:
    """Return the peak in bytes since `reset_peak`, and stop counting, because counting is slow.

    If `reset_peak` was never called, return the bytes that are allocated in pools.
    """
    global _is_counting
    if _count is None:
        return allocated()
    if _is_counting:
        _count.__exit__(None, None, None)
        _is_counting = False
    return _count.peak


def view(storage: torch.UntypedStorage, like: torch.Tensor, nbytes_offset: int = 0) -> torch.Tensor:
    """Return a tensor in ``storage``, at ``nbytes_offset`` bytes, with the dtype, shape and strides of ``like``."""
    offset = nbytes_offset // like.element_size()
    made = torch.empty(0, dtype=like.dtype).set_(storage, offset, like.size(), like.stride())
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


class _Outside:
    """Memory that is outside of pools, and whose address a graph or a weak reference has."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        data = (storage.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "shape": (storage.nbytes(),), "typestr": "|u1", "data": data}

    def unowned(self) -> torch.UntypedStorage:
        """Return a storage that shares the memory and keeps it allocated, but does not count as an owner."""
        return torch.from_numpy(np.asarray(self)).untyped_storage()

    def is_freed(self) -> bool:
        """Return whether no tensor owns the memory any more."""
        return torch._C._storage_Use_Count(self._storage._cdata) == 1  # type: ignore[attr-defined]

    def overwrite(self) -> None:
        """Overwrite the memory with NaN, but four bytes with 1.0 in float32, because they may be TE's skip flag."""
        content = np.asarray(self)
        content[:] = POISON
        if content.size == 4:
            content.view(np.float32)[:] = 1.0


_OUTSIDE: weakref.WeakValueDictionary[int, _Outside] = weakref.WeakValueDictionary()


def _outside(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    found = _OUTSIDE.get(storage.data_ptr())
    if found is None:
        found = _OUTSIDE[storage.data_ptr()] = _Outside(storage)
    return found.unowned()


def overwrite_freed() -> None:
    """Overwrite memory outside of pools that no tensor owns any more."""
    for memory in list(_OUTSIDE.values()):
        if memory.is_freed():
            memory.overwrite()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the memory of ``tensor`` without owning it.

    If ``tensor`` is outside of pools and has no dimensions or no elements, the alias does own the memory.
    """
    at = address(tensor)
    segment = _segment_at(at)
    if segment is not None:
        return view(segment.storage, tensor, at - segment.address)
    if not tensor.dim() or not tensor.numel():
        return tensor.detach()
    storage = tensor.untyped_storage()
    return view(_outside(storage), tensor, at - storage.data_ptr())


def address_taken(tensor: torch.Tensor) -> None:
    """Record that the program reads the address of ``tensor``, perhaps for a weak reference."""
    global _last_taken
    if _segment_at(address(tensor)) is None:
        storage = tensor.untyped_storage()
        _last_taken = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()


def at_address(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor at an address in a pool, or in the tensor that was last passed to `address_taken`.

    The returned tensor does not own the memory.
    """
    segment = _segment_at(at)
    taken, start, nbytes = _last_taken or (None, 0, 0)
    if segment is not None:
        # As on a GPU, the new tensor has its own storage, whose use count does not include other tensors.
        storage, start = torch.from_numpy(segment.memory).untyped_storage(), segment.address
    elif taken is not None and 0 <= at - start < nbytes and (owned := _storage(taken)) is not None:
        storage = _outside(owned)
    else:
        raise NotImplementedError(f"the simulator does not know a tensor at the address {at:#x}")
    return view(storage, torch.empty(shape, dtype=dtype, device="meta"), at - start)


_last_taken: tuple[StorageWeakRef, int, int] | None = None
"""A weak reference to the storage whose address was read last, the address of its start, and its size in bytes."""


def _storage(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of ``reference``, or None if the storage was freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
    return found


def _segment_at(address: int) -> _Segment | None:
    return next((segment for segment in _SEGMENTS if segment.address <= address < segment.end), None)
