"""The ``_order`` of TransformerEngine's `make_graphed_callables`: its grammar, and a plan computed once from it.

An order says in which sequence the graphs of a pipelined step are captured, which must be the sequence in which they
are replayed. It is a sequence of numbers. The model is cut into chunks, numbered from 1; each microbatch runs through
each chunk once. For chunk ``c`` (a whole number):

========= =============================================================================================
entry     meaning
========= =============================================================================================
``c``     the forward of the chunk's next microbatch
``-c``    the dgrad (the gradient of the inputs, and of the weights that are not delayed) of its next microbatch
``-c-.5`` the delayed wgrad (the gradient of the weights) of its next microbatch
========= =============================================================================================

The k-th entry of a kind and chunk stands for the chunk's k-th microbatch; forwards, dgrads and wgrads are counted
separately. An order is legal when

1. it is not empty, and each entry is a finite number other than 0;
2. forwards are whole numbers, and the fraction of a wgrad is exactly one half;
3. chunks are numbered from 1 without gaps;
4. every chunk has the same number of microbatches: as many forwards, and as many dgrads;
5. the k-th dgrad of a chunk comes after its k-th forward;
6. wgrads are given for all microbatches of a chunk or for none, and the k-th wgrad comes after the k-th dgrad;
7. with wgrads, each chunk has one layer (one callable).

A chunk without wgrads whose modules delay theirs nevertheless has them captured right after the dgrad of each layer,
as TE 2.10 does; they are to be replayed at that place too.

What lives how long: the static inputs of a forward are read last by the wgrad of its microbatch if the chunk has
wgrads, else by the dgrad; so is the buffer that a dgrad reads its grad output from. For the grad inputs that a dgrad
returns see `grad_input_releases`.

This module needs neither torch nor TransformerEngine.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

FORWARD = "forward"
DGRAD = "dgrad"
WGRAD = "wgrad"

_logger = logging.getLogger("te_graph_fixes.order")


@dataclass(frozen=True)
class Entry:
    """What the entry at one position of an order stands for; chunk and microbatch are counted from 0.

    ``last_read`` is the position at which the entry's buffer (a forward's static inputs, a dgrad's grad output) is
    read for the last time, its own position for a wgrad.
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
    """What each entry of a legal order stands for, and which buffers it uses. Made by `make_plan`.

    ``order`` holds ints, and floats for wgrads; ``layers`` the number of layers of each chunk; ``entries`` an `Entry`
    for each position; ``delayed`` the chunks that have wgrad entries, counted from 0.
    """

    def __init__(self, entries: Sequence[Entry], layers: Sequence[int]) -> None:
        self.entries = tuple(entries)
        self.layers = list(layers)
        self.order = [_value(entry) for entry in entries]
        self.microbatches = 1 + max(entry.microbatch for entry in entries)
        self.delayed = frozenset(entry.chunk for entry in entries if entry.kind == WGRAD)
        self._grad_outputs = Buffers()

    def index(self, position: int, layer: int) -> int:
        """TE's number for the graphs and samples of one layer at ``position``: by chunk, microbatch, layer."""
        entry = self.entries[position]
        layers_before = sum(self.layers[: entry.chunk])
        return layers_before * self.microbatches + entry.microbatch * self.layers[entry.chunk] + layer

    def backward(self, position: int, needs_wgrad: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
        """The backward graphs to capture at ``position``, as (layer, whether it is the layer's wgrad).

        ``needs_wgrad`` says, by `index`, which layers delay a wgrad; RuntimeError where an entry asks for one that is
        not delayed.
        """
        entry = self.entries[position]
        for layer in reversed(range(self.layers[entry.chunk])):
            delays = needs_wgrad.get(self.index(position, layer), False)
            if entry.kind == DGRAD:
                yield layer, False
                if delays and entry.chunk not in self.delayed:
                    yield layer, True
            elif delays:
                yield layer, True
            else:
                raise RuntimeError(f"{_at(position, _value(entry), entry.chunk + 1)}: no module delays its wgrad")

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
        samples = list(zip(sample_args, sample_kwargs, strict=True))
        buffers = Buffers()
        assigned: dict[Hashable, Any] = {}
        busy: dict[int, float] = {}
        separated = 0
        for position, entry in enumerate(self.entries):
            if entry.kind != FORWARD:
                continue
            index = self.index(position, 0)
            leaves, spec = flatten(samples[index])
            if not all(hasattr(leaf, "data_ptr") for leaf in leaves):
                continue  # TE says what is wrong with this sample
            slot: Hashable = index
            if reuse:
                signature = (str(spec), *_signatures(leaves))
                slot = (signature, buffers.take(signature, position, entry.last_read))
            if slot not in assigned:
                shared = [busy.get(leaf.data_ptr(), -1) > position for leaf in leaves]
                if any(shared):
                    separated += 1
                    leaves = [_copy(leaf) if copy else leaf for leaf, copy in zip(leaves, shared, strict=True)]
                    samples[index] = unflatten(leaves, spec)
                busy.update((leaf.data_ptr(), math.inf if reuse else entry.last_read) for leaf in leaves)
                assigned[slot] = samples[index]
            samples[index] = assigned[slot]
        if separated:
            _logger.info(
                "%d of %d samples shared tensors with a microbatch in use at the same time: they have their own now",
                separated,
                len(samples),
            )
        args, kwargs = [args for args, _ in samples], [kwargs for _, kwargs in samples]
        for given, found in ((sample_args, args), (sample_kwargs, kwargs)):
            if reuse and isinstance(given, list):
                given[:] = found
        return args, kwargs


def make_plan(
    order: Iterable[Any],
    layers: int | Sequence[int] | None,
    callables: int,
    sample_args: int,
    sample_kwargs: int,
    training: bool,
) -> Plan:
    """The plan for ``order``; a one-line ValueError where it, or what goes with it, breaks a rule of the grammar.

    ``layers`` is TE's ``_num_layers_per_chunk``; ``callables``, ``sample_args`` and ``sample_kwargs`` are the numbers
    of what was given.
    """
    entries = parse(order)
    plan = Plan(entries, _layers(entries, layers, sample_args))
    total = sum(plan.layers)
    if callables != total:
        raise ValueError(
            f"_order has {len(plan.layers)} chunks with {total} layers, but {callables} callables are given"
        )
    for name, number in (("sample_args", sample_args), ("sample_kwargs", sample_kwargs)):
        if number != total * plan.microbatches:
            raise ValueError(
                f"_order has {plan.microbatches} microbatches of {total} layers, which need "
                f"{total * plan.microbatches} {name}, but {number} are given"
            )
    for position, entry in enumerate(entries):
        if entry.kind == WGRAD:
            place = _at(position, plan.order[position], entry.chunk + 1)
            if any(number != 1 for number in plan.layers):
                raise ValueError(
                    f"{place}: with wgrads each chunk has one layer, but _num_layers_per_chunk is {plan.layers}"
                )
            if not training:
                raise ValueError(f"{place}: wgrads need modules in training mode")
            break
    return plan


def parse(order: Iterable[Any]) -> list[Entry]:
    """The entries of a legal order; ValueError naming position, entry, chunk and rule for any other."""
    try:
        given = list(order)
    except TypeError:
        raise ValueError(f"_order is {order!r}: it must be a sequence of numbers") from None
    if not given:
        raise ValueError("_order is empty: it must hold a forward and a dgrad for each microbatch of each chunk")
    positions: dict[tuple[str, int], list[int]] = {}
    entries: list[tuple[str, int, int]] = []
    for position, value in enumerate(given):
        kind, chunk = _kind_and_chunk(position, value)
        same = positions.setdefault((kind, chunk), [])
        before = {DGRAD: FORWARD, WGRAD: DGRAD}.get(kind)
        if before and len(same) >= len(positions.get((before, chunk), ())):
            raise ValueError(
                f"{_at(position, value, chunk)}: {kind} {len(same) + 1} of a chunk must come after its {before} "
                f"{len(same) + 1}"
            )
        entries.append((kind, chunk - 1, len(same)))
        same.append(position)
    _check_counts(given, positions)
    return [
        Entry(kind, chunk, microbatch, (positions.get((WGRAD, chunk + 1)) or positions[DGRAD, chunk + 1])[microbatch])
        for kind, chunk, microbatch in entries
    ]


def _kind_and_chunk(position: int, value: Any) -> tuple[str, int]:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"_order[{position}] = {value!r}: an entry must be a finite number")
    fraction, whole = math.modf(abs(number))
    chunk = int(whole)
    if chunk == 0:
        raise ValueError(f"{_at(position, value, chunk)}: chunks are numbered from 1")
    if number > 0 and fraction:
        raise ValueError(f"{_at(position, value, chunk)}: a forward must be a whole number")
    if fraction not in (0.0, 0.5):
        raise ValueError(f"{_at(position, value, chunk)}: the fraction of a wgrad must be exactly one half")
    return FORWARD if number > 0 else WGRAD if fraction else DGRAD, chunk


