"""Blocks of which a part runs again: right to the bit, or run again as a whole, whatever their code does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

import remat
from remat.runtime.calls.tape import Recorder
from remat.runtime.raw_memory import watches
from support.live_models import allocate_gradients
from support.steps import assert_same, chain_of, parted
from support.unit_blocks import blocks, by_calls, left_by, memory_of, step_of

WIDTH, ROWS, STEPS = 8, 6, 3
SINGLY = tuple(frozenset([number]) for number in range(8))  # each of the first tensors that a block saves, by itself
Body = Callable[["Block", Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Does what it is made for with its input and with what its layer makes of that."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body, self.calls = nn.Linear(WIDTH, WIDTH), body, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # a run once more counts the same call
        return self.body(self, x, self.linear(x))


def model_of(body: Body) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(body), nn.Linear(WIDTH, 3))


def trained(model: nn.Module) -> list[Tensor]:
    """Some steps with other data each: losses and gradients."""
    left = []
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        left += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return left


def assert_right(body: Body, parts: Iterable[frozenset[int]] = SINGLY) -> None:
    """Whatever part of what such a block saves is dropped, it trains as without a plan."""
    plain = trained(model_of(body))
    chain = chain_of(model_of(body), torch.randn(ROWS, WIDTH).requires_grad_())
    for dropped in parts:
        driven = remat.apply(model_of(body), parted(chain, [dropped] * (chain.length - 1)))
        assert_same(plain, trained(driven), f"{sorted(dropped)}")


def _statistics_of_its_own(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """To make what batch normalisation returns, it must change new statistics, not the kept ones once more."""
    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    y = functional.batch_norm(h.tanh(), mean, variance, training=True)
    return x + torch.sigmoid(y * mean) * h


def _reads_on_the_host(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """What is read belongs to what a part makes: no run as a whole is needed for that."""
    return x + torch.sigmoid(h * sum(map(sum, (h * 1.5).tanh().tolist())))


def _makes_a_longer_one_each_time(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """One that looks as in the run that was recorded would have the length of that."""
    return x + torch.sigmoid(h * torch.arange(block.calls).shape[0])


def _writes_in_place_in_some_runs(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """The result of an operator that nobody needs may be left out, but not where it changes what others read."""
    other = h.detach() * 1.0
    if block.calls == 2:
        other.mul_(2)
    else:
        other.mul(2)
    return x + torch.sigmoid(h + other)


def _saves_another_one_in_the_last_run(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """Then what was kept is no result of `exp`, from which the sigmoid is made, although it looks like one."""
    one, other = h.detach().exp(), h.detach().sin()
    y = torch.sigmoid(h + one.tanh())
    return x + y * (other if block.calls == STEPS else one)


def _slices_of_what_is_outside(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """As the parts of a condition that a coupling layer takes; they may lie elsewhere the next time."""
    start = block.calls % 3
    scaled = h[:, 4:] * x[:, start : start + 4]
    return x + functional.gelu(torch.cat([scaled, h[:, :4] * block.linear.bias[4:]], -1))


BODIES: dict[str, Body] = {
    "slices of what is outside": _slices_of_what_is_outside,
    "statistics of its own": _statistics_of_its_own,
    "reads on the host": _reads_on_the_host,
    "makes a longer one each time": _makes_a_longer_one_each_time,
    "writes in place in some runs": _writes_in_place_in_some_runs,
    "saves another one in the last run": _saves_another_one_in_the_last_run,
}


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a, b + functional.gelu(self.linear(a) * b)], -1)


def test_blocks_that_save_slices_of_their_input_can_be_kept_in_part() -> None:
    model = nn.Sequential(*(Coupling() for _ in range(4)), nn.Linear(64, 3))
    assert all(remat.profile(model, torch.randn(128, 64)).options[:4])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class OfOneImage(nn.Module):
    """Hands its blocks a permuted batch of one, whose first stride says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 1.5).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_of_a_permuted_batch_of_one_can_be_kept_in_part() -> None:
    model, x = OfOneImage(), torch.randn(1, 16, 12, 12)
    chain = remat.profile(model, x)
    assert sum(map(bool, chain.options)) >= 3
    plain = copy.deepcopy(model)
    remat.fit(model, x, 0.6, quiet=True)
    for _ in range(2):
        for each in (plain, model):
            each(x).square().sum().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


