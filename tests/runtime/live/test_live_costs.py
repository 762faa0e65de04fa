"""What live DTR knows of operators: their sizes, their scratch memory, and for how long it is remembered."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor

import remat
from remat.runtime import operators
from remat.runtime.live import costs
from remat.runtime.operators import is_sized_by_data
from support.memory import metered, peak_of

pytestmark = pytest.mark.usefixtures("operator_by_operator")

WHOLE = 16_384  # bytes of a tensor


def test_what_is_known_of_operators_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MOST", 40)
    monkeypatch.setattr(costs.SHARED, "facts", {})
    monkeypatch.setattr(costs.SHARED, "_scratch", {})
    for length in range(1, 60):
        with remat.DTR("1MiB"):
            torch.ones(length) @ torch.ones(length)
    assert len(costs.SHARED.facts) <= 40
    assert len(costs.SHARED._scratch) <= 40


def test_numbers_and_lengths_that_are_met_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is computed with is no matter of cost; scratch memory is measured for a size class once."""
    monkeypatch.setattr(costs.SHARED, "facts", {})
    monkeypatch.setattr(costs.SHARED, "_scratch", {})
    x = torch.ones(1000)

    def firsts(compute: Callable[[], Tensor]) -> int:
        with remat.DTR("1MiB") as dtr:
            compute()
        return dtr._last._mode.carrying_out.first_calls

    for _ in range(3):
        firsts(lambda: x * 7 + 1)
    known = len(costs.SHARED.facts)
    for number in (8, 9, 10):
        assert firsts(lambda number=number: x * number + number) == 0
    assert len(costs.SHARED.facts) == known
    assert firsts(lambda: torch.ones(900) * 7) <= 1  # the length is new, and filling it
    assert firsts(lambda: torch.ones(901) * 7) <= 1


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x[:, mask[0]],
        lambda x, mask: x[mask[:, 0]],
        lambda x, mask: x[mask[:, 0], 3],
        lambda x, mask: mask.nonzero(),
        torch.masked_select,
        lambda x, mask: torch.masked_select(x, mask[:1]),
        lambda x, mask: x[torch.tensor([1, 2])],
        lambda x, mask: torch.repeat_interleave(torch.tensor([3, 4])),
        lambda x, mask: (x * mask).to_sparse_csr().values(),
        lambda x, mask: (x * mask).to_sparse().values(),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sizes_that_depend_on_data_are_counted(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(200, 300)
    mask = x > 1.5
    with remat.DTR("1GiB"):
        expected = compute(x, mask)
    with remat.DTR("1GiB") as dtr:
        found = compute(x, mask)
    assert torch.equal(found, expected)
    made = found.untyped_storage().nbytes()
    limit = dtr.report().peak_bytes + 64
    with remat.DTR(limit) as again:
        found = compute(x, mask)
    assert torch.equal(found, expected)
    assert again.report().peak_bytes <= limit
    assert made < 200 * 300 * 4  # far from the whole, which once was charged


@pytest.mark.parametrize("granularity", ["operator", "module"])
def test_what_is_known_of_operators_holds_no_memory(granularity: str) -> None:
    """Arguments are named in what is remembered, and some of them are memory."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    held: list[weakref.ref[torch.UntypedStorage]] = []
    for _ in range(4):
        with remat.DTR("1MiB", granularity=granularity):
            y = model(torch.randn(4, 8))
            storage = y.detach().exp().untyped_storage()
            torch.empty(0).set_(storage)
            torch.rand(3, generator=torch.Generator())
            held.append(weakref.ref(storage))
            y.sum().backward()
            del y, storage
    gc.collect()
    assert not any(reference() is not None for reference in held)
    assert not any(isinstance(each, torch.Generator) for key in costs.SHARED.facts for each in key)


@pytest.mark.parametrize("several", [False, True])
def test_an_exponential_is_charged_what_any_numbers_need(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scratch memory grows with the numbers, so that of small ones says nothing of others."""
    monkeypatch.setattr(costs.SHARED, "facts", {})
    x = torch.randn(2, 48, 48) if several else torch.randn(48, 48)

    def reported(scale: float) -> int:
        with remat.DTR("10MiB") as dtr:
            scaled = x * scale
            torch.linalg.matrix_exp(scaled)
        return dtr.report().peak_bytes

    assert all(
        reported(scale) >= peak_of(lambda s=scale: torch.linalg.matrix_exp(x * s)) for scale in (1e-9, 0.02, 9.0)
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_scratch_memory_of_more_data_than_ever_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.SHARED, "facts", {})
    monkeypatch.setattr(costs.SHARED, "_scratch", {})
    x = torch.rand(64, 64)
    for share in (0.02, 0.5, 0.9, 0.3):
        given = x * (x < share)
        with remat.DTR("10MiB") as dtr:
            given.to_sparse_csr()
        assert dtr.report().peak_bytes >= peak_of(given.to_sparse_csr)


def test_numbers_that_autograd_keeps_are_counted() -> None:
    """No operator is seen to make them."""
    x = torch.ones(16, requires_grad=True)

    def long() -> None:
        y = x
        for number in range(300):
            y = (y * (1.0 + number)).sin()
        y.sum().backward()

    peak = peak_of(long)
    for _ in range(3):
        with remat.DTR("1MiB", granularity="operator") as dtr:
            long()
        assert dtr.report().peak_bytes >= peak


@pytest.mark.parametrize("granularity", ["operator", "module"])
def test_scratch_memory_that_another_profiler_hides_is_told(
    granularity: str, monkeypatch: pytest.MonkeyPatch, nothing_known: None
) -> None:
    monkeypatch.setattr(costs.SHARED, "facts", {})
    monkeypatch.setattr(costs.SHARED, "_scratch", {})
    x = torch.randn(64, 64)

    def step(budget: str) -> None:
        with remat.DTR(budget, granularity=granularity):
            x.sin().cos().tan()

    with torch.autograd.profiler.profile():
        step("10MiB")  # there is room for what nobody knows
        with pytest.warns(remat.OverBudgetWarning, match="may have used more than 36.0 KiB: the scratch memory"):
            step("36KiB")
    step("36KiB")
    with torch.autograd.profiler.profile():
        step("36KiB")


def test_whether_sizes_need_data_is_asked_anew_where_arguments_decide() -> None:
    """Putting by numbers says nothing of putting by masks; of other operators of PyTorch one answer holds."""
    x, ones = torch.zeros(4), torch.ones(())

    def asked(index: Tensor) -> bool:
        put = torch.ops.aten.index_put.default
        args = (x, [index], ones)
        return is_sized_by_data(put, args, {}, put(*args))

    by_mask = asked(x > 1)
    assert not asked(torch.tensor([1, 2]))
    assert asked(x > 1) == by_mask
    assert torch.ops.aten.index_put.default not in operators._SIZED_WITHOUT_DATA


def test_some_shapes_are_known_for_one_type_of_numbers_alone() -> None:
    """Products by group are; how long a packed sequence becomes is known for none, and depends on the lengths."""
    grouped, packed = torch.ops.aten._grouped_mm.default, torch.ops.aten._pack_padded_sequence.default
    operators._SIZED_WITHOUT_DATA.discard(grouped)
    args = (torch.randn(8, 32), torch.randn(2, 32, 32), torch.tensor([3, 8], dtype=torch.int32))
    assert not is_sized_by_data(grouped, args, {}, grouped(*args))
    sequences = (torch.randn(3, 2, 4), torch.tensor([3, 1]), False)
    assert is_sized_by_data(packed, sequences, {}, packed(*sequences))


@pytest.mark.parametrize("held", [4, 16])
def test_storages_that_no_operator_makes_are_counted_and_told(held: int) -> None:
    """Copies of modules make such. They are there before anybody can make room, so that the report is what is left."""
    budget = 10 * WHOLE

    def step() -> None:
        kept = [(sample + number).sin() for number in range(held)]
        bare = torch.empty(0).set_(torch.UntypedStorage(4 * WHOLE)).fill_(1)
        (sum(each.sum() for each in kept) + bare.sum()).item()

    def block() -> remat.DTR:
        with remat.DTR(budget, granularity="operator") as dtr:
            step()
        return dtr

    sample = torch.randn(WHOLE // 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.OverBudgetWarning)
        block()
        peak, dtr = metered(block)
    report = dtr.report()
    assert (peak > budget, report.outcome) == ((False, "pass") if held == 4 else (True, "over"))
    assert peak <= report.peak_bytes


@pytest.mark.parametrize("granularity", ["operator", "module"])
@pytest.mark.parametrize(
    "select",
    [torch.masked_select, lambda x, mask: mask.nonzero(), lambda x, mask: (x * mask).unique()],
    ids=["masked_select", "nonzero", "unique"],
)
def test_scratch_memory_of_what_makes_less_than_when_it_was_measured(
    select: Callable[[Tensor, Tensor], Tensor], granularity: str, monkeypatch: pytest.MonkeyPatch, nothing_known: None
) -> None:
    """Where the size of an output depends on data: what a call takes besides may be over before the output is there."""
    monkeypatch.setattr(costs.SHARED, "facts", {})
    monkeypatch.setattr(costs.SHARED, "_scratch", {})
    x = torch.randn(100_000, dtype=torch.float64)

    def block(mask: Tensor) -> remat.DTR:
        with remat.DTR("1GiB", granularity=granularity) as dtr:
            select(x, mask)
        return dtr

    block(x == x)  # noqa: PLR0124
    few = x > x.sort().values[-10]
    peak, dtr = metered(lambda: block(few))
    assert peak <= dtr.report().peak_bytes
