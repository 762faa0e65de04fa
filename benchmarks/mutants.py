"""Mistakes put into the code at random, to see which of them the tests notice: `make mutants`.

Cosmic Ray makes the mistakes (another operator, another number, a condition turned round), one at a time, in a clone of
the repository; the tests that should notice are run until the first fails. A sample of all mistakes that it can make is
drawn with a fixed seed. What was found is written after each one, and a later call goes on there. A mistake is known by
the function that it is made in: where that has changed, others are drawn in the place of its mistakes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.keeping import RESULTS, origin
from remat.files import write_whole

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".mutants"  # with a clone for each worker, since mistakes are written to files
SAMPLE, SEED = 300, 1
SECONDS = 600  # after which tests that do not end count as failed

_PLANNING = "judges planners solvers ilp"
_RUNNING = "executor_errors judges exactness exactness_modules found_by_users limits"
_MODELS = "any_model ordinary_models limits"
_UNITS = "live_units unit_programs unit_plans"
_LIVE = "live_peaks live_block live_programs live_run live_models"
TESTS = {
    "remat/simulation.py": "simulation judges solvers planners budget",
    "remat/solvers/base.py": f"{_PLANNING} verdicts budgets",
    "remat/solvers/_tables.py": _PLANNING,
    "remat/solvers/_table_kernels.py": _PLANNING,
    "remat/solvers/persistent.py": _PLANNING,
    "remat/solvers/floating.py": _PLANNING,
    "remat/solvers/revolve.py": _PLANNING,
    "remat/solvers/sequential.py": _PLANNING,
    "remat/solvers/chen.py": _PLANNING,
    "remat/solvers/offload.py": "offload_plans offload offload_use",
    "remat/solvers/_offload_kernels.py": "offload_plans offload",
    "remat/solvers/ilp.py": f"ilp {_PLANNING}",
    "remat/solvers/checkmate.py": f"ilp {_PLANNING}",
    "remat/runtime/planned/forward_run.py": _RUNNING,
    "remat/runtime/calls/call.py": f"{_RUNNING} one_engine",
    "remat/runtime/calls/passed.py": _RUNNING,
    "remat/runtime/calls/recompute.py": f"{_RUNNING} options",
    "remat/runtime/calls/saved.py": f"{_RUNNING} {_UNITS}",
    "remat/runtime/calls/stage_call.py": _RUNNING,
    "remat/runtime/calls/environment.py": _RUNNING,
    "remat/runtime/calls/state.py": _RUNNING,
    "remat/runtime/calls/places.py": f"patched_forward other_paths {_MODELS} found_by_users",
    "remat/runtime/links.py": "offload",
    "remat/runtime/offload.py": "offload",
    "remat/runtime/planned/order.py": f"patched_forward other_paths {_MODELS} found_by_users",
    "remat/runtime/planned/executor.py": _RUNNING,
    "remat/runtime/planned/patched_forward.py": f"patched_forward other_paths {_MODELS} found_by_users",
    "remat/profiling/model_pass.py": f"finding other_paths {_MODELS} profiling",
    "remat/profiling/stage_pass.py": f"profiling found_by_users budget {_MODELS}",
    "remat/profiling/sequence_pass.py": "profiling found_by_users budget limits",
    "remat/profiling/assembling.py": f"profiling found_by_users budget {_MODELS}",
    "remat/profiling/code_graph.py": f"finding other_paths {_MODELS} profiling",
    "remat/measuring/isolating.py": f"finding other_paths {_MODELS} profiling",
    "remat/profiling/alive.py": f"finding other_paths {_MODELS} profiling",
    "remat/measuring/gauges.py": f"finding other_paths {_MODELS} profiling",
    "remat/runtime/calls/tape.py": "options exactness",
    "remat/runtime/calls/partial.py": f"options {_UNITS}",
    "remat/runtime/calls/tapes.py": "options",
    "remat/runtime/calls/hull.py": "options",
    "remat/options/sending.py": "offload offload_use",
    "remat/measuring/work.py": "profiling finding",
    "remat/options/units.py": "options budget profiling",
    "remat/runtime/live/units/account.py": _UNITS,
    "remat/runtime/live/units/call.py": _UNITS,
    "remat/runtime/live/units/calls.py": f"{_UNITS} unit_turns",
    "remat/runtime/live/units/choosing.py": _UNITS,
    "remat/runtime/live/units/course.py": f"{_UNITS} unit_turns",
    "remat/runtime/live/units/history.py": f"{_UNITS} unit_turns",
    "remat/runtime/live/units/known.py": f"{_UNITS} unit_turns unit_calls",
    "remat/runtime/live/units/log.py": f"{_UNITS} dormant_blocks",
    "remat/runtime/live/units/orders.py": _UNITS,
    "remat/runtime/live/units/pieces.py": _UNITS,
    "remat/runtime/live/units/remaking.py": f"{_UNITS} unit_replays",
    "remat/runtime/live/units/saving.py": f"{_UNITS} unit_surprises",
    "remat/runtime/live/units/story.py": _UNITS,
    "remat/runtime/live/units/plans.py": "unit_plans",
    "remat/runtime/live/units/pool.py": _UNITS,
    "remat/runtime/live/units/makings.py": f"{_UNITS} unit_replays",
    "remat/runtime/live/units/unit.py": _UNITS,
    "remat/runtime/live/steps.py": "fit_by_calls",
    "remat/runtime/dtr/learning.py": "learning unit_plans",
    "remat/runtime/live/repeating.py": _LIVE,
    "remat/runtime/live/store.py": _LIVE,
    "remat/runtime/live/ledger.py": _LIVE,
    "remat/runtime/dtr/core.py": f"dtr {_LIVE}",
    "remat/runtime/dtr/_kernels.py": f"dtr {_LIVE}",
    "remat/comparison/result.py": "verdicts compare compare_files plans_as_text cards package",
    "remat/comparison/table.py": "verdicts compare compare_files plans_as_text cards package",
}


def mutants(sample: int, survivors: bool, workers: int) -> None:
    """Goes on with the sample; `survivors`: tries those again that no test noticed."""
    clones: queue.Queue[Path] = queue.Queue()
    for number in range(workers):
        clones.put(_clone(number))
    os.chdir(WORK / "clone0")
    _check_collected(WORK / "clone0")
    file = RESULTS / "mutants.json"
    rows = {row["key"]: row for row in (json.loads(file.read_text())["rows"] if file.exists() else [])}
    drawn = _drawn(sample, rows)
    missing = [key for key in drawn if key not in rows or (survivors and rows[key]["outcome"] == "survived")]
    rows = {key: row for key, row in rows.items() if key in drawn}

    def tried(key: str) -> dict[str, Any]:
        clone = clones.get()
        try:
            return {"key": key, **_tried(drawn[key], clone)}
        finally:
            clones.put(clone)

    with ThreadPoolExecutor(workers) as pool:
        for row in pool.map(tried, missing):
            rows[row["key"]] = row
            found = Counter(each["outcome"] for each in rows.values())
            print(f"{len(rows)}/{len(drawn)}: {row['outcome']} {row['where']} {dict(found)}", flush=True)
            _write(file, len(drawn), [rows[key] for key in drawn if key in rows])


def _write(file: Path, sample: int, rows: Sequence[dict[str, Any]]) -> None:
    noticed = sum(row["outcome"] != "survived" for row in rows)
    content = {
        "note": "a random sample of Cosmic Ray's mistakes; noticed: a test failed, or ran out of time",
        "machine": origin(),
        **{"sample": sample, "tried": len(rows), "noticed": noticed, "share": noticed / len(rows)},
        "rows": rows,
    }
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode())


def _clone(number: int) -> Path:
    """A clone of the last commit."""
    clone = WORK / f"clone{number}"
    if not clone.exists():
        WORK.mkdir(exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    data = WORK / "shared"
    if (ROOT.parent / "shared").exists() and not data.exists():  # beside the clones as beside this repository
        data.symlink_to(ROOT.parent / "shared")
    for command in (["fetch", "--quiet", "origin", "HEAD"], ["reset", "--quiet", "--hard", "FETCH_HEAD"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    return clone


def _check_collected(clone: Path) -> None:
    """A test file that does not load would notice every mistake."""
    files = sorted({name for tests in TESTS.values() for name in tests.split()})
    done = _pytest(clone, files, "--collect-only", "-q")
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drawn(sample: int, before: Collection[str]) -> dict[str, Any]:
    """The mistakes to try, in the order in which they are tried: those tried `before` that can still be made, and more.

    They are ranked by chance, each by itself: any beginning is a sample too, and where a function changes, what was
    drawn of the others stays.
    """
    ranked = _all()
    order = sorted(ranked, key=lambda key: (key not in before, _digest(f"{SEED} {key}")))[:sample]
    print(f"{len(ranked)} mistakes can be made in {len(TESTS)} files; {len(order)} are tried", flush=True)
    return {key: ranked[key] for key in order}


def _all() -> dict[str, Any]:
    """Every mistake that can be made, by what it is and the function that it is made in."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB, use_db

    database = WORK / "mutants.sqlite"
    with use_db(str(database), WorkDB.Mode.create) as work:
        init([Path(name) for name in TESTS], work, {})
        found = [mutation for item in work.work_items for mutation in item.mutations]
    database.unlink()
    sources = {name: _Source(Path(name).read_text()) for name in TESTS}
    numbers: Counter[str] = Counter()
    keys = {}
    for each in sorted(found, key=lambda each: (str(each.module_path), each.operator_name, each.occurrence)):
        source = sources[str(each.module_path)]
        if _is_within(each.start_pos, source.notes):
            continue
        what = f"{each.operator_name.removeprefix('core/')} {_digest(source.around(each.start_pos))}"
        numbers[what] += 1
        keys[f"{what} {numbers[what]}"] = each
    return keys


