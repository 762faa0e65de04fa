"""Random models under random limits in random training loops: `python -m benchmarks.fuzz --help`.

Each case follows from its number and the seed alone. A model is made twice from the same state; one copy trains as it
is, the other within a limit, by the same loop with the same random numbers. All that the steps leave is compared, bit
for bit, and then the allocator's peak of one more step with the limit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.fuzz_loops import Criterion, Side, draw_limit, draw_loop
from benchmarks.fuzz_models import Draw, in_words, other, seasoned, sequential
from benchmarks.fuzz_results import Results
from benchmarks.keeping import RESULTS
from benchmarks.module_programs.holding import same
from benchmarks.pairing import peak_of
from remat import rotor
from remat.runtime.pytree import loss_in, map_tensors, tensors
from remat.simulation import store_all_peak

KINDS = {"sequential": sequential, "other": other}
ATTEMPTS = 60  # programs that plain PyTorch refuses, before a case is given up
SECONDS = 60  # for one case
SAVED_EVERY = 20
SCALARS = 64  # bytes, at most, that a sum or a mean outside of the limit makes: itself, the gradient it starts from

Record = list[tuple[str, torch.Tensor | None]]


class CaseTimeout(BaseException):
    """A case took too long; no `Exception`, so that nobody takes it for one of theirs."""


# The case ------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a case; `ratio`: the measured peak over the limit."""

    outcome: str
    text: str = ""
    ratio: float | None = None
    warned: list[str] = field(default_factory=list)


