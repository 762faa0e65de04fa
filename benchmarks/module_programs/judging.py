"""Outcomes: a program in all ways, at all shares of what it takes plainly, compared bit by bit and byte by byte."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.fuzz import CaseTimeout, where, within
from benchmarks.module_programs.holding import difference, same
from benchmarks.module_programs.program import Program, program_of
from benchmarks.module_programs.training import Left, Training, by_plan, fresh, in_blocks, plainly

SHARES = (0.9, 0.7, 0.5)
WAYS = ("plan", "calls", "operator")
SECONDS = 40  # for one case
PLAIN_TURNS = 10  # of two plain trainings at once, where two in blocks leave something else
Row = dict[str, Any]


def differs(expected: Left, found: Left) -> str:
    for number, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True)):
        if not same(torch.tensor(a), torch.tensor(b)):
            return f"loss {number}: {a} plainly, {b}"
    for number, (one, other) in enumerate(zip(expected.states, found.states, strict=True)):
        told = difference(one, other)
        if told:
            return f"after step {number}: {told}"
    return ""


def plain(program: Program) -> tuple[Left | None, int, str]:
    """What plain PyTorch leaves, the bytes of a batch; None and why, where it refuses or does not repeat itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with within(SECONDS):
                expected, batch = plainly(program)
                told = differs(expected, plainly(program)[0])
        except Exception as error:
            return None, 0, f"{type(error).__name__}: {str(error)[:200]} at {where(error)}"
        except CaseTimeout:
            return None, 0, "slow"
    return (None, 0, f"does not repeat itself: {told}") if told else (expected, batch, "")


def judged(seed: int, row: Callable[[Row], None], only: tuple[str, ...] = WAYS) -> None:
    """Gives `row` one for each way and share, or one that says why the program does not count."""
    try:
        program = program_of(seed)
    except Exception as error:
        row({"seed": seed, "outcome": "skipped", "seen": f"{type(error).__name__}: {error} at {where(error)}"})
        return
    expected, batch, why = plain(program)
    if expected is None:
        row({"seed": seed, "outcome": "skipped", "seen": why, "program": str(program)})
        return
    for way in only:
        for share in SHARES:
            limit = int(share * (expected.peak + (batch if way == "plan" else 0)))
            row({"seed": seed, "way": way, "share": share, "limit": limit, "program": str(program)}
                | guarded(program, way, limit, expected))  # fmt: skip
        if way != "plan" and program.loop.at_once and draws_nothing(program, expected):
            found = at_once(program, int(0.7 * expected.peak), way, expected)
            row({"seed": seed, "way": f"{way}, two threads", "share": 0.7, "program": str(program)} | found)
            if found["outcome"] == "slow":
                return  # the threads go on, and draw from the same random numbers


