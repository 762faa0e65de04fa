"""Programs that gave wrong gradients, or went over their limit, in silence: each by plans and at both granularities."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from remat.errors import InfeasibleBudget, RematError, ReplayError, UnsupportedModel
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.hooks import Hooks, hooked_to_all
from remat.runtime.calls.partial import Differs, Parts, Replaying
from remat.runtime.calls.stages import Stage
from remat.runtime.calls.tape import Tape
from remat.runtime.dtr import _kernels as k
from remat.runtime.dtr.heuristics import make_heuristic
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.operators import traits_of
from support.memory import metered, peak_of
from support.steps import assert_same

WIDTH, ROWS = 32, 48
HIDDEN = [torch.Generator()]
pytestmark = pytest.mark.filterwarnings(
    "ignore::remat.OverBudgetWarning",
    "ignore::remat.ThrashingWarning",
    "ignore:.*recomputed as a whole",
    "ignore:.*have changed since it was measured",
)


class Held:
    """An object of the program's own that a module holds."""

    def __init__(self, seed: int) -> None:
        self.generators = {"noise": torch.Generator().manual_seed(seed)}


class Block(nn.Module):
    """One thing that a module may do besides computing; `x` and `h` are what it works on."""

    def __init__(self, does: str, seed: int) -> None:
        super().__init__()
        self.inner, self.outer, self.does = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), does
        self.embedding, self.leaky = nn.Embedding(20, WIDTH, max_norm=0.5), nn.RReLU()
        self.drawing: Any = {
            "generator": torch.Generator().manual_seed(seed),
            "in a list": [torch.Generator().manual_seed(seed)],
            "in an object": Held(seed),
            "random": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "numpy of old": np.random.RandomState(seed),
        }.get(does)
        self.scale, self.calls, self.last = 1.0, 0, torch.zeros(())
        self.log: list[float] = []
        self.tensors: dict[int, Tensor] = {}
        self.recent: deque[int] = deque(maxlen=4)

    def forward(self, x: Tensor) -> Tensor:
        before, after = DOES[self.does]
        before(self, x)
        h = self.inner(x).tanh()
        return x + self.outer(torch.sigmoid(h * after(self, h)) * h)


def _nothing(block: Block, x: Tensor) -> None:
    return None


def _copied(how: Callable[[nn.Module], nn.Module]) -> Callable[[Block, Tensor], Tensor]:
    def copied(block: Block, h: Tensor) -> Tensor:
        other: Any = how(block.inner)
        if how is not copy.copy:
            with torch.no_grad():
                other.weight.mul_(0.5)
        result: Tensor = other(h[:, :WIDTH])
        return result

    return copied


def _writes(change: Callable[[Tensor], Any], *, data: bool) -> Callable[[Block, Tensor], None]:
    def writes(block: Block, x: Tensor) -> None:
        with torch.no_grad():
            change(block.inner.weight.data if data else block.inner.weight)

    return writes


def _weights(block: Block, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), block.inner.weight, retain_graph=True)
    return 1 + gradient.mean().detach()


def _inner_gradient(block: Block, h: Tensor) -> Tensor:
    with torch.enable_grad():
        z = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(block.outer(z).tanh().sum(), z)
    return gradient


def _enlarges(block: Block, h: Tensor) -> Tensor:
    made = torch.empty(0)
    with torch.no_grad():
        torch.mul(h, 2, out=made)
    return made


def _resizes(block: Block, h: Tensor) -> Tensor:
    return torch.empty(4).resize_(h.shape).copy_(h.detach())


def _counts(block: Block, h: Tensor) -> float:
    block.calls += 1
    return 1.0 + block.calls % 3


def _remembers(block: Block, h: Tensor) -> Tensor:
    """What no attribute held before the first step."""
    before: Tensor = getattr(block, "first", torch.zeros(()))
    block.first = h.detach().mean()
    return before + 1


def _logs(block: Block, h: Tensor) -> float:
    block.log.append(float(h.detach().mean()))
    block.tensors[len(block.log)] = h.detach().mean()
    block.recent.append(len(block.log))
    return 1 + sum(block.log[-2:]) / 2 + sum(block.recent) / 8


def _keeps(block: Block, h: Tensor) -> Tensor:
    before, block.last = block.last, h.detach().mean()
    return before + 1


def _of_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002  # what programs draw from without a word


def _data(block: Block, h: Tensor) -> Tensor:
    y = h.exp()
    z = y.sin() * y
    y.data.mul_(0.5)  # autograd has saved it, and no version counts
    return z


