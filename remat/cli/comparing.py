"""`remat compare`: strategies side by side, planned and run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from remat.budgets import resolve_budget
from remat.cli.app import (
    BUDGETS,
    INTERRUPTED,
    NOTHING_FITS,
    SLOTS,
    Batch,
    Command,
    Device,
    HostLimit,
    Model,
    app,
    budget_in,
    console,
)
from remat.errors import InfeasibleBudget
from remat.formatting import format_bytes

if TYPE_CHECKING:
    from remat.comparison.result import Comparison


@app.command(cls=Command)
def strategies() -> None:
    """List the planners, heuristics and other strategies: what each is for, and what it needs."""
    from remat.strategies import STRATEGIES

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    table.add_column("what it is for")
    for family in STRATEGIES.values():
        needs = f" (needs {family.needs})" if family.needs else ""
        table.add_row(family.name, escape(family.purpose + needs))
    console.print(table)


@app.command(cls=Command)
def compare(
    model: Model,
    budgets: Annotated[
        str | None,
        typer.Option(
            help=f"{BUDGETS} Default: five, from the minimum to plain PyTorch.", metavar="LIST", show_default=False
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, see `remat strategies`.",
            metavar="LIST",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option(help="Run every plan, or only predict.", metavar="")] = True,
    repeats: Annotated[int, typer.Option(help="Timed steps of each plan.", metavar="N", min=1)] = 3,
    slots: Annotated[int, typer.Option(help=SLOTS, metavar="N", min=1)] = 500,
    batch: Batch = 8,
    device: Device = "cpu",
    host_limit: HostLimit = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and figures; continues an earlier comparison there.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Compare strategies at several budgets: plan, run next to plain PyTorch, recommend the best."""
    from remat.cli.models import load_example
    from remat.comparison.compare import compare as compare_strategies

    sizes = None if budgets is None else [budget_in(text) for text in budgets.split(",")]
    names = None if strategies is None else [name.strip() for name in strategies.split(",")]
    for size in sizes or ():
        resolve_budget(size, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    example = load_example(model, batch, device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = compare_strategies(
        example.model,
        example.sample,
        sizes,
        names,
        example.loss,
        measure=measure,
        repeats=repeats,
        slots=slots,
        host_limit=None if host_limit is None else resolve_budget(budget_in(host_limit)),
        file=None if out is None else out / "comparison.json",
    )
    console.print(f"[bold]{escape(model)}[/bold]", highlight=False)
    console.print(found, highlight=False)
    if out is not None:
        for path in _write_comparison(out, found):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if not found.complete:
        raise typer.Exit(INTERRUPTED)
    if not any(_works(found, size) for size in found.budgets):
        raise typer.Exit(NOTHING_FITS)


def _works(found: Comparison, size: int) -> bool:
    """Whether anything stays within this budget."""
    try:
        found.best(size)
    except InfeasibleBudget:
        return False
    return True


def _write_comparison(out: Path, found: Comparison) -> list[Path]:
    """The table as CSV, and the figures: of all, and of the plan to take within each budget."""
    found.to_csv(out / "comparison.csv")
    paths = [out / "comparison.json", out / "comparison.csv", out / "comparison.png"]
    found.plot().savefig(paths[-1], dpi=150)
    for size in filter(partial(_works, found), sorted(set(found.budgets))):
        best = found.best(size)
        if best.schedule is not None and best.budget_bytes is not None:
            paths.append(out / f"plan_{in_a_name(size, found.budgets)}.png")
            found.plot(strategy=best.strategy, budget=best.budget_bytes).savefig(paths[-1], dpi=150)
    return paths


def in_a_name(size: int, among: Iterable[int]) -> str:
    """A budget in a file name, as people write it; with its bytes where others among them would be called the same."""
    text = format_bytes(size).replace(" ", "")
    alike = {other for other in among if format_bytes(other).replace(" ", "") == text}
    return text if alike == {size} else f"{text}_{size}"
