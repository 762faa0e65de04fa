"""Blocks with twice the room that those before took run as plain PyTorch, until they go on in another way."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

import remat
from remat.runtime.live.units.roomy import RoomyBlock
from support.memory import metered
from support.unit_blocks import by_calls, left_by

pytestmark = pytest.mark.usefixtures("nothing_known")
ROOM = "1GiB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 128), nn.Linear(128, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.dropout(self.up(self.norm(x)).tanh(), 0.1, self.training))


class Model(nn.Module):
    """Called by its blocks, which are units then, or as a whole, which is one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.again = 0  # how often the last one runs once more
        self.sees: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.sees()
        for _ in range(self.again):
            x = self.blocks[-1](x)
        return x.square().mean()


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step(model: Model, rows: int = 64) -> torch.Tensor:
    torch.manual_seed(7)
    loss = model.forward(torch.randn(rows, 32))
    loss.backward()
    return loss.detach()


def block(model: Model, budget: str | int = ROOM, rows: int = 64) -> tuple[remat.DTR, torch.Tensor]:
    with remat.DTR(budget) as dtr:
        loss = step(model, rows)
    return dtr, loss


def is_roomy(dtr: remat.DTR) -> bool:
    return isinstance(dtr._block, RoomyBlock)


def settled(model: Model, budget: str | int = ROOM) -> remat.DTR:
    """After so many blocks that all of it is known."""
    for _ in range(5):
        dtr, _ = block(model, budget)
    return dtr


def test_it_is_plain_pytorch_and_says_what_it_takes() -> None:
    plain, model = made(), made()
    seen = []

    def sees() -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        seen.append((hooks is None, _len_torch_dispatch_stack()))

    model.sees = sees
    kinds = []
    for _ in range(6):
        dtr, loss = block(model)
        kinds.append(is_roomy(dtr))
        assert torch.equal(loss, step(plain))
        assert all(map(torch.equal, left_by(plain), left_by(model)))
    assert kinds == [False, False, False, True, True, True]
    assert seen[-1] == (True, 0)
    peak, _ = metered(lambda: step(plain))
    report = dtr.report()
    assert by_calls(dtr) and dtr.is_routine and report.outcome == "pass" and report.overhead == 1.0
    assert peak <= report.peak_bytes <= 1.1 * peak
    assert not report.evictions and not report.recomputations and not dtr.decisions
    assert remat.simulate_dtr(dtr.trace, dtr.budget).peak_bytes == pytest.approx(report.peak_bytes, abs=1024)
    assert dtr.advice().least_bytes is not None


def test_twice_of_what_is_needed_is_enough_and_less_is_not() -> None:
    model = made()
    most = settled(model)._block._path.repeats.most
    assert is_roomy(settled(model, int(2.01 * most) + 1024))
    assert not is_roomy(settled(model, int(1.9 * most)))


def _runs_longer(model: Model) -> int:
    model.again = 2
    return 64


def _has_other_inputs(model: Model) -> int:
    return 48


def _has_a_frozen_parameter(model: Model) -> int:
    model.blocks[2].up.weight.requires_grad_(False)
    return 64


def _has_a_part_in_eval_mode(model: Model) -> int:
    model.blocks[3].norm.eval()
    return 64


def _has_another_module(model: Model) -> int:
    torch.manual_seed(3)
    model.blocks[1].up = nn.Sequential(nn.Linear(32, 128), nn.ReLU())
    return 64


def _has_another_block(model: Model) -> int:
    model.blocks.insert(2, nn.Tanh())
    return 64


def _has_wider_parameters(model: Model) -> int:
    torch.manual_seed(3)
    up, down = model.blocks[4].up, model.blocks[4].down
    up.weight, up.bias = nn.Parameter(torch.randn(256, 32)), nn.Parameter(torch.randn(256))
    down.weight = nn.Parameter(torch.randn(32, 256))
    return 64