DOES: dict[str, tuple[Callable[[Block, Tensor], None], Callable[[Block, Tensor], Any]]] = {
    "generator": (_nothing, lambda b, h: torch.rand(h.shape, generator=b.drawing)),
    "in a list": (_nothing, lambda b, h: torch.rand(h.shape, generator=b.drawing[0])),
    "in an object": (_nothing, lambda b, h: torch.rand(h.shape, generator=b.drawing.generators["noise"])),
    "random": (_nothing, lambda b, h: b.drawing.random()),
    "numpy": (_nothing, lambda b, h: float(b.drawing.random())),
    "numpy of old": (_nothing, lambda b, h: float(b.drawing.rand())),
    "python's": (_nothing, lambda b, h: random.random() + _of_numpy()),
    "rrelu": (_nothing, lambda b, h: b.leaky(h - 0.5)),
    "rrelu in place": (_nothing, lambda b, h: functional.rrelu((h - 0.5).clone(), training=True, inplace=True)),
    "deepcopy": (_nothing, _copied(copy.deepcopy)),
    "copy": (_nothing, _copied(copy.copy)),
    "pickle": (_nothing, _copied(lambda module: pickle.loads(pickle.dumps(module)))),
    "clamps": (_writes(lambda w: w.clamp_(-0.1, 0.1), data=False), lambda b, h: 1.0),
    "clamps data": (_writes(lambda w: w.clamp_(-0.1, 0.1), data=True), lambda b, h: 1.0),
    "scales": (_writes(lambda w: w.mul_(0.9), data=False), lambda b, h: 1.0),
    "scales data": (_writes(lambda w: w.mul_(0.9), data=True), lambda b, h: 1.0),
    "max norm": (_nothing, lambda b, h: b.embedding(torch.arange(ROWS) % 20).sum(1, keepdim=True)),
    "gradient of weights": (_nothing, _weights),
    "inner gradient": (_nothing, _inner_gradient),
    "enlarges": (_nothing, _enlarges),
    "resizes": (_nothing, _resizes),
    "counts": (_nothing, _counts),
    "keeps": (_nothing, _keeps),
    "remembers": (_nothing, _remembers),
    "logs": (_nothing, _logs),
    "turns": (_nothing, lambda b, h: h.detach().t().exp().t_().reshape(-1).view(h.shape)),
    "values of a storage": (_nothing, lambda b, h: 1 + (h.exp().detach().untyped_storage()[5] % 4)),
    "data": (_nothing, _data),
}
# What a plan refuses in a sentence: a run once more is another one, or a backward lies in a forward.
REFUSED = ("scales", "scales data", "gradient of weights", "inner gradient")


def model_of(does: str) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that programs draw from without a word
    return nn.Sequential(*(Block(does, seed) for seed in range(4)), nn.Linear(WIDTH, WIDTH))