@pytest.mark.parametrize("name", BODIES)
def test_blocks_train_as_without_a_plan(name: str) -> None:
    assert_right(BODIES[name])


def _shares_memory_at_first(block: Block, x: Tensor, h: Tensor) -> Tensor:
    one, other = h.detach().exp(), h.detach().sin()
    return x + torch.sigmoid(h * one).tanh() * (other if block.calls == 2 else one)


def test_saved_tensors_that_no_longer_share_memory() -> None:
    """They look as before, and are others: said at once, and not tried in part."""
    for number in range(6):
        with pytest.warns(UserWarning, match="it saves other tensors than when it was recorded"):
            assert_right(_shares_memory_at_first, [frozenset([number])])


def _saves_a_negated_view(block: Block, x: Tensor, h: Tensor) -> Tensor:
    """The imaginary part of a conjugate is negated when it is read: what is made from its memory must not be."""
    imaginary = torch.view_as_complex(h.unflatten(-1, (WIDTH // 2, 2))).conj().imag
    return x + torch.sigmoid(h.clone()) + (x[:, : WIDTH // 2] * imaginary).sum()


def test_views_that_are_negated_when_they_are_read() -> None:
    with pytest.warns(UserWarning, match="it saves a tensor that is conjugated when it is read"):
        assert_right(_saves_a_negated_view)


def test_nobody_watches_memory_when_a_part_was_made() -> None:
    """Functions of PyTorch are its own again, and nothing holds what was made."""
    before, own = watches(), torch.Tensor.tolist
    assert_right(_reads_on_the_host)
    assert watches() == before and torch.Tensor.tolist is own


# Under DTR -----------------------------------------------------------------------------------------------------------


class Noisy(nn.Sequential):
    """Autograd saves the noise of RReLU before it is drawn."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.RReLU())


@pytest.mark.usefixtures("nothing_known")
def test_noise_that_is_drawn_after_it_was_saved() -> None:
    """The last that a module does: a run once more must not end with what was saved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy() for _ in range(4)), nn.Linear(WIDTH, 3))
    allocate_gradients(model)
    step = step_of(model, torch.randn(400, WIDTH))
    step()
    plain = left_by(model)
    budget = int(0.6 * memory_of(step))
    left_by(model)
    torch.use_deterministic_algorithms(True)  # fills new memory, which may hold the same noise from before
    try:
        for _ in range(3):
            (dtr,) = blocks(step, budget, 1)
            assert_same(plain, left_by(model))
    finally:
        torch.use_deterministic_algorithms(False)
    assert by_calls(dtr) and dtr.report().evictions


class Choosing(nn.Module):
    """Which of its two inputs it works on is decided elsewhere, where nobody looks."""

    chosen = 0

    def forward(self, *inputs: Tensor) -> Tensor:
        return (inputs[self.chosen] * 0.5).exp() + inputs[1 - self.chosen]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = Choosing()
        self.pairs = nn.ModuleList(nn.ModuleList(self._layer() for _ in range(2)) for _ in range(4))

    @staticmethod
    def _layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = self.choose(*(layer(x) for layer in pair))
        return x


@pytest.mark.usefixtures("nothing_known")
def test_a_module_that_works_on_another_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """That looks like the one that was recorded, and may not be in memory, as it was read by nobody."""
    torch.manual_seed(0)
    model = Branches()
    allocate_gradients(model)
    step = step_of(model, torch.randn(400, WIDTH))
    budget = int(0.6 * memory_of(step))
    blocks(step, budget, 3)
    monkeypatch.setattr(Choosing, "chosen", 1)
    left_by(model)
    step()
    plain = left_by(model)
    (dtr,) = blocks(step, budget, 1)
    assert_same(plain, left_by(model))
    assert by_calls(dtr) and dtr.report().evictions


def test_threads_that_begin_to_record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives hooks that two threads register at once the same number, by which it tells those of all modules."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    number = RemovableHandle.next_id
    seen: list[tuple[str, ...]] = []

    def elsewhere() -> None:
        monkeypatch.setattr(RemovableHandle, "next_id", number)  # it has read that before the other one wrote it
        record(lambda: layer(x))

    def record(run: Callable[[], object]) -> None:
        with Recorder(timed=True) as recorder:
            run()
            layer(x)
        seen.append(recorder.tape.operators[-1].modules)

    def in_a_thread() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    record(in_a_thread)
    assert seen == [("Linear",)] * 2
