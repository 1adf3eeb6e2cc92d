"""Plan the captures of a schedule and their static buffers, from the ``_order`` of `make_graphed_callables`.

An order is a sequence of numbers. For chunk ``c`` of a model, counted from 1, ``c`` is the forward of the chunk's next
microbatch, ``-c`` its dgrad, and ``-c - 0.5`` its delayed wgrad. The rules of legal orders are in
docs/maintainers/schedules.md of te-graph-fixes. This module needs neither torch nor TransformerEngine.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

FORWARD, DGRAD, WGRAD = KINDS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Entry:
    """An entry of an order. Chunks and microbatches are counted from 0.

    ``last_read`` is the position of the last reader of the entry's buffer (the static inputs of a forward, the grad
    output of a dgrad). The reader is the wgrad of the microbatch if the chunk has wgrads, else the dgrad.
    """

    kind: str
    chunk: int
    microbatch: int
    last_read: int


class Buffers:
    """An assignment of numbers to buffers, with as few numbers as possible for each signature.

    Buffers with equal signatures that are in use at the same time have different numbers.
    """

    def __init__(self) -> None:
        self._last_reads: dict[Hashable, list[int]] = {}

    def take(self, signature: Hashable, start: int, last_read: int) -> int:
        """Return a number that is free for ``signature`` at ``start``, and reserve it until ``last_read``.

        ``start`` must not decrease from call to call.
        """
        last_reads = self._last_reads.setdefault(signature, [])
        for number, other in enumerate(last_reads):
            if other <= start:
                last_reads[number] = last_read
                return number
        last_reads.append(last_read)
        return len(last_reads) - 1


class Plan:
    """The entries of a legal order, and their buffers.

    ``entries`` are the result of `parse`. ``layers`` is the number of layers of each chunk. ``delayed`` are the chunks
    with wgrad entries, counted from 0. The constructor raises ValueError if the order has wgrads, unless each chunk has
    exactly one layer.
    """

    def __init__(self, entries: Sequence[Entry], layers: Sequence[int]) -> None:
        self.entries = entries
        self.layers = layers
        self.microbatches = 1 + max(entry.microbatch for entry in entries)
        self.delayed = frozenset(entry.chunk for entry in entries if entry.kind == WGRAD)
        if self.delayed and set(layers) != {1}:
            raise ValueError(f"_order has wgrads, so each chunk must have one layer, but chunks have {layers} layers")
        self._grad_outputs = Buffers()

    def index(self, position: int, layer: int) -> int:
        """Return TE's index of ``layer`` at ``position``. TE sorts graphs and inputs by chunk, microbatch and layer."""
        entry = self.entries[position]
        layers_before = sum(self.layers[: entry.chunk])
        return layers_before * self.microbatches + entry.microbatch * self.layers[entry.chunk] + layer

    def backward(self, position: int, needs_wgrad: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
        """Yield a pair for each backward graph to capture at ``position``: its layer, and whether it is a wgrad.

        ``needs_wgrad`` maps each `index` to whether its layer delays a wgrad. Raise RuntimeError if the entry is a
        wgrad, but its layer delays none. A delayed wgrad without an entry follows its dgrad.
        """
        entry = self.entries[position]
        for layer in reversed(range(self.layers[entry.chunk])):
            delays = needs_wgrad.get(self.index(position, layer), False)
            if entry.kind == WGRAD and not delays:
                raise RuntimeError(
                    f"_order[{position}] is a wgrad, but no module of chunk {entry.chunk + 1} in training mode delays "
                    "its wgrad. Build a module with delay_wgrad_compute=True, or remove the entry."
                )
            if entry.kind == DGRAD:
                yield layer, False
            if delays and (entry.kind == WGRAD or entry.chunk not in self.delayed):
                yield layer, True

    def grad_output(self, position: int, signature: Hashable) -> tuple[Hashable, int]:
        """Return the key of the grad-output buffer of the dgrad at ``position``.

        Only dgrads with equal signatures share a buffer. Call this method once for each dgrad, in the sequence of the
        order.
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
        """Return the static args and kwargs of each forward, by `index`, for an order with wgrads.

        Microbatches in flight at the same time never share a tensor, even if the caller passed them the same tensor.
        Constants are an exception (`find_constants`). With ``reuse``, the forwards use as few sets of inputs as
        possible, and sample arguments in a list are replaced in this list, as in TE, so that unused samples are freed.
        ``flatten`` and ``unflatten`` are functions of torch's pytree.
        """
        args, kwargs = (
            given if reuse and isinstance(given, list) else list(given) for given in (sample_args, sample_kwargs)
        )
        constants = find_constants([flatten(sample)[0] for sample in zip(args, kwargs, strict=True)])
        buffers = Buffers()
        assigned: dict[Hashable, list[Any]] = {}
        busy: dict[int, float] = {}
        for position, entry in enumerate(self.entries):
            if entry.kind != FORWARD:
                continue
            index = self.index(position, 0)
            leaves, spec = flatten((args[index], kwargs[index]))
            slot: Hashable = index
            if reuse:
                signature = (str(spec), *signatures(leaves, constants))
                slot = (signature, buffers.take(signature, position, entry.last_read))
            if slot not in assigned:
                static = [_copy(leaf) if busy.get(leaf.data_ptr(), -1) > position else leaf for leaf in leaves]
                own = [leaf.data_ptr() for leaf in static if leaf.data_ptr() not in constants]
                busy.update(dict.fromkeys(own, math.inf if reuse else entry.last_read))
                assigned[slot] = static
            pairs = zip(leaves, assigned[slot], strict=True)
            args[index], kwargs[index] = unflatten(
                [leaf if leaf.data_ptr() in constants else static_leaf for leaf, static_leaf in pairs], spec
            )
        return args, kwargs


def find_constants(samples: Iterable[Sequence[Any]]) -> set[int]:
    """Return the addresses of constants in the ``samples``, such as Megatron-Core's rotary table, or an empty set.

    A constant needs no gradient and occurs in samples whose other tensors differ. In contrast, a caller that reuses the
    static inputs of an earlier microbatch reuses all of them together. Each sample with a constant uses the constant
    itself as its static input, because no data of another sample may be copied over it.
    """
    constants: set[int] = set()
    first_samples: dict[int, list[int]] = {}
    for sample in samples:
        addresses = [leaf.data_ptr() for leaf in sample]
        for leaf, address in zip(sample, addresses, strict=True):
            if not leaf.requires_grad and first_samples.setdefault(address, addresses) != addresses:
                constants.add(address)
    return constants


def parse(order: Iterable[Any]) -> list[Entry]:
    """Return the entries of a legal order. For any other order, raise ValueError with a one-line message."""
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
                f"_order has {forwards} forwards, {dgrads} dgrads and {wgrads} wgrads of chunk {chunk}. Each chunk "
                f"needs at least one forward, as many forwards and dgrads as chunk 1 has forwards ({microbatches}), "
                "and as many wgrads or none."
            )
    entries = {}
    for (kind, chunk), of_microbatches in [*positions.items()]:
        last_reads = positions[WGRAD, chunk] or positions[DGRAD, chunk]
        for microbatch, position in enumerate(of_microbatches):
            entries[position] = Entry(kind, chunk - 1, microbatch, last_reads[microbatch])
    return [entry for _, entry in sorted(entries.items())]


def signatures(sample: Sequence[Any], constants: set[int]) -> list[Hashable]:
    """Return the properties that the static input of each tensor in ``sample`` must have, or [] for an empty sample.

    The properties include the first index of the tensor's address in the sample, and whether this address is one of the
    ``constants``.
    """
    addresses = [tensor.data_ptr() for tensor in sample]
    return [
        (
            *(type(t), t.shape, t.dtype, t.layout, t.device, t.stride(), t.requires_grad),
            addresses.index(a),
            a in constants,
        )
        for t, a in zip(sample, addresses, strict=True)
    ]


def _copy(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def grad_input_releases(order: Iterable[Any], layers_per_chunk: Sequence[int]) -> list[list[int]]:
    """Return the grad inputs that may return to the graph memory pool before each entry of ``order`` is captured.

    Element ``i`` of the result lists callables by `Plan.index`, or is []. After entry ``i`` begins, no code reads the
    gradients that the dgrads of these callables return. Only first layers of chunks are listed, because TE's own rule
    is correct for all other layers. Raise ValueError for an illegal order.

    The schedule is Megatron-Core's interleaved 1F1B. A step is the backward of one model chunk for one microbatch.
    Megatron-Core sends the gradient of the chunk's first layer, and waits for this send after the next step and the
    forward that runs with that step (docs/maintainers/schedules.md of te-graph-fixes).
    """
    plan = Plan(parse(order), layers_per_chunk)
    entries = plan.entries
    model_chunks = _model_chunks(plan)
    steps = _steps(plan, model_chunks)
    ends = [_end_of_forwards(entries, step[-1], model_chunks) for step in steps]
    sends = [model_chunks[entries[step[0]].chunk] > 0 for step in steps]

    releases: list[list[int]] = [[] for _ in range(len(entries) + 1)]
    for step in steps:
        for dgrad, dgrad_below in pairwise(step):
            releases[dgrad_below + 1].append(plan.index(dgrad, 0))
    last_forward = max(position for position, entry in enumerate(entries) if entry.kind == FORWARD)
    last_steady = next((number for number, end in enumerate(ends) if end > last_forward), None)
    for number, step in enumerate(steps[:-1]):
        wait = number + 1
        if number == last_steady and sends[number]:
            # The last send of the steady state is known to be complete only after the next send of the cooldown.
            wait = next((later for later in range(wait, len(steps)) if sends[later]), wait)
        releases[ends[wait]].append(plan.index(step[-1], 0))
    return releases[:-1]


def _model_chunks(plan: Plan) -> list[int]:
    """Return, for each chunk, the number of the model chunk that contains it.

    If each chunk is one layer, a model chunk is a sequence of chunks that all microbatches run without a gap
    (docs/maintainers/schedules.md of te-graph-fixes).
    """
    chunks = len(plan.layers)
    if set(plan.layers) != {1}:
        return list(range(chunks))
    forwards = [entry.chunk for entry in plan.entries if entry.kind == FORWARD]
    dgrads = [entry.chunk for entry in reversed(plan.entries) if entry.kind == DGRAD]
    neighbors = list(pairwise([None, *forwards, None, *dgrads, None]))
    numbers = [0]
    for chunk in range(1, chunks):
        is_same = all((first == chunk - 1) == (second == chunk) for first, second in neighbors)
        numbers.append(numbers[-1] if is_same else numbers[-1] + 1)
    return numbers


def _steps(plan: Plan, model_chunks: Sequence[int]) -> list[list[int]]:
    """Return, for each step (a model chunk and a microbatch), the positions of its dgrads, from its last layer down."""
    steps: list[list[int]] = []
    for position, entry in enumerate(plan.entries):
        if entry.kind == DGRAD and plan.layers[entry.chunk]:
            if steps and _is_below(entry, plan.entries[steps[-1][-1]], model_chunks):
                steps[-1].append(position)
            else:
                steps.append([position])
    return steps


def _is_below(lower: Entry, upper: Entry, model_chunks: Sequence[int]) -> bool:
    """Return whether ``lower`` runs the layer directly below ``upper`` in the same model chunk."""
    return lower.chunk == upper.chunk - 1 and model_chunks[lower.chunk] == model_chunks[upper.chunk]


def _end_of_forwards(entries: Sequence[Entry], dgrad: int, model_chunks: Sequence[int]) -> int:
    """Return the position after ``dgrad`` and after any following forwards that continue a model chunk.

    The last forward before ``dgrad`` belongs to this model chunk.
    """
    end = dgrad + 1
    last = next(entry for entry in reversed(entries[:dgrad]) if entry.kind == FORWARD)
    for position, entry in enumerate(entries[end:], end):
        if entry.kind == FORWARD and _is_below(last, entry, model_chunks):
            last, end = entry, position + 1
        elif entry.kind != WGRAD:
            break
    return end
