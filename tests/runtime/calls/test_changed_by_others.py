"""State that a forward reads, and code outside changes before the backward: a recomputation meets what the forward met.

Each program by a plan in which every block is made again, and by DTR at both granularities, against plain PyTorch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.errors import InfeasibleBudget, NoChain, ReplayError, UnsupportedModel
from remat.runtime.calls import state
from remat.runtime.calls.objects import objects_in
from remat.runtime.live.units import known
from support.live_models import allocate_gradients
from support.steps import assert_same
from support.unit_blocks import Model, left_by, memory_of

pytestmark = [
    pytest.mark.usefixtures("nothing_known"),
    pytest.mark.filterwarnings(
        "ignore::remat.OverBudgetWarning", "ignore:.*recomputed as a whole", "ignore:.*measured and planned again"
    ),
]
WIDTH, HIDDEN, ROWS, BLOCKS, STEPS = 16, 64, 128, 6, 7
OF_NUMPY = np.random.default_rng(0)
Step = Callable[[int], None]
Read = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """A perceptron whose hidden units do something more."""

    sigma = 0.0

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.up, self.down, self.read = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), read
        self.others = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(2))
        self.scale, self.which, self.factors = 1.0, 0, [1.0]
        self.table, self.context, self.look = torch.ones(HIDDEN), None, Look(1.0)
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.read(self, self.up(x) + self.others[self.which](x)).tanh())


class Look:
    """An object that modules hold."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Nested:
    def __init__(self, factor: float) -> None:
        self.look = Look(factor)

    @property
    def factor(self) -> float:
        return self.look.factor


class Listed:
    def __init__(self, factor: float) -> None:
        self.looks = [Look(factor)]

    @property
    def factor(self) -> float:
        return self.looks[0].factor


class Computed:
    def __init__(self, factor: float) -> None:
        self.function = lambda: factor

    @property
    def factor(self) -> float:
        return self.function()


class Plain(nn.Module):
    """Nothing but PyTorch's own layers, of which one has a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LeakyReLU(0.1), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def in_a_row(read: Read) -> nn.Sequential:
    return nn.Sequential(*(Block(read) for _ in range(BLOCKS)))


def of_x(step: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def twice(read: Read, set_to: Callable[[Any, int], None]) -> tuple[nn.Module, Step]:
    """Two forwards, before each of which every block is set to something else, and one backward."""
    model = in_a_row(read)

    def step(number: int) -> None:
        found = []
        for which in range(2):
            for block in model:
                set_to(block, which)
            found.append(model(of_x(number)))
        (found[0].sin() * found[1]).mean().backward()

    return model, step


def then(model: nn.Sequential, before: Callable[[Any], None], after: Callable[[Any], None]) -> tuple[nn.Module, Step]:
    """Each block is set to something before a forward, and to something else after it."""

    def step(number: int) -> None:
        for block in model:
            before(block)
        loss = model(of_x(number)).square().mean()
        for block in model:
            after(block)
        loss.backward()

    return model, step


def put(**values: Any) -> Callable[[Any], None]:
    def set_to(block: Any) -> None:
        for name, value in values.items():
            setattr(block, name, value)

    return set_to


def training(part: str, on: bool) -> Callable[[Any], None]:
    """As programs of two networks switch the one off while the other learns."""

    def switch(block: Any) -> None:
        getattr(block, part).requires_grad_(on)

    return switch


def _as_it_is(block: Any, h: Tensor) -> Tensor:
    return h


def hooked() -> tuple[nn.Module, Step]:
    """A hook that is there in forwards, and not in backwards."""
    model = nn.Sequential(*(Plain() for _ in range(BLOCKS)))
    steer = of_x()[0].repeat(HIDDEN // WIDTH)

    def step(number: int) -> None:
        handles = [block.layers[0].register_forward_hook(lambda m, given, output: output + steer) for block in model]
        loss = model(of_x(number)).square().mean()
        for handle in handles:
            handle.remove()
        loss.backward()

    return model, step


def of_a_layer() -> tuple[nn.Module, Step]:
    model = nn.Sequential(*(Plain() for _ in range(BLOCKS)))

    def step(number: int) -> None:
        for block in model:
            block.layers[1].negative_slope = 0.1
        loss = model(of_x(number)).square().mean()
        for block in model:
            block.layers[1].negative_slope = 0.5
        loss.backward()

    return model, step


def one_cell() -> tuple[nn.Module, Step]:
    """A module that is called again and again, and told each time which time it is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Block(lambda block, h: h * block.scale)

        def forward(self, x: Tensor) -> Tensor:
            for number in range(BLOCKS):
                self.cell.scale = 0.5 + number / 4
                x = self.cell(x)
            return x

    model = Net()
    return model, lambda number: model(of_x(number)).square().mean().backward()


