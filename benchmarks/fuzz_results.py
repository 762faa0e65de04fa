"""What became of the cases of the fuzz, in a file that grows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.ages import is_current
from benchmarks.keeping import origin
from remat.files import write_whole


class Results:
    """The file of results: goes on where it stopped; begins anew where it is older than the code that it measures."""

    def __init__(self, path: Path, seed: int, kinds: Iterable[str]) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "note": "Random models, limits and training loops: python -m benchmarks.fuzz. All cases that did not pass",
            "machine": origin(),
            "seed": seed,
            "next": dict.fromkeys(kinds, 0),
            "counts": {kind: {} for kind in kinds},
            "programs_that_plain_pytorch_refused": 0,
            "least_limit_named_anew": 0,
            "seconds": 0.0,
            "worst": {},
            "cases": [],
        }
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if found and is_current("fuzz", found["machine"]["revision"]):
            if found["seed"] != seed:
                raise SystemExit(f"{path} holds cases of seed {found['seed']}; give another file with --out")
            self.found = found

    def add(self, kind: str, row: dict[str, Any], attempts: int, seconds: float) -> None:
        found, outcome = self.found, row["outcome"]
        found["next"][kind] = row["number"] + 1
        found["counts"][kind][outcome] = found["counts"][kind].get(outcome, 0) + 1
        found["programs_that_plain_pytorch_refused"] += attempts
        found["least_limit_named_anew"] += "did not work" in row["limit"]
        found["seconds"] += seconds
        if row["ratio"] is not None and row["ratio"] > found["worst"].get(outcome, {}).get("ratio", 0.0):
            found["worst"][outcome] = {"ratio": row["ratio"], "number": row["number"]}
        if outcome != "pass":
            found["cases"].append(row)

    def save(self) -> None:
        write_whole(self.path, (json.dumps(self.found, indent=1) + "\n").encode())

    def __str__(self) -> str:
        counts = [f"{kind}: {', '.join(f'{n} {name}' for name, n in sorted(of.items()))}"
                  for kind, of in self.found["counts"].items() if of]  # fmt: skip
        cases = sum(sum(of.values()) for of in self.found["counts"].values())
        worst = max((of["ratio"] for of in self.found["worst"].values()), default=0.0)
        return (
            f"{'; '.join(counts)}; worst peak / limit {worst:.4f}; {self.found['seconds'] / max(cases, 1):.2f} s each"
        )
