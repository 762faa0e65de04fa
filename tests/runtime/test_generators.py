"""States of random number generators: what is asked for less than it seems must be what it would be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from remat.runtime.generators import RandomState, of_python

OLD: Any = np.random.mtrand._rand

# Everything that moves them on, sets them back, or puts others in their place.
MOVES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(1),
    "NumPy's uniform": OLD.random_sample,
    "NumPy's normal": OLD.standard_normal,
    "NumPy's integers": lambda: OLD.randint(0, 7),
    "NumPy's seed": lambda: OLD.seed(2),
    "PyTorch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def states_again() -> Iterator[None]:
    mine, numpys = random.getstate(), OLD.get_state()
    yield
    random.setstate(mine)
    OLD.set_state(numpys)


def in_full() -> tuple[Any, ...]:
    return random.getstate(), repr(OLD.get_state(legacy=False)), OLD.get_state()[1].tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_state_is_another_where_the_generator_is_in_another(seed: int) -> None:
    order = random.Random(seed)
    seen: list[tuple[RandomState, tuple[Any, ...]]] = []
    for _ in range(60):
        MOVES[order.choice(list(MOVES))]()
        if seen and order.random() < 0.3:
            again, full = order.choice(seen)
            again.restore()
            assert in_full() == full
        seen.append((RandomState((), of_python(), of_cpu=False), in_full()))
        state, full = seen[-1]
        for other, in_full_then in seen:
            assert (state == other) == (full == in_full_then)


def test_a_normal_number_that_was_drawn_before_counts() -> None:
    OLD.seed(0)
    OLD.standard_normal()  # draws two, and keeps one
    before = RandomState((), of_python(), of_cpu=False)
    first = OLD.standard_normal()  # draws no bits
    assert before.keep_changed(before.now())
    before.restore()
    assert OLD.standard_normal() == first


def test_states_that_the_program_sets_are_seen() -> None:
    OLD.seed(0)
    OLD.standard_normal()
    kept = OLD.get_state()
    OLD.standard_normal()
    after = RandomState((), of_python(), of_cpu=False)  # the same bits as `kept`, and no number kept
    OLD.set_state(kept)
    assert after != after.now()


def test_another_source_of_bits_is_seen() -> None:
    kept = np.random.get_bit_generator()
    try:
        OLD.seed(0)
        before = RandomState((), of_python(), of_cpu=False)
        np.random.set_bit_generator(np.random.PCG64(0))
        other = before.now()
        assert before != other
        OLD.random_sample()
        assert other != other.now()
    finally:
        np.random.set_bit_generator(kept)
