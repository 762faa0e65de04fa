"""State that modules keep from step to step in plain attributes: what runs again finds it as the first run did."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import remat
from remat.layout import Layout
from support.steps import assert_same, gradients_of, train_step

WIDTH, ROWS, STEPS = 8, 6, 4


class Keeping(nn.Module):
    """Two layers and something that `act` keeps in attributes."""

    def __init__(self, act: Act, **attributes: Any) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell, self.act = nn.LSTM(WIDTH, WIDTH), act
        for name, value in attributes.items():
            setattr(self, name, copy.deepcopy(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x).tanh()


Act = Callable[[Any, Tensor], Tensor]


def recur(self: Any, x: Tensor) -> Tensor:
    """Truncated back-propagation through time: the state is cut off where it is read."""
    state = None if self.state is None else tuple(each.detach() for each in self.state)
    y, self.state = self.cell(x, state)
    return x + y


def recur_detached(self: Any, x: Tensor) -> Tensor:
    y, state = self.cell(x, self.state)
    self.state = tuple(each.detach() for each in state)
    return x + y


def smooth(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    z = y + 0.1 * self.last.detach()
    self.last = y
    return z


def log(self: Any, x: Tensor) -> Tensor:
    self.log.append(self.linear(x))
    return self.log[-1] + 0.1 * self.log[0].detach()


def log_anew(self: Any, x: Tensor) -> Tensor:
    self.log = [*self.log[-1:], self.linear(x)]
    return self.log[-1] + 0.1 * self.log[0].detach()


def by_name(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    z = y + 0.1 * self.log["last"].detach() if "last" in self.log else y
    self.log["last"] = y
    return z


class Pair(NamedTuple):
    mean: Tensor
    count: int


def in_a_pair(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x) * (1 + 0.1 * self.kept.count) + self.kept.mean.detach()
    self.kept = Pair(y.mean(0), self.kept.count + 1)
    return y


def begin(self: Any, x: Tensor) -> Tensor:
    """A running mean that begins with the first batch's."""
    y = self.linear(x)
    mean = y.detach().mean(0)
    self.mean = 0.9 * self.mean + 0.1 * mean if self.begun else mean
    self.begun = True
    return y - self.mean


def begin_parameters(self: Any, x: Tensor) -> Tensor:
    """As activation normalisation: the first batch sets a parameter."""
    y = self.linear(x)
    if not self.begun:
        with torch.no_grad():
            self.other.bias.copy_(y.mean(0))
        self.begun = True
    return self.other(y)


def take_turns(self: Any, x: Tensor) -> Tensor:
    self.first = not self.first
    return (self.linear if self.first else self.other)(x)


def take_turns_by_name(self: Any, x: Tensor) -> Tensor:
    self.turn = "other" if self.turn == "linear" else "linear"
    return getattr(self, self.turn)(x)


def hook_a_weight(self: Any, x: Tensor) -> Tensor:
    if not self.hooked:
        self.linear.weight.register_hook(lambda gradient: gradient * 2)
        self.hooked = True
    return self.linear(x)


