"""Results: rows in `benchmarks/results`, with the machine, the versions and the revision that they came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.ages import RESULTS, ROOT, git, is_current
from remat.files import write_whole
from remat.utils.machine import machine

FIGURES = ROOT / "docs" / "figures"

Rows = list[dict[str, Any]]


def revision() -> str:
    """The commit, with a "+" where the code differs from it."""
    commit = (git("rev-parse", "--short", "HEAD") or "").strip()
    made = (":!benchmarks/results", ":!benchmarks/logs")
    changed = git("status", "--porcelain", "--", "remat", "benchmarks", *made)
    return commit + "+" * bool(changed)


def origin() -> dict[str, Any]:
    """Where a result comes from."""
    return {**machine(), "revision": revision()}


def write(name: str, rows: Rows, note: str) -> None:
    """Writes the rows as JSON, with where they come from and, in `note`, how they were made."""
    RESULTS.mkdir(exist_ok=True)
    content = {"note": note, "machine": origin(), "rows": rows}
    write_whole(RESULTS / f"{name}.json", (json.dumps(content, indent=1, default=asdict) + "\n").encode())


class Kept:
    """A result that is made of parts, each written when it is done: a run that was interrupted goes on behind them.

    Parts of another machine or version are made again; so are those that are older than the code they measure, unless
    `goes_on` is set. Every row says its revision.
    """

    goes_on = False

    def __init__(self, name: str, note: str) -> None:
        self.name, self.note = name, note
        self.rows: Rows = []
        path = RESULTS / f"{name}.json"
        if not path.exists():
            return
        found, here = json.loads(path.read_text()), origin()
        revision = found["machine"].pop("revision")
        rows = [{"revision": revision, **row} for row in found["rows"]]
        if found["machine"] == {key: value for key, value in here.items() if key != "revision"}:
            self.rows = [row for row in rows if self._holds(row["revision"], here["revision"])]

    def _holds(self, revision: str, here: str) -> bool:
        return self.goes_on or revision == here or is_current(self.name, revision)

    def part(self, key: str, make: Callable[[], Iterable[dict[str, Any]]]) -> Rows:
        """The rows of a part; made if they are not there."""
        found = [row for row in self.rows if row.get("part") == key]
        if not found:
            own = revision()
            found = [{"part": key, "revision": own, **row} for row in make()]
            self.rows += found
            write(self.name, self.rows, self.note)
            print(f"{self.name}: {key}, {len(found)} rows", flush=True)
        return found
