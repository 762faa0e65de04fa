"""Which results are older than the code that they measure: `python -m benchmarks --older` makes those again.

A result says the revision that it was made by. It is as old as the commits since then that changed the code it
measures, and not only comments and docstrings; of one that was made in parts, the oldest part counts.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
_FEW = 50  # commits that are looked into; of more than that it does not matter which changed nothing but words

_PLANNERS = ("remat/solvers", "remat/simulation.py", "remat/schedule.py", "remat/chain.py")
_SIMULATOR = ("remat/runtime/dtr",)
_DTR = ("remat/runtime", ":!remat/runtime/planned")
_SHOWN = ("remat", ":!remat/check", ":!remat/cli", ":!remat/plotting")
_PLANS = (*_SHOWN, ":!remat/estimation", ":!remat/comparison", ":!remat/integrations", ":!remat/runtime/live",
          ":!remat/runtime/dtr")  # fmt: skip


class Measured(NamedTuple):
    """What a result is of.

    Attributes:
        code: what it measures, as git's pathspecs.
        command: makes it, after `python -m`; "" for `benchmarks NAME`.
        hours: it takes hours.
        elsewhere: what it needs that is not on every machine.
    """

    code: Sequence[str]
    command: str = ""
    hours: bool = False
    elsewhere: str = ""


MEASURED = {
    "options": Measured(_PLANS),
    "rivals": Measured(_PLANS),
    "any_model": Measured(_PLANS),
    "any_model_libraries": Measured(_PLANS),
    "any_model_compile": Measured(_PLANS),
    "skips": Measured(_PLANS),
    "peaks": Measured(_PLANS),
    "step_cost": Measured(_PLANS),
    "store_all": Measured(_PLANS),
    "sequential": Measured(_PLANS),
    "frontier": Measured(_PLANS),
    "protocol": Measured(_PLANS),
    "compiled": Measured(_PLANS),
    "head": Measured(_PLANS),
    "offload": Measured(_PLANS),
    "whole_device": Measured(_PLANS),
    "sharded": Measured(_PLANS),
    "trainers": Measured((*_PLANS, "remat/integrations")),
    "first_use": Measured(_SHOWN),
    "compare": Measured(_SHOWN),
    "estimates": Measured(_SHOWN),
    "live_units": Measured(_DTR),
    "live": Measured(_DTR),
    "planners": Measured(_PLANNERS),
    "dtr": Measured(_SIMULATOR),
    "dtr_logs": Measured(_DTR),
    "learned": Measured(_SIMULATOR),
    "live_models": Measured(_DTR, "benchmarks.live_models", hours=True),
    "live_turns": Measured(_DTR, "benchmarks.live_turns", hours=True),
    "live_fuzz": Measured(_DTR, "benchmarks.live_fuzz", hours=True),
    "dtr_run": Measured(_DTR, hours=True),
    "table1": Measured(_SHOWN, hours=True),
    "rotor": Measured(_PLANS, hours=True),
    "rotor_planned": Measured(_PLANNERS, hours=True),
    "rotor_growing": Measured(_PLANS, hours=True),
    "prediction": Measured(_PLANS, hours=True),
    "dtr_simulated": Measured(_SIMULATOR, hours=True),
    "fuzz": Measured(_PLANS, "benchmarks.fuzz --seed 2026", hours=True),
    "module_fuzz": Measured(_SHOWN, "benchmarks.module_fuzz", hours=True),
    "mutants": Measured(_SHOWN, "benchmarks.mutants", hours=True, elsewhere="the extra `mutants`"),
    "zoo": Measured(_PLANS, "benchmarks.zoo", hours=True, elsewhere="timm and torchvision"),
    "on_gpu": Measured(_SHOWN, elsewhere="a GPU"),
    "device_memory": Measured(_PLANS, elsewhere="a GPU"),
}


def commits_since(name: str) -> int | None:
    """How many commits have changed the code that this result measures; None where that is not known.

    That is so without git and its history, and where the code was not committed when it was measured.
    """
    ages = [_commits(revision, _code_of(name)) for revision in _revisions(name)]
    return None if None in ages else max(age for age in ages if age is not None)


def is_current(name: str, revision: str) -> bool:
    """Whether what was made by this revision holds for the code as it is."""
    return _commits(revision, _code_of(name)) == 0


def older() -> list[str]:
    """The results that are older than their code, or may be, and can be made on any machine: what takes hours last."""
    found = [name for name in MEASURED if not MEASURED[name].elsewhere and commits_since(name) != 0]
    return sorted(found, key=lambda name: MEASURED[name].hours)


def _code_of(name: str) -> tuple[str, ...]:
    """What a result measures, and the file that measures it."""
    return (*MEASURED[name].code, f"benchmarks/{name}.py")


def _revisions(name: str) -> set[str]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {""}
    found: dict[str, Any] = json.loads(path.read_text())
    own = found["machine"]["revision"]
    return {row.get("revision", own) for row in found.get("rows", []) if "part" in row} or {own}


@functools.cache
def _commits(revision: str, code: tuple[str, ...]) -> int | None:
    if not revision or revision.endswith("+"):
        return None
    found = git("rev-list", f"{revision}..HEAD", "--", *code)
    if found is None:
        return None
    commits = found.split()
    return len(commits) if len(commits) > _FEW else sum(_changes(commit, code) for commit in commits)


@functools.cache
def _changes(commit: str, code: tuple[str, ...]) -> bool:
    """Whether a commit has changed more of it than comments and docstrings."""
    names = git("diff-tree", "--no-commit-id", "--name-only", "-r", commit, "--", *code) or ""
    return any(_is_changed(commit, name) for name in names.splitlines())


@functools.cache
def _is_changed(commit: str, name: str) -> bool:
    if not name.endswith(".py"):
        return True
    before, after = git("show", f"{commit}^:{name}"), git("show", f"{commit}:{name}")
    return before is None or after is None or _without_words(before) != _without_words(after)


def _without_words(source: str) -> str:
    """What a file does: its syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def git(*words: str) -> str | None:
    """What it answers; None where it cannot."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout if done.returncode == 0 else None
