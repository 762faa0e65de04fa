"""Runs benchmarks and writes `benchmarks/results/`.

    python -m benchmarks             # says how each result stands: which are older than the code they measure
    python -m benchmarks NAME ...    # makes these
    python -m benchmarks --older     # makes those that are older, one after the other, as `make measure` does

Run nothing beside one that uses all cores (`sequential`, `compare`, `any_model` and others): PyTorch's threads wait
for each other busily, and a step takes twenty times as long where another process has one of the cores.

A result is older where commits have changed the code that it measures since it was made (`benchmarks/ages.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module

from benchmarks.ages import MEASURED, commits_since, older
from benchmarks.keeping import Kept

_ELSEWHERE = {"store_all": "speed", "sequential": "speed", "compare": "comparing", "any_model_libraries": "any_model",
              "any_model_compile": "any_model"}  # fmt: skip


def benchmark(name: str) -> Callable[[], object]:
    """The function that makes a result: of its name, and in a module of that name but for a few."""
    return getattr(import_module(f"benchmarks.{_ELSEWHERE.get(name, name)}"), name)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURED)}")
    parser.add_argument("--older", action="store_true", help="all whose results are older than the code they measure")
    parser.add_argument("--go-on", action="store_true", help="keep parts that another revision of the code has made")
    given = parser.parse_args()
    Kept.goes_on = given.go_on
    unknown = [name for name in given.names if name not in MEASURED]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(MEASURED)}")
    if given.older:
        sys.exit(measure(older()))
    if not given.names:
        print("\n".join(standing()))
    failed = 0
    for name in given.names:
        if MEASURED[name].command:
            failed += measure([name])
        else:
            benchmark(name)()
    sys.exit(failed)


def standing() -> list[str]:
    """A line for each result: how many commits have changed the code that it measures."""
    ages = {name: commits_since(name) for name in MEASURED}
    said = {None: "older, or not to be known", 0: "of the code as it is"}
    return [f"{name:<20} {said.get(age, f'{age} commits older than its code')}" for name, age in ages.items()]


def measure(names: list[str]) -> int:
    """Makes these, each in a process of its own, so that one that fails ends no other. Returns how many have failed."""
    failed = 0
    for number, name in enumerate(names, start=1):
        print(f"{number} of {len(names)}: {name}", flush=True)
        began = time.monotonic()
        words = MEASURED[name].command or f"benchmarks {name}"
        status = subprocess.run([sys.executable, "-m", *words.split()], check=False).returncode
        failed += status != 0
        print(f"{name}: {'failed, ' * (status != 0)}{(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    return failed


if __name__ == "__main__":
    main()
