"""Trains a program plainly, by a plan, or in blocks of DTR; notes all that its steps leave, and the last peak."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import remat
from benchmarks.module_programs.drawing import SHARED
from benchmarks.module_programs.holding import State, hold_anew, put_back, taken
from benchmarks.module_programs.program import Block, Program
from remat import rotor
from remat.runtime.meter import MemoryMeter
from remat.runtime.pytree import tensors

RETRIES = 2  # of a step of DTR that does not fit: what it found out may change how the next one runs
Blocks = Callable[[], remat.DTR]
Called = Callable[..., Any]


@dataclass
class Left:
    """What a training left: states after each step, the last one's peak, and what a block said of going over."""

    states: list[State] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    peak: int = 0
    said: str = ""
    failed: int = 0  # steps of DTR that were run again


def total(model: nn.Module, made: Any) -> Tensor:
    loss = torch.zeros(())
    for output in tensors(made):
        loss = loss + output.float().square().mean()
    for block in model.modules():
        if isinstance(block, Block) and block.auxiliary is not None:
            loss = loss + block.auxiliary
    return loss


def fresh(program: Program) -> nn.Module:
    """A copy of the model, and the world as it is before training."""
    model = copy.deepcopy(program.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    random.seed(program.seed)
    np.random.seed(program.seed % 2**31)  # noqa: NPY002
    SHARED.manual_seed(program.seed)
    torch.manual_seed(program.seed)
    return model


class Training:
    """The loop of a program around a copy of its model.

    Args:
        called: what is called in the model's place, where that is a wrapper.
        block: makes the blocks that steps run in; None: they run as they are.
        given: whether the batch counts, as it does for plans.
    """

    def __init__(
        self, program: Program, model: nn.Module, called: Called | None = None, block: Blocks | None = None,
        given: bool = False, metered: bool = True,
    ) -> None:  # fmt: skip
        self.program, self.loop, self.model, self.block = program, program.loop, model, block
        self.called = model if called is None else called
        self.given, self.metered, self.rate = given, metered, 0.05

    def run(self) -> Left:
        left, last = Left(), len(self.loop.order) - 1
        for number, batch in enumerate(self.loop.order):
            for block in self.program.blocks_of(self.model):
                block.step = min(number, last - 1)  # the last step repeats the one before
            self._events(number, left)
            before = taken(self.model) if self.block is not None else None
            for attempt in range(RETRIES + 1):
                try:
                    self._step(number, batch, left, measured=number == last)
                    break
                except (remat.OutOfBudget, remat.Thrashing):
                    if attempt == RETRIES or before is None:
                        raise
                    left.failed += 1
                    self.model.zero_grad(set_to_none=False)
                    put_back(self.model, before)
            left.states.append(taken(self.model))
            if number < last - 1:
                self._update()
        return left

    def peak_of(self, batch: int) -> int:
        """Of one more step with this batch."""
        left = Left()
        self._step(len(self.loop.order), batch, left, measured=True)
        return left.peak

    # A step ----------------------------------------------------------------------------------------------------------

    def _step(self, number: int, batch: int, left: Left, *, measured: bool) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(self.program.seed + batch)
        again = 0 if self.loop.calls == "once" else 1
        batches = [self.program.batch(batch + 50 * part) for part in range(again + 1)]
        losses: list[float] = []
        swaps = "swaps" in self.loop.events.get(number, [])
        if not measured or not self.metered:
            self._in_block(number, batches, losses, left, swaps)
        else:
            gc.collect()
            meter = MemoryMeter(torch.device("cpu"), may_be_idle=True)
            with meter.session():
                hold_anew(self.model)
                with meter.region():
                    self._in_block(number, batches, losses, left, swaps)
            (region,) = meter.regions
            left.peak = region.peak_bytes - region.start_bytes
            if self.given:  # of which those of one call at a time count
                counted = batches if self.loop.calls == "both" else batches[:1]
                left.peak += sum(tensor.nbytes for each in counted for tensor in each)
        left.losses.append(losses)

    def _in_block(self, number: int, batches: list[Any], losses: list[float], left: Left, swaps: bool) -> None:
        if self.block is None:
            self._passes(batches, losses, swaps)
            return
        dtr = self.block()
        if self.loop.places == 2 and number % 2 and number < len(self.loop.order) - 1:
            with dtr:  # the other place: a block is known by its line
                self._passes(batches, losses, swaps)
        else:
            with dtr:
                self._passes(batches, losses, swaps)
        if number == len(self.loop.order) - 1:
            left.said = "" if dtr.report().outcome == "pass" else dtr.report().outcome

    def _passes(self, batches: list[Any], losses: list[float], swaps: bool) -> None:
        if self.loop.calls == "both":
            first, second = (total(self.model, self.called(*batch)) for batch in batches)
            if self.program.seed % 2:  # as in a pipeline
                first.backward()
                second.backward()
                losses += [first.item(), second.item()]
                return
            loss = first + second * 0.5
            del first, second
            loss.backward()
            losses.append(loss.item())
            return
        for batch in batches:
            loss = total(self.model, self.called(*batch))
            if swaps:
                self._swap()
            loss.backward()
            losses.append(loss.item())
            del loss

    def _swap(self) -> None:
        """Gives a parameter other data between forward and backward."""
        parameter = next(each for each in reversed(list(self.model.parameters())) if each.dim() == 2)
        parameter.data = parameter.data * 1.01

    # Between steps ---------------------------------------------------------------------------------------------------

    def _events(self, number: int, left: Left) -> None:
        if "evaluates" in self.loop.events.get(number - 1, []):
            self.model.train()
        for event in self.loop.events.get(number, []):
            if event == "freezes":
                for index, parameter in enumerate(self.model.parameters()):
                    parameter.requires_grad_(index % 3 != 1)
            elif event == "evaluates":
                self.model.eval()
            elif event == "slower":
                self.rate *= 0.1
            elif event == "copied":
                twin = copy.deepcopy(self.model)
                loss = total(twin, twin(*self.program.batch(7)))
                loss.backward()
                left.losses.append([loss.item()])

    def _update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    parameter.sub_(parameter.grad, alpha=self.rate)


# The ways ------------------------------------------------------------------------------------------------------------


def plainly(program: Program) -> tuple[Left, int]:
    """What it leaves, and the bytes of its batch."""
    left = Training(program, fresh(program)).run()
    several = 2 if program.loop.calls == "both" else 1
    return left, several * sum(tensor.nbytes for tensor in program.batch(0))


def by_plan(program: Program, limit: int) -> Training:
    """Made to train by a plan; raises what remat has against that."""
    model = fresh(program)
    before, sample = taken(model), program.batch(0)
    given = sample if len(sample) > 1 else sample[0]
    held = program.seed % 2 == 0
    called: Called = model

    def loss(made: Any) -> Tensor:
        return total(model, made)

    if program.loop.calls == "both":
        called = rotor.Checkpointable(model, given, limit, loss=loss, in_flight=2, output_held=held)
    elif program.seed % 3 == 0:
        called = rotor.Checkpointable(model, given, limit, loss=loss, output_held=held)
    else:
        remat.fit(model, given, memory=limit, loss=loss, quiet=True, output_held=held)
    put_back(model, before)  # planning runs the model, which advances what is Python's; training begins anew
    if isinstance(called, rotor.Checkpointable) and isinstance(model, nn.Sequential):
        return Training(program, model, called, given=True)
    return Training(program, model, given=True)


def in_blocks(program: Program, limit: int, granularity: str, *, metered: bool = True) -> Training:
    return Training(program, fresh(program), block=lambda: remat.DTR(limit, granularity=granularity), metered=metered)