def trained(model: nn.Module, around: Callable[[], Any] = nullcontext, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with around():
            loss = model(x).square().mean()
            loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    numbers = torch.tensor([random.random(), _of_numpy(), *(n for b in model for n in getattr(b, "log", ()))])
    return [*left, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state(), numbers]


@pytest.mark.parametrize("does", DOES)
def test_plans(does: str) -> None:
    plain = trained(model_of(does))
    for limit in (0.8, 0.6):
        model = model_of(does)
        try:
            remat.fit(model, torch.randn(ROWS, WIDTH, generator=torch.Generator()), memory=limit, quiet=True)
            found = trained(model)
        except (UnsupportedModel, ReplayError, InfeasibleBudget) as error:
            assert does in REFUSED or isinstance(error, InfeasibleBudget)
            continue
        assert_same(plain, found, f"{does} at {limit}")


@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("does", DOES)
def test_dtr(does: str, granularity: str) -> None:
    plain = trained(model_of(does))
    with remat.DTR("1GiB", granularity="operator") as dtr:
        model_of(does)(torch.randn(ROWS, WIDTH)).square().mean().backward()
    for share in (1.5, 0.8, 0.65):
        budget = int(share * dtr.report().peak_bytes)

        def around(budget: int = budget) -> remat.DTR:
            return remat.DTR(budget, granularity=granularity, costs="model", thrash_limit=None)

        assert_same(plain, trained(model_of(does), around), f"{does} at {share}")


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * torch.rand(x.shape, generator=HIDDEN[0])


def test_a_generator_that_nobody_holds() -> None:
    """Plans refuse it; DTR keeps what was computed with it."""
    model, x = nn.Sequential(*(Foreign() for _ in range(4))), torch.randn(ROWS, WIDTH)
    with pytest.raises(UnsupportedModel, match=r"torch\.Generator that is neither.*attribute"):
        remat.fit(model, x, memory=0.7, quiet=True)
    for granularity in ("module", "operator"):
        HIDDEN[0].manual_seed(3)
        plain = trained(copy.deepcopy(model))
        HIDDEN[0].manual_seed(3)
        found = trained(copy.deepcopy(model), lambda g=granularity: remat.DTR(60_000, granularity=g, thrash_limit=None))
        assert_same(plain[:-1], found[:-1], granularity)


def test_fit_leaves_generators_and_counters_alone() -> None:
    for does in ("generator", "random", "numpy", "counts"):
        model = model_of(does)
        before = trained(copy.deepcopy(model))
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # the generator that programs draw from without a word
        again = copy.deepcopy(model)
        remat.fit(again, torch.randn(ROWS, WIDTH, generator=torch.Generator()), memory=1.0, quiet=True)
        remat.remove(again)
        found = trained(again)
        assert_same(before[:-2], found[:-2], does)


def test_a_fit_that_is_refused_leaves_parameters_alone() -> None:
    model = model_of("scales")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RematError):
        remat.fit(model, torch.randn(ROWS, WIDTH), memory=1000, quiet=True)
    assert_same(before, [parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("way", ["plan", "calls"])
def test_other_memory_in_a_parameter(way: str) -> None:
    """`parameter.data = other` between a forward and its backward."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh()) for _ in range(1)), nn.Linear(128, 32)),
        None,
    )
    model = nn.Sequential(*(copy.deepcopy(model) for _ in range(4)))
    x = torch.randn(64, 32)
    if way == "plan":
        model = remat.apply(model, remat.solve(remat.profile(model, x), 0.6, "recompute_all"))
        loss = model(x).square().mean()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with pytest.raises(ReplayError, match=r"were replaced since its forward"):
            loss.backward()
        return
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    most = peak_of(lambda: model(x).square().mean().backward())
    for number in range(4):
        with remat.DTR(int(0.6 * most), thrash_limit=None):
            loss = model(x).square().mean()
            if number < 3:
                loss.backward()
                continue
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            with pytest.raises(ReplayError, match=r"were replaced since its forward"):
                loss.backward()


# Within the limit ----------------------------------------------------------------------------------------------------


class Casting(nn.Module):
    """Turns autocast on in its own forward: copies of weights are made that no tape has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.down(functional.gelu(self.up(x)))
        return y.float() + x


class Checkpointing(nn.Module):
    """PyTorch's checkpointing holds the state of the generator, which no operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x.tanh(), use_reentrant=False)
        return made + x


@pytest.mark.parametrize("kind", [Casting, Checkpointing])
def test_known_calls_at_other_places(kind: type[nn.Module]) -> None:
    """What calls leave behind counts wherever they run, and not only where they were recorded."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(kind() for _ in range(5))), torch.randn(16, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def plain() -> None:
        model(x).square().mean().backward()

    most = peak_of(plain)

    def one_place(budget: int) -> remat.DTR:
        with remat.DTR(budget, thrash_limit=None) as dtr:
            plain()
        return dtr

    def another(budget: int) -> remat.DTR:
        with remat.DTR(budget, thrash_limit=None) as dtr:
            plain()
        return dtr

    seen = 0
    for share in (2.0, 0.95, 0.85):
        for place in (one_place, another):
            for _ in range(4):
                place(int(share * most))  # scratch memory cannot be learned while a profiler runs
            for _ in range(3):
                peak, dtr = metered(lambda place=place, share=share: place(int(share * most)))
                if dtr.report().outcome == "pass":
                    seen += dtr.report().evictions > 0
                    assert peak <= share * most
    assert seen


@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_what_is_enlarged_counts(granularity: str) -> None:
    model, x = model_of("enlarges"), torch.randn(ROWS, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    most = peak_of(lambda: model(x).square().mean().backward())
    for share in (0.9, 0.75):

        def step(share: float = share) -> remat.DTR:
            with remat.DTR(int(share * most), granularity=granularity, thrash_limit=None) as dtr:
                model(x).square().mean().backward()
            return dtr

        for _ in range(4):
            step()
        peak, dtr = metered(step)
        assert dtr.report().evictions
        assert peak <= share * most or dtr.report().outcome == "over"


def test_a_share_stays_as_many_bytes() -> None:
    """Also after parameters are frozen, when storing everything takes less."""
    model, x = nn.Sequential(*(Block("counts", 0) for _ in range(6))), torch.randn(ROWS, WIDTH)
    remat.fit(model, x, memory=0.6, quiet=True)
    model(x).square().mean().backward()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    model(x).square().mean().backward()


# Errors --------------------------------------------------------------------------------------------------------------


def test_two_threads_with_models_of_their_own() -> None:
    """Modules that another thread calls are none of a call that is recorded here."""
    failed: list[BaseException] = []
    stop = threading.Event()

    def other() -> None:
        model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), torch.randn(2, 8)
        while not stop.is_set():
            try:
                model(x)
            except BaseException as error:
                failed.append(error)
                return

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(3):
            trained(model_of("random"), lambda: remat.DTR("1GiB"), steps=3)
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_who_looks_on_in_another_thread_is_no_hook_of_the_program() -> None:
    """A recording there may begin, or end, while a run is made again here with the hooks that it has met."""
    module, called = nn.Linear(2, 2), []

    def looked_on() -> Callable[[], None]:
        return hooked_to_all(lambda *_: called.append("before"), lambda *_: called.append("after"))

    ends_inside = looked_on()
    hooks = Hooks([module])
    assert not hooks.any
    own = nn.modules.module.register_module_forward_hook(lambda *_: None)  # of the program, after the run
    with hooks.again():
        ends_inside()
        ends_later = looked_on()
    module(torch.randn(2))
    own.remove()
    module(torch.randn(2))
    ends_later()
    module(torch.randn(2))
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_jagged_tensors(granularity: str) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    rows = [torch.randn(5, 16), torch.randn(9, 16)]

    def step() -> list[Tensor]:
        model.zero_grad()
        model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = step()
    for _ in range(3):
        with remat.DTR("1MiB", granularity=granularity):
            found = step()
        assert_same(plain, found)


class Jagged(nn.Module):
    """Has jagged tensors inside, of which each run makes others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged)
        return torch.cat(list(self.linear(rows).sin().unbind())) + x


def test_jagged_tensors_in_a_plan() -> None:
    torch.manual_seed(0)
    wide = [nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(4)]
    model = nn.Sequential(*wide[:2], Jagged(), *wide[2:])
    plain = trained(copy.deepcopy(model))
    remat.fit(model, torch.randn(ROWS, WIDTH), memory=0.7, quiet=True)
    assert_same(plain[:-2], trained(model)[:-2])  # without the states of random numbers


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64)
        self.back = nn.Linear(64, 16)
        self.register_buffer("graph", torch.eye(32).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.sparse.mm(self.graph, self.linear(x).relu()))


def test_sparse_products_in_a_plan() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Sparse() for _ in range(5))), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    remat.fit(model, x, memory=0.8, quiet=True)
    for one in (plain, model):
        one(x).square().mean().backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_functions_that_allow_no_hooks_are_refused_in_a_sentence() -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(RematError, match=r"torch\.func\.grad.*torch\.autograd\.grad"), remat.DTR("1MiB"):
        torch.func.grad(lambda x: linear(x).sum())(torch.randn(4))


def test_devices_that_keep_no_statistics_are_refused() -> None:
    class Elsewhere(nn.Module):
        pass

    class Parameter:
        device = torch.device("mps")

    class There(Stage):
        def parameters(self) -> Iterator[Any]:
            yield Parameter()

    with pytest.raises(UnsupportedModel, match=r"CPUs and on devices whose allocator tells.*which 'mps' does not"):
        accelerators(There([Elsewhere()], "somewhere"), ())


def test_recomputation_is_limited_by_all_that_was_computed() -> None:
    """Also by what the policy core is only being told of, as after a block in which nothing had to be decided."""
    ledger = Ledger(20, make_heuristic("h_lru"), sampling=False, skip_small=False, seed=0)
    second = 10**9
    (first,) = ledger.add("a", second, [], [10])
    (other,) = ledger.add("b", second, [], [10])
    (third,) = ledger.add("c", second, [other], [10])
    ledger.note(k.RELEASE, third)
    ledger.add("d", second, [first], [0])
    assert Limits(2.0).ask(ledger) == k.DONE
    assert ledger.core.scalar(k.AGAIN_COST) == second


def test_a_replay_that_no_mode_would_see_is_none_in_part() -> None:
    """Room may be asked for where dispatch is off, as while the state of a generator is taken."""
    replaying = Replaying(Parts(Tape(), ()), lambda number: None)
    with torch._C._DisableTorchDispatch(), pytest.raises(Differs), replaying:
        raise AssertionError


def test_operators_that_only_python_knows_have_traits() -> None:
    """Those of the symbolic shapes of jagged tensors: asking PyTorch's dispatcher for them ends the process."""
    assert traits_of(torch.ops.aten.sym_size.default).label == "sym_size"
