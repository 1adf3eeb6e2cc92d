"""Test the entries, buffers and inputs that `graph_order` plans, without torch and TransformerEngine."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_graph_fixes.support.graph_order import DGRAD, FORWARD, WGRAD, Entry, Plan, parse
from tests.support.legal_orders import NAMED, changed_order, legal, random_order

CHOICES = st.integers(0, 2**32).map(random.Random)
ADDRESSES = count(1)


@st.composite
def orders(draw: st.DrawFn, wgrads: bool = True) -> list[float]:
    """Generate legal orders of up to 4 chunks and 6 microbatches. If ``wgrads``, any chunk may delay its wgrads."""
    chunks = draw(st.integers(1, 4))
    delayed = draw(st.sets(st.integers(1, chunks))) if wgrads else ()
    return random_order(draw(CHOICES), chunks, draw(st.integers(1, 6)), delayed)


def plan_of(order: Sequence[float], layers: int = 1) -> Plan:
    entries = parse(order)
    return Plan(entries, [layers] * (1 + max(entry.chunk for entry in entries)))


def largest_overlap(lifetimes: Sequence[tuple[int, int]]) -> int:
    return max(
        (sum(start <= position < end for start, end in lifetimes) for position in {start for start, _ in lifetimes}),
        default=0,
    )


@dataclass
class Tensor:
    """A stand-in for a tensor, with the attributes that the plan reads."""

    address: int = field(default_factory=lambda: next(ADDRESSES))
    shape: tuple[int, ...] = (2,)
    requires_grad: bool = True
    dtype = layout = device = None

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def data_ptr(self) -> int:
        return self.address

    def detach(self) -> Tensor:
        return Tensor(self.address, self.shape, False)

    def clone(self) -> Tensor:
        return Tensor(shape=self.shape, requires_grad=self.requires_grad)

    def requires_grad_(self, value: bool) -> Tensor:
        self.requires_grad = value
        return self


def flatten(sample: tuple[tuple[Tensor, ...], dict[str, Tensor]]) -> tuple[list[Tensor], tuple[str, ...]]:
    args, kwargs = sample
    return [*args, *kwargs.values()], tuple(kwargs)


def unflatten(leaves: list[Tensor], names: tuple[str, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    split = len(leaves) - len(names)
    return tuple(leaves[:split]), dict(zip(names, leaves[split:], strict=True))


def assign(plan: Plan, samples: list[list[Tensor]], reuse: bool) -> list[list[Tensor]]:
    args, kwargs = plan.assign_inputs(
        [(sample[0],) for sample in samples], [{"x": s[1]} for s in samples], reuse, flatten, unflatten
    )
    return [[*a, k["x"]] for a, k in zip(args, kwargs, strict=True)]


def check_entries(order: list[float]) -> None:
    """Check the microbatch of each entry, and that its ``last_read`` is the last backward entry of this microbatch."""
    plan = plan_of(order)
    seen: dict[float, int] = {}
    for position, (value, entry) in enumerate(zip(order, plan.entries, strict=True)):
        microbatch = seen[value] = seen.get(value, -1) + 1
        chunk = int(abs(value)) - 1
        readers = [i for i, v in enumerate(order) if v == -chunk - 1.5] or [
            i for i, v in enumerate(order) if v == -chunk - 1
        ]
        kind = FORWARD if value > 0 else DGRAD if value == int(value) else WGRAD
        assert entry == Entry(kind, chunk, microbatch, readers[microbatch])
        assert plan.index(position, 0) == chunk * plan.microbatches + microbatch


def check_grad_outputs(order: list[float], shapes: random.Random) -> None:
    """Check that grad outputs in use never share a buffer, and that the number of buffers is minimal."""
    plan = plan_of(order)
    used: dict[Any, list[tuple[int, int]]] = {}
    alive: dict[Any, list[tuple[int, int]]] = {}
    for position, entry in enumerate(plan.entries):
        if entry.kind == DGRAD:
            shape = shapes.choice("ab")
            key = plan.grad_output(position, shape)
            lifetime = position, max(entry.last_read, position + 1)
            assert all(end <= position for _, end in used.get(key, ()))
            used.setdefault(key, []).append(lifetime)
            alive.setdefault(shape, []).append(lifetime)
    for shape, lifetimes in alive.items():
        assert len([key for key in used if key[0] == shape]) == largest_overlap(lifetimes)


def check_inputs(order: list[float], choices: random.Random) -> None:
    """Check that microbatches in flight share no tensor, and that reuse needs as few tensors as possible."""
    plan = plan_of(order)
    pool = [Tensor(shape=(choices.randint(1, 2),)) for _ in range(choices.randint(2, 6))]
    number = sum(entry.kind == FORWARD for entry in plan.entries)
    samples = [choices.sample(pool, 2) for _ in range(number)]
    for reuse in (False, True):
        assigned = assign(plan, samples, reuse)
        lives: dict[int, list[tuple[int, int]]] = {}
        kinds: dict[Any, list[tuple[int, int]]] = {}
        sets: dict[Any, set[tuple[int, ...]]] = {}
        for position, entry in enumerate(plan.entries):
            if entry.kind != FORWARD:
                continue
            given, found = samples[plan.index(position, 0)], assigned[plan.index(position, 0)]
            assert [(t.shape, t.requires_grad) for t in found] == [(t.shape, t.requires_grad) for t in given]
            for tensor in found:
                assert all(end <= position for _, end in lives.get(tensor.address, ()))
                lives.setdefault(tensor.address, []).append((position, entry.last_read))
            shapes = tuple(tensor.shape for tensor in found)
            kinds.setdefault(shapes, []).append((position, entry.last_read))
            sets.setdefault(shapes, set()).add(tuple(tensor.address for tensor in found))
        if reuse:
            assert {shapes: len(found) for shapes, found in sets.items()} == {
                shapes: largest_overlap(lifetimes) for shapes, lifetimes in kinds.items()
            }


def check_mutated(order: list[float], choices: random.Random) -> None:
    """Check that a changed order raises an error if and only if it is illegal, with one line about ``_order``."""
    changed = changed_order(order, choices)
    if legal(changed):
        assert len(parse(changed)) == len(changed)
        return
    with pytest.raises(ValueError, match=r"\A_order[^\n]+\Z"):
        parse(changed)


def check_all(order: list[float], choices: random.Random) -> None:
    check_entries(order)
    check_grad_outputs(order, choices)
    check_inputs(order, choices)
    check_mutated(order, choices)


@given(orders(), CHOICES)
@settings(max_examples=300, deadline=None)
def test_plans(order: list[float], choices: random.Random) -> None:
    check_all(order, choices)


@given(orders(wgrads=False), st.integers(1, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whole_number_orders_are_as_in_te(order: list[float], layers: int, delays: bool) -> None:
    plan = plan_of(order, layers)
    assert not plan.delayed
    done: dict[float, int] = {}
    for position, (value, entry) in enumerate(zip(order, plan.entries, strict=True)):
        microbatch = done[value] = done.get(value, -1) + 1
        first = (entry.chunk * plan.microbatches + microbatch) * layers
        assert [plan.index(position, layer) for layer in range(layers)] == list(range(first, first + layers))
        if entry.kind == DGRAD:
            needs_wgrad = dict.fromkeys(range(layers * len(order)), delays)
            backward = list(plan.backward(position, needs_wgrad))
            assert [layer for layer, is_wgrad in backward if not is_wgrad] == list(reversed(range(layers)))
            assert [layer for layer, is_wgrad in backward if is_wgrad] == list(reversed(range(layers))) * delays
            assert not delays or backward[1] == (layers - 1, True)
            assert {plan.grad_output(position, "shape") for _ in range(layers)} == {("shape", 0)}
            assert entry.last_read == position


@pytest.mark.parametrize("order", NAMED.values(), ids=NAMED)
def test_named_orders_are_legal(order: list[float]) -> None:
    check_all(order, random.Random(1))


def test_wgrad_that_no_module_delays() -> None:
    plan = plan_of([1, -1, -1.5])
    with pytest.raises(RuntimeError, match=r"_order\[2\] is a wgrad, but no module of chunk 1 in training mode delays"):
        list(plan.backward(2, {0: False}))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("order", [NAMED[name] for name in sorted(NAMED)], ids=sorted(NAMED))
def test_a_constant_of_all_microbatches_and_layers_stays_one_tensor(order: list[float], reuse: bool) -> None:
    """As without the fixes, all microbatches and layers must share a constant, such as Megatron-Core's rotary table."""
    plan = plan_of(order)
    constant = Tensor(requires_grad=False)
    forwards = [position for position, entry in enumerate(plan.entries) if entry.kind == FORWARD]
    found = assign(plan, [[Tensor(), constant] for _ in forwards], reuse)
    assert {sample[1].address for sample in found} == {constant.address}
    if reuse:
        lives = [(position, plan.entries[position].last_read) for position in forwards]
        assert len({sample[0].address for sample in found}) == largest_overlap(lives)


