"""`python -m remat.check`: runs checks and benchmarks on a device, and writes each result as soon as it has it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from remat.check.benchmarks import BATCHES, BENCHMARKS, compared, largest_batch
from remat.check.checks import CHECKS, Skipped
from remat.errors import RematError
from remat.files import write_whole
from remat.runtime.accelerator import give_back, is_accelerator, memory_bytes, name_of
from remat.utils.machine import machine

_FAILED = 1  # exit status


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m remat.check", description=__doc__)
    here = torch.accelerator.current_accelerator(check_available=True)
    default = "cpu" if here is None else here.type
    parser.add_argument("--device", default=default, help=f"cuda, cuda:1, xpu, cpu, ... (default: {default})")
    parser.add_argument("--out", type=Path, default=Path("check"), help="folder for the results, created if missing")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this one of --list; repeatable")
    parser.add_argument("--small", action="store_true", help="use small models; always set on the CPU")
    parser.add_argument("--again", action="store_true", help="repeat what an earlier run has finished")
    parser.add_argument("--seconds", type=float, default=480, help="start nothing after this time (default: 480)")
    parser.add_argument("--list", action="store_true", help="list all checks and exit")
    given = parser.parse_args()
    everything = [*CHECKS, *BATCHES, *BENCHMARKS]
    if given.list:
        print("\n".join(everything))
        return
    unknown = [name for name in given.only or () if name not in everything]
    if unknown:
        parser.error(f"unknown check {unknown[0]!r}; see --list")
    try:
        device = torch.device(given.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"cannot use device {given.device!r}: {str(error).splitlines()[0]}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for where bits are to repeat
    given.out.mkdir(parents=True, exist_ok=True)
    session = _Session(device, given.out, small=given.small or device.type == "cpu", again=given.again)
    sys.exit(_FAILED if session.run(given.only or everything, given.seconds) else 0)


class _Session:
    """Results of one device, in a file that a later call goes on with."""

    def __init__(self, device: torch.device, out: Path, *, small: bool, again: bool) -> None:
        self.device, self.out, self.small = device, out, small
        self.machine = {**machine(), **_of_device(device), "small": small}
        self.file = out / f"gpu_{self.machine['device'].replace(' ', '_').lower()}.json"
        self.results: dict[str, Any] = {}
        if self.file.exists() and not again:
            before = json.loads(self.file.read_text())
            if before.get("machine") == self.machine:
                self.results = before["results"]

    def run(self, names: list[str], seconds: float) -> int:
        """Runs what has not been run; returns how many checks have failed in all."""
        print(
            f"{self.machine['device']}, torch {torch.__version__}; results in {self.file}. {len(names)} checks, up to "
            f"{seconds / 60:.0f} minutes, a line for each that is over",
            flush=True,
        )
        until = time.monotonic() + seconds
        for name in names:
            if self.results.get(name, {}).get("outcome") in ("pass", "skipped"):
                continue
            if time.monotonic() > until:
                print(f"time limit reached before {name!r}; run again to continue", flush=True)
                break
            self._one(name)
        outcomes = Counter(found["outcome"] for found in self.results.values())
        print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())), flush=True)
        return outcomes["failed"]

    def _one(self, name: str) -> None:
        began = time.monotonic()
        deterministic = torch.are_deterministic_algorithms_enabled()
        found: dict[str, Any] = {"outcome": "pass"}
        try:
            if name in BENCHMARKS:
                own = self.file.with_name(f"{self.file.stem}_{BENCHMARKS[name].replace(' ', '_')}.json")
                found |= compared(BENCHMARKS[name], self.device, self.small, own)
            elif name in BATCHES:
                found |= {"found": largest_batch(BATCHES[name], self.device, self.small)}
            else:
                torch.use_deterministic_algorithms(True)  # or attention on a GPU does not repeat its bits
                found |= {"found": CHECKS[name](self.device, self.small)}
        except Skipped as reason:
            found = {"outcome": "skipped", "note": str(reason)}
        except (AssertionError, RematError, RuntimeError) as error:
            traceback.print_exc()
            found = {"outcome": "failed", "note": f"{type(error).__name__}: {error}"}
        finally:
            torch.use_deterministic_algorithms(deterministic)
        give_back(self.device)
        found["seconds"] = round(time.monotonic() - began, 1)
        self.results[name] = found
        content = {"machine": self.machine, "results": self.results}
        write_whole(self.file, (json.dumps(content, indent=1, default=str) + "\n").encode())
        note = f": {found['note']}" if "note" in found else ""
        print(f"{found['outcome']:8}{name} ({found['seconds']} s){note}", flush=True)


def _of_device(device: torch.device) -> dict[str, Any]:
    if not is_accelerator(device):
        return {"device": device.type}
    found = {"device": name_of(device), "memory_bytes": memory_bytes(device)}
    if device.type == "cuda":  # ROCm's, too
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        cudnn = torch.backends.cudnn.version()
        found |= {"capability": capability, "cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": cudnn}
    return found


if __name__ == "__main__":
    main()
