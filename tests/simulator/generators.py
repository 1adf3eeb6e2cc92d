"""Random generators that, as on a GPU, can share a state. Only one state is active at a time.

The CPU's default generator draws every random number from the active state. This module stores the other states.
"""

from __future__ import annotations

import torch


class State:
    """The state of one or more generators. Graphs refer to the state, and draw from it at each replay."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    @property
    def numbers(self) -> torch.Tensor:
        """Return the state as a tensor, in the format of `torch.get_rng_state`."""
        return torch.default_generator.get_state() if self is active() else self._numbers

    @numbers.setter
    def numbers(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        if self is active():
            torch.default_generator.set_state(numbers)

    def activate(self) -> State:
        """Activate this state for all operations. Return the state that was active before."""
        before = active()
        before._numbers = before.numbers
        DEFAULT.state = self
        torch.default_generator.set_state(self._numbers)
        return before


class Generator(torch.Generator):
    """A stand-in for a CUDA generator."""

    state: State

    @classmethod
    def of(cls, state: State) -> Generator:
        generator = cls()
        generator.state = state
        return generator

    def get_state(self) -> torch.Tensor:
        return self.state.numbers

    def set_state(self, new_state: torch.Tensor) -> Generator:  # type: ignore[override]
        self.state.numbers = new_state
        return self

    def manual_seed(self, seed: int) -> Generator:
        self.state.numbers = torch.Generator().manual_seed(seed).get_state()
        return self

    def initial_seed(self) -> int:
        return torch.Generator().set_state(self.state.numbers).initial_seed()

    def clone_state(self) -> Generator:
        return self.of(State(self.state.numbers.clone()))

    def graphsafe_get_state(self) -> Generator:
        return self.of(self.state)

    def graphsafe_set_state(self, state: torch.Generator) -> Generator:  # type: ignore[override]
        assert isinstance(state, Generator)
        if self is DEFAULT:
            state.state.activate()
        self.state = state.state
        return self


DEFAULT = Generator()
DEFAULT.state = State(torch.default_generator.get_state())


def active() -> State:
    """Return the state from which random numbers are drawn."""
    return DEFAULT.state
