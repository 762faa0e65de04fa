"""Mistakes put into the code at random, to see which of them the tests notice: `make mutants`.

Cosmic Ray makes the mistakes (another operator, another number, a condition turned round), one at a time, in a clone of
the repository; the tests that should notice are run until the first fails. A sample of all mistakes that it can make is
drawn with a fixed seed. What was found is written after each one, and a later call goes on there; what was found in a
file that has changed since is looked for again.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.pairing import RESULTS, revision
from remat.host.machine import machine

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".mutants"  # with a clone for each worker, since mistakes are written to files
SAMPLE, SEED = 300, 1
SECONDS = 600  # after which tests that do not end count as failed

_PLANNING = "judges planners solvers ilp"
_RUNNING = "executor_errors judges exactness exactness_modules found_by_users limits"
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
    "remat/solvers/ilp.py": f"ilp {_PLANNING}",
    "remat/solvers/checkmate.py": f"ilp {_PLANNING}",
    "remat/runtime/planned/executor.py": _RUNNING,
    "remat/runtime/calls/environment.py": _RUNNING,
    "remat/runtime/planned/call_executor.py": "patched_forward any_model ordinary_models found_by_users limits",
    "remat/profiling/passes.py": "finding any_model limits ordinary_models profiling",
    "remat/runtime/live/ledger.py": _LIVE,
    "remat/runtime/dtr/core.py": f"dtr {_LIVE}",
    "remat/runtime/dtr/_kernels.py": f"dtr {_LIVE}",
    "remat/comparison/result.py": "verdicts compare compare_files plans_as_text cards package",
}


def mutants(sample: int, survivors: bool, workers: int) -> None:
    """Goes on with the sample; `survivors`: tries those again that no test noticed."""
    clones: queue.Queue[Path] = queue.Queue()
    for number in range(workers):
        clones.put(_clone(number))
    os.chdir(WORK / "clone0")
    _check_collected(WORK / "clone0")
    drawn, digests = _drawn(sample), {name: _digest(Path(name).read_bytes()) for name in TESTS}
    file = RESULTS / "mutants.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {row["key"]: row for row in before if row["file"] == digests[row["key"].partition(" ")[0]]}
    rows = {key: row for key, row in rows.items() if key in drawn}
    missing = [key for key in drawn if key not in rows or (survivors and rows[key]["outcome"] == "survived")]

    def tried(key: str) -> dict[str, Any]:
        clone = clones.get()
        try:
            return {"key": key, "file": digests[str(drawn[key].module_path)], **_tried(drawn[key], clone)}
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
        "machine": {**machine(), "revision": revision()},
        **{"sample": sample, "tried": len(rows), "noticed": noticed, "share": noticed / len(rows)},
        "rows": rows,
    }
    written = file.with_suffix(".part")
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.replace(file)


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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _drawn(sample: int) -> dict[str, Any]:
    """The mistakes to try, by file, operator and number, in the order in which they are tried.

    They are ranked by chance, each by itself: any beginning is a sample too, and where a file changes, what was drawn
    of the others stays.
    """
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB, use_db

    database = WORK / "mutants.sqlite"
    with use_db(str(database), WorkDB.Mode.create) as work:
        init([Path(name) for name in TESTS], work, {})
        found = [mutation for item in work.work_items for mutation in item.mutations]
    database.unlink()
    notes = {name: set(_annotations(ast.parse(Path(name).read_text()))) for name in TESTS}
    keys = {
        f"{each.module_path} {each.operator_name.removeprefix('core/')} {each.occurrence}": each
        for each in found
        if not _is_within(each.start_pos, notes[str(each.module_path)])
    }
    print(f"{len(keys)} mistakes can be made in {len(TESTS)} files; {sample} are tried", flush=True)
    return {key: keys[key] for key in sorted(keys, key=lambda key: _digest(f"{SEED} {key}".encode()))[:sample]}


def _annotations(tree: ast.AST) -> Iterator[tuple[int, int, int, int]]:
    """Where annotations stand, which nothing reads when the code runs, and what is there for type checkers."""
    for node in ast.walk(tree):
        found: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            found = [node.returns, *(argument.annotation for argument in given if argument is not None)]
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
    files = [f"tests/test_{name}.py" for name in tests]
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