def guarded(program: Program, way: str, limit: int, expected: Left) -> Row:
    """An attempt; where it does not fit, and an error names the least budget, one more within that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, minimum = attempt(program, way, limit, expected, caught)
        if minimum is None:
            return found
        again, named = attempt(program, way, minimum, expected, caught)
    if again["outcome"] in ("bits", "silent", "raw", "slow"):
        return again | {"seen": f"at the least budget {minimum} that an error named: {again['seen']}"}
    if named is not None:
        found["seen"] += f"; the least budget {minimum} that it named is too small, {named} is named then"
    return found


def attempt(program: Program, way: str, limit: int, expected: Left, caught: list[Any]) -> tuple[Row, int | None]:
    try:
        with within(SECONDS):
            training = by_plan(program, limit) if way == "plan" else in_blocks(program, limit, way)
            left = training.run()
            return verdict(training, left, expected, limit, caught), None
    except CaseTimeout:
        told = next((str(each.message) for each in caught if issubclass(each.category, remat.ThrashingWarning)), "")
        found = {"outcome": "said" if told else "slow", "seen": f"more than {SECONDS} s; {told[:200]}"}
        return found, None
    except remat.RematError as error:
        text = f"{type(error).__name__}: {error}"
        ours = any(words in text.lower() for words in ("this is a bug", "please report", "bug of remat"))
        if ours or text.endswith(": "):
            return {"outcome": "raw", "seen": f"{text} at {where(error)}"}, None
        return {"outcome": "said", "seen": text[:300]}, getattr(error, "minimum", None)
    except Exception as error:
        return {"outcome": "raw", "seen": f"{type(error).__name__}: {str(error)[:400]} at {where(error)}"}, None


def verdict(training: Training, left: Left, expected: Left, limit: int, caught: list[Any]) -> Row:
    told = differs(expected, left)
    said = left.said or next((str(each.message) for each in caught if _is_ours(each)), "")
    if told:
        return {"outcome": "bits", "seen": told + (f" (and it warned: {said[:150]})" if said else "")}
    if left.peak <= limit:
        return {"outcome": "pass", "seen": "", "retried": left.failed}
    over = f"{left.peak - limit} bytes over {limit}"
    if said:
        return {"outcome": "said", "seen": f"{over}; {said[:200]}"}
    if training.given:
        over += f"; {training.peak_of(0) - limit} over with the sample's own data"
    return {"outcome": "silent", "seen": over}


def _is_ours(warning: Any) -> bool:
    """Whether a warning says that a limit may not hold."""
    text = str(warning.message)
    return issubclass(warning.category, remat.OverBudgetWarning) or text.startswith(("remat", "rotor")) or any(
        words in text for words in ("left the chain", "may exceed the", "without the limit")
    )  # fmt: skip


def draws_nothing(program: Program, expected: Left) -> bool:
    """Whether two trainings at once can be compared at all: threads share their random numbers."""
    names = ("Python's numbers", "NumPy's numbers", "shared generator")
    first, last = expected.states[-2], expected.states[-1]
    torch.manual_seed(program.seed + program.loop.order[-1])
    seeded = same(last["torch's numbers"], torch.get_rng_state())
    return seeded and all(same(first[name], last[name]) for name in names)


def at_once(program: Program, limit: int, way: str, expected: Left) -> Row:
    """Two copies in two threads, each in blocks of its own."""
    found = _in_two_threads(program, expected, lambda: in_blocks(program, limit, way, metered=False))
    if found["outcome"] not in ("bits", "raw"):
        return found
    for _ in range(PLAIN_TURNS):
        plainly_found = _in_two_threads(program, expected, lambda: Training(program, fresh(program), metered=False))
        if plainly_found["outcome"] != "pass":
            return {"outcome": "skipped", "seen": f"plain PyTorch in two threads: {plainly_found['seen']}"}
    return found


def _in_two_threads(program: Program, expected: Left, made: Callable[[], Training]) -> Row:
    trainings = [made() for _ in range(2)]
    fresh(program)
    found: list[Left | Exception] = []

    def work(training: Training) -> None:
        try:
            found.append(training.run())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(training,), daemon=True) for training in trainings]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with within(SECONDS):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        except CaseTimeout:
            return {"outcome": "slow", "seen": f"two threads, at {standing(threads)}"}
    for each in found:
        if isinstance(each, remat.RematError):
            return {"outcome": "said", "seen": str(each)[:300]}
        if isinstance(each, Exception):
            return {"outcome": "raw", "seen": f"{type(each).__name__}: {str(each)[:300]} at {where(each)}"}
        told = differs(_of_one_thread(expected), _of_one_thread(each))
        if told:
            return {"outcome": "bits", "seen": told}
    return {"outcome": "pass", "seen": ""}


def _of_one_thread(left: Left) -> Left:
    """Without the random numbers, which the threads have seeded in turns."""
    states = [{key: value for key, value in state.items() if key != "torch's numbers"} for state in left.states]
    return Left(states, left.losses)


def standing(threads: list[threading.Thread]) -> list[str]:
    """Where threads are that do not end."""
    frames = sys._current_frames()
    found = [traceback.extract_stack(frames[each.ident])[-4:] for each in threads if each.ident in frames]
    return [" > ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack) for stack in found]
