"""Test the lifetimes of grad inputs that ``grad-input-lifetime`` computes. Cases of `verify` test the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_graph_fixes.support.graph_order import grad_input_releases
from tests.support.megatron_orders import interleaved, layer_wise


@dataclass
class Stage:
    """A pipeline stage and its schedules. Chunks of `model_order` are model chunks, chunks of `order` are layers."""

    stages: int
    stage: int
    layers: list[int]
    microbatches: int
    wgrads: bool

    @property
    def model_order(self) -> list[int]:
        return interleaved(self.stages, self.stage, len(self.layers), self.microbatches)

    @property
    def order(self) -> list[float]:
        return layer_wise(self.model_order, self.layers, self.wgrads)

    @property
    def ones(self) -> list[int]:
        return [1] * sum(self.layers)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    number = draw(st.integers(2, 4))
    layers = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return Stage(
        number, draw(st.integers(0, number - 1)), layers, number * draw(st.integers(1, 3)), draw(st.booleans())
    )


def released_before(order: Sequence[float], releases: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, int]:
    """Return the position of the entry before which each released grad input is released, by its dgrad's position."""
    microbatches = sum(entry == 1 for entry in order)
    first = [microbatches * before for before in accumulate(layers, initial=0)]
    seen = [0] * len(layers)
    dgrad_of = {}
    for position, entry in enumerate(order):
        if entry < 0 and entry == int(entry) and layers[-int(entry) - 1]:
            chunk = -int(entry) - 1
            dgrad_of[first[chunk] + seen[chunk] * layers[chunk]] = position
            seen[chunk] += 1
    released = [(dgrad_of[index], position) for position, indices in enumerate(releases) for index in indices]
    assert len(dict(released)) == len(released), "released twice"
    return dict(released)


def te_rule(order: Sequence[float], layers: Sequence[int]) -> dict[int, int]:
    """Return TE's releases, like `released_before`. TE releases a grad input after the capture of the next dgrad."""
    dgrads = [i for i, entry in enumerate(order) if entry < 0 and entry == int(entry) and layers[-int(entry) - 1]]
    return {this: after + 1 for this, after in pairwise(dgrads) if after + 1 < len(order)}


def last_reads(order: Sequence[float], layers: Sequence[int]) -> dict[int, int]:
    """Return, like `released_before`, the position of the first entry after Megatron's last read of each grad input.

    Within a model chunk, the layer below reads a grad input at the next dgrad. The grad input of a model chunk's first
    layer is sent to the previous stage. Megatron waits for this send in the step of the next model chunk's backward,
    after that chunk's dgrads and the step's forwards, but before the chunk's last wgrad.
    """
    place = [(chunk, depth) for chunk, size in enumerate(layers) for depth in range(size)]
    dgrads = [i for i, entry in enumerate(order) if entry < 0 and entry == int(entry)]
    ends = []  # for each step, the last dgrad of its model chunk, and the step's end
    for i in dgrads:
        if place[-int(order[i]) - 1][1] == 0:
            end = i + 1
            while end < len(order) and order[end] > 0 and place[int(order[end]) - 1][1] > 0:
                end += 1
            ends.append((i, end))
    reads = {i: after + 1 for i, after in pairwise(dgrads) if place[-int(order[i]) - 1][1] > 0}
    reads |= {i: end for (i, _), (_, end) in pairwise(ends)}
    return {i: end for i, end in reads.items() if end < len(order)}


@given(stages(), st.data())
@settings(deadline=None)
def test_real_model_chunks_keep_the_rule_of_te(stage: Stage, data: st.DataObject) -> None:
    order = stage.model_order
    for layers in ([1] * len(stage.layers), stage.layers, data.draw(st.permutations([0, *stage.layers[1:]]))):
        assert released_before(order, grad_input_releases(order, layers), layers) == te_rule(order, layers)


@given(stages())
@settings(deadline=None)
def test_one_layer_a_model_chunk_keeps_the_rule_of_te(stage: Stage) -> None:
    stage.layers = [1] * len(stage.layers)
    assert released_before(stage.order, grad_input_releases(stage.order, stage.ones), stage.ones) == te_rule(
        stage.order, stage.ones
    )


@given(stages())
@settings(deadline=None)
def test_layers_as_chunks_are_released_as_megatron_reads_them(stage: Stage) -> None:
    """Each grad input must be released right after Megatron's last read of it."""
    order = stage.order
    found = released_before(order, grad_input_releases(order, stage.ones), stage.ones)
    assert found == last_reads(order, stage.layers)


def test_the_last_send_before_the_cooldown_is_held_until_a_later_one_is_waited_for() -> None:
    held_longer = []
    for stages, chunks, layers in product((2, 3), (2, 3, 4), (1, 2)):
        for group, microbatches in product(range(stages, 3 * stages), range(stages, 4 * stages + 3)):
            order = interleaved(stages, 0, chunks, microbatches, group)
            dgrads = [i for i, entry in enumerate(order) if entry < 0]
            last_forward = max(i for i, entry in enumerate(order) if entry > 0)
            last_steady = next(i for i in dgrads if i > last_forward)
            released = released_before(order, grad_input_releases(order, [layers] * chunks), [layers] * chunks)
            later_sends = [i for i in dgrads if i > last_steady and order[i] != -1]
            if order[last_steady] != -1 and later_sends:
                assert released.get(last_steady, len(order)) > later_sends[0]
            rule = te_rule(order, [layers] * chunks)
            assert released.keys() == rule.keys()
            longer = {i for i in released if released[i] != rule[i]}
            assert longer <= {last_steady}
            held_longer += [(stages, chunks, group, microbatches)] * len(longer)
    assert (2, 3, 4, 6) in held_longer
    assert all(microbatches % group for _, _, group, microbatches in held_longer)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("wgrads", [False, True])
def test_a_stage_with_one_model_chunk_needs_one_grad_input_more_than_te(microbatches: int, wgrads: bool) -> None:
    """With several microbatches, up to three grad inputs are in use at a time.

    By TE's rule, there are two, because a layer reads one grad input and returns another.
    """
    layers = 48
    order = layer_wise([1] * microbatches + [-1] * microbatches, [layers], wgrads)
    found = released_before(order, grad_input_releases(order, [1] * layers), [1] * layers)
    dgrads = [i for i, entry in enumerate(order) if entry < 0 and entry == int(entry)]
    in_use = [sum(made <= i < found.get(made, len(order)) for made in dgrads) for i in dgrads]
    assert max(in_use) == (2 if microbatches == 1 else 3)