@pytest.mark.parametrize("reuse", [False, True])
def test_different_constants_stay_apart(reuse: bool) -> None:
    """A replay of one layer must not write into another layer's constant, such as a rotary table."""
    tables = Tensor(requires_grad=False), Tensor(requires_grad=False)
    samples = [[Tensor(), table] for table in tables for _ in range(3)]
    order = [1, 2, -2, 1, -2.5, -1, 2, -1.5, -2, -1, 1, 2, -2.5, -1.5, -2, -1, -2.5, -1.5]
    found = assign(plan_of(order), samples, reuse)
    assert [sample[1].address for sample in found] == [sample[1].address for sample in samples]


@pytest.mark.parametrize("reuse", [False, True])
def test_reused_samples_leave_the_callers_list(reuse: bool) -> None:
    args = [(Tensor(),), (Tensor(),)]
    given = list(args)
    found, _ = plan_of([1, -1, -1.5, 1, -1, -1.5]).assign_inputs(given, [{}, {}], reuse, flatten, unflatten)
    assert found == [args[0], args[0 if reuse else 1]]
    assert given == (found if reuse else args)


def test_chunks_may_be_empty() -> None:
    plan = Plan(parse([1, 2, -2, -1]), [0, 1])
    assert list(plan.backward(3, {})) == []
    assert plan.index(1, 0) == 0


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], "_order has 0 forwards"),
        ([1, float("nan")], "NaN"),
        ([1, 0, -1], "_order[1] = 0: entries are c, -c and -c - 0.5"),
        ([1, -0.5, -1], "_order[1] = -0.5: entries are"),
        ([1, 1.5], "_order[1] = 1.5: entries are"),
        ([1, -1, -1.25], "_order[2] = -1.25: entries are"),
        ([1, -1.5, -1], "_order[1] = -1.5: the dgrad of its microbatch must come before this wgrad"),
        ([-1, 1], "_order[0] = -1: the forward of its microbatch must come before this dgrad"),
        ([1, -1, -1], "_order[2] = -1: the forward of its microbatch must come before this dgrad"),
        ([1, 1, -1], "_order has 2 forwards, 1 dgrads and 0 wgrads of chunk 1"),
        ([2, -2], "_order has 0 forwards, 0 dgrads and 0 wgrads of chunk 1"),
        (
            [1, 2, -2, -1, 2, -2],
            "_order has 2 forwards, 2 dgrads and 0 wgrads of chunk 2. Each chunk needs at least one forward",
        ),
        ([1, 1, -1, -1.5, -1], "_order has 2 forwards, 2 dgrads and 1 wgrads of chunk 1"),
    ],
)
def test_bad_orders(order: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(order)


def test_a_chunk_with_wgrads_has_one_layer() -> None:
    with pytest.raises(ValueError, match=r"each chunk must have one layer, but chunks have \[2\] layers"):
        plan_of([1, -1, -1.5], layers=2)