class Given:
    """An object that calls are passed, and that the program changes between them."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.number = x, 0


def passed() -> tuple[nn.Module, Step]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, given: Given) -> Tensor:
            return given.x + self.down(self.up(given.x).tanh() * given.number)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            given = Given(x)
            for number, layer in enumerate(self.layers):
                given.number = number
                given.x = layer(given)
            return given.x

    model = Net()
    return model, lambda number: model(of_x(number)).square().mean().backward()


def from_an_iterator() -> tuple[nn.Module, Step]:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2 * WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor, skips: Iterator[Tensor]) -> Tensor:
            return self.down(self.up(torch.cat([x, next(skips)], 1)).tanh())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downs = nn.ModuleList(Block(lambda block, h: h) for _ in range(BLOCKS))
            self.ups = nn.ModuleList(Up() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            found = []
            for down in self.downs:
                x = down(x)
                found.append(x)
            skips = iter(reversed(found))
            for up in self.ups:
                x = up(x, skips)
            return x

    model = Net()
    return model, lambda number: model(of_x(number)).square().mean().backward()


def warmed_up() -> tuple[nn.Module, Step]:
    """From the fifth step on, what blocks return is changed in place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, HIDDEN)) for _ in range(8)
            )
            self.more = False

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                if self.more:
                    x += 1.0
            return x

    model = Net()

    def step(number: int) -> None:
        model.more = number >= 4
        model(of_x(number).repeat(1, HIDDEN // WIDTH)).square().mean().backward()

    return model, step


def begins_to_draw() -> tuple[nn.Module, Step]:
    model = in_a_row(lambda block, h: h * (random.gauss(1.0, Block.sigma) if Block.sigma else 1.0))

    def step(number: int) -> None:
        Block.sigma = 0.1 * (number >= 3)
        model(of_x(number)).square().mean().backward()

    return model, step


def conjugated() -> tuple[nn.Module, Step]:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(WIDTH, HIDDEN, dtype=torch.cfloat) / 8)
            self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=torch.cfloat) / 8)

        def forward(self, z: Tensor) -> Tensor:
            h = z @ self.up
            return (h * h.abs().sigmoid()) @ self.down

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Complex() for _ in range(BLOCKS))

        def forward(self, z: Tensor) -> Tensor:
            for block in self.blocks:
                z = block(z.conj())
            return z

    model = Net()
    return model, lambda number: model(of_x(number).to(torch.cfloat)).abs().square().mean().backward()


def made_in_inference() -> tuple[nn.Module, Step]:
    """A table that grows, first in an evaluation."""
    model = in_a_row(_looks_up)
    with torch.inference_mode():
        model(torch.randn(2 * ROWS, WIDTH))
    return model, lambda number: model(of_x(number)).square().mean().backward()


def _looks_up(block: Any, h: Tensor) -> Tensor:
    if len(h) > len(block.shift) or block.shift.ndim == 1:
        block.shift = torch.arange(len(h), dtype=h.dtype)[:, None].expand(-1, HIDDEN) / 1000
    return h + block.shift[: len(h)]


