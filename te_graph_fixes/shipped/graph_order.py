"""Plans from the ``_order`` of TransformerEngine's `make_graphed_callables`: where captures stand, and their buffers.

An order is a sequence of numbers. For the chunks of a model, counted from 1, ``c`` stands for the forward of the
chunk's next microbatch, ``-c`` for its dgrad, and ``-c - 0.5`` for its delayed wgrad. The rules of legal orders are in
docs/maintainers/orders.md of te-graph-fixes. This module needs neither torch nor TransformerEngine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

FORWARD, DGRAD, WGRAD = KINDS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Entry:
    """An entry of an order; chunk and microbatch are counted from 0.

    ``last_read`` is the position at which the entry's buffer (a forward's static inputs, a dgrad's grad output) is
    read for the last time: that of its microbatch's wgrad where the chunk has wgrads, else of its dgrad.
    """

    kind: str
    chunk: int
    microbatch: int
    last_read: int


class Buffers:
    """Numbers for buffers with lifetimes: the fewest, for each signature, that keep those in use at a time apart."""

    def __init__(self) -> None:
        self._last_reads: dict[Hashable, list[int]] = {}

    def take(self, signature: Hashable, start: int, last_read: int) -> int:
        """The number of a buffer that is free at ``start``, in use until ``last_read``; starts never decrease."""
        last_reads = self._last_reads.setdefault(signature, [])
        for number, other in enumerate(last_reads):
            if other <= start:
                last_reads[number] = last_read
                return number
        last_reads.append(last_read)
        return len(last_reads) - 1


class Plan:
    """The entries of a legal order, and the buffers that they use.

    ``entries`` are those of `parse`, ``layers`` the number of layers of each chunk, ``delayed`` the chunks that have
    wgrad entries, counted from 0. ValueError where such a chunk has several layers.
    """

    def __init__(self, entries: Sequence[Entry], layers: Sequence[int]) -> None:
        self.entries = entries
        self.layers = layers
        self.microbatches = 1 + max(entry.microbatch for entry in entries)
        self.delayed = frozenset(entry.chunk for entry in entries if entry.kind == WGRAD)
        if self.delayed and set(layers) != {1}:
            raise ValueError(f"_order has wgrads: give one layer in each chunk, not {layers}")
        self._grad_outputs = Buffers()

    def index(self, position: int, layer: int) -> int:
        """TE's number for the graphs and samples of one layer at ``position``: by chunk, microbatch, layer."""
        entry = self.entries[position]
        layers_before = sum(self.layers[: entry.chunk])
        return layers_before * self.microbatches + entry.microbatch * self.layers[entry.chunk] + layer

    def backward(self, position: int, needs_wgrad: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
        """The backward graphs to capture at ``position``, as (layer, whether it is the layer's wgrad).

        ``needs_wgrad`` says, by `index`, which layers delay a wgrad; RuntimeError where an entry asks for one that is
        not delayed. Those that no entry asks for come right after their dgrad.
        """
        entry = self.entries[position]
        for layer in reversed(range(self.layers[entry.chunk])):
            delays = needs_wgrad.get(self.index(position, layer), False)
            if entry.kind == WGRAD and not delays:
                raise RuntimeError(
                    f"_order[{position}] is a wgrad, and no module of chunk {entry.chunk + 1} in training mode delays "
                    "its own: build one with delay_wgrad_compute=True, or leave the entry out"
                )
            if entry.kind == DGRAD:
                yield layer, False
            if delays and (entry.kind == WGRAD or entry.chunk not in self.delayed):
                yield layer, True

    def grad_output(self, position: int, signature: Hashable) -> tuple[Hashable, int]:
        """The key of the buffer that the dgrad at ``position`` reads its grad output from, among equal signatures.

        To be called once for each dgrad, in the sequence of the order.
        """
        return signature, self._grad_outputs.take(signature, position, self.entries[position].last_read)

    def assign_inputs(
        self,
        sample_args: Sequence[Any],
        sample_kwargs: Sequence[Any],
        reuse: bool,
        flatten: Callable[[Any], tuple[list[Any], Any]],
        unflatten: Callable[[list[Any], Any], Any],
    ) -> tuple[list[Any], list[Any]]:
        """The static inputs of each forward (by `index`), for an order with wgrads.

        Microbatches that are in use at the same time never share a tensor, even where the caller gave them the same
        one. With ``reuse``, the fewest sets of inputs that allow for this serve all, and lists are changed in place, as
        TE does, so that the caller does not keep alive what is not used. ``flatten`` and ``unflatten`` are those of
        torch's pytree.
        """
        args, kwargs = (
            given if reuse and isinstance(given, list) else list(given) for given in (sample_args, sample_kwargs)
        )
        buffers = Buffers()
        assigned: dict[Hashable, Any] = {}
        busy: dict[int, float] = {}
        for position, entry in enumerate(self.entries):
            if entry.kind != FORWARD:
                continue
            index = self.index(position, 0)
            leaves, spec = flatten((args[index], kwargs[index]))
            slot: Hashable = index
            if reuse:
                signature = (str(spec), *_signatures(leaves))
                slot = (signature, buffers.take(signature, position, entry.last_read))
            if slot not in assigned:
                leaves = [_copy(leaf) if busy.get(leaf.data_ptr(), -1) > position else leaf for leaf in leaves]
                busy.update((leaf.data_ptr(), math.inf if reuse else entry.last_read) for leaf in leaves)
                assigned[slot] = unflatten(leaves, spec)
            args[index], kwargs[index] = assigned[slot]
        return args, kwargs


def parse(order: Iterable[Any]) -> list[Entry]:
    """The entries of a legal order; ValueError, in one line, for any other."""
    positions: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position, value in enumerate(order):
        chunk, fraction = int(abs(value)), abs(value) % 1
        if chunk < 1 or fraction not in ((0,) if value > 0 else (0, 0.5)):
            raise ValueError(f"_order[{position}] = {value}: entries are c, -c and -c - 0.5, for chunks c from 1")
        kind = FORWARD if value > 0 else WGRAD if fraction else DGRAD
        before = {DGRAD: FORWARD, WGRAD: DGRAD}.get(kind)
        if before and len(positions[kind, chunk]) == len(positions[before, chunk]):
            raise ValueError(
                f"_order[{position}] = {value}: the {before} of its microbatch must come before this {kind}"
            )
        positions[kind, chunk].append(position)
    microbatches = len(positions[FORWARD, 1])
    for chunk in range(1, 1 + max(chunk for _, chunk in positions)):
        forwards, dgrads, wgrads = (len(positions[kind, chunk]) for kind in KINDS)
        if not forwards == dgrads == microbatches > 0 or wgrads not in (0, microbatches):
            raise ValueError(
                f"_order has {forwards} forwards, {dgrads} dgrads and {wgrads} wgrads of chunk {chunk}: each chunk has "
                f"as many forwards and dgrads as chunk 1 has forwards, {microbatches}, and as many wgrads or none"
            )
    entries = {}
    for (kind, chunk), of_microbatches in [*positions.items()]:
        last_reads = positions[WGRAD, chunk] or positions[DGRAD, chunk]
        for microbatch, position in enumerate(of_microbatches):
            entries[position] = Entry(kind, chunk - 1, microbatch, last_reads[microbatch])
    return [entry for _, entry in sorted(entries.items())]


def _signatures(sample: Sequence[Any]) -> list[Hashable]:
    """All that static inputs keep of the tensors of a sample, and which of these are the same."""
    addresses = [tensor.data_ptr() for tensor in sample]
    return [
        (type(t), t.shape, t.dtype, t.layout, t.device, t.stride(), t.requires_grad, addresses.index(t.data_ptr()))
        for t in sample
    ]


def _copy(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def grad_input_releases(order: Iterable[Any], layers_per_chunk: Sequence[int]) -> list[list[int]]:
    """Which grad inputs may go back to the graph pool just before each entry of ``order`` is captured.

    Element ``i`` of the result lists callables by `Plan.index`: of each, the gradient that its dgrad returns is read
    for the last time before entry ``i`` runs. Only the first layer of a chunk occurs; for the others TE has a rule of
    its own, which is right. ValueError for an order that is not legal.

    Megatron-Core waits for the send of such a gradient as docs/maintainers/lifetimes.md of te-graph-fixes says. Where
    each chunk is one layer the order does not name the model chunks, and they are taken to be as long as it allows.
    """
    plan = Plan(parse(order), layers_per_chunk)
    entries = plan.entries
    if set(plan.layers) == {1}:
        model_chunks = _longest_model_chunks(entries, len(plan.layers))
    else:
        model_chunks = list(range(len(plan.layers)))
    steps = _steps(plan, model_chunks)
    ends = [_end_of_forwards(entries, step[-1], model_chunks) for step in steps]
    sends = [model_chunks[entries[step[0]].chunk] > 0 for step in steps]
    last_forward = max(position for position, entry in enumerate(entries) if entry.kind == FORWARD)
    last_steady = next((number for number, end in enumerate(ends) if end > last_forward), None)

    releases: list[list[int]] = [[] for _ in range(len(entries) + 1)]
    for number, step in enumerate(steps):
        for dgrad in step[:-1]:
            releases[ends[number]].append(plan.index(dgrad, 0))
        if number + 1 < len(steps):
            waited = number + 1
            if number == last_steady and sends[number]:  # the last send before the cooldown ends with a later one
                waited = next((later for later in range(waited, len(steps)) if sends[later]), waited)
            releases[ends[waited]].append(plan.index(step[-1], 0))
    return releases[:-1]


def _longest_model_chunks(entries: Sequence[Entry], chunks: int) -> list[int]:
    """The number of each chunk's model chunk, where these are as long as an order with one layer a chunk allows."""
    forwards = [entry.chunk for entry in entries if entry.kind == FORWARD]
    dgrads = [entry.chunk for entry in reversed(entries) if entry.kind == DGRAD]
    neighbours = list(pairwise([None, *forwards, None, *dgrads, None]))
    numbers = [0]
    for chunk in range(1, chunks):
        is_one = all((first == chunk - 1) == (second == chunk) for first, second in neighbours)
        numbers.append(numbers[-1] if is_one else numbers[-1] + 1)
    return numbers


def _steps(plan: Plan, model_chunks: Sequence[int]) -> list[list[int]]:
    """The positions of the dgrads of each model chunk and microbatch, which run one after the other."""
    steps: list[list[int]] = []
    for position, entry in enumerate(plan.entries):
        if entry.kind == DGRAD and plan.layers[entry.chunk]:
            if steps and _are_neighbours(entry, plan.entries[steps[-1][-1]], model_chunks):
                steps[-1].append(position)
            else:
                steps.append([position])
    return steps


def _are_neighbours(lower: Entry, upper: Entry, model_chunks: Sequence[int]) -> bool:
    """Whether the chunk of an entry is directly below that of another one, in one model chunk."""
    return lower.chunk == upper.chunk - 1 and model_chunks[lower.chunk] == model_chunks[upper.chunk]


def _end_of_forwards(entries: Sequence[Entry], dgrad: int, model_chunks: Sequence[int]) -> int:
    """The position after ``dgrad``, or after the last forward before the next dgrad of the model chunk under way."""
    end = dgrad + 1
    under_way = next(entry for entry in reversed(entries[:dgrad]) if entry.kind == FORWARD)
    for position, entry in enumerate(entries[end:], end):
        if entry.kind == FORWARD and _are_neighbours(under_way, entry, model_chunks):
            under_way, end = entry, position + 1
        elif entry.kind != WGRAD:
            break
    return end