class _Source:
    """A file: where nothing reads what stands there when the code runs, and the function around a place."""

    def __init__(self, text: str) -> None:
        self.lines, tree = text.splitlines(keepends=True), ast.parse(text)
        self.notes = set(_annotations(tree))
        parts = [node for part in tree.body for node in (part.body if isinstance(part, ast.ClassDef) else [part])]
        self._spans = [(_first_line(node), node.end_lineno or node.lineno) for node in parts]

    def around(self, position: tuple[int, int]) -> str:
        """The text of the function, method or statement that a place lies in; its line where it lies in none."""
        first, last = next(
            ((first, last) for first, last in self._spans if first <= position[0] <= last), (position[0], position[0])
        )
        return "".join(self.lines[first - 1 : last])


def _first_line(node: ast.stmt) -> int:
    return min(each.lineno for each in (*getattr(node, "decorator_list", ()), node))


def _annotations(tree: ast.AST) -> Iterator[tuple[int, int, int, int]]:
    """What does not matter when the code runs: annotations, what is there for type checkers, options of compilers."""
    for node in ast.walk(tree):
        found: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            found = [node.returns, *(argument.annotation for argument in given if argument is not None)]
            found += [each for each in node.decorator_list if "njit" in ast.unparse(each)]  # how it is compiled
        elif isinstance(node, ast.AnnAssign):
            found = [node.annotation]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found = [node]
        for each in found:
            if each is not None:
                yield each.lineno, each.col_offset, each.end_lineno, each.end_col_offset  # type: ignore[attr-defined]


