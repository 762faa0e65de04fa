"""`remat simulate-dtr`: traces of operators replayed as DTR would run them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from remat.cli.app import Command, app, budget_in, chain_in, columns_table, console
from remat.errors import RematError
from remat.formatting import format_bytes
from remat.utils.moved import moved
from remat.utils.progress import shown

if TYPE_CHECKING:
    from remat.runtime.dtr.simulator import Cell
    from remat.runtime.dtr.trace import Trace


_WHY = {
    "oom": "an operator does not fit, with its inputs, its outputs and tensors that cannot be evicted",
    "thrash": "recomputation takes the step over --thrash-limit times its own time",
}


@app.command("simulate", cls=Command, hidden=True, deprecated=True)  # its name until 0.2
@app.command("simulate-dtr", cls=Command)
def simulate_dtr(
    traces: Annotated[
        list[str], typer.Argument(help="Logs: files, .gz files, members of a zip (logs.zip/unet.log), or a chain.json.")
    ],
    budgets: Annotated[
        str,
        typer.Option(
            help="Comma-separated fractions of the peak without evictions, bytes, or sizes with a unit.", metavar="LIST"
        ),
    ] = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0",
    heuristics: Annotated[
        str,
        typer.Option(
            help="Comma-separated, see `remat strategies`.",
            metavar="LIST",
        ),
    ] = "h_dtr,h_dtr_eq,h_dtr_local,h_lru",
    deallocation: Annotated[str, typer.Option(help="eager, banish or ignore.", metavar="NAME")] = "eager",
    thrash_limit: Annotated[
        float, typer.Option(help="Stop a run at this multiple of the program's own time.", metavar="TIMES")
    ] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the table as JSON and CSV.", metavar="FOLDER")] = None,
) -> None:
    """Simulate dynamic tensor rematerialisation (DTR) on traces, within several budgets."""
    from remat.runtime.dtr.heuristics import make_heuristic
    from remat.runtime.dtr.simulator import Replay, sweep

    names = [name.strip() for name in heuristics.split(",")]
    for name in names:
        make_heuristic(name)
    sizes = [budget_in(text) for text in budgets.split(",")]
    replays = {name: Replay(trace) for name, trace in traces_in(traces).items()}
    with shown(True) as tell:
        chosen, told = {name: name for name in names}, partial(tell, "simulating")
        cells = sweep(replays, sizes, chosen, [deallocation], thrash_limit=thrash_limit, progress=told)
    for model, replay in replays.items():
        own = [cell for cell in cells if cell.model == model]
        peak, constants, largest = map(format_bytes, replay.baseline[:3])
        console.print(
            f"{model}: peak {peak} without evictions and without scratch memory, which a trace does not have; "
            f"{constants} of constants, {largest} for the largest operator with its inputs and outputs. Overhead by "
            "heuristic:",
            highlight=False,
        )
        console.print(sweep_table(own, names))
        for outcome, why in _WHY.items():
            if any(cell.report.outcome == outcome for cell in own):
                console.print(f"{outcome}: {why}", highlight=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_cells(out, cells)
        console.print(f"wrote the table to {out}")


@app.command(
    cls=Command,
    hidden=True,
    deprecated=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def experiment(context: typer.Context) -> None:
    """The DTR paper's experiments, which have moved to the repository: `python -m benchmarks.papers`."""
    try:
        moved("remat experiment", "benchmarks.papers.__main__").main(context.args)
    except ImportError as error:
        raise RematError(f"{error}: run `python -m benchmarks.papers` there") from error


def traces_in(paths: Sequence[str]) -> dict[str, Trace]:
    """Traces by name: of the file, or of the path where several files have the same name."""
    stems = [Path(path).stem for path in paths]
    return {stem if stems.count(stem) == 1 else path: _trace(path) for stem, path in zip(stems, paths, strict=True)}


def _trace(path: str) -> Trace:
    from remat.runtime.dtr.trace import Trace

    if path.endswith(".json"):
        return Trace.from_chain(chain_in(path, 1, "cpu"))
    try:
        return Trace.load(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise RematError(f"cannot read {path}: {error}") from error


def sweep_table(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    """Overhead, or why there is none, by budget and heuristic."""
    table = columns_table("", "budget", *names)
    by_budget: dict[int, dict[str, str]] = {}
    for cell in cells:
        report = cell.report
        shown = f"{report.overhead:.3f}" if report.outcome == "pass" else report.outcome
        by_budget.setdefault(report.budget_bytes or 0, {})[cell.heuristic] = shown
    for size, row in sorted(by_budget.items()):
        table.add_row(format_bytes(size), *(row[name] for name in names))
    return table


def write_cells(out: Path, cells: Sequence[Cell]) -> None:
    """One row a simulation, as JSON and as CSV."""
    import csv
    import io
    import json

    from remat.files import write_whole

    keep = ("outcome", "budget_bytes", "peak_bytes", "overhead", "evictions", "recomputations", "accesses")
    own = ("model", "heuristic", "deallocation")
    rows = [{name: getattr(cell if name in own else cell.report, name) for name in (*own, *keep)} for cell in cells]
    write_whole(out / "simulations.json", (json.dumps(rows, indent=1) + "\n").encode())
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(out / "simulations.csv", text.getvalue().encode())