def _check_counts(given: list[Any], positions: dict[tuple[str, int], list[int]]) -> None:
    chunks = {chunk for _, chunk in positions}
    microbatches = len(positions.get((FORWARD, 1), ()))
    for chunk in sorted(chunks):
        forwards = positions[FORWARD, chunk]
        place = _at(forwards[-1], given[forwards[-1]], chunk)
        if chunk > 1 and chunk - 1 not in chunks:
            raise ValueError(f"{place}: chunks are numbered from 1 without gaps, but there is no chunk {chunk - 1}")
        if len(forwards) != microbatches:
            raise ValueError(
                f"{place}: every chunk must have the same number of microbatches, but there are {len(forwards)} "
                f"forwards, and {microbatches} of chunk 1"
            )
        for kind, rule in (
            (DGRAD, "every microbatch has one dgrad"),
            (WGRAD, "all of a chunk's microbatches have wgrads or none"),
        ):
            found = positions.get((kind, chunk), [])
            if len(found) != microbatches and (found or kind == DGRAD):
                place = _at(found[-1], given[found[-1]], chunk) if found else place
                raise ValueError(f"{place}: {rule}, but there are {len(found)} {kind}s for {microbatches} forwards")


def _layers(entries: Sequence[Entry], layers: int | Sequence[int] | None, samples: int) -> list[int]:
    """The number of layers of each chunk, as TE reads ``_num_layers_per_chunk``."""
    chunks = 1 + max(entry.chunk for entry in entries)
    forwards = sum(entry.kind == FORWARD for entry in entries)
    if layers is None:
        if not samples or samples % forwards:
            raise ValueError(f"_order has {forwards} forwards: {samples} sample_args cannot be divided among them")
        return [samples // forwards] * chunks
    try:
        found = [operator.index(number) for number in (layers if isinstance(layers, Iterable) else [layers] * chunks)]
    except TypeError:
        found = []
    if len(found) != chunks or any(number < 0 for number in found):
        raise ValueError(
            f"_num_layers_per_chunk is {layers!r}: it must be one number of layers, or {chunks}, one for each chunk"
        )
    return found


def _value(entry: Entry) -> int | float:
    number = entry.chunk + 1
    return {FORWARD: number, DGRAD: -number, WGRAD: -number - 0.5}[entry.kind]


def _at(position: int, value: Any, chunk: int) -> str:
    return f"_order[{position}] = {value!r} (chunk {chunk})"


def _signatures(sample: Sequence[Any]) -> list[Hashable]:
    """All that static inputs keep of the tensors of a sample, and which of these are the same."""
    addresses = [tensor.data_ptr() for tensor in sample]
    return [
        (type(t), t.shape, t.dtype, t.layout, t.device, t.stride(), t.requires_grad, addresses.index(t.data_ptr()))
        for t in sample
    ]


def _copy(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _Dgrad:
    """The dgrad of a chunk (counted from 0) and microbatch.

    ``first_callable`` is TE's index of its first layer; ``end`` the entry behind it, and behind the forwards of a model
    chunk that is under way.
    """

    chunk: int
    first_callable: int
    end: int


def grad_input_releases(order: Sequence[float], layers_per_chunk: Sequence[int]) -> list[list[int]]:
    """Which grad inputs may go back to the graph pool just before each entry of ``order`` is captured.

    Element ``i`` of the result lists callables by TE's index (chunk by chunk, within it microbatch by microbatch,
    within it layer by layer): of each, the gradient that its dgrad returns is read for the last time before entry
    ``i`` runs. Only the first layer of a chunk occurs; for the others TE has a rule of its own, which is right.

    Who reads it: the backward of the layer below, which comes before the next dgrad; and for the first layer of a model
    chunk the send to the previous pipeline stage. Megatron-Core waits for that send once the next model chunk's
    backward, and the forward that overlaps it, have been issued. So it is held through the next model chunk's last
    dgrad and through the forwards of a model chunk that is under way at that point.

    For the last send before the cooldown, whose backwards have no forwards beside them, Megatron-Core waits at the very
    end (unless ``overlap_p2p_comm_warmup_flush`` is set): what holds it up before is only that a later send comes after
    it. On the first stage the first model chunk sends nothing. So that grad input is held through the next backward of
    another model chunk, if there is one. In schedules whose microbatches fill all groups the next backward is one.

    Where a chunk has several layers the chunks are the model chunks, and this is TE's rule: released after the next
    chunk's dgrad. Where every chunk is one layer, as under Megatron's ``overlap_moe_expert_parallel_comm``, the order
    does not name the model chunks. Chunks ``c`` and ``c + 1`` can be of one model chunk only if each forward of ``c``
    is directly followed, among the forwards, by one of ``c + 1``, and each dgrad of ``c + 1``, among the dgrads, by one
    of ``c``. An interleaved schedule of real model chunks never looks like that, for it runs a chunk for several
    microbatches before the next: its lifetimes are TE's. Otherwise a gradient is held for as long as the worst division
    of the chunks into model chunks needs.
    """
    if any(layers != 1 for layers in layers_per_chunk):
        model_chunks = list(range(len(layers_per_chunk)))
    else:
        model_chunks = _longest_model_chunks(order, len(layers_per_chunk))
    steps = _steps(_dgrads(order, layers_per_chunk, model_chunks), model_chunks)
    ends = [step[-1].end for step in steps]
    sends = [model_chunks[step[0].chunk] > 0 for step in steps]
    last_forward = max(i for i, entry in enumerate(order) if entry > 0)
    last_steady = next((s for s, end in enumerate(ends) if end > last_forward), None)

    releases: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for s, step in enumerate(steps):
        for dgrad in step[:-1]:
            releases[ends[s]].append(dgrad.first_callable)
        if s + 1 < len(steps):
            waited = s + 1
            if s == last_steady and sends[s]:
                waited = next((later for later in range(s + 1, len(steps)) if sends[later]), waited)
            releases[ends[waited]].append(step[-1].first_callable)
    return releases[:-1]


def _dgrads(order: Sequence[float], layers_per_chunk: Sequence[int], model_chunks: Sequence[int]) -> list[_Dgrad]:
    """The dgrads of an order, less those of chunks without layers."""
    microbatches = sum(entry > 0 for entry in order) // len(layers_per_chunk)
    next_callable = [microbatches * layers for layers in accumulate(layers_per_chunk, initial=0)]
    dgrads = []
    for i, entry in enumerate(order):
        chunk = -int(entry) - 1
        if _is_dgrad(entry) and layers_per_chunk[chunk]:
            dgrads.append(_Dgrad(chunk, next_callable[chunk], _end_of_forwards(order, i, model_chunks)))
            next_callable[chunk] += layers_per_chunk[chunk]
    return dgrads


def _steps(dgrads: Iterable[_Dgrad], model_chunks: Sequence[int]) -> list[list[_Dgrad]]:
    """The dgrads of each model chunk and microbatch, which run one behind the other."""
    steps: list[list[_Dgrad]] = []
    for dgrad in dgrads:
        if steps and _are_neighbours(dgrad.chunk, steps[-1][-1].chunk, model_chunks):
            steps[-1].append(dgrad)
        else:
            steps.append([dgrad])
    return steps


def _are_neighbours(lower: int, upper: int, model_chunks: Sequence[int]) -> bool:
    """Whether a chunk is directly below another one of its model chunk; they are counted from 0."""
    return 0 <= lower == upper - 1 and model_chunks[lower] == model_chunks[upper]


def _is_dgrad(entry: float) -> bool:
    return entry < 0 and math.ceil(entry) == entry


def _end_of_forwards(order: Sequence[float], dgrad: int, model_chunks: Sequence[int]) -> int:
    """The entry after ``dgrad``, or after the last forward before the next dgrad of the model chunk under way there."""
    end = dgrad + 1
    under_way = next((int(entry) - 1 for entry in reversed(order[:dgrad]) if entry > 0), -1)
    for i in range(dgrad + 1, len(order)):
        chunk = int(order[i]) - 1
        if order[i] > 0 and _are_neighbours(under_way, chunk, model_chunks):
            under_way, end = chunk, i + 1
        elif order[i] > 0 or _is_dgrad(order[i]):
            break
    return end


def _longest_model_chunks(order: Sequence[float], num_chunks: int) -> list[int]:
    """The number of each chunk's model chunk, where these are as long as an order with one layer a chunk allows."""
    forwards = [entry for entry in order if entry > 0]
    dgrads = [-entry for entry in reversed(order) if _is_dgrad(entry)]
    neighbours = list(pairwise([0, *forwards, 0, *dgrads, 0]))
    numbers = [0]
    for chunk in range(1, num_chunks):
        is_one = all((first == chunk) == (second == chunk + 1) for first, second in neighbours)
        numbers.append(numbers[-1] if is_one else numbers[-1] + 1)
    return numbers