def _double(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


def hook_each_time(self: Any, x: Tensor) -> Tensor:
    """As many times as it is called, and no more."""
    self.linear.weight.register_hook(lambda gradient: gradient * 2)
    self.other.weight.register_post_accumulate_grad_hook(_double)
    return self.other(self.linear(x))


def begin_under_a_hook(self: Any, x: Tensor) -> Tensor:
    """The hook, of what lives for one step, does not say that what the flag stands for is done."""
    y = self.linear(x) * (2.0 if self.begun else 1.0)
    y.register_hook(lambda gradient: gradient * 2)
    self.begun = True
    return y


def count_in_a_dictionary(self: Any, x: Tensor) -> Tensor:
    counts = self.counts["runs"]
    counts["all"] += 1
    counts["log"][0].append(counts["all"])
    return self.linear(x) * (counts["all"] + len(counts["log"][0]))


def count_in_an_array(self: Any, x: Tensor) -> Tensor:
    self.counts[0][1] += 1
    return self.linear(x) * float(self.counts[0].sum())


def count_in_a_new_array(self: Any, x: Tensor) -> Tensor:
    self.counts = self.counts + 1
    return self.linear(x) * float(self.counts.sum())


def hook_and_hold(self: Any, x: Tensor) -> Tensor:
    if self.handle is None:
        self.handle = self.linear.weight.register_hook(lambda gradient: gradient * 2)
    return self.linear(x)


def hook_a_module(self: Any, x: Tensor) -> Tensor:
    if not self.hooked:
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        self.hooked = True
    return self.linear(x)


class Table:
    def __init__(self) -> None:
        self.values = torch.ones(WIDTH)


def make_an_object(self: Any, x: Tensor) -> Tensor:
    if not self.made:
        self.table, self.made = Table(), True
    self.count += 1
    return self.linear(x) * self.table.values / self.count


STATES: dict[str, Callable[[], nn.Module]] = {
    "recurrent": lambda: Keeping(recur, state=None),
    "recurrent, detached": lambda: Keeping(recur_detached, state=None),
    "a tensor": lambda: Keeping(smooth, last=torch.zeros(WIDTH)),
    "a list": lambda: Keeping(log, log=[]),
    "a list made anew": lambda: Keeping(log_anew, log=[]),
    "a deque": lambda: Keeping(log, log=deque(maxlen=2)),
    "a dictionary": lambda: Keeping(by_name, log={}),
    "a named tuple": lambda: Keeping(in_a_pair, kept=Pair(torch.zeros(WIDTH), 0)),
    "a mean that begins": lambda: Keeping(begin, begun=False, mean=torch.zeros(WIDTH)),
    "a mean that is made": lambda: Keeping(begin, begun=False),
    "a parameter that begins": lambda: Keeping(begin_parameters, begun=False),
    "turns": lambda: Keeping(take_turns, first=False),
    "turns by name": lambda: Keeping(take_turns_by_name, turn="linear"),
    "a hook of a weight": lambda: Keeping(hook_a_weight, hooked=False),
    "a hook each time": lambda: Keeping(hook_each_time),
    "a flag, and a hook of an activation": lambda: Keeping(begin_under_a_hook, begun=False),
    "a list in a dictionary": lambda: Keeping(count_in_a_dictionary, counts={"runs": {"all": 0, "log": ([],)}}),
    "an array": lambda: Keeping(count_in_an_array, counts=[np.zeros(2)]),
    "an array made anew": lambda: Keeping(count_in_a_new_array, counts=np.zeros(2)),
    "a hook that is held": lambda: Keeping(hook_and_hold, handle=None),
    "a hook of a module": lambda: Keeping(hook_a_module, hooked=False),
    "an object": lambda: Keeping(make_an_object, made=False, count=0),
}


def stack(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(STATES[kind]() for _ in range(3)), nn.Linear(WIDTH, WIDTH))


def samples() -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]


TWICE = remat.Schedule.parse("F_ck1 F_ck2 F_ck3 F_ck4 F_all5 B5 F_all4 B4 F_all3 B3 F_all2 B2 F_all1 B1")


def recomputing(model: nn.Module) -> nn.Module:
    """Each stage runs twice."""
    return remat.apply(model, TWICE)


def ending_early(model: nn.Module) -> nn.Module:
    """The second time only up to what it saves last, as if a profile had found that right."""
    layout = Layout((1,) * 4, (f"float32[{ROWS}, {WIDTH}] cpu",), ends_early=(True,) * 4)
    return remat.apply(model, replace(TWICE, layout=layout))


def fitted(model: nn.Module) -> nn.Module:
    """Nothing is recomputed: what was measured must have left no trace."""
    return remat.fit(model, samples()[0], memory=1.0, quiet=True)


@pytest.mark.parametrize("prepared", [recomputing, ending_early, fitted])
@pytest.mark.parametrize("kind", STATES)
def test_steps_leave_what_plain_ones_do(kind: str, prepared: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = stack(kind), prepared(stack(kind))
    for number, sample in enumerate(samples()):
        assert_same(train_step(plain, sample), train_step(model, sample), f"step {number}")


class Switching(nn.Module):
    """Switches and switches back; what autograd saves last lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        self.other.requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        y = self.drop(self.other(self.linear(x).tanh()))
        torch.set_default_dtype(torch.float32)
        self.other.requires_grad_(True)
        self.drop.train(self.training)
        return y + 1


class Quantised(nn.Module):
    """Works with another weight, a hook and another forward for a while; what autograd saves last lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.linear.weight.data, self.scale
        self.linear.weight.data, self.scale = weight.sign() * weight.abs().mean(), scale * 0.5
        hook = self.linear.register_forward_hook(lambda module, given, output: output * 2)
        self.other.forward = lambda x: nn.functional.linear(x, self.other.weight)  # type: ignore[method-assign]
        y = self.other(self.linear(x).tanh() * self.scale)
        hook.remove()
        del self.other.forward
        self.linear.weight.data, self.scale = weight, scale
        return y + 1


def test_what_a_forward_changes_for_a_while_is_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Quantised() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    sample = samples()[0].repeat(64, 1)
    plain = copy.deepcopy(model)
    remat.fit(model, sample, 0.6, quiet=True)
    for number in range(3):
        assert_same(train_step(plain, sample), train_step(model, sample), f"step {number}")
        assert_same([*plain.state_dict().values()], [*model.state_dict().values()], f"step {number}")
        assert not any("forward" in vars(block.other) or block.linear._forward_hooks for block in model[:4])


def test_what_a_forward_switches_is_as_plain_pytorch_leaves_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Switching() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    model = ending_early(model)
    try:
        for number, sample in enumerate(samples()):
            assert_same(train_step(plain, sample), train_step(model, sample), f"step {number}")
            assert torch.get_default_dtype() is torch.float32
            assert all(module.training for module in model.modules())
            assert all(parameter.requires_grad for parameter in model.parameters())
    finally:
        torch.set_default_dtype(torch.float32)


class Normalised(nn.Module):
    """Running statistics, which PyTorch's kernel writes without counting a version, where a flag of its own says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.follows = nn.Linear(WIDTH, WIDTH), False
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.linear(x), self.running_mean, self.running_var, training=self.follows)


@pytest.mark.parametrize("prepared", [recomputing, fitted])
def test_running_statistics_of_another_layer_that_begin_later(prepared: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Normalised() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    model = prepared(copy.deepcopy(plain))
    for number, sample in enumerate(samples()):
        for layer in (*plain.modules(), *model.modules()):
            if isinstance(layer, Normalised):
                layer.follows = number > 1
        assert_same(train_step(plain, sample), train_step(model, sample), f"step {number}")


class Packed(nn.Module):
    """Works on a tuple of a class that looks at what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: PackedSequence) -> PackedSequence:
        y, _ = self.cell(x)
        return y._replace(data=y.data.tanh() + x.data)


class OfLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Packed() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
        for block in self.blocks:
            packed = block(packed)
        return self.head(pad_packed_sequence(packed)[0])


@pytest.mark.filterwarnings("ignore:.*depends on the data:remat.OverBudgetWarning")
def test_sequences_that_are_packed() -> None:
    torch.manual_seed(0)
    plain, sample = OfLengths(), torch.randn(5, 3, WIDTH)
    model = copy.deepcopy(plain)
    model.source = random.SystemRandom()  # which nobody can have draw again, so that nobody uses it
    remat.fit(model, sample, memory=0.7, quiet=True)
    for _ in range(2):
        assert_same(train_step(plain, sample), train_step(model, sample))


def carry(self: Any, x: Tensor) -> Tensor:
    """The gradient goes back into the forward before."""
    y = self.linear(x) if self.last is None else self.linear(x) + self.last
    self.last = y
    return y


def test_a_gradient_goes_into_the_forward_before() -> None:
    torch.manual_seed(0)
    plain, (first, second, *_) = nn.Sequential(*(Keeping(carry, last=None) for _ in range(2))), samples()
    schedule = remat.Schedule.parse("F_ck1 F_ck2 F_all3 B3 F_all2 B2 F_all1 B1")
    planned = remat.apply(copy.deepcopy(plain), schedule)
    for model in (plain, planned):
        (model(first).square().sum() + model(second).sum()).backward()
    assert_same(gradients_of(plain), gradients_of(planned))


def test_a_model_whose_gradient_goes_into_the_forward_before_is_not_measured() -> None:
    """No run of its stages stands alone."""
    with pytest.raises(remat.UnsupportedModel, match="with its graph other than by its output"):
        remat.profile(nn.Sequential(*(Keeping(carry, last=None) for _ in range(2))), samples()[0])


class Clamped(nn.Linear):
    """Changes its own weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_copies_of_parameters_that_forwards_change_are_counted() -> None:
    """A recomputation compares with them."""
    blocks = [nn.Sequential(Clamped(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]
    model, sample = nn.Sequential(*blocks), torch.randn(256, 256)
    chain = remat.profile(model, sample).without_options
    schedule = remat.solve(chain, remat.minimum_budget(chain))
    assert schedule.recomputations
    assert remat.run(model, sample, schedule, repeats=1).outcome == "pass"


class Holding(torch.autograd.Function):
    """Keeps a tensor where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.x.cos()


class Twice(nn.Module):
    """What a function of its own keeps, a layer saves too: a recomputation makes that anew beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return Holding.apply(y) + self.second(y)


def test_what_is_kept_unseen_and_saved_too_counts_twice_once_it_was_recomputed() -> None:
    model, sample = nn.Sequential(*(Twice() for _ in range(6))), torch.randn(256, 256)
    chain = remat.profile(model, sample).without_options
    schedule = remat.Schedule.parse(
        "F_ck1 F_none2 F_none3 F_none4 F_none5 F_none6 F_all7 B7 "
        "F_all1 F_all2 F_all3 F_all4 F_all5 F_all6 B6 B5 B4 B3 B2 B1"
    )
    predicted = remat.simulate(chain, schedule).peak_bytes
    assert remat.run(model, sample, schedule, repeats=1).peak_bytes <= predicted
