"""`compare`: plans with every strategy, runs each plan and DTR next to plain PyTorch, and reports what each costs."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.comparison.bench import Bench, Loss
from remat.comparison.predictions import UNLIMITED, ByChain, ByTrace, Predictions
from remat.comparison.result import PLAIN, Comparison, Entry
from remat.comparison.rounds import OpenEntry, Progress, measure, sum_up
from remat.errors import RematError, UnsupportedModel
from remat.formatting import count
from remat.profiling.profile import profile
from remat.runtime.calls.stages import describe, describe_call, is_sequential
from remat.runtime.checks import check_count, check_model, check_sample, checked_loss
from remat.runtime.dtr.trace import Trace
from remat.runtime.execution import Execution
from remat.runtime.executor import UnderDTR
from remat.runtime.library import has_checkpointing
from remat.runtime.live.context import DTR
from remat.runtime.pytree import tensors
from remat.solvers.base import Solver
from remat.solvers.offload import Offload
from remat.strategies import (
    CHECKPOINTING,
    ByCalls,
    Dynamic,
    Static,
    Strategy,
    make_strategies,
    takes_long,
)
from remat.utils.machine import machine
from remat.utils.progress import shown
from remat.utils.warn import warn

_AUTOMATIC = 5  # budgets, where none are given


def compare(
    model: nn.Module,
    sample: Any,
    budgets: Sequence[int | str | float] | int | str | float | None = None,
    strategies: Sequence[str | Solver | Execution | Callable] | None = None,
    loss: Loss | None = None,
    *,
    measure: bool = True,
    repeats: int = 3,
    slots: int = 500,
    file: str | os.PathLike[str] | None = None,
    progress: bool | Progress = True,
    output_held: bool = True,
    host_limit: int | str | None = None,
) -> Comparison:
    """Compares strategies on a model at several budgets: predicts each, then measures it on this machine.

    The protocol: the model is profiled once. Every strategy runs the same sample with the same random numbers under one
    executor. After a warm-up step, separate steps measure memory and gradients. Then steps are timed in rounds: in each
    round every strategy runs one step, in changing order, with a plain PyTorch step right before or after it. The
    report has medians; overheads are ratios to the adjacent plain step. Identical schedules are run once. The model is
    left as found.

    Args:
        model: any module; static strategies plan for the chains found in it, DTR for all of it.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; its first dimension counts
            the examples. On the model's device.
        budgets: one or several, each an int (bytes), a string ("2GiB"), or a float in (0, 1] of the store-all peak.
            They cover what `remat.run` measures, the sample included. None: five, in equal ratios from the least that
            works to that peak.
        strategies: names of `remat.strategies.STRATEGIES` (`remat strategies` lists them, with what each is for);
            `Solver` objects; functions that are heuristics; `Execution` objects. A planner's name means the paper's
            plans, "+parts" behind it plans that may keep a part of a stage. None: the usual planners (floating unless
            it would take long), fit, DTR in both granularities, and the checkpointing of the model's library where it
            has one.
        loss: a function of the output that returns a scalar; without one the output is backpropagated with a fixed
            random gradient.
        measure: False stops after the predictions, of DTR too: nothing larger than single stages is run.
        repeats: rounds of timed steps.
        slots: memory units of the dynamic programs.
        file: a JSON file, updated after each measurement. If it exists, the comparison continues: it uses the stored
            profile, does not repeat measurements of the same strategies and budgets, and keeps all other entries.
        output_held: hold the output until the backward is over, as most training loops do; as for `remat.profile`.
        host_limit: also compare the planner `offload`, which may use so much of the host's memory (an int, or "32GiB").
        progress: whether to show progress on stderr; or a function of what is done, how much of it, and of how much.

    Returns:
        A `Comparison`. An interruption (Ctrl-C, or the stop button of Jupyter) ends it early: it then holds what was
        planned and measured until then, and says so. Before anything is planned there is nothing to return, and the
        interruption goes on; what was profiled is in the file.

    Raises:
        RematError: an unknown strategy, nothing that could be compared, or a file that was made for another model,
            sample or machine.
        InvalidBudget: a budget in another form.
        InvalidFile: a file that holds no comparison.
    """
    check_model(model)
    check_sample(sample)
    check_count("repeats", repeats)
    check_count("slots", slots)
    if isinstance(budgets, (int, str, float)):
        budgets = [budgets]
    loss = checked_loss(loss) if not isinstance(loss, nn.Module) else loss
    chosen = make_strategies(strategies, slots)
    if strategies is None and measure and has_checkpointing(model):
        chosen += make_strategies([CHECKPOINTING])
    if host_limit is not None:
        resolve_budget(host_limit)
        chosen = [
            *(each for each in chosen if each.name != Offload.name),
            Static("offload", Offload(slots, host_limit)),
        ]
    for budget in budgets or ():
        resolve_budget(budget, store_all_bytes=2**62)  # its form, before anything is measured
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise RematError(f"{file}: its folder does not exist; create it first")
    before = Comparison.load(file) if file is not None and Path(file).exists() else None
    with shown(progress) as tell:
        work = _Comparing(
            model, sample, loss, measure, tell, file, output_held=output_held, offload=host_limit is not None
        )
        if before is not None:
            work.take_up(before)
        try:
            work.plan(chosen, budgets, everything=strategies is not None)
            if measure:
                work.run(repeats)
        except KeyboardInterrupt:
            if not work.rows:
                raise
            work.interrupted()
            warn(work.notes[-1])
        return work.result()


class _Comparing:
    """One comparison on its way."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss: Loss | None,
        measure: bool,
        tell: Progress,
        file: str | os.PathLike[str] | None,
        *,
        output_held: bool,
        offload: bool,
    ) -> None:
        self.output_held, self.offload = output_held, offload
        self.model, self.sample, self.loss = model, sample, loss
        self.measure, self.tell, self.file = measure, tell, file
        self.chain: Chain | None = None
        self.trace: Trace | None = None
        self.extra = 0
        self.least: dict[str, int] = {}
        self.heuristics: dict[str, Any] = {}
        self.notes: list[str] = []
        self.budgets: list[int] = []
        self.rows: list[OpenEntry] = []
        self.before: Comparison | None = None
        self.complete = False
        self.fingerprint = _fingerprint(model, sample, loss, output_held, offload)

    # Planning --------------------------------------------------------------------------------------------------------

    def take_up(self, before: Comparison) -> None:
        """Goes on from an earlier comparison.

        Raises:
            RematError: it was of something else, or made elsewhere.
        """
        if before.fingerprint != self.fingerprint:
            raise RematError(
                f"the file contains a comparison of another model or sample ({before.model}, batch of {before.batch}), "
                "or of this one with other parameters, flags or loss. Use another file, or delete this one"
            )
        if before.machine != machine():
            raise RematError(
                f"the file contains measurements of another machine, {before.machine}; this is {machine()}. Use "
                "another file: times of two machines cannot be compared"
            )
        self.before, self.chain = before, before.chain
        if before.measured or not self.measure:  # else its trace may only be the chain's
            self.trace, self.extra = before.trace, before.trace_extra_bytes

    def plan(self, chosen: list[Strategy], budgets: Sequence[int | str | float] | None, *, everything: bool) -> None:
        """Profiles, plans and predicts. `everything`: also runs slow planners, because the user named them."""
        chosen = self._profile(chosen)
        self.keep()
        if not everything and self.chain is not None:
            long = [strategy.name for strategy in chosen if takes_long(strategy, self.chain)]
            self.notes += [f"{name} is left out, because its planning is slow; name it to include it" for name in long]
            chosen = [strategy for strategy in chosen if strategy.name not in long]
        predictions = self._predictions(chosen)
        plain = next(iter(predictions.values())).plain()  # the chain's word, where there is one
        for done, strategy in enumerate(chosen):
            self.tell(f"minimum budget: {strategy.name}", done, len(chosen))
            predicting = predictions.get(type(strategy))
            least = None if predicting is None else predicting.least_bytes(strategy)
            if least is not None:
                self.least[strategy.name] = least
        self.notes += [note for each in predictions.values() for note in each.notes]
        self.heuristics = {each.name: each.heuristic for each in chosen if isinstance(each, Dynamic)}
        self.budgets = self._sizes(budgets, plain.peak_bytes)
        self.rows = [OpenEntry(Entry(PLAIN, None, plain), None)]
        try:
            for done, strategy in enumerate(chosen):
                self.tell(f"planning: {strategy.name}", done, len(chosen))
                if type(strategy) in predictions:
                    entries = predictions[type(strategy)].entries(strategy, self.budgets)
                    self.rows += [OpenEntry(entry, strategy) for entry in entries]
                elif self.measure:
                    sizes: list[int | None] = [*self.budgets] if isinstance(strategy, ByCalls) else [None]
                    self.rows += [OpenEntry(Entry(strategy.name, size), strategy) for size in sizes]
                elif isinstance(strategy, ByCalls):
                    self.notes.append(f"{strategy.name} is left out: only a measurement shows its cost")
        finally:  # an interrupted one keeps what was measured before, too
            self._take_over()
        self.complete = not self.measure
        self.keep()

    def _profile(self, chosen: list[Strategy]) -> list[Strategy]:
        """Measures the stages if the model is a chain; returns the strategies that apply."""
        dynamic = [strategy for strategy in chosen if not isinstance(strategy, Static)]
        if len(dynamic) == len(chosen) and self.measure:
            return chosen
        try:
            if self.chain is None:
                wanted: dict[str, Any] = {"output_held": self.output_held, "offload": self.offload}
                self.chain = profile(self.model, self.sample, loss=self.loss, progress=self.tell, **wanted)
        except UnsupportedModel as error:
            if is_sequential(self.model):
                raise
            left_out = ", ".join(strategy.name for strategy in chosen if isinstance(strategy, Static))
            kind = type(self.model).__name__
            if not dynamic or not self.measure:
                raise RematError(
                    f"{left_out or 'predictions'} need a chain of stages, but this {kind} has none: {error}"
                ) from error
            self.notes.append(f"{left_out} are left out: no chain was found in this {kind}")
            return [*dynamic]
        return chosen

    def _predictions(self, chosen: list[Strategy]) -> dict[type, Predictions]:
        """By kind of strategy."""
        found: dict[type, Predictions] = {}
        if self.chain is not None:
            found[Static] = ByChain(self.chain)
        if self.chain is None or any(isinstance(strategy, Dynamic) for strategy in chosen):
            self.trace = self.trace or self._recorded()
            found[Dynamic] = ByTrace(self.trace, self.extra)
        return found

    def _recorded(self) -> Trace:
        """The trace of a step in which DTR evicts nothing, or, if no step is to be run, of the chain."""
        if self.measure or self.chain is None:
            self.tell("recording a step", 0, 1)
            try:
                with self._bench() as bench:
                    unlimited = UnderDTR(DTR(UNLIMITED, granularity="operator"), bench.sample_bytes)
                    step = bench.step(unlimited)
                    step()  # costs are the least of an operator's first three calls
                return unlimited.dtr.trace
            except torch.OutOfMemoryError:
                if self.chain is None:
                    raise
                self.notes.append("DTR is predicted from the chain: a step without evictions does not fit this device")
        return Trace.from_chain(self.chain)

    def _bench(self) -> Bench:
        return Bench(self.model, self.sample, self.loss, output_held=self.output_held)

    def _sizes(self, budgets: Sequence[int | str | float] | None, most: int) -> list[int]:
        if budgets is None:
            least = min(self.least.values(), default=most)
            between = [step / (_AUTOMATIC - 1) for step in range(1, _AUTOMATIC - 1)]
            budgets = [least, *(math.ceil(least * (most / least) ** share) for share in between), most]
        sizes = list(dict.fromkeys(resolve_budget(budget, most) for budget in budgets))
        if not sizes:
            raise RematError("no budgets to compare; leave `budgets` out for five from the minimum to plain PyTorch")
        return sizes

    def _take_over(self) -> None:
        """What was measured before, of the same strategies, budgets and schedules."""
        known = {} if self.before is None else {(e.strategy, e.budget_bytes): e for e in self.before.entries}
        taken = 0
        for row in self.rows:
            entry = known.get((row.entry.strategy, row.entry.budget_bytes))
            if entry is not None and entry.measured is not None and entry.schedule == row.entry.schedule:
                row.take_over(entry)
                taken += 1
        if taken and self.measure:
            self.notes.append(f"{taken} of {len(self.rows)} entries were measured in an earlier run")

    # Running ---------------------------------------------------------------------------------------------------------

    def run(self, repeats: int) -> None:
        """Measures what is missing."""
        sum_up(self.rows)
        with self._bench() as bench:
            measure(bench, self.rows, repeats, self.tell, self.keep)
        self.complete = True
        self.keep()

    def interrupted(self) -> None:
        """Records that it ended early, and writes the file."""
        sum_up(self.rows)
        done = sum(row.measured is not None for row in self.rows)
        where = "" if self.file is None else f"; compare again with file={os.fspath(self.file)!r} to continue"
        self.notes.append(f"interrupted: {done} of {len(self.rows)} entries were measured{where}")
        self.keep()

    def keep(self) -> None:
        """Writes the present result to the file, which keeps its entries of other strategies and budgets."""
        if self.file is None:
            return
        result = self.result()
        if self.before is not None:
            there = {(entry.strategy, entry.budget_bytes) for entry in result.entries}
            others = [e for e in self.before.entries if (e.strategy, e.budget_bytes) not in there]
            result = replace(
                result,
                entries=(*result.entries, *others),
                budgets=tuple(dict.fromkeys((*result.budgets, *self.before.budgets))),
                least_bytes={**self.before.least_bytes, **result.least_bytes},
            )
        result.save(self.file)

    def result(self) -> Comparison:
        return Comparison(
            model=self._name(),
            batch=_batch(self.sample),
            budgets=tuple(self.budgets),
            entries=tuple(row.finished() for row in self.rows),
            least_bytes=self.least,
            chain=self.chain,
            trace=self.trace,
            trace_extra_bytes=self.extra,
            machine=machine(),
            notes=tuple(self.notes),
            complete=self.complete,
            fingerprint=self.fingerprint,
            heuristics=self.heuristics,
        )

    def _name(self) -> str:
        kind = type(self.model).__name__
        if self.chain is None:
            return kind
        return f"{kind} of {count(self.chain.length - 1 - sum(self.chain.fixed), 'stage')}"


def _batch(sample: Any) -> int:
    """Examples in the sample."""
    found = [tensor for tensor in tensors(sample) if tensor.ndim]
    return found[0].shape[0] if found else 1


def _fingerprint(model: nn.Module, sample: Any, loss: Loss | None, output_held: bool, offload: bool) -> str:
    """A hash of all that makes measurements comparable: modules, flags, tensors, form of the sample, autocast."""
    parts = [model, loss] if isinstance(loss, nn.Module) else [model]
    found: list[object] = [describe_call(sample), loss is None, output_held]
    given = getattr(loss, "__wrapped__", loss)  # what the program gave
    while isinstance(given, partial):
        given = given.func
    code = getattr(given, "__code__", None)  # lambdas have no name
    found.append(getattr(given, "__qualname__", type(given).__name__))
    found.append(None if code is None else (code.co_names, code.co_code))
    found += ["offload"] * offload
    for part in parts:
        found += [(name, type(module).__name__, module.training) for name, module in part.named_modules()]
        for kind in (part.named_parameters(), part.named_buffers()):
            found += [(name, *describe(tensor), tensor.requires_grad) for name, tensor in kind]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