@pytest.mark.parametrize(
    "change",
    [
        *(_runs_longer, _has_other_inputs, _has_a_frozen_parameter, _has_a_part_in_eval_mode, _has_another_module),
        *(_has_another_block, _has_wider_parameters),
    ],
)
def test_it_goes_on_in_another_way(change: Callable[[Model], int]) -> None:
    """With the same bits, within the budget, and it is learned what that takes."""
    plain, model = made(), made()
    for _ in range(5):
        step(plain)
    budget = 3 * settled(model)._block._path.repeats.most
    settled(model, budget)
    for _ in range(5):
        step(plain)
    left_by(plain), left_by(model)
    rows = change(plain)
    assert change(model) == rows
    kinds, more = [], 0
    for _ in range(24):
        expected = step(plain, rows)
        peak, (dtr, loss) = metered(lambda: block(model, budget, rows))
        assert torch.equal(expected, loss)
        assert all(map(torch.equal, left_by(plain), left_by(model)))
        assert peak <= budget and dtr.report().outcome == "pass"
        kinds.append(is_roomy(dtr))
        more += peak > dtr.report().peak_bytes
    assert not kinds[0] and kinds[-1]
    assert more <= 1  # the block in which code between calls that was not watched has done something else


class Whole:
    """A model and its plain copy, of which a call is one unit."""

    def __init__(self) -> None:
        self.plain, self.model = made(), made()
        self.budget = 2**30
        for _ in range(5):
            dtr = self.block()
        self.budget = 3 * dtr._block._path.repeats.most
        for _ in range(5):
            dtr = self.block()
        assert is_roomy(dtr)

    def _step(self, model: Model, calls: int) -> torch.Tensor:
        torch.manual_seed(7)
        loss = torch.stack([model(torch.randn(64, 32)) for _ in range(calls)]).sum()
        loss.backward()
        return loss.detach()

    def block(self, again: int = 0, calls: int = 1) -> remat.DTR:
        self.plain.again = self.model.again = again
        with remat.DTR(self.budget) as dtr:
            loss = self._step(self.model, calls)
        assert torch.equal(loss, self._step(self.plain, calls))
        assert all(map(torch.equal, left_by(self.plain), left_by(self.model)))
        return dtr


def test_what_a_call_does_inside_is_looked_at_too() -> None:
    """By the nodes of autograd, once it is over; it counts as one that varies from then on, and is seen each time."""
    whole = Whole()
    for again in (2, 2, 2, 0, 0, 0, 0):
        dtr = whole.block(again)
        assert not is_roomy(dtr) and dtr.report().outcome == "pass"


def test_a_call_that_does_far_more_than_ever_is_said() -> None:
    whole = Whole()
    with pytest.warns(remat.OverBudgetWarning, match="far more than in blocks before"):
        dtr = whole.block(40)
    assert dtr.report().outcome == "over"


def test_where_warnings_are_errors_nothing_is_left_behind() -> None:
    whole = Whole()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(remat.OverBudgetWarning):
            whole.block(40)
    assert not any("forward" in vars(module) for module in whole.model.modules())
    left_by(whole.model)
    for each in (whole.plain, whole.model):
        each.load_state_dict(made().state_dict())
    assert not is_roomy(whole.block())


def test_the_rest_of_a_block_that_took_too_much_is_right() -> None:
    whole = Whole()
    with pytest.warns(remat.OverBudgetWarning):
        dtr = whole.block(40, calls=3)
    assert dtr.report().outcome == "over"


