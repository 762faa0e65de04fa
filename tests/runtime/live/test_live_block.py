"""The block of live DTR: what is in it, what is left after it, and what goes wrong."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import remat
from remat.runtime.live import choosing, limits
from remat.runtime.live.choosing import CANDIDATES, FIRST
from support.live_models import make, step_of
from support.live_programs import evict_all
from support.memory import peak_of

pytestmark = pytest.mark.usefixtures("operator_by_operator")

MIB = 2**20


def chain_loss(width: int = 64, depth: int = 6) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))), torch.randn(
        256, width
    )


def test_what_is_left_is_plain(tmp_path: Path) -> None:
    model, x = chain_loss()
    with remat.DTR("100MiB", thrash_limit=None) as dtr:
        y = model(x)
        kept = y * 2
        evict_all(dtr)
        loss = (y * y).mean()
        loss.backward()
        evict_all(dtr)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(y, expected)
    assert type(y) is torch.Tensor
    assert torch.equal(kept, expected * 2)
    assert np.array_equal(kept.detach().numpy(), (expected * 2).detach().numpy())
    assert "tensor(" in repr(kept)
    torch.save(kept, tmp_path / "kept.pt")
    assert torch.equal(torch.load(tmp_path / "kept.pt"), kept)
    assert torch.equal(copy.deepcopy(kept.detach()), kept)
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    assert (kept + 1).sum().item() == pytest.approx((expected * 2 + 1).sum().item())


def test_memory_is_read_in_the_block() -> None:
    """NumPy, tolist, printing, pickling, DLPack and pointers see an evicted tensor as it was."""
    x = torch.randn(64, 64)
    with remat.DTR("100MiB", thrash_limit=None) as dtr:
        for read in (
            np.asarray,
            lambda y: torch.tensor(y.tolist()),
            torch.utils.dlpack.from_dlpack,
            copy.deepcopy,
            lambda y: torch.frombuffer(bytearray(memoryview(y.numpy()).tobytes()), dtype=torch.float32).view(64, 64),
        ):
            y = x * 3
            evict_all(dtr)
            assert y.numel() == 64 * 64
            assert torch.equal(torch.as_tensor(read(y)), x * 3)
        y = x * 3
        evict_all(dtr)
        assert "tensor(" in str(y)
        evict_all(dtr)
        buffer = io.BytesIO()
        torch.save(y, buffer)
        array = y.numpy()
        array[0, 0] = 7.0  # behind the dispatcher's back, but its memory stays where NumPy has it
        evict_all(dtr)
        assert y[0, 0].item() == 7.0
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), x * 3)


def test_methods_of_tensor_are_put_back() -> None:
    names = ("__repr__", "numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__")
    before = {name: torch.Tensor.__dict__.get(name) for name in names}
    with remat.DTR("1MiB"):
        assert torch.Tensor.__dict__["numpy"] is not before["numpy"]
    assert {name: torch.Tensor.__dict__.get(name) for name in names} == before


def test_backward_after_the_block() -> None:
    model, x = chain_loss()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with remat.DTR("100MiB", thrash_limit=None) as dtr:
        loss = model(x).square().mean()
        evict_all(dtr)
    loss.backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), expected, strict=True))


def test_changes_that_are_seen_too_late_are_an_error() -> None:
    model, x = chain_loss()
    with remat.DTR("100MiB", thrash_limit=None) as dtr:
        loss = model(x).square().mean()
        loss.detach().numpy()  # so that it stays in memory, and nothing is recomputed for it at the end
        evict_all(dtr)
    with torch.no_grad():
        model[0][0].weight.add_(1)
    with pytest.raises((remat.ReplayError, RuntimeError), match=r"changed where DTR|modified by an inplace"):
        loss.backward()


def test_a_saved_parameter_that_is_changed_is_an_error_as_in_pytorch() -> None:
    model, x = chain_loss()
    with remat.DTR("100MiB", thrash_limit=None), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss = model(x).square().mean()
        with torch.no_grad():
            model[1][0].weight.mul_(2)
        loss.backward()


def test_no_memory_is_left_held() -> None:
    run = step_of(make("GPT"))
    with remat.DTR("1GiB", costs="model") as dtr:
        run()
    budget = dtr.report().peak_bytes // 2

    def limited() -> None:
        with remat.DTR(budget, thrash_limit=None):
            run()

    limited()
    levels = []
    for _ in range(2):
        meter = remat.runtime.meter.MemoryMeter(torch.device("cpu"))
        with meter.session(), meter.region():
            limited()
        levels.append(meter.regions[0].end_bytes - meter.regions[0].start_bytes)
    assert levels == [0, 0]

    def failing() -> None:
        with pytest.raises(remat.OutOfBudget), remat.DTR(budget // 8):
            run()

    meter = remat.runtime.meter.MemoryMeter(torch.device("cpu"))
    failing()
    with meter.session(), meter.region():
        failing()
    assert meter.regions[0].end_bytes == meter.regions[0].start_bytes


def test_a_budget_too_small_names_the_operator_and_the_least_that_works() -> None:
    model, x = chain_loss()
    with pytest.raises(remat.OutOfBudget, match=r"tanh\(float32\[256, 64\]\)") as caught:
        with remat.DTR("100KiB"):
            model(x)
    error = caught.value
    assert error.budget == 100 * 1024
    assert error.needed > error.budget
    assert "does not fit into 100 KiB" in str(error)
    with pytest.raises(remat.OutOfBudget), remat.DTR(error.minimum - 1):
        model(x)
    with remat.DTR(error.minimum, costs="model") as dtr:
        first = model[0](x)  # the operator that it names
    assert dtr.report().outcome == "pass"
    assert torch.equal(first, model[0](x))


def test_after_an_operator_that_does_not_fit_the_block_goes_on() -> None:
    x = torch.ones(256, 256)
    with remat.DTR("900KiB", thrash_limit=None) as dtr:
        y = x + 1
        with pytest.raises(remat.OutOfBudget):
            torch.cat([y, y, y])
        z = y * 2
        evict_all(dtr)
        assert z.sum().item() == 4 * 256 * 256
    assert torch.equal(y, x + 1)


def test_room_that_was_made_for_an_operator_that_fails_is_given_back() -> None:
    x = torch.ones(128, 128)
    with remat.DTR("300KiB", thrash_limit=None) as dtr:
        bad = x * -1
        for _ in range(20):
            evict_all(dtr)  # so that room is made for what it needs, and for what it would return
            with pytest.raises(torch.linalg.LinAlgError):
                torch.linalg.cholesky(bad)
        y = x * 3
    assert torch.equal(y, x * 3)
    report = dtr.report()
    assert report.outcome == "pass" and report.peak_bytes <= 300 * 1024


def test_held_beyond_the_budget() -> None:
    """More than fits is still in memory after the block, and the report says so."""
    x = torch.ones(64, 1024)
    with pytest.warns(remat.OverBudgetWarning, match="DTR used 2.00 MiB") as told, remat.DTR("1MiB") as dtr:
        kept = [x * i for i in range(8)]  # 2 MiB
    assert {each.filename for each in told} == {__file__}  # the user's line
    assert all(torch.equal(tensor, x * i) for i, tensor in enumerate(kept))
    assert dtr.report().outcome == "over"


def test_thrashing_is_noticed() -> None:
    model, x = chain_loss(depth=30)

    def run() -> None:
        model(x).square().mean().backward()

    with remat.DTR("1GiB", costs="model") as dtr:
        run()
    trace, most = dtr.trace, dtr.report().peak_bytes
    thrashing = next(
        b for b in range(most, 0, -most // 50)
        if remat.simulate_dtr(trace, b, "h_size", thrash_limit=3.0).outcome == "thrash"
    )  # fmt: skip
    with pytest.warns(remat.ThrashingWarning, match="a larger budget would be much faster"):
        with remat.DTR(thrashing, "h_size", costs="model", thrash_limit=1.5) as dtr:
            run()
    assert dtr.report().outcome == "thrash"


def test_what_a_heuristic_that_thrashes_takes_counts_and_not_a_replay_of_it(
    compiled_core: None, nothing_known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is better on paper is tried once, and then the one that took least is taken."""
    monkeypatch.setattr(choosing, "learn", lambda *args, **_: SimpleNamespace(name=args[3][0], nanoseconds=1))
    model, x = chain_loss(depth=30)
    took, whole = list[tuple[float, str]](), 0
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.ThrashingWarning)
            with remat.DTR(whole // 2 or 2**30, costs="model", thrash_limit=1.0001) as dtr:
                model(x).square().mean().backward()
        if whole:
            took.append((dtr.report().overhead or 0.0, dtr.name))
        whole = whole or dtr.report().peak_bytes
    assert {name for _, name in took[:4]} == set(CANDIDATES)
    assert set(took[4:]) == {min(took[:4])}


def test_a_heuristic_that_a_block_was_given_up_with_is_not_taken_again(compiled_core: None) -> None:
    model, x = chain_loss(depth=30)
    for budget in (2**30, 2**20):
        with remat.DTR(budget, FIRST, costs="model") as dtr:
            model(x).square().mean().backward()
    assert dtr.report().evictions

    def taken(thrashed: dict[str, float]) -> str:
        found = choosing.choose(dtr._block.ledger, thrashed, by_model=True)
        assert found is not None
        return found.name

    assert taken({}) == FIRST
    assert taken({FIRST: math.inf}) not in ("", FIRST)
    assert taken({FIRST: 9.0}) != FIRST and taken({FIRST: 1.0}) == FIRST
    others = dict.fromkeys(CANDIDATES[1:], math.inf)
    assert taken({FIRST: 9.0, **others}) == taken({FIRST: math.inf, **others}) == FIRST
    assert choosing.candidates(others) == (FIRST,)


@pytest.mark.parametrize("error", [None, ValueError])
def test_by_calls_too_and_not_after_an_error_of_the_program(
    compiled_core: None, nothing_known: None, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    model, x = chain_loss(depth=30)
    names, whole = list[str](), 0
    for number in range(4):
        if number == 2 and error is None:
            monkeypatch.setattr(limits, "_HOPELESS", 0)
            monkeypatch.setattr(limits, "_LEAST_NANOSECONDS", 0)
        how = {"costs": "model", "thrash_limit": 1.0001, "granularity": "module"}
        dtr = remat.DTR(whole // 2 or 2**30, **how)
        with warnings.catch_warnings(), suppress(remat.Thrashing, ValueError):
            warnings.simplefilter("ignore", remat.ThrashingWarning)
            with dtr:
                model(x).square().mean().backward()
                if number == 2 and error is not None:
                    raise error
        whole = whole or dtr.report().peak_bytes
        names.append(dtr.name)
    assert (names[3] == FIRST) == (error is not None) and names[2] == FIRST


def read_evicted(limit: float | None, times: int) -> tuple[remat.DTR, int]:
    """A block in which a result is evicted with all that it was computed from, and read, again and again; how often."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), torch.randn(2048, 512)
    done = 0
    with remat.DTR("1GiB", costs="model", thrash_limit=limit) as dtr, torch.no_grad():
        y = model(x)
        while done < times:
            evict_all(dtr)
            try:
                y.sum()
            except remat.Thrashing:
                break
            done += 1
    return dtr, done


def test_thrashing_is_what_goes_beyond_its_limit() -> None:
    overhead = read_evicted(None, 1)[0].report().overhead
    assert overhead is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_evicted(overhead * (1 + 1e-9), 1)[0].report().outcome == "pass"
    with pytest.warns(remat.ThrashingWarning):
        assert read_evicted(overhead * (1 - 1e-9), 1)[0].report().outcome == "thrash"


def test_recomputation_without_end_is_stopped() -> None:
    """At 20 times what the program has computed, and 10 ms, which is little here."""
    with pytest.warns(remat.ThrashingWarning):
        dtr, done = read_evicted(2.0, 100)
    own = sum(call.nanoseconds for call in dtr.trace.instructions if isinstance(call, remat.runtime.dtr.trace.Call))
    again = (dtr.report().overhead - 1) * own
    each, most = again / (done + 1), 20 * own + 10**7
    assert most < again <= most + each
    assert dtr.report().outcome == "thrash"


def test_the_block_goes_on_where_something_cannot_be_computed_again() -> None:
    x, other = torch.ones(64), torch.arange(64.0)
    with remat.DTR("1GiB", thrash_limit=None) as dtr:
        first, second = (x * 2).exp(), (other * 3).sin()
        both = first + second
        evict_all(dtr)
        with _disable_current_modes():
            x.add_(1)
        with pytest.raises(remat.ReplayError, match="changed where DTR cannot see"):
            both.sum()
        del first, both  # what the program still holds at the end would have to be there
        assert torch.equal(second + 0, (other * 3).sin())
        third = second * 2
        evict_all(dtr)
    assert torch.equal(third, (other * 3).sin() * 2)


def test_blocks_do_not_nest_but_follow_one_another() -> None:
    x = torch.randn(32, 32)
    dtr = remat.DTR("1MiB")
    with dtr:
        y = x * 2
        with pytest.raises(remat.RematError, match="inside another one"), remat.DTR("1MiB"):
            pass
    with dtr:
        z = y * 2
    assert torch.equal(z, x * 4)


def test_two_threads_have_blocks_of_their_own() -> None:
    cases = [make("GPT"), make("LSTM")]
    runs = [step_of(case) for case in cases]
    expected = []
    for case, run in zip(cases, runs, strict=True):
        torch.manual_seed(4)
        case.model.eval()  # the generator of random numbers is common to both threads
        run()
        expected.append([p.grad.clone() for p in case.model.parameters()])
        for p in case.model.parameters():
            p.grad.zero_()
    budgets = []
    for case, run in zip(cases, runs, strict=True):
        with remat.DTR("1GiB", costs="model") as dtr:
            run()
        budgets.append(int(0.75 * dtr.report().peak_bytes))
        for p in case.model.parameters():
            p.grad.zero_()
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def work(run: Callable[[], None], budget: int) -> None:
        try:
            with remat.DTR(budget, costs="model", thrash_limit=None) as dtr:
                start.wait(60)  # both are inside of their blocks
                run()
            report = dtr.report()
            assert report.evictions > 0
            assert report.peak_bytes <= budget
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in zip(runs, budgets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for case, gradients in zip(cases, expected, strict=True):
        assert all(torch.equal(p.grad, g) for p, g in zip(case.model.parameters(), gradients, strict=True))


def test_sparse_gradients() -> None:
    def work(block: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)
        optimizer = torch.optim.SparseAdam(table.parameters())
        with block:  # type: ignore[attr-defined]
            for _ in range(3):
                loss = functional.cross_entropy(head(table(torch.tensor([1, 4, 4, 9]))), torch.tensor([0, 1, 2, 0]))
                loss.backward()
                if isinstance(block, remat.DTR):
                    evict_all(block)
                optimizer.step()
        return [loss, table.weight, head.weight.grad, table.weight.grad.to_dense()]

    from contextlib import nullcontext

    assert all(map(torch.equal, work(nullcontext()), work(remat.DTR("1MiB", thrash_limit=None))))


def test_hooks_see_each_gradient_once() -> None:
    def work(block: object) -> tuple[list[float], list[torch.Tensor]]:
        model, x = chain_loss()
        seen: list[float] = []
        model[2][0].weight.register_hook(lambda g: seen.append(g.sum().item()) or g * 2)
        model[3].register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0].sum().item()))
        model[4].register_forward_hook(lambda module, args, output: seen.append(output.sum().item()))
        with block:  # type: ignore[attr-defined]
            model(x).square().mean().backward()
        return seen, [p.grad for p in model.parameters()]

    from contextlib import nullcontext

    with remat.DTR("10MiB", costs="model") as probe:
        model, x = chain_loss()
        model(x).square().mean().backward()
    seen, gradients = work(nullcontext())
    mine = work(remat.DTR(int(probe.report().peak_bytes * 0.7), costs="model", thrash_limit=None))
    assert mine[0] == seen
    assert all(map(torch.equal, gradients, mine[1]))


def test_decisions_with_the_cost_model_repeat_themselves() -> None:
    run = step_of(make("UNet"))
    operators: Any = {"granularity": "operator", "costs": "model", "thrash_limit": None}
    with remat.DTR("1GiB", **operators) as dtr:
        run()
    budget = dtr.report().peak_bytes // 2
    decisions = []
    for _ in range(3):
        with remat.DTR(budget, **operators) as dtr:
            run()
        decisions.append(dtr.decisions)
    assert decisions[1] == decisions[2] != []  # the first block may meet scratch memory that it did not know of


def test_a_users_heuristic() -> None:
    run = step_of(make("GPT"))
    with remat.DTR("1GiB", costs="model") as dtr:
        run()
    budget = int(dtr.report().peak_bytes * 0.7)
    decisions = []
    for heuristic in (
        "h_dtr_local",
        lambda c: c.cost / np.maximum(c.bytes * c.staleness, 1e-9),  # the same, but not known to be
        lambda c: -c.cost / np.maximum(c.bytes * c.staleness, 1e-9),
    ):
        with remat.DTR(budget, heuristic, costs="model", thrash_limit=None) as dtr:
            run()
        decisions.append(dtr.decisions)
    assert decisions[0] == decisions[1] != decisions[2] != []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deallocation": "banish"}, "'eager' only"),
        ({"costs": "guessed"}, "unknown costs 'guessed'"),
        ({"thrash_limit": 0.5}, "must be above 1"),
        ({"heuristic": "h_best"}, "unknown heuristic 'h_best'"),
        ({"budget": 0.5}, "it needs a budget in bytes"),
        ({"budget": "lots"}, "not a number with a unit"),
    ],
)
def test_wrong_arguments(options: dict, message: str) -> None:
    with pytest.raises((remat.RematError, ValueError), match=message):
        remat.DTR(**{"budget": "1GiB", **options})
    with pytest.raises(remat.RematError, match="has not run a block yet"):
        remat.DTR("1GiB").report()


def test_from_the_second_step_on_the_peak_keeps_the_budget_with_measured_costs() -> None:
    run = step_of(make("DenseNet"))
    with remat.DTR("1GiB") as dtr:
        run()
    budget = int(dtr.report().peak_bytes * 0.6)

    def limited() -> None:
        with warnings.catch_warnings(), remat.DTR(budget, thrash_limit=None):
            run()

    limited()
    assert all(peak_of(limited) <= budget for _ in range(3))
    assert MIB < budget


def test_advice_names_budgets_that_work() -> None:
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
    sample = torch.randn(64, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def block(budget: int) -> remat.DTR:
        with remat.DTR(budget, "h_dtr_eq", costs="model", thrash_limit=None) as dtr:
            model(sample).sum().backward()
        return dtr

    for _ in range(3):
        whole = block(2**30)
    dtr = block(int(0.6 * whole.report().peak_bytes))
    advice = dtr.advice()
    assert advice.least_bytes < advice.cheap_bytes <= whole.report().peak_bytes
    assert block(advice.least_bytes).report().outcome == "pass"
    assert block(advice.cheap_bytes).report().overhead <= 1.1
    assert advice.cheap_bytes < whole.report().peak_bytes
    assert block(advice.cheap_bytes - 1024).report().overhead > 1.1
    with pytest.raises(remat.OutOfBudget):
        block(advice.least_bytes - 512)
    (name, cost), *_ = advice.costliest
    assert name in ("tanh", "addmm", "t")
    assert cost > 0
    assert 0 < advice.bookkeeping < 1
    assert "10% overhead" in str(advice)
    assert not whole.advice().costliest


def test_thrashing_names_a_budget_that_does_not() -> None:
    cell, inputs = nn.GRUCell(32, 32), torch.randn(60, 8, 32)
    for parameter in cell.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def block(budget: int) -> remat.DTR:
        state = torch.zeros(8, 32)
        with remat.DTR(budget, "h_lru", costs="model", thrash_limit=3.0) as dtr:
            for given in inputs:
                state = cell(given, state)
            state.square().sum().backward()
        return dtr

    for _ in range(3):
        whole = block(2**30).report().peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(remat.Thrashing) as caught:
            block(int(0.4 * whole))
        assert caught.value.minimum is not None
        assert block(caught.value.minimum).report().overhead < 6
    assert pickle.loads(pickle.dumps(caught.value)).minimum == caught.value.minimum
