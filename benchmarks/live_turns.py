"""Programs that take turns at one place of a program, under DTR: equal bits, and within the budget.

    python -m benchmarks.live_turns --programs 200

Each has modules in a loop, and goes on in four ways after a beginning that they may share: other calls, other lengths,
changes in place, failed calls, backwards on the way, modules that do more at times. Some 25 blocks each. Outcomes of a
block: "pass"; "said", it went over and says so, or an error names a cause; "first", it went over without a word when it
went a way for the first or second time with its units; "bits", "silent", "raw" as in `live_fuzz`.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import remat
from benchmarks.keeping import write
from remat.errors import RematError
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.meter import MemoryMeter

SLACK = 1024  # bytes: numbers that Python hands to operators are tensors too
_KNOWN_AFTER = 2  # blocks of a way

Step = tuple[str, int, int]  # what happens, which module, how many states ago the one that it works on was made
Way = tuple[list[Step], tuple[str, ...]]  # the forward's steps, and what happens before the backward
_CALLS = ["call"] * 6 + ["two", "outside"]
_OTHERS = ["call"] * 5 + ["two", "half", "outside", "detach", "in place", "in place after", "more", "refused", "fails"]


class Cell(nn.Module):
    """Does more where `more` is set, which no look of its arguments tells."""

    def __init__(self, width: int, kind: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.norm = nn.Dropout(0.2 if kind & 1 else 0.0), nn.BatchNorm1d(width) if kind & 2 else None
        self.returns_two, self.more = bool(kind & 4), False

    def forward(self, x: Tensor, by: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.down(self.drop(self.up(x).tanh()))
        if self.norm is not None:
            x = self.norm(x)
        if by is not None:
            x = x * by.sigmoid()
        if self.more:
            x = x.exp().sigmoid().tanh()
        return (x, x.sum(1, keepdim=True)) if self.returns_two else x


class Program:
    """Modules, an input, and the ways in which blocks go."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        width, rows = chance.choice([32, 64]), chance.choice([32, 96])
        self.cells = nn.ModuleList(Cell(width, chance.randrange(8)) for _ in range(chance.choice([2, 4, 6])))
        self.sample = torch.randn(rows, width)
        for parameter in self.cells.parameters():
            parameter.grad = torch.zeros_like(parameter)
        base = _steps(chance, chance.randrange(4, 14), _CALLS)
        self.ways: list[Way] = [(base, ())]
        for _ in range(3):
            steps = base
            if chance.random() < 0.8:
                steps = base[: chance.randrange(len(base) + 1)] + _steps(chance, chance.randrange(1, 25), _OTHERS)
            before = chance.sample(["retain", "from the middle", "gradients of gradients"], chance.randrange(3))
            self.ways.append((steps, tuple(before)))
        self.order = [0] * 5
        for _ in range(8):
            self.order += [0] * chance.randrange(1, 3) + [chance.randrange(1, 4)]
        self._shares = chance.choice([1.15, 1.4]), chance.choice([0.5, 0.7, 0.9])
        self._buffers = [buffer.clone() for buffer in self.cells.buffers()]

    def budget(self) -> int:
        """Some memory that the first way has enough of, and the others may not."""
        taken = []
        for way in self.ways:
            for _ in range(2):
                with remat.DTR("100GiB", granularity="operator") as dtr:
                    self.run(way)
            taken.append(dtr.report().peak_bytes)
        return int(max(self._shares[0] * taken[0], self._shares[1] * max(taken)))

    def run(self, way: Way) -> None:
        steps, before = way
        torch.manual_seed(5)
        states, rest = [self.sample], torch.zeros(())
        for kind, number, ago in steps:
            x, other = states[-min(max(ago, 1), len(states))], states[-min(ago + 1, len(states))]
            output = _step(kind, self.cells[number % len(self.cells)], x, other)
            if isinstance(output, tuple):
                rest = rest + output[1].mean()
                output = output[0]
            states.append(output + 0.1 * x)
        loss = states[-1].square().mean() + rest
        for what in before:
            if what == "gradients of gradients":
                parameter = self.cells[0].up.weight
                (gradient,) = torch.autograd.grad(loss, [parameter], retain_graph=True, allow_unused=True)
                loss = loss if gradient is None else loss + gradient.square().mean()
            elif what == "retain":
                loss.backward(retain_graph=True)
            elif states[len(states) // 2].requires_grad:
                states[len(states) // 2].square().mean().backward(retain_graph=True)
        loss.backward()

    def left(self) -> list[Tensor]:
        """Gradients and buffers, which are as at the beginning from then on."""
        found = [*(p.grad.clone() for p in self.cells.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in self.cells.buffers()]
        for parameter in self.cells.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for buffer, was in zip(self.cells.buffers(), self._buffers, strict=True):
            buffer.copy_(was)
        return found


def _steps(chance: random.Random, count: int, kinds: Sequence[str]) -> list[Step]:
    return [(chance.choice(kinds), chance.randrange(6), chance.choice([0, 0, 0, 1, 2, 3])) for _ in range(count)]


def _step(kind: str, cell: nn.Module, x: Tensor, other: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    if kind in ("refused", "fails"):  # before the call, or in it
        hook = cell.register_forward_pre_hook(_refuse) if kind == "refused" else None
        try:
            cell(x.new_zeros(3, 5))
        except (RuntimeError, InterruptedError):
            x = x + 0.0
        finally:
            if hook is not None:
                hook.remove()
        return x
    if kind == "two":
        return cell(x, other)
    if kind == "more":
        cell.more = True
        try:
            return cell(x)
        finally:
            cell.more = False
    if kind == "half":
        half = cell(x[: len(x) // 2])
        half = half[0] if isinstance(half, tuple) else half
        return torch.cat([half, half])
    if kind == "in place after":
        output = cell(x)
        return (output[0] if isinstance(output, tuple) else output).mul_(0.9)
    outside = {
        "outside": lambda: x.sin() * 0.5,
        "detach": lambda: x.detach() * 1.0,
        "in place": lambda: (x + 1).add_(1),
    }
    return outside[kind]() if kind in outside else cell(x)


def _refuse(*_: object) -> None:
    raise InterruptedError


def check(program: Program) -> Counter[str]:
    """What became of its blocks."""
    plain = []
    program.left()
    for way in program.ways:
        try:
            program.run(way)
        except RuntimeError:  # nothing left to differentiate
            return Counter({"programs without a gradient": 1})
        plain.append(program.left())
    budget = program.budget()
    program.left()
    found: Counter[str] = Counter({"programs": 1})
    known: Counter[int] = Counter()
    for number in program.order:
        way, meter = program.ways[number], MemoryMeter(torch.device("cpu"))
        try:
            with warnings.catch_warnings(), meter.session(), meter.region():
                warnings.simplefilter("ignore")
                with remat.DTR(budget, thrash_limit=30) as dtr:
                    program.run(way)
        except RematError:
            program.left()
            found["said"] += 1
            continue
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            found["raw"] += 1
            return found
        block = dtr._block
        found["dormant"] += isinstance(block, UnitsBlock) and block.calls.pool.log.precedent is not None
        peak = meter.regions[0].peak_bytes - meter.regions[0].start_bytes
        if not all(map(torch.equal, plain[number], program.left())):
            found["bits"] += 1
        elif dtr.report().outcome != "pass":
            found["said"] += 1
            known.clear()  # its units are others from now on
        elif peak > budget + SLACK:
            found["silent" if known[number] >= _KNOWN_AFTER else "first"] += 1
        else:
            found["pass"] += 1
        known[number] += 1
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.programs):
        found = check(Program(seed))
        if found["bits"] or found["silent"] or found["raw"]:
            print(seed, dict(found), flush=True)
        total += found
    print(dict(total))
    write("live_turns", [dict(total)], "blocks of DTR by calls in programs that take turns, by what became of them")


if __name__ == "__main__":
    main()