def _moves_a_mean(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.table.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - block.table


def in_lists(block: Any, which: int) -> None:
    block.factors[:] = [1.0 + which]


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "a number": lambda: twice(lambda b, h: h * b.scale, lambda b, which: put(scale=1.0 + which)(b)),
    "a number of one cell": one_cell,
    "which part": lambda: twice(lambda b, h: h, lambda b, which: put(which=which)(b)),
    "in a list": lambda: twice(lambda b, h: h * b.factors[0], in_lists),
    "a tensor": lambda: then(
        in_a_row(lambda b, h: h if b.context is None else h * b.context),
        put(context=torch.full((HIDDEN,), 2.0)),
        put(context=None),
    ),
    "an attribute that comes later": lambda: then(
        in_a_row(lambda b, h: 2 * h if hasattr(b, "late") else h), lambda b: vars(b).pop("late", None), put(late=True)
    ),
    "an object": lambda: twice(lambda b, h: h * b.look.factor, lambda b, which: put(look=LOOKS[which])(b)),
    **{
        f"an object that nobody else holds, {kind.__name__}": lambda kind=kind: twice(
            lambda b, h: h * b.look.factor, lambda b, which: put(look=kind(1.0 + which))(b)
        )
        for kind in (Look, Slotted, Nested, Listed, Computed)
    },
    "an object with a tensor": lambda: twice(
        lambda b, h: h * b.look.factor, lambda b, which: put(look=Look(torch.tensor(1.0 + which)))(b)
    ),
    "objects in a list": lambda: twice(
        lambda b, h: h * getattr(b, "looks", [b.look])[0].factor, lambda b, which: put(looks=[Look(1.0 + which)])(b)
    ),
    "a setting of a layer": of_a_layer,
    "a buffer that is replaced": lambda: then(
        in_a_row(lambda b, h: h + b.shift),
        put(shift=torch.ones(HIDDEN)),
        put(shift=torch.zeros(HIDDEN)),
    ),
    "a tensor that its forward changes": lambda: then(in_a_row(_moves_a_mean), put(), put()),
    "a hook": hooked,
    "an object that is passed": passed,
    "an iterator": from_an_iterator,
    "its output": warmed_up,
    "numbers of Python, later": begins_to_draw,
    "a generator of NumPy, global": lambda: then(
        in_a_row(lambda b, h: h * float(OF_NUMPY.uniform(0.5, 1.5))), put(), put()
    ),
    "conjugated views": conjugated,
    "a table made in inference mode": made_in_inference,
}
LOOKS = (Look(1.0), Look(2.0))


def in_blocks(read: Read) -> tuple[nn.Module, Step]:
    """Blocks whose calls a plan stands in for, so that their `__dict__` holds more while they run."""

    model = Model(*(Block(read) for _ in range(BLOCKS)))
    for block in model.stages:
        block.choice = (nn.Tanh(), nn.Sigmoid())
        block.part = block.choice[0]

    def step(number: int) -> None:
        for block in model.stages:
            vars(block).pop("late", None)
            vars(block).pop("later", None)
            block.part = block.choice[0]
        loss = model(of_x(number)).square().mean()
        for block in model.stages:
            block.late = block.later = True
            block.part = block.choice[1]
        loss.backward()

    return model, step


class Mode(Enum):
    ONE = 1
    TWO = 2


def _turns(block: Any, h: Tensor) -> Tensor:
    """Changes an enumeration, a number of NumPy's, and a counter of its own."""
    block.mode = Mode.TWO if getattr(block, "mode", Mode.ONE) is Mode.ONE else Mode.ONE
    block.scale = np.float64(block.scale) * 0.9
    block.count = getattr(block, "count", None) or Counter()
    block.count["calls"] += 1
    return h * float(block.scale) * block.mode.value + block.count["calls"] / 8


class OfNumPy:
    @staticmethod
    def drawn() -> float:
        return sum(float(OF_NUMPY.uniform(0.5, 1.5)) for _ in range(2))


class Seen:
    def __init__(self) -> None:
        self.numbers: list[int] = []