def test_calls_whose_memory_depends_on_data_are_not_taken_for_granted() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 256)

        def forward(self, x: torch.Tensor, padded: bool = False) -> torch.Tensor:
            if padded:
                return self.inner(torch.zeros(int(x[:, 0].sum()), 32)).tanh().sum() + x.sum()
            return self.inner(x[x[:, 0] > 0]).tanh().sum()

    for padded in (False, True):
        model = Chosen()
        for rows in (*[4] * 8, 512):
            sample = torch.zeros(512, 32)
            sample[:rows, 0] = 1
            with remat.DTR("1MiB") as dtr:
                model(sample, padded).backward()
            assert not is_roomy(dtr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_share_one_product_are_sized_by_shapes_alone(dtype: torch.dtype) -> None:
    """How many rows each gets depends on data; how many there are does not, in whatever type PyTorch knows that."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weights = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) / 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen, order = self.gate(x).argmax(-1).sort()
            ends = torch.histc(chosen.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            return x.index_add(0, order, functional.grouped_mm(x[order], self.weights, offs=ends))

    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(3))).to(dtype)
    plain = copy.deepcopy(model)
    for _ in range(4):
        x = torch.randn(64, 32, dtype=dtype)  # other numbers each time: other rows for each
        with remat.DTR(ROOM) as dtr:
            model(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert all(map(torch.equal, left_by(model), left_by(plain)))
    assert is_roomy(dtr)


def test_paths_that_alternate() -> None:
    """Such blocks are not roomy for long, but all are right, and each is within its budget."""
    plain, model = made(), made()
    budget = 3 * settled(model)._block._path.repeats.most
    settled(model, budget)
    for _ in range(10):
        step(plain)
    left_by(plain), left_by(model)
    for number in range(30):
        plain.again = model.again = number % 5 % 2
        expected = step(plain)
        peak, (dtr, loss) = metered(lambda: block(model, budget))
        assert torch.equal(expected, loss) and all(map(torch.equal, left_by(plain), left_by(model)))
        assert peak <= budget and dtr.report().outcome == "pass"


def _accumulates(model: Model, x: torch.Tensor) -> None:
    model.forward(x).backward()
    model.forward(2 * x).backward()


def _evaluates_in_between(model: Model, x: torch.Tensor) -> None:
    loss = model.forward(x)
    with torch.no_grad():
        model.eval().forward(x)
    model.train()
    loss.backward()


def _casts(model: Model, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.forward(x)
    loss.backward()


def _takes_gradients_of_gradients(model: Model, x: torch.Tensor) -> None:
    loss = model.forward(x)
    (gradient,) = torch.autograd.grad(loss, [model.blocks[0].up.weight], create_graph=True)
    (loss + gradient.square().sum()).backward()


def _checkpoints(model: Model, x: torch.Tensor) -> None:
    y = checkpoint(model.blocks[0], x, use_reentrant=False)
    model.forward(y).backward()


def _calls_in_a_thread(model: Model, x: torch.Tensor) -> None:
    loss = model.forward(x)
    with ThreadPoolExecutor(1) as pool:
        loss = loss + pool.submit(lambda: model.blocks[0](x).sum()).result()
    loss.backward()


@pytest.mark.parametrize(
    "program",
    [
        *(_accumulates, _evaluates_in_between, _casts, _takes_gradients_of_gradients),
        *(_checkpoints, _calls_in_a_thread),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_programs_do_in_a_block(program: Callable[[Model, torch.Tensor], None], dtype: torch.dtype) -> None:
    plain, model = made().to(dtype), made().to(dtype)

    def run(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(7)
        program(model, torch.randn(64, 32, dtype=dtype))
        return left_by(model)

    roomy = 0
    for _ in range(9):
        with remat.DTR(ROOM) as dtr:
            found = run(model)
        assert all(map(torch.equal, run(plain), found))
        roomy += is_roomy(dtr)
    assert roomy


def test_caches_are_off_as_in_the_blocks_before() -> None:
    model = made()
    model.blocks[0].config = SimpleNamespace(use_cache=True)
    seen = []
    model.sees = lambda: seen.append(model.blocks[0].config.use_cache)
    assert is_roomy(settled(model))
    assert seen[1:] == [False] * 4 and model.blocks[0].config.use_cache  # the first ran operator by operator


def test_another_model_that_is_called_first() -> None:
    model, other, plain = made(), made(1), made(1)

    def both(first: Model) -> tuple[remat.DTR, torch.Tensor]:
        with remat.DTR(ROOM) as dtr:
            loss = step(first)
        return dtr, loss

    for _ in range(5):
        dtr, _ = both(model)
    assert is_roomy(dtr)
    dtr, loss = both(other)
    assert not is_roomy(dtr) and torch.equal(loss, step(plain))
    assert all(map(torch.equal, left_by(plain), left_by(other)))


def test_what_it_leaves_behind() -> None:
    """Nothing, whether it ends by an exception or not; a block that ended so is followed by roomy ones."""
    model = made()
    settled(model)

    def fails() -> None:
        raise ValueError("of the program")

    model.sees = fails
    with pytest.raises(ValueError, match="of the program"):
        block(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not torch.nn.modules.module._global_forward_pre_hooks
    model.sees = lambda: None
    assert is_roomy(block(model)[0])
    with remat.DTR(ROOM), pytest.raises(remat.RematError, match="inside another one"), remat.DTR(ROOM):
        pass
    assert is_roomy(block(model)[0])


def test_it_does_not_keep_the_model() -> None:
    model = made()
    settled(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
