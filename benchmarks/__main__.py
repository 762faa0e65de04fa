"""Runs benchmarks and writes `benchmarks/results/`.

    python -m benchmarks             # says how each result stands: which are older than the code they measure
    python -m benchmarks NAME ...    # makes these
    python -m benchmarks --older     # makes those that are older, one after the other, as `make measure` does

A result is older where commits have changed the code that it measures since it was made (`benchmarks/ages.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.ages import MEASURED, commits_since, older
from benchmarks.any_model import against_compile, against_libraries, any_model
from benchmarks.comparing import comparing
from benchmarks.compiled import compiled
from benchmarks.device_memory import device_memory
from benchmarks.dtr import dtr
from benchmarks.dtr_logs import dtr_logs
from benchmarks.dtr_run import dtr_run
from benchmarks.dtr_simulated import dtr_simulated
from benchmarks.estimates import estimates
from benchmarks.first_use import first_use
from benchmarks.frontier import frontier
from benchmarks.head import head
from benchmarks.keeping import Kept
from benchmarks.learned import learned
from benchmarks.live import live
from benchmarks.live_units import live_units
from benchmarks.offload import offload
from benchmarks.on_gpu import on_gpu
from benchmarks.options import options
from benchmarks.peaks import peaks
from benchmarks.planners import planners
from benchmarks.prediction import prediction
from benchmarks.protocol import protocol
from benchmarks.rivals import rivals
from benchmarks.rotor import rotor
from benchmarks.rotor_growing import rotor_growing
from benchmarks.rotor_planned import rotor_planned
from benchmarks.sharded import sharded
from benchmarks.skips import skips
from benchmarks.speed import sequential, store_all
from benchmarks.step_cost import step_cost
from benchmarks.table1 import table1
from benchmarks.trainers import trainers
from benchmarks.whole_device import whole_device

BENCHMARKS = {
    "planners": planners,
    "dtr": dtr,
    "dtr_logs": dtr_logs,
    "dtr_simulated": dtr_simulated,
    "dtr_run": dtr_run,
    "store_all": lambda: store_all(30),
    "sequential": lambda: sequential(10),
    "prediction": prediction,
    "peaks": peaks,
    "learned": learned,
    "live": lambda: live(7),
    "live_units": live_units,
    "first_use": first_use,
    "estimates": estimates,
    "frontier": lambda: frontier(6),
    "compare": comparing,
    "compiled": compiled,
    "any_model": any_model,
    "any_model_libraries": against_libraries,
    "any_model_compile": against_compile,
    "rivals": rivals,
    "options": options,
    "offload": offload,
    "on_gpu": on_gpu,
    "rotor": rotor,
    "rotor_planned": rotor_planned,
    "rotor_growing": rotor_growing,
    "protocol": protocol,
    "sharded": sharded,
    "skips": skips,
    "step_cost": step_cost,
    "table1": table1,
    "trainers": trainers,
    "whole_device": whole_device,
    "device_memory": device_memory,
    "head": head,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--older", action="store_true", help="all whose results are older than the code they measure")
    parser.add_argument("--go-on", action="store_true", help="keep parts that another revision of the code has made")
    given = parser.parse_args()
    Kept.goes_on = given.go_on
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    if given.older:
        sys.exit(measure(older()))
    if not given.names:
        print("\n".join(standing()))
    for name in given.names:
        BENCHMARKS[name]()


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
