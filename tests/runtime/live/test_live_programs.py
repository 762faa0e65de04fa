"""Random programs under random evictions give what plain PyTorch gives, to the bit; exceptions lose nothing."""

from __future__ import annotations

import gc
import random
from contextlib import suppress

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import remat
from support.live_programs import OPERATIONS, PROGRAMS, Step, evicting, run_program

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return type(b) is type(a) and torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b.detach()))


def plainly(steps: list[Step]) -> list[torch.Tensor]:
    try:
        return run_program(steps)
    except RuntimeError:
        assume(False)  # such as: nothing in it needs a gradient
        raise


@settings(max_examples=110, deadline=None)
@given(PROGRAMS, st.floats(0.02, 0.12), st.integers(0, 2**32))
def test_random_evictions(steps: list[Step], rate: float, seed: int) -> None:
    plain, chance = plainly(steps), random.Random(seed)
    with evicting(lambda: chance.random() < rate):
        mine = run_program(steps)
    assert all(same(a, b) for a, b in zip(plain, mine, strict=True))


@settings(max_examples=20, deadline=None)
@given(PROGRAMS.map(lambda steps: steps[:2]))
def test_everything_evicted_after_every_operator(steps: list[Step]) -> None:
    plain = plainly(steps)
    with evicting(lambda: True) as dtr:
        mine = run_program(steps)
    assert all(same(a, b) for a, b in zip(plain, mine, strict=True))
    assert dtr.report().evictions > 0


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_under_evictions(name: str) -> None:
    steps = [(name, 0, 1), (name, 3, 1)]
    plain = run_program(steps)
    with evicting(lambda: True) as dtr:
        mine = run_program(steps)
    assert all(same(a, b) for a, b in zip(plain, mine, strict=True))
    assert dtr.report().recomputations > 0


def test_a_constant_that_was_copied_aside_is_known_by_its_new_number() -> None:
    steps: list[Step] = [("statistics", 0, 0), ("statistics", 0, 3), ("numpy", 3, 0)]
    chance = random.Random(2427558)
    with evicting(lambda: chance.random() < 0.028):
        mine = run_program(steps)
    assert all(same(a, b) for a, b in zip(run_program(steps), mine, strict=True))


class Interruption(Exception):
    pass


@settings(max_examples=12, deadline=None)
@given(PROGRAMS, st.integers(1, 120))
def test_an_exception_at_any_operator_leaves_all_usable(steps: list[Step], when: int) -> None:
    """What the program holds is as plain PyTorch would have left it, and the rest of the memory is given back."""

    count = 0

    def count_down() -> bool:
        nonlocal count
        count += 1
        if count == when:
            raise Interruption
        return count % 3 == 0

    def carry_out(held: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(3)
        x = held["x"] = torch.randn(4, 4, requires_grad=True)
        for number, (name, _, _) in enumerate(steps):
            made = OPERATIONS[name](x, x)
            held[str(number)] = made[0] if isinstance(made, list) else made

    held: dict[str, torch.Tensor] = {}
    with suppress(Interruption), evicting(count_down):
        carry_out(held)
    plain: dict[str, torch.Tensor] = {}
    carry_out(plain)
    for name, tensor in held.items():
        assert same(plain[name], tensor)
        assert tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
        assert str(tensor)
    gc.collect()
    with remat.DTR("1GiB"):  # the thread is not left inside a block
        pass
