"""The peak that DTR reports is the allocator's, in the first block that meets its operators and in later ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.runtime.dtr.heuristics import make_heuristic
from remat.runtime.live.ledger import Instructions, Ledger
from support.memory import metered

pytestmark = pytest.mark.usefixtures("operator_by_operator")

WIDTH = 251  # met nowhere else, so that the first block knows nothing of its operators
SLACK = 512  # bytes: numbers of a few bytes each, which the runtime holds on its own account


class Program:
    """Some layers, and one of several ends whose operators need memory in ways of their own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        self.norm, self.wide = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(30_000)
        self.sample, self.few = torch.randn(500, WIDTH), torch.randn(2, 30_000)
        for parameter in (self.weight, *self.norm.parameters(), *self.wide.parameters()):
            parameter.grad = torch.zeros_like(parameter)

    def deep(self, y: Tensor) -> Tensor:
        for _ in range(4):
            y = (y @ self.weight).tanh()
        return y

    def concatenated(self) -> Tensor:
        y = self.deep(self.sample)
        return torch.cat([y, torch.sort(y, 1)[0], y.t().contiguous().t()], 1)

    def normalised(self) -> Tensor:
        return self.norm(self.deep(self.sample)).relu()

    def wide_statistics(self) -> Tensor:
        return self.wide(self.few * 2).relu()

    def sized_by_data(self) -> Tensor:
        y = self.deep(self.sample)
        return y[y > 0] * 2

    def random(self) -> Tensor:
        return nn.functional.dropout(self.deep(self.sample), 0.3).softmax(1)

    def in_place(self) -> Tensor:
        return (self.deep(self.sample) * 1).mul_(2).add_(1).relu_()

    def factorised(self) -> Tensor:
        y = self.deep(self.sample)
        return torch.linalg.svdvals(y[:100, :100]).sum() + y.std()

    def summed_up(self) -> Tensor:
        y = self.deep(self.sample)
        return torch.topk(y, 100)[0].sum() + y.median() + torch.cumsum(y, 1).sum()

    def scratch_of_one_output(self) -> Tensor:
        return (self.sample * 2).logsumexp(1).requires_grad_()

    def scratch_of_several_outputs(self) -> Tensor:
        return (self.sample * 2).kthvalue(3, 1)[0].requires_grad_()

    def constant_changed(self) -> Tensor:
        constant = torch.ones(700, WIDTH)
        y = self.deep(constant * 3)
        constant.add_(1)
        return y.sum() + (constant @ self.weight).tanh().sum()

    def statistics_again(self) -> Tensor:
        """A batch norm whose output gives way, so that it runs again on copies of its statistics."""
        y = self.wide(self.few * 2).detach()
        others = [self.few * number for number in range(8)]
        for other in others:
            y = y + other.sum()
        return (y + torch.stack(others).sum(0)).requires_grad_()

    def counted_afterwards(self) -> Tensor:
        """Room is made for as many distinct numbers as there can be."""
        y = self.sample * 2
        parts = [(torch.unique((y * number).round()), torch.sort(y * number, 1)[0]) for number in range(1, 6)]
        return (sum(found.sum() + ordered.sum() for found, ordered in parts)).requires_grad_()

    def masks_of_all_sizes(self) -> Tensor:
        """One operator whose output is small first and large then."""
        y = self.sample * 2
        parts = [y[y > bound].sum() for bound in (7.0, 3.0, 0.0, -9.0)]
        return torch.stack(parts).requires_grad_()

    def saved_and_then_changed(self) -> Tensor:
        y = self.deep(self.sample)
        z = y * y
        y.add_(1)
        return (z.detach() + y.detach()).requires_grad_()


