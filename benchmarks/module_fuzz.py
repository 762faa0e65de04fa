"""Random modules trained by plans, under DTR by calls and operator by operator: equal bits, and within the limit.

    python -m benchmarks.module_fuzz --programs 2000 --seed 1     # goes on where it stopped
    python -m benchmarks.module_fuzz --again                      # those that were bad, once more, as after a repair
    python -m benchmarks.module_fuzz --only 100007                # one program, told in full; writes nothing
    python -m benchmarks.module_fuzz --only 100007 --way calls

A program is a stack of four to eight blocks whose forwards are made of what people write there: values read on the
host, writes in place, hooks, generators of their own, threads and copies (`benchmarks/module_programs`). It trains some
steps on other data each, in three ways at three shares of what it takes plainly, and all that its steps leave is
compared with plain PyTorch; the peak is that of the last step, which repeats the one before. Outcomes: "pass"; "said",
it went over or was refused and an error, a report or a warning says so; "bits"; "silent", above the limit by one byte
or more, and nothing says so; "raw", an error that is none of remat's, a crash, or an error that says that it is a bug;
"slow". A program that plain PyTorch refuses, or does not repeat, is skipped.

Each program runs in a process of its own: what blocks learn of operators stays in a process, and crashes end one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import torch

import remat
from benchmarks.ages import is_current
from benchmarks.keeping import RESULTS, write
from benchmarks.module_programs.judging import SECONDS, WAYS, judged
from benchmarks.module_programs.reducing import reduced

NAME = "module_fuzz"
BAD = ("bits", "silent", "raw", "slow")
PER_SEED = 100_000  # programs of a seed
SAVED_EVERY = 10
Row = dict[str, Any]


def warmed_up() -> None:
    """Imports and compiles, or loads, once what all children use. No profiler runs here: it does not survive a fork."""
    import torch._dynamo  # noqa: F401  # which checkpointing brings in, a second of each child otherwise

    from remat.runtime.dtr.core import compile_all

    compile_all()
    gc.collect()
    gc.freeze()  # or each collection of each child walks through all of PyTorch


def child(pipe: Connection, seed: int, ways: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    try:
        judged(seed, pipe.send, ways)
    except BaseException:
        pipe.send({"seed": seed, "outcome": "raw", "seen": f"the fuzz itself: {traceback.format_exc()[-1500:]}"})
    pipe.close()


def rows_of(seed: int, ways: tuple[str, ...]) -> list[Row]:
    """Of a program in a process of its own. Where that dies, one more says so."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(theirs, seed, ways))
    process.start()
    theirs.close()
    rows: list[Row] = []
    while True:
        if not mine.poll(3 * SECONDS):  # an alarm does not get through to code that never comes back to Python
            process.kill()
            rows.append({"seed": seed, "outcome": "slow", "seen": f"hangs after {len(rows)} cases"})
            break
        try:
            rows.append(mine.recv())
        except EOFError:
            break
    process.join(20)
    if process.exitcode is None:  # threads that never end
        process.kill()
        process.join()
    elif process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        rows.append({"seed": seed, "outcome": "raw", "seen": f"{name} after {len(rows)} cases: {rows[-1:]}"})
    return rows


class Totals:
    """What was found so far, as rows of the file."""

    def __init__(self, seed: int, first: int) -> None:
        self.seed, self.first, self.next, self.seconds = seed, first, first, 0.0
        self.counts: dict[str, Counter[str]] = {}
        self.bad: list[Row] = []

    @classmethod
    def found(cls, seed: int, first: int | None) -> Totals:
        totals, path = cls(seed, first or 0), RESULTS / f"{NAME}.json"
        if first is None and path.exists():
            found = json.loads(path.read_text())
            head, *rows = found["rows"]
            if head["seed"] == seed and is_current(NAME, found["machine"]["revision"]):
                totals.next, totals.seconds = head["programs"], head["seconds"]
                totals.bad = [row for row in rows if "of" not in row]
                totals.counts = {row.pop("of"): Counter(row) for row in rows if "of" in row}
        return totals

    def add(self, rows: list[Row], seconds: float) -> list[Row]:
        """Returns the bad ones."""
        self.next, self.seconds = self.next + 1, self.seconds + seconds
        for row in rows:
            self.counts.setdefault(row.get("way", "program"), Counter())[row["outcome"]] += 1
        bad = [row for row in rows if row["outcome"] in BAD]
        self.bad += bad
        return bad

    def again(self) -> None:
        """Judges the cases that were bad once more."""
        for seed in sorted({row["seed"] for row in self.bad}):
            now = {(row.get("way"), row.get("share")): row for row in rows_of(seed, WAYS)}
            for row in [row for row in self.bad if row["seed"] == seed]:
                self.bad.remove(row)
                found = now.pop((row.get("way"), row.get("share")), row)
                count = self.counts[row.get("way", "program")]
                count[row["outcome"]] -= 1
                count[found["outcome"]] += 1
                self.bad += [found] if found["outcome"] in BAD else []
            for row in [row for row in now.values() if row["outcome"] in BAD]:  # which was not
                count = self.counts[row.get("way", "program")]
                count["pass"] -= 1
                count[row["outcome"]] += 1
                self.bad.append(row)

    def save(self) -> None:
        head: Row = {"seed": self.seed, "programs": self.next, "seconds": round(self.seconds, 1)}
        counts: list[Row] = [{"of": way, **+count} for way, count in self.counts.items()]
        write(NAME, [head, *counts, *self.bad], "random modules: python -m benchmarks.module_fuzz; all that is bad")

    def __str__(self) -> str:
        told = "; ".join(f"{way}: {dict(count)}" for way, count in self.counts.items())
        return f"{self.next} programs, {self.seconds / max(self.next - self.first, 1):.1f} s each: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, help="number of the first program; without it, where the file stopped")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--again", action="store_true", help="judge what was bad in the file once more, and end")
    parser.add_argument("--only", type=int, metavar="SEED", help="the program of this seed, in this process, told")
    parser.add_argument("--way", choices=WAYS, help="in this way alone")
    parser.add_argument(
        "--reduce", type=float, metavar="SHARE", help="with --only and --way: make that program smaller"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = (options.way,) if options.way else WAYS
    if options.only is not None and options.reduce:
        warmed_up()
        print(reduced(options.only, options.way, options.reduce))
        return
    if options.only is not None:
        judged(options.only, lambda row: print(json.dumps(row, indent=1)), ways)
        return
    print(f"remat of {remat.__file__}", file=sys.stderr)
    warmed_up()
    totals = Totals(options.seed, options.first or 0) if options.dry else Totals.found(options.seed, options.first)
    if options.again:
        totals.again()
        totals.save()
        print(totals)
        return
    for number in range(totals.next, (options.first or 0) + options.programs):
        start = time.perf_counter()
        for row in totals.add(rows_of(PER_SEED * options.seed + number, ways), time.perf_counter() - start):
            print(json.dumps(row), flush=True)
        if not options.dry and totals.next % SAVED_EVERY == 0:
            totals.save()
            print(totals, file=sys.stderr, flush=True)
    if not options.dry:
        totals.save()
    print(totals)


if __name__ == "__main__":
    main()
