"""`largest`: the largest batch, or the longest sequence, that trains within a limit, and the fastest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.comparison.bench import Bench
from remat.devices import DEVICES, Device, device_called
from remat.errors import InfeasibleBudget, NoChain, RematError, UnsupportedModel
from remat.estimation.world import World
from remat.formatting import format_bytes, table, text_table
from remat.profiling.profile import estimate_in, profile
from remat.runtime.accelerator import device_of, is_accelerator, name_of
from remat.runtime.checks import Loss, check_model
from remat.runtime.planned.validity import training
from remat.simulation import store_all_peak
from remat.solvers import planner
from remat.training.fit import AUTO, Wish, unit_of
from remat.training.head import as_asked
from remat.training.holdings import checked_optimizers
from remat.training.planned import Planned
from remat.training.rehearsal import rehearse
from remat.training.searching import largest_within
from remat.training.setup import Setup
from remat.utils.progress import Progress, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure

_SIZES = 6  # that are measured: the largest, about half of it, and so on
_ABOUT = 1.4  # times
_STEPS = 3  # that are timed, of each
_AS_FAST = 0.95  # of the highest rate, from which on a size counts as fast
_TRIES = 8  # of sizes that may turn out to take more than was estimated
_LESS = 0.75  # of a limit, that is planned for where the device had no memory left


class Tried(NamedTuple):
    """Steps of one size.

    Attributes:
        plain_bytes, least_bytes: estimated, without recomputation and at least.
        peak_bytes: measured, of the plan for the limit.
        seconds: of a step by it, the median.
        recomputations: in a step.
    """

    size: int
    plain_bytes: int
    least_bytes: int
    peak_bytes: int
    seconds: float
    recomputations: int

    @property
    def rate(self) -> float:
        """Of the size a second: examples, if it is a batch."""
        return self.size / self.seconds


@dataclass(frozen=True)
class Largest:
    """What `largest` found; print it, or show it in Jupyter.

    Attributes:
        size: the largest that fits.
        too_large: the smallest that was found not to fit; None where none was looked at.
        limit_bytes: for the step, and for what `besides_bytes` counts.
        besides_bytes: what the device holds besides a step, where the limit is of the device; else 0.
        tried: the sizes that were measured, in rising order.
    """

    size: int
    too_large: int | None
    limit_bytes: int
    besides_bytes: int
    tried: tuple[Tried, ...]

    @property
    def fastest(self) -> Tried:
        """Of the sizes that were measured, the one with the highest rate."""
        return max(self.tried, key=lambda each: each.rate)

    @property
    def knee(self) -> Tried:
        """The smallest size with 95 % of the highest rate."""
        return next(each for each in self.tried if each.rate >= _AS_FAST * self.fastest.rate)

    def __str__(self) -> str:
        return "\n".join([self._summary(), *text_table(_COLUMNS, self._rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._summary())}</p>{table(_COLUMNS, self._rows())}"

    def plot(self) -> Figure:
        """A figure: how much a second, against the size."""
        from remat.plotting.rates import plot_rates

        return plot_rates(self)

    def _summary(self) -> str:
        fails = "" if self.too_large is None else f" ({self.too_large} does not)"
        fastest, knee = self.fastest, self.knee
        same = "" if knee is fastest else f"; {knee.size} reaches {knee.rate / fastest.rate:.0%} of that"
        return (
            f"{self.size} fits {format_bytes(self.limit_bytes)}{fails}, at {self.tried[-1].rate:.3g} a second. The "
            f"fastest is {fastest.size}, at {fastest.rate:.3g} a second{same}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        sizes = [(each, [each.plain_bytes, each.least_bytes, each.peak_bytes]) for each in self.tried]
        return [
            (
                *(str(each.size), *(format_bytes(size + self.besides_bytes) for size in found)),
                *(f"{each.rate:.3g}", str(each.recomputations)),
            )
            for each, found in sizes
        ]


_COLUMNS = ("size", "without recomputation", "least", "measured", "a second", "recomputations")


def largest(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    memory: int | str = AUTO,
    loss: Loss | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    of: str | None = None,
    chunk_head: bool | str = False,
    quiet: bool = False,
    **options: Any,
) -> Largest:
    """The largest batch, or the longest sequence, with which `model` trains within `memory`, and which is the fastest.

        found = remat.largest(model, lambda size: torch.randn(size, 3, 224, 224), "8GiB")
        remat.fit(model, sample_of(found.size), "8GiB")

    Sizes are looked for by estimates, without running the model; the largest one, and halves of it, are then run by
    their plans, a few steps each, and measured. Where steps take more than was estimated, plans are made for less.
    Where a forward cannot be estimated, it is measured instead. The model stays as it was.

    Args:
        make_sample: a function of a size, from 1 on, that makes a sample as `fit` takes it, on the model's device.
        memory, loss, optimizer, of, chunk_head: as for `fit`; memory in bytes, or "auto".
        quiet: show no progress on stderr.
        options: as for `remat.profile`: `stages`, `output_held`, `options`, ...

    Returns:
        Sizes, their memory, and how much of the size a second they train.

    Raises:
        InfeasibleBudget: the size of 1 does not fit.
        UnsupportedModel: as `remat.profile`.
        RematError: a share as `memory`, or `make_sample` is no function.
    """
    check_model(model)
    if not callable(make_sample):
        raise RematError("make_sample has to be a function of a size, such as lambda size: batch[:size]")
    if isinstance(memory, float):
        raise RematError(f"memory={memory}: a share is of what one sample takes; give it in bytes, such as '8GiB'")
    setup = Setup(loss=loss, of=of or unit_of(memory, optimizer))
    wish = Wish(setup, memory, quiet=quiet, optimizers=checked_optimizers(optimizer)).checked()
    wish = wish.with_holdings(model, make_sample(1))
    limit = resolve_budget(wish.limit_for(Planned(model, setup)))
    search = _Search(model, make_sample, loss, limit, setup.of, {**options, "chunk_head": chunk_head})
    with training(model), shown(not quiet) as tell:
        return search.run(tell, wish.besides)


class _Search:
    def __init__(
        self,
        model: nn.Module,
        make_sample: Callable[[int], Any],
        loss: Loss | None,
        limit: int,
        of: str,
        options: dict[str, Any],
    ) -> None:
        self.model, self.make_sample, self.loss, self.limit, self.of = model, make_sample, loss, limit, of
        self.options, self.planned = options, limit  # less, once steps were seen to take more than plans say
        self.accelerated = is_accelerator(device_of(model))
        self.device = _device_for(device_of(model))
        self.solver = planner("fastest")
        self.chains: dict[int, Chain] = {}
        self.runs = True  # whether the model can be estimated

    def run(self, tell: Progress, besides: int) -> Largest:
        """The search, and what was measured."""

        def takes(size: int) -> int:
            tell(f"looking at a size of {size}", len(self.chains), len(self.chains) + 1)
            return self.solver.minimum_budget(self.chain(size))

        for _ in range(_TRIES):
            known = {size: self.solver.minimum_budget(chain) for size, chain in self.chains.items()}
            size, too_large = largest_within(takes, self.planned, known)
            if not size:
                least = self.solver.minimum_budget(self.chain(1))
                raise InfeasibleBudget(self.limit + besides, least + self.limit - self.planned + besides)
            tell(f"measuring a size of {size}", 0, _SIZES)
            measured = self.measured(size)
            if measured is not None:
                break
        else:
            raise UnsupportedModel("steps take more than is estimated at each size; use remat.fit with a sample")
        found = [measured]
        while found[-1].size > 1 and len(found) < _SIZES:
            half = found[-1].size // 2
            near = [size for size in self.chains if half / _ABOUT <= size <= half * _ABOUT]  # looked at already
            half = min(near, key=lambda size: abs(size - half), default=half)
            tell(f"measuring a size of {half}", len(found), _SIZES)
            smaller = self.measured(half)
            if smaller is None:
                break
            found.append(smaller)
        fails = None if too_large == math.inf else int(too_large)
        return Largest(size, fails, self.limit + besides, besides, tuple(reversed(found)))

    def chain(self, size: int) -> Chain:
        """The estimated costs of a size; measured ones, where the forward depends on what is computed."""
        if size not in self.chains:
            sample, options = self.make_sample(size), dict(self.options)
            try:
                if self.runs:
                    self.chains[size] = estimate_in(World(self.device), self.model, sample, self.loss, options)
                    return self.chains[size]
            except NoChain:
                raise
            except UnsupportedModel:
                self.runs = False
            options.pop("chunk_head", None)  # which an estimate takes out
            with as_asked(self.model, self.options["chunk_head"], stays=False):
                self.chains[size] = profile(self.model, sample, loss=self.loss, repeats=1, **options)
        return self.chains[size]

    def measured(self, size: int) -> Tried | None:
        """Steps of a size by the plan for the limit; None where they take more, and plans are for less from then on."""
        chain = self.chain(size)
        schedule = self.solver.solve(chain, self.planned)
        sample, held = self.make_sample(size), self.options.get("output_held", True)
        with as_asked(self.model, self.options["chunk_head"], stays=False):
            found = rehearse(self.model, sample, self.loss, schedule, output_held=held)
            if found is None:
                self.planned = int(self.planned * _LESS)
                return None
            taken = found.of("allocated" if self.of == "allocated" or not self.accelerated else "reserved")
            if taken > self.limit:
                self.planned = int(min(self.planned * self.limit / taken, self.planned - 1))
                return None
            with Bench(self.model, sample, self.loss, output_held=held) as bench:
                step = bench.step(schedule)
                seconds = sorted(bench.seconds(step) for _ in range(_STEPS))[_STEPS // 2]
        least = self.solver.minimum_budget(chain)
        return Tried(size, store_all_peak(chain), least, taken, seconds, schedule.recomputations)


def _device_for(device: torch.device) -> Device:
    """Whose memory and kernels are like those of a device here."""
    if not is_accelerator(device):
        return DEVICES["cpu"]
    return device_called(name_of(device)) or DEVICES["h100"]
