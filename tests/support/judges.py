"""Second opinions, written apart from what they judge: what a schedule costs, and what a step by it computes.

Both take the words of the paper (Beaumont et al., Section 3.1 and Table 1) one by one, and keep no running sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.chain import Chain
from remat.layout import Option
from remat.schedule import Operation, Schedule


class Verdict(NamedTuple):
    """Of a sequence: whether it is valid, and for each operation the peak and what is stored after it, in bytes."""

    valid: bool
    moments: list[tuple[int, int]]
    seconds: float

    @property
    def peak(self) -> int:
        return max(peak for peak, _ in self.moments)


def judge(chain: Chain, operations: Iterable[Operation]) -> Verdict:  # noqa: PLR0911, PLR0912  # a table of rules
    """Table 1, with a dictionary of all that is in memory in place of counters."""
    last = chain.length
    memory = {("reserve", 0): chain.reserve_bytes, ("a", 0): chain.act_bytes[0], ("grad", last): chain.grad_bytes[last]}
    moments: list[tuple[int, int]] = []
    seconds = 0.0
    part: dict[int, Option] = {}  # of stages of which F_all has kept a part
    backwards = list(range(last, 0, -1))
    operations = [*operations]
    for number, (kind, stage, option) in enumerate(operations):
        before = sum(memory.values())
        at_hand = ("a", stage - 1) in memory or ("saved", stage - 1) in memory
        if stage > last or not at_hand or not backwards:
            return Verdict(False, moments, seconds)
        if kind == "B":
            if backwards[0] != stage or ("saved", stage) not in memory:
                return Verdict(False, moments, seconds)
            backwards.pop(0)
            rest = part.pop(stage, None)
            extra = chain.bwd_overhead_bytes[stage - 1] if rest is None else rest.bwd_overhead_bytes
            peak = before + chain.grad_bytes[stage - 1] + extra
            seconds += 0.0 if rest is None else rest.replay_seconds
            for gone in (("saved", stage), ("grad", stage), ("a", stage - 1)):
                memory.pop(gone, None)
            memory["grad", stage - 1] = chain.grad_bytes[stage - 1]
            seconds += chain.bwd_seconds[stage - 1]
        else:
            once = kind == "F_all" and len(backwards) == last
            if chain.fixed[stage - 1] and not once:
                return Verdict(False, moments, seconds)
            if kind == "F_all":
                if ("saved", stage) in memory:
                    return Verdict(False, moments, seconds)
                name, size = ("saved", stage), chain.saved_bytes[stage - 1]
                scratch = chain.save_overhead_bytes[stage - 1]
                if option > len(chain.options[stage - 1]):
                    return Verdict(False, moments, seconds)
                if option:
                    part[stage] = chain.options[stage - 1][option - 1]
                    size, scratch = part[stage].saved_bytes, part[stage].save_overhead_bytes
            else:
                name, size = ("a", stage), chain.act_bytes[stage]
                scratch = chain.fwd_overhead_bytes[stage - 1]
            if kind == "F_none" and (("a", stage - 1) not in memory or ("saved", stage) in memory):
                return Verdict(False, moments, seconds)
            peak = before + size + scratch
            memory[name] = size
            if kind == "F_none":
                del memory["a", stage - 1]
            first = all(other == "B" or ran != stage for other, ran, _ in operations[:number])
            part_only = kind == "F_all" and option > 0
            next_is_its_backward = [*operations[number + 1 : number + 2]] == [Operation("B", stage)]
            to_the_end = first or kind != "F_all" or not next_is_its_backward or part_only
            seconds += chain.fwd_seconds[stage - 1] if to_the_end else chain.replay_seconds[stage - 1]
            seconds += 0.0 if first or kind != "F_all" else chain.again_seconds[stage - 1]
        moments.append((peak, sum(memory.values())))
    return Verdict(not backwards, moments, seconds)


def train_naively(
    model: nn.Sequential, schedule: Schedule, sample: torch.Tensor, *, autocast: bool = False, seed: int = 7
) -> list[torch.Tensor]:
    """A step by a schedule on plain autograd, a stage at a time: each stage a graph of its own, no hooks.

    Every module is a stage that takes and returns one tensor; behind them comes the loss, the mean square. Returns what
    a step leaves: output, gradients (parameters', then the sample's), buffers, state of the generator.
    """
    torch.manual_seed(seed)
    stages = list(model)
    activations: dict[int, torch.Tensor] = {0: sample}
    graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of F_all: the stage's input, a leaf, and its output
    before: dict[int, tuple[torch.Tensor, list[dict[str, Any]]]] = {}  # of a first run: generator and buffers
    output, gradient = None, torch.ones(())

    def run(stage: int, value: torch.Tensor) -> torch.Tensor:
        nonlocal output
        if stage > len(stages):
            return value.float().square().mean()
        parts = list(stages[stage - 1].modules())
        now = (torch.get_rng_state(), [dict(part._buffers) for part in parts])
        again = stage in before
        if not again:
            before[stage] = (
                now[0],
                [{name: b.clone() for name, b in each.items() if b is not None} for each in now[1]],
            )
        else:
            torch.set_rng_state(before[stage][0])
            for part, buffers in zip(parts, before[stage][1], strict=True):
                part._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = stages[stage - 1](value)
        if again:
            torch.set_rng_state(now[0])
            for part, buffers in zip(parts, now[1], strict=True):
                part._buffers.update(buffers)
        elif stage == len(stages):
            output = result.detach()
        return result

    for kind, stage, _ in schedule.operations:
        if kind == "B":
            leaf, result = graphs.pop(stage)
            if result.requires_grad:
                result.backward(gradient)
            gradient = leaf.grad
        else:
            given = activations[stage - 1] if stage - 1 in activations else graphs[stage - 1][1]
            leaf = given.detach()
            if leaf.is_floating_point():
                leaf.requires_grad_(sample.requires_grad or stage > 1)
            if kind == "F_all":
                graphs[stage] = (leaf, run(stage, leaf))
            else:
                with torch.no_grad():
                    activations[stage] = run(stage, leaf)
            if kind == "F_none":
                del activations[stage - 1]
    missing = torch.tensor(-math.inf)
    gradients = [missing if each.grad is None else each.grad for each in model.parameters()]
    assert output is not None
    of_sample = missing if gradient is None else gradient
    return [output, *gradients, of_sample, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