def seeing() -> tuple[nn.Module, Step]:
    """Calls are passed an object with a list that grows."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor, seen: Seen) -> Tensor:
            return x + self.down((self.up(x) + len(seen.numbers)).tanh())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            seen = Seen()
            for number, layer in enumerate(self.layers):
                seen.numbers.append(number)
                x = layer(x, seen)
            return x

    model = Net()
    return model, lambda number: model(of_x(number)).square().mean().backward()


class Mean(nn.Module):
    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


def shared() -> tuple[nn.Module, Step]:
    """One buffer of two modules of a block."""

    def read(block: Any, h: Tensor) -> Tensor:
        return block.norm(h) * (1 + block.shift).sigmoid()

    model = in_a_row(read)
    for block in model:
        block.norm = Mean(block.shift)
    return model, lambda number: model(of_x(number)).square().mean().backward()


def averaging(holder: str) -> tuple[nn.Module, Step]:
    """An average that layers move from the third step on, by `.data`, which no version tells of."""

    def moves(block: Any, h: Tensor) -> Tensor:
        average = getattr(block, holder)
        if block.moves:
            average.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h + average.clone()

    model = in_a_row(moves)
    for block in model:
        block.moves = False

    def step(number: int) -> None:
        for block in model:
            block.moves = number > 1
        model(of_x(number)).square().mean().backward()

    return model, step


def one_average() -> tuple[nn.Module, Step]:
    """All blocks read it; the last one moves it."""
    model, step = averaging("shift")
    for block in model:
        block.shift = model[0].shift
    for block in model[:-1]:
        block.read = lambda b, h: h + b.shift.clone()
    return model, step


def _anneals(block: Any, h: Tensor) -> Tensor:
    block.look.factor *= 0.9
    return h * block.look.factor


FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)


def in_a_context() -> tuple[nn.Module, Step]:
    """A context variable that is set around forwards, and only from the third step on."""
    model = in_a_row(lambda b, h: h * FACTOR.get())

    def step(number: int) -> None:
        token = FACTOR.set(0.5 if number > 1 else 1.0)
        loss = model(of_x(number)).square().mean()
        FACTOR.reset(token)
        loss.backward()

    return model, step


PROGRAMS |= {
    "a context variable": in_a_context,
    "a number of an object of its own": lambda: then(in_a_row(_anneals), put(), put()),
    "a buffer that is moved later": lambda: averaging("shift"),
    "a tensor that is moved later": lambda: averaging("table"),
    "a buffer of all, moved by one": one_average,
    "a part, and two attributes that come later": lambda: in_blocks(
        lambda b, h: b.part(2 * h if hasattr(b, "late") else h)
    ),
    "an enumeration, NumPy's number and a counter": lambda: then(in_a_row(_turns), put(), put()),
    "a generator of NumPy, in functions": lambda: then(in_a_row(lambda b, h: h * OfNumPy.drawn()), put(), put()),
    "a list in an object that is passed": seeing,
    "a buffer with two names": shared,
    "weights that are trained again": lambda: then(in_a_row(_as_it_is), training("up", False), training("up", True)),
    "weights that are frozen": lambda: then(in_a_row(_as_it_is), training("down", True), training("down", False)),
}


def made(name: str) -> tuple[nn.Module, Step]:
    global OF_NUMPY  # noqa: PLW0603  # a program's own
    torch.manual_seed(0)
    random.seed(0)
    OF_NUMPY = np.random.default_rng(0)
    Block.sigma = 0.0
    model, step = PROGRAMS[name]()
    allocate_gradients(model)
    return model, step


def trained(model: nn.Module, step: Step, around: Callable[[Step, int], None], steps: int = STEPS) -> list[Tensor]:
    return [tensor for number in range(steps) for tensor in (around(step, number), left_by(model))[1]]


def plainly(step: Step, number: int) -> None:
    step(number)


@pytest.mark.parametrize("name", [each for each in PROGRAMS if each not in ("its output", "conjugated views")])
def test_by_a_plan(name: str) -> None:
    expected = trained(*made(name), plainly)
    model, step = made(name)
    try:
        remat.fit(model, of_x(), 0.6, quiet=True)
    except InfeasibleBudget as error:  # the plan or DTR needs more
        assert error.minimum is not None
        remat.fit(model, of_x(), error.minimum, quiet=True)
    assert_same(expected, trained(model, step, plainly))


@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_under_dtr(name: str, granularity: str) -> None:
    expected = trained(*made(name), plainly)
    budget = int(0.6 * memory_of(lambda: alone(name)))
    model, step = made(name)

    def around(step: Step, number: int) -> None:
        with remat.DTR(budget, costs="model", thrash_limit=None, granularity=granularity):
            step(number)

    assert_same(expected, trained(model, step, around))


def alone(name: str) -> None:
    model, step = made(name)
    step(0)
    left_by(model)


def _norms() -> tuple[nn.Module, Step]:
    """A forward of running statistics, and one that moves them, before the backward of both."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*blocks)

    def step(number: int) -> None:
        fixed = model.eval()(of_x(number))
        (fixed - model.train()(of_x(number + 1))).square().mean().backward()

    return model, step