WIDE = 2 * 4 * 30_000  # running mean and variance
# Bytes that are counted and may not be taken: statistics, of which only a recomputation makes copies, and results of
# which only the most is known before they are there.
COUNTED = {
    "normalised": 2 * 4 * WIDTH,
    "wide_statistics": WIDE,
    "statistics_again": WIDE,
    "counted_afterwards": 4 * 500 * WIDTH,
}
ENDS = [name for name, value in vars(Program).items() if not name.startswith("_") and name != "deep"]


def block_of(program: Program, end: str, budget: int) -> remat.DTR:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.ThrashingWarning)
        with remat.DTR(budget, "h_dtr_eq", costs="model", thrash_limit=None) as dtr:
            getattr(program, end)().sum().backward()
    return dtr


@pytest.mark.parametrize("end", ENDS)
def test_the_reported_peak_is_the_measured_one(end: str) -> None:
    program, more = Program(), COUNTED.get(end, 0) + SLACK

    def block(budget: int) -> Callable[[], remat.DTR]:
        return lambda: block_of(program, end, budget)

    first = block(2**40)().report().peak_bytes
    (whole, dtr), (again, _) = metered(block(2**40)), metered(block(2**40))
    assert whole == again <= dtr.report().peak_bytes <= whole + more
    assert whole <= first <= whole + more
    evicted = 0
    for share in (0.9, 0.75, 0.6):
        budget = int(share * whole)
        try:
            block(budget)()
        except remat.OutOfBudget as error:
            assert error.minimum is not None
            budget = error.minimum
        measured, dtr = metered(block(budget))
        report = dtr.report()
        simulated = remat.simulate_dtr(dtr.trace, dtr.budget, "h_dtr_eq", thrash_limit=1e9)
        assert simulated.budget_bytes == budget and simulated.peak_bytes <= budget
        assert (simulated.evictions, simulated.recomputations) == (report.evictions, report.recomputations)
        assert measured <= report.peak_bytes <= min(measured + more, budget)
        evicted += report.evictions
    assert evicted or end.startswith(("wide", "scratch", "masks"))  # where nothing can be spared


@pytest.mark.parametrize("layers", [20, 40, 100])
def test_the_budget_that_an_error_names_works_where_room_was_made_for_numbers(layers: int) -> None:
    """Room for what no operator makes is made where memory is short, and makes it no other program."""
    x = torch.ones(1024, requires_grad=True)

    def block(budget: int | str) -> remat.Report:
        with remat.DTR(budget, "h_dtr_eq", thrash_limit=None) as dtr:
            y = x
            for number in range(layers):
                y = (y * (1.0 + number)).sin()
            y.sum().backward()
            x.grad = None
        return dtr.report()

    for _ in range(3):
        whole = block("1GiB").peak_bytes
    refused = 0
    for share in (0.2, 0.1, 0.05, 0.02):
        try:
            block(int(share * whole))
        except remat.OutOfBudget as error:
            refused += 1
            assert error.minimum is not None and block(error.minimum).peak_bytes <= error.minimum
    assert refused > 0


def test_a_program_begins_like_another_whatever_memory_was_counted_beside() -> None:
    def program(calls: list[tuple[str, int]]) -> Instructions:
        notes = Ledger(2**20, make_heuristic("h_dtr_eq"), sampling=False, skip_small=False, seed=0)
        for label, size in calls:
            if label == "numbers":
                notes.add_beside(label, 1, [], size)
            else:
                notes.add(label, 1, [], [size])
        return notes.program()

    whole = program([("mm", 64), ("numbers", 8), ("sin", 64), ("cos", 32)])
    assert whole.begins_like(program([("mm", 64), ("sin", 64), ("numbers", 8), ("cos", 1)]))  # the last is a guess
    assert whole.begins_like(program([("numbers", 8)]))
    assert not whole.begins_like(program([("mm", 64), ("sin", 8), ("cos", 32)]))
    assert not whole.begins_like(program([("mm", 64), ("cos", 32)]))
    assert not whole.begins_like(program([("mm", 64), ("sin", 64), ("cos", 32), ("cos", 32)]))