class Case:
    """A model, a limit and a loop. Raises what plain PyTorch raises where it does not take the program."""

    def __init__(self, seed: int, number: int, attempt: int) -> None:
        self.kind = list(KINDS)[number % 2]
        draw = Draw(f"{seed}/{number}/{attempt}")
        self.seed = draw.getrandbits(31)
        torch.manual_seed(self.seed)
        self.program = seasoned(draw, KINDS[self.kind](draw))
        interfaces = {"fit": 55, "rotor": 15, "rotor, at the first step": 8, "apply": 22}
        self.interface = draw.choices(list(interfaces), list(interfaces.values()))[0]
        self.loop = draw_loop(draw, self.program, self.interface)
        self.limit = draw_limit(draw)
        self.solver = draw.choice(["persistent", "persistent", "floating", "fastest"])
        self.in_flight = 2 if self.loop.order != "each" and self.interface == "rotor" else 1
        self.detached, self.strict = draw.chance(0.5), draw.chance(0.5)
        self.scaled = draw.chance(0.5)
        self.sample = self.program.batch(self.program.count)
        self.batches = [[self._batch(step) for _ in range(self.loop.batches)] for step in range(self.loop.steps)]
        backbone = self._backbone() if self.loop.backbone else None
        criterion = self._criterion(draw, backbone) if self.loop.loss == "given" else None
        self._first = Side(self.program.model, backbone, criterion)
        self.plain = self._copy()
        self.expected = self.train(self.plain)
        self.note = ""  # on the limit, once there is one

    def __str__(self) -> str:
        return f"{', '.join(self.program.notes)}: {in_words(self.program.model)}"

    def _batch(self, step: int) -> Any:
        smaller = self.loop.smaller_last and step == self.loop.steps - 1
        return self.program.batch(self.program.count * 2 // 3 if smaller else self.program.count)

    def _backbone(self) -> nn.Module:
        width = self.sample.shape[1] if self.sample.dim() == 4 else self.sample.shape[-1]
        first = nn.Conv2d(width, width, 3, padding=1) if self.sample.dim() == 4 else nn.Linear(width, width)
        return nn.Sequential(first, nn.Tanh()).to(self.sample.dtype)

    def _criterion(self, draw: Draw, backbone: nn.Module | None) -> Criterion:
        with torch.no_grad(), self._autocast():
            value = self.sample if backbone is None else backbone(self.sample)
            return Criterion(draw, called(copy.deepcopy(self.program.model), value))

    def _copy(self) -> Side:
        """A copy of the model, and of what it trains with, from before the first step."""
        return Side(*copy.deepcopy((self._first.model, self._first.backbone, self._first.criterion)))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.loop.autocast else nullcontext()

    # The loop --------------------------------------------------------------------------------------------------------

    def train(self, side: Side) -> Record:
        """The loop; returns all that its steps leave, by name."""
        loop = self.loop
        side.optimizer = side.optimizer or self.optimizer(side)
        left: Record = []
        for step, batches in enumerate(self.batches):
            torch.manual_seed(self.seed + step)
            side.optimizer.zero_grad(set_to_none=loop.to_none)
            if loop.evaluates and step:
                side.model.eval()
                with torch.no_grad(), self._autocast():
                    seen(called(side.model, self.fed(side, batches[0])), f"step {step}: evaluation", left)
                side.model.train()
            given = [self.fresh(batch) for batch in batches]
            self.step(side, given, (f"step {step}: ", left))
            state(side, given, f"step {step}: ", left)
            if loop.clips:
                nn.utils.clip_grad_norm_(side.parameters(), 1.0)
            side.optimizer.step()
            left += [(f"step {step}: {name} after the optimiser", p.detach().clone()) for name, p in named(side)]
        return left

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[self.loop.optimizer]
        return kind(side.parameters(), lr=1e-3)

    def fresh(self, batch: Any) -> Any:
        """A batch of one's own, whose leaves need a gradient where the loop says so."""
        needs = self.loop.input_gradient
        return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(needs), batch)

    def fed(self, side: Side, batch: Any) -> Any:
        """What the model takes: the batch, or what the backbone makes of it."""
        return batch if side.backbone is None else side.backbone(batch)

    def step(
        self, side: Side, batches: Sequence[Any], noted: tuple[str, Record] | None = None, *, holds: bool | None = None
    ) -> None:
        """Forwards, losses and backwards of the batches of a step."""
        holds = self.loop.holds if holds is None else holds
        for group in [[batch] for batch in batches] if self.loop.order == "each" else [batches]:
            with self._autocast():
                ends = [self._forward(side, batch, noted, holds) for batch in group]
                if self.loop.autocast == "whole":
                    self._backward(ends)
            if self.loop.autocast != "whole":
                self._backward(ends)
            del ends

    def _forward(
        self, side: Side, batch: Any, noted: tuple[str, Record] | None, holds: bool
    ) -> tuple[torch.Tensor, Any]:
        output = called(side.model, self.fed(side, batch))
        if noted is not None:
            seen(output, f"{noted[0]}output", noted[1])
        loss = self._loss(side, output)
        if noted is not None:
            noted[1].append((f"{noted[0]}loss", loss.detach().clone()))
        return loss, output if holds else None

    def _loss(self, side: Side, output: Any) -> torch.Tensor:
        if self.loop.loss == "own":
            loss = loss_in(output)
            assert loss is not None
            return loss
        if side.criterion is not None:
            return side.criterion(output)
        ends = [tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
        first, *others = [end.sum() if self.loop.loss == "sum" else end.mean() for end in ends]
        return sum(others, first)

    def _backward(self, ends: Sequence[tuple[torch.Tensor, Any]]) -> None:
        for loss, _ in ends if self.loop.order != "last in" else reversed(ends):
            (loss / len(self.batches[0]) if self.scaled and len(self.batches[0]) > 1 else loss).backward()

    # Within the limit ------------------------------------------------------------------------------------------------

    def check(self) -> Outcome:
        """Trains within the limit, compares and measures."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self._checked()
        found.warned = [str(each.message) for each in caught if str(each.message).startswith(("remat", "rotor"))]
        if found.outcome == "over" and (self.program.wanders or any("left the chain" in text for text in found.warned)):
            found.outcome = "over, left the chain"
        return found

    def _checked(self) -> Outcome:
        side = self._copy()
        if not self.loop.late:
            side.optimizer = self.optimizer(side)
        given = self.fresh(self.sample)
        with self._autocast():
            sample = self.fed(side, given)
        if side.backbone is not None and self.detached:
            sample = sample.detach().requires_grad_()
        loss = self._given_loss(side)
        with self._autocast():
            chain = remat.profile(side.model, sample, loss=loss)
            least, most = remat.minimum_budget(chain), store_all_peak(chain)
        asked, size = self._limit(least, most)
        self.note = f"{asked!r} = {size} bytes, least {least}, all {most}"
        side.model, size = self._planned(side.model, sample, loss, asked, size, chain)
        del sample, given, chain
        different = differences(self.expected, self.train(side))
        if different:
            if differences(self.expected, self.train(self._copy())):
                raise NotRepeatable("plain PyTorch does not repeat itself")
            return Outcome("bits", different)
        peak = self.peak(side) - (SCALARS if self.loop.loss in {"sum", "mean"} else 0)
        if peak <= size:
            return Outcome("pass", ratio=peak / size)
        text = f"measured {peak} bytes, {peak - size} over {size}"
        if isinstance(asked, float) and self.interface == "fit":
            text += " (of storing everything as measured here, which may differ a little from what `fit` measured)"
        if self.loop.holds:
            without = self.peak(side, holds=False) - (SCALARS if self.loop.loss in {"sum", "mean"} else 0)
            if without <= size:
                return Outcome("over, output held", f"{text}; {without} without", peak / size)
            text = f"{text}; {without} without the output held"
        return Outcome("over", text, peak / size)

    def _given_loss(self, side: Side) -> Callable[[Any], torch.Tensor] | None:
        """The loss as it is given to `fit`: a module, or a function that holds the targets of the sample."""
        criterion = side.criterion
        coarse = self.loop.autocast or "bfloat16" in self.program.notes  # of which a sum takes a copy
        if criterion is None and coarse and self.loop.loss in {"sum", "mean"}:
            return lambda output: self._loss(side, output)
        if criterion is None or criterion.head is not None or not self.strict:
            return criterion
        return lambda output: criterion(output, strict=True)

    def _limit(self, least: int, most: int) -> tuple[int | str | float, int]:
        if self.in_flight > 1:
            size = round((1.2 + abs(self.limit.share)) * most)
            return size, size
        if self.interface == "rotor, at the first step":  # where nobody could catch that it is too small
            size = round(1.1 * least + max(self.limit.share, 0) * max(most - least, 0))
            return size, size
        return self.limit.between(least, most)

    def _planned(
        self, model: nn.Module, sample: Any, loss: Any, asked: Any, size: int, chain: remat.Chain
    ) -> tuple[Any, int]:
        """What trains within the limit, and that limit in bytes.

        The least limit of one measurement may be a little less than that of the next, since what is fused depends on
        times; both have to name one that works.
        """
        with self._autocast():
            for attempt in range(3):
                try:
                    return self._plan(model, sample, loss, asked, size, chain)
                except remat.InfeasibleBudget as error:
                    if attempt == 2:
                        raise
                    after = "was too small" if attempt == 0 else "did not work"
                    self.note += f"; {asked} {after}, {error.minimum} is named"
                    asked = size = error.minimum
        raise AssertionError("not reached")

    def _plan(self, model: nn.Module, sample: Any, loss: Any, asked: Any, size: int, chain: Any) -> tuple[Any, int]:
        if self.interface == "fit":
            return remat.fit(model, sample, memory=asked, loss=loss, quiet=True), size
        if self.interface == "apply":
            schedule = remat.solve(chain, asked, self.solver)
            assert schedule.budget_bytes is not None
            return remat.apply(model, schedule), schedule.budget_bytes
        first = sample if self.interface == "rotor" else None
        made = rotor.Checkpointable(model, first, mem_limit=asked, loss=loss, in_flight=self.in_flight)
        sequence = made.sequence
        return made, size if sequence is None or self.in_flight > 1 else sequence.budget_bytes or size

    def peak(self, side: Side, *, holds: bool | None = None) -> int:
        """The allocator's peak of one more step above what was there before it, with the bytes of what is fed."""
        for parameter in side.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        given = [self.fresh(self.sample) for _ in range(self.in_flight)]
        if side.backbone is not None:
            with self._autocast():
                given = [side.backbone(each).detach().requires_grad_() for each in given]
        alone = Side(side.model, None, side.criterion)
        storages = {id(s): s for each in given for s in (tensor.untyped_storage() for tensor in tensors(each))}
        fed = sum(storage.nbytes() for storage in storages.values())
        return fed + peak_of(lambda: self.step(alone, given, holds=holds))


class NotRepeatable(Exception):
    """The program is none that can be compared: plain PyTorch does not give the same twice."""


def called(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def seen(output: Any, name: str, left: Record) -> None:
    """Notes an output; of those of transformers what does not depend on caches of keys and values."""
    logits = getattr(output, "logits", None)
    found = tensors(output) if logits is None else [logits, *(getattr(output, "hidden_states", None) or ())]
    left += [(f"{name} {index}", tensor.detach().clone()) for index, tensor in enumerate(found)]


def named(side: Side) -> Iterator[tuple[str, nn.Parameter]]:
    for part, module in side.parts():
        for name, parameter in module.named_parameters():
            yield f"{part}.{name}", parameter


def state(side: Side, batches: Sequence[Any], name: str, left: Record) -> None:
    """Notes gradients of parameters and inputs, buffers and the state of the random numbers."""
    left.append((f"{name}random numbers", torch.get_rng_state()))
    for key, parameter in named(side):
        left.append((f"{name}gradient of {key}", None if parameter.grad is None else parameter.grad.clone()))
    for index, tensor in enumerate(tensors(list(batches))):
        left.append((f"{name}gradient of input {index}", None if tensor.grad is None else tensor.grad.clone()))
    for part, module in side.parts():
        left += [(f"{name}buffer {part}.{key}", buffer.clone()) for key, buffer in module.named_buffers()]


def differences(expected: Record, found: Record) -> str:
    """What differs in a bit, the first few by name; empty if nothing does."""
    if [name for name, _ in expected] != [name for name, _ in found]:
        return f"{len(expected)} results of plain PyTorch, {len(found)} within the limit, or of other names"
    told = [f"{name}: {_difference(a, b)}" for (name, a), (_, b) in zip(expected, found, strict=True)
            if not same(a, b)]  # fmt: skip
    return f"{len(told)} of {len(expected)} differ: {'; '.join(told[:4])}" if told else ""


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None:
        return f"{'none' if a is None else 'there'}, within the limit {'none' if b is None else 'there'}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)}, within the limit {b.dtype} {tuple(b.shape)}"
    return f"off by {(a.double() - b.double()).abs().max().item():.3g} of {a.double().abs().max().item():.3g}"


# Many cases ----------------------------------------------------------------------------------------------------------


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Inside, `CaseTimeout` is raised after so long."""

    def stop(*_: object) -> None:
        raise CaseTimeout(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def made(seed: int, number: int, told: Callable[[str], None]) -> tuple[Case, int]:
    """The case of a number, and how many programs before it plain PyTorch refused."""
    for attempt in range(ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Case(seed, number, attempt), attempt
        except Exception as error:  # whatever plain PyTorch has against the program
            told(f"attempt {attempt}: plain PyTorch: {type(error).__name__}: {error}")
    raise RuntimeError(f"case {number}: plain PyTorch refused {ATTEMPTS} programs")


def run(seed: int, number: int, told: Callable[[str], None] = lambda text: None) -> tuple[dict[str, Any], int]:
    """Runs a case; returns its row, and how many programs before it plain PyTorch refused."""
    row: dict[str, Any] = {"number": number, "kind": list(KINDS)[number % 2], "limit": ""}
    attempts = 0
    try:
        with within(SECONDS):
            case, attempts = made(seed, number, told)
            row |= {"model": str(case), "loop": str(case.loop), "interface": case.interface}
            told("\n".join(f"{key}: {value}" for key, value in row.items()))
            told(f"{case.limit}, {case.program.model}")
            try:
                found = _checked(case, told)
            finally:
                row["limit"] = case.note
    except CaseTimeout as error:
        told(traceback.format_exc())
        found = Outcome("timeout", str(error))
    row |= {"outcome": found.outcome, "ratio": found.ratio, "text": found.text}
    if found.warned:
        row["warned"] = found.warned
    told(json.dumps(row, indent=1))
    return row, attempts


def _checked(case: Case, told: Callable[[str], None]) -> Outcome:
    try:
        return case.check()
    except remat.RematError as error:
        told(traceback.format_exc())
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except NotRepeatable as error:
        return Outcome("not counted", str(error))
    except Exception as error:
        told(traceback.format_exc())
        return Outcome("raw error", f"{type(error).__name__}: {error}; at {where(error)}")


def where(error: BaseException) -> str:
    """The last lines of code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=int, default=1000, help="numbers 0 to this, even ones sequential, odd ones other"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="run this number alone, tell all about it, write nothing")
    parser.add_argument("--kind", choices=list(KINDS), help="only cases of this kind")
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzz.json", help="goes on where this file stopped")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        run(options.seed, options.only, told=print)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results, since = Results(options.out, options.seed, KINDS), 0
    kinds = list(KINDS)
    try:
        for number in range(options.cases):
            kind = kinds[number % 2]
            if number < results.found["next"][kind] or options.kind not in {None, kind}:
                continue
            start = time.perf_counter()
            row, attempts = run(options.seed, number)
            results.add(kind, row, attempts, time.perf_counter() - start)
            since += 1
            if since % SAVED_EVERY == 0:
                gc.collect()
                results.save()
                print(f"{number + 1}/{options.cases}: {results}", flush=True)
    finally:
        results.save()
    print(f"{results}; {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