def _swap(tensor: Tensor, value: float) -> None:
    tensor.data = torch.full_like(tensor, value)


def _fill(tensor: Tensor, value: float) -> None:
    tensor.fill_(value)


def _moves_a_mean_in_a_list(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.factors[0].mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h + block.factors[0]


def _with_lists(forward: Read) -> nn.Module:
    model = in_a_row(forward)
    for block in model:
        block.factors = [torch.zeros(HIDDEN)]
    return model


IN_PLACE: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "a tensor that is trained": lambda: then(
        in_a_row(lambda b, h: h + b.trained),
        put(trained=torch.zeros(HIDDEN, requires_grad=True)),
        lambda b: _fill(b.trained.detach(), 0.5),
    ),
    "a buffer": lambda: then(
        in_a_row(lambda b, h: h + b.shift), lambda b: _fill(b.shift, 0.0), lambda b: _fill(b.shift, 0.1)
    ),
    "a buffer's memory": lambda: then(
        in_a_row(lambda b, h: h + b.shift), lambda b: _swap(b.shift, 0.0), lambda b: _swap(b.shift, 0.1)
    ),
    "a tensor in an attribute": lambda: then(
        in_a_row(lambda b, h: h + b.table), lambda b: _fill(b.table, 1.0), lambda b: _fill(b.table, 0.5)
    ),
    "statistics": _norms,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_an_error_and_not_evicted_the_next_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for inputs: the old values are nowhere, where they are too large to be copied."""
    monkeypatch.setattr(state, "_SMALL", 0)
    monkeypatch.setitem(PROGRAMS, name, IN_PLACE[name])
    steps = 2 * STEPS
    expected = trained(*made(name), plainly, steps)
    budget = int(0.6 * memory_of(lambda: alone(name)))
    model, step = made(name)
    failed = []

    def around(step: Step, number: int) -> None:
        try:
            with remat.DTR(budget, costs="model", thrash_limit=None):
                step(number)
        except ReplayError as error:
            assert "modified in place since the forward" in str(error)
            failed.append(number)

    found = []
    for number in range(steps):
        around(step, number)
        found.append(left_by(model))
    assert 0 < len(failed) < STEPS and failed[-1] < steps - 4
    size = len(found[0])
    for number in range(steps):
        if number not in failed:
            assert_same(expected[number * size : (number + 1) * size], found[number])


def test_a_tensor_in_a_list_that_its_module_changes_is_an_error() -> None:
    model = _with_lists(_moves_a_mean_in_a_list)
    with pytest.raises(UnsupportedModel, match=r"It writes to a tensor of shape \(64,\) in an attribute: make that a"):
        remat.fit(model, of_x(), 0.5, quiet=True, options=False)
    assert not any(block.factors[0].any() for block in model)  # as they were


def test_a_tensor_in_a_list_that_others_change_is_an_error() -> None:
    model = _with_lists(lambda b, h: h + b.factors[0])
    remat.fit(model, of_x(), 0.5, quiet=True, options=False)
    loss = model(of_x()).square().mean()
    for block in model:
        block.factors[0].fill_(1.0)
    with pytest.raises(ReplayError, match=r"a tensor of shape \(64,\) in an attribute in .* was modified in place"):
        loss.backward()


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_by_a_plan_what_is_changed_in_place_is_as_it_was_or_an_error(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_SMALL", 1 << 14 if small else 0)
    plain, step_of_it = IN_PLACE["a buffer"]()
    model, step = IN_PLACE["a buffer"]()
    model.load_state_dict(plain.state_dict())
    remat.fit(model, of_x(), 0.5, quiet=True)
    if small:
        assert_same(trained(plain, step_of_it, plainly), trained(model, step, plainly))
        return
    with pytest.raises(ReplayError, match=r"'shift' of a Block in .* was modified in place since the forward"):
        step(0)


def test_weights_that_are_gone_are_an_error() -> None:
    """Of plans, by which gradients come from a recomputation; under DTR these weights are put back for one."""
    model = nn.Sequential(*(Plain() for _ in range(BLOCKS)))
    allocate_gradients(model)
    own = [block.layers[0].weight for block in model]
    remat.fit(model, of_x(), 0.5, quiet=True)
    model(of_x()).square().mean().backward()
    for block in model:
        block.layers[0].weight = nn.Parameter(0.5 * block.layers[0].weight.detach())
    loss = model(of_x()).square().mean()
    for block, weight in zip(model, own, strict=True):
        block.layers[0].weight = weight
    with pytest.raises(ReplayError, match="were replaced since its forward"):
        loss.backward()


def test_blocks_that_are_passed_an_iterator_are_no_chain() -> None:
    model, _ = from_an_iterator()
    with pytest.raises(NoChain, match=r"'ups\.0' is passed an iterator, which gives its items only once"):
        remat.profile(model, of_x(), small=0.0)


def test_under_ddp_versions_of_buffers_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the same values to them in each forward; to tensors in attributes it does not."""
    monkeypatch.setattr(state, "_SMALL", 0)
    model = in_a_row(lambda b, h: h + b.shift + b.table)
    remat.fit(model, of_x(), 0.5, quiet=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name in ("shift", "table"):
        loss = model(of_x()).square().mean()
        for block in model:
            getattr(block, name).copy_(getattr(block, name).clone())
        with pytest.raises(ReplayError, match="'table' of a Block") if name == "table" else nullcontext():
            loss.backward()


@dataclass
class Record:
    x: Tensor


def test_a_record_that_is_passed_is_not_held() -> None:
    """What is in it is, without its graph."""
    given = Given(of_x())
    assert objects_in(([Record(of_x())], {"given": given, "look": Look, "module": nn.Tanh()})) == [given]


def test_measuring_changes_no_tensor_in_an_attribute() -> None:
    model, _ = then(in_a_row(_moves_a_mean), put(), put())
    before = [(block.table, block.table.clone()) for block in model]
    remat.fit(model, of_x(), 0.5, quiet=True)
    for block, (table, values) in zip(model, before, strict=True):
        assert block.table is table and torch.equal(table, values)


def test_what_is_known_of_a_module_is_bounded() -> None:
    """Numbers that differ in each step are other calls each time."""

    module = Plain()
    bound = known.KnownCalls([module])
    for number in range(3 * known._MOST):
        bound.of(module, (of_x(),), {"number": number})
    assert all(len(units) <= known._MOST for units in bound.units.values())


class _Subclass(Tensor):
    pass


class _CountsInAList(nn.Module):
    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.layer, self.counts = nn.Linear(HIDDEN, HIDDEN), [count]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.counts[0].add_(1)
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize(
    "count",
    [
        lambda: torch.zeros(3),
        lambda: nn.Parameter(torch.zeros(3), requires_grad=False),
        lambda: torch.zeros(3).as_subclass(_Subclass),
    ],
    ids=["tensor", "frozen parameter", "subclass"],
)
def test_measuring_puts_back_what_counts_in_a_list(count: Callable[[], Tensor]) -> None:
    model = nn.Sequential(*(_CountsInAList(count()) for _ in range(6)))
    remat.profile(model, torch.randn(8, HIDDEN))
    assert not any(block.counts[0].any() for block in model)
