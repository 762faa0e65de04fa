"""Which revision each result is of, and how much of what it measures has changed since."""

from __future__ import annotations

from benchmarks.ages import MEASURED, commits_since
from benchmarks.figures.common import PASSING, figure, file, table


@figure
def results__standing() -> str:
    return table(["result", "revision", "measured on", "commits to what it measures since"], [*map(_line, MEASURED)])


PASSING.add("results.standing")


def _line(name: str) -> list[str]:
    machine = file(name)["machine"]
    age = commits_since(name)
    since = {None: "not known", 0: "none"}.get(age, str(age))
    place = machine.get("accelerator") or f"{machine['processor']}, {machine['cores']} cores"
    return [f"`{name}`", machine["revision"], f"{place}, PyTorch {machine['torch']}", since]
