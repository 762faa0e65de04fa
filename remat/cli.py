"""The command line: `remat profile` and `remat plan`, also as `python -m remat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remat.errors import InfeasibleBudget, RematError
from remat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from remat.chain import Chain

app = typer.Typer(
    help="Train PyTorch models inside a memory limit: measure a model, plan for budgets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[str, typer.Argument(help="A model of remat.models (gpt, resnet50, ...) or package.module:function.")]
Batch = Annotated[int, typer.Option(help="Batch size of the sample, for the models of remat.models.", min=1)]
Out = Annotated[Path | None, typer.Option(help="Folder for the results as JSON; made if it is not there.")]


@app.callback()
def _main() -> None:
    """Without it a single command would lose its name."""


@app.command()
def profile(model: Model, batch: Batch = 8, out: Out = None) -> None:
    """Measure every stage of a model: bytes and seconds."""
    chain = _profile(model, batch)
    console.print(_stage_table(model, chain))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        chain.save(out / "chain.json")
        console.print(f"wrote {out / 'chain.json'}")


@app.command()
def plan(
    model: Model,
    budgets: Annotated[
        str, typer.Option(help="Comma-separated: fractions of the store-all peak, bytes, or amounts with a unit.")
    ] = "0.3,0.5,0.8",
    solver: Annotated[str, typer.Option(help="Name of the planner.")] = "persistent",
    slots: Annotated[int, typer.Option(help="Memory units of the dynamic program.", min=1)] = 500,
    batch: Batch = 8,
    out: Out = None,
) -> None:
    """Plan for several budgets and show what each is predicted to cost."""
    from remat.simulation import simulate
    from remat.solvers import make_solver
    from remat.solvers.base import store_all_peak

    planner = make_solver(solver, slots=slots)
    wanted = [_budget(text) for text in budgets.split(",")]
    chain = _profile(model, batch)
    table = _table(
        f"{model}: {format_bytes(store_all_peak(chain))} when everything is stored, "
        f"{format_bytes(planner.minimum_budget(chain))} at least with {solver}",
        *("budget", "predicted\npeak", "seconds\nper step", "overhead", "recom-\nputed"),
    )
    for text, answer in zip(budgets.split(","), planner.solve_many(chain, wanted), strict=True):
        if isinstance(answer, InfeasibleBudget):
            table.add_row(f"{text} = {format_bytes(answer.budget)}", "infeasible", "", "", "")
            continue
        report = simulate(chain, answer)
        overhead = "" if report.overhead is None else f"{report.overhead:.3f}"
        cells = (format_bytes(report.peak_bytes), format_seconds(report.seconds), overhead)
        table.add_row(f"{text} = {format_bytes(answer.budget_bytes or 0)}", *cells, str(report.recomputations))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            answer.save(out / f"schedule_{text.strip()}.json")
    console.print(table)
    if out is not None:
        chain.save(out / "chain.json")
        console.print(f"wrote the chain and the schedules to {out}")


def _budget(text: str) -> int | str | float:
    """A budget as typed: a number with a point is a fraction, one without is bytes, anything else has a unit."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _profile(name: str, batch: int) -> Chain:
    from remat.models.examples import load_example
    from remat.profiling import profile as profile_model

    model, sample = load_example(name, batch)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return profile_model(model, sample, progress=tell)


def _table(title: str, *columns: str) -> Table:
    """Numbers in columns that do not wrap, narrow enough for a terminal of 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        is_text = column in ("stage", "")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=position > 0)
    return table


def _stage_table(name: str, chain: Chain) -> Table:
    table = _table(
        f"{name}: {chain.length - 1} stages and the loss",
        *("stage", "forward", "backward", "output", "saved", "forward\noverhead", "backward\noverhead", ""),
    )
    for index, stage in enumerate(chain.names):
        marks = [
            mark
            for mark, set_ in (
                ("random", chain.draws_random[index]),
                ("buffers", chain.changes_buffers[index]),
                ("no gradient", chain.grad_bytes[index + 1] == 0 and stage != "loss"),
            )
            if set_
        ]
        table.add_row(
            stage,
            format_seconds(chain.fwd_seconds[index]),
            format_seconds(chain.bwd_seconds[index]),
            format_bytes(chain.act_bytes[index + 1]),
            format_bytes(chain.saved_bytes[index]),
            format_bytes(chain.fwd_overhead_bytes[index]),
            format_bytes(chain.bwd_overhead_bytes[index] - chain.bwd_released_bytes[index]),
            ", ".join(marks),
        )
    return table


def main() -> None:
    """Entry point: errors of remat become one line on stderr and exit status 2."""
    try:
        app()
    except RematError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)