def _is_within(position: tuple[int, int], ranges: set[tuple[int, int, int, int]]) -> bool:
    return any((a, b) <= position < (c, d) for a, b, c, d in ranges)


def _tried(mutation: Any, clone: Path) -> dict[str, Any]:
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    name = str(mutation.module_path)
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    start = time.monotonic()
    with use_mutation(clone / name, operator, mutation.occurrence) as (before, after):
        outcome = "no change" if after is None else _outcome(TESTS[name].split(), clone)
    changed = [
        f"{old.strip()} -> {new.strip()}"
        for old, new in zip(before.splitlines(), (after or before).splitlines(), strict=False)
        if old != new
    ]
    return {
        "outcome": outcome,
        "where": f"{name}:{mutation.start_pos[0]} in {mutation.definition_name}",
        "change": changed[0][:240] if changed else "",
        "seconds": round(time.monotonic() - start, 1),
    }


def _outcome(tests: Sequence[str], clone: Path) -> str:
    try:
        done = _pytest(clone, tests, "-x", "-q", "-m", "not slow", "--timeout", "120")
    except subprocess.TimeoutExpired:
        return "timeout"
    return "survived" if done.returncode == 0 else "noticed"


def _pytest(clone: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(clone),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(clone) + "-numba",
        "OMP_NUM_THREADS": "1",
    }
    files = [str(path.relative_to(clone)) for name in tests for path in (clone / "tests").rglob(f"test_{name}.py")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *files],
        cwd=clone,
        env=environment,
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many mistakes are tried in all")
    parser.add_argument("--survivors", action="store_true", help="try those again that no test noticed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many are tried at once")
    given = parser.parse_args()
    mutants(given.sample, given.survivors, given.workers)
