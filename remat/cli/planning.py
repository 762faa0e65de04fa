"""`remat profile`, `plan` and `calibrate`: a model's costs on this machine, or estimated for another device."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from remat.budgets import resolve_budget
from remat.cli.app import (
    BUDGETS,
    NOTHING_FITS,
    SLOTS,
    Batch,
    Command,
    Device,
    HostLimit,
    Model,
    ModelOrChain,
    Out,
    Planned,
    app,
    budget_in,
    chain_in,
    columns_table,
    console,
    profiled,
)
from remat.errors import InfeasibleBudget, RematError
from remat.formatting import count, format_bytes, format_seconds
from remat.utils.progress import shown

if TYPE_CHECKING:
    from remat.chain import Chain
    from remat.schedule import Schedule
    from remat.solvers.base import Solver


@app.command(cls=Command)
def profile(model: Model, batch: Batch = 8, device: Device = "cpu", out: Out = None) -> None:
    """Measure the memory and time of every stage of a model."""
    chain = profiled(model, batch, device)
    console.print(f"{model}: {chain}", highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        chain.save(out / "chain.json")
        console.print(f"wrote {out / 'chain.json'}")


@app.command(cls=Command)
def plan(
    model: ModelOrChain,
    budgets: Annotated[str, typer.Option(help=BUDGETS, metavar="LIST")] = "0.3,0.5,0.8",
    solver: Annotated[
        str,
        typer.Option(
            help="Planner whose plans are drawn and written: persistent, floating, fastest, chen, revolve, ...",
            metavar="NAME",
        ),
    ] = "persistent",
    also: Annotated[
        str, typer.Option(help="Comma-separated planners to add to the table: floating, ilp, ...", metavar="LIST")
    ] = "",
    slots: Annotated[int, typer.Option(help=SLOTS, metavar="N", min=1)] = 500,
    pictures: Annotated[bool, typer.Option(help="Draw each plan and its memory over time.", metavar="")] = True,
    batch: Batch = 8,
    device: Planned = "cpu",
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            "--optimiser",
            help="For an estimate: none, sgd, momentum, adam, adam-mixed or adam-8bit.",
            metavar="NAME",
        ),
    ] = "adam",
    shards: Annotated[
        int, typer.Option(help="For an estimate: devices that share the parameters (FSDP).", metavar="N", min=1)
    ] = 1,
    largest: Annotated[
        bool, typer.Option("--largest-batch", help="For an estimate: find the largest batch that fits.", metavar="")
    ] = False,
    host_limit: HostLimit = None,
    out: Out = None,
) -> None:
    """Plan for several budgets: the cost of every planner's plans, and a drawing of one planner's.

    For a device that this machine need not have, as --device h100, the model is not run: memory and time are estimated.
    """
    from remat.simulation import store_all_peak
    from remat.solvers import make_solver
    from remat.solvers import planner as planner_of

    room = None if host_limit is None else resolve_budget(budget_in(host_limit))
    planner = planner_of(solver, slots, room)
    asked = [make_solver(name.strip(), slots=slots) for name in also.split(",") if name.strip()]
    texts = [text.strip() for text in budgets.split(",")]
    wanted = [budget_in(text) for text in texts]
    for budget in wanted:
        resolve_budget(budget, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    if _is_estimated(device):
        chain = _estimate(model, batch, device, optimizer, shards, largest, room)
    elif largest:
        raise RematError("--largest-batch is for an estimate: name a device to estimate for, as --device h100")
    else:
        chain = chain_in(model, batch, device, offload=room is not None)
    sizes = [resolve_budget(budget, store_all_peak(chain)) for budget in wanted]
    headings = [f"{text} =\n{format_bytes(size)}" for text, size in zip(texts, sizes, strict=True)]
    table, answers = _comparison(model, chain, sizes, headings, planner, asked, slots)
    console.print(table)
    for text, answer in zip(texts, answers, strict=True):
        if isinstance(answer, InfeasibleBudget):
            console.print(f"[bold]{text}[/bold]: {escape(str(answer))}\n", highlight=False, soft_wrap=True)
            continue
        if pictures:
            _draw(text, chain, answer)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            answer.save(out / f"schedule_{text}.json")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        chain.save(out / "chain.json")
        console.print(f"wrote the chain and the schedules to {out}")
    if all(isinstance(answer, InfeasibleBudget) for answer in answers):
        raise typer.Exit(NOTHING_FITS)


def _comparison(
    model: str,
    chain: Chain,
    sizes: Sequence[int],
    headings: Sequence[str],
    planner: Solver,
    asked: Sequence[Solver],
    slots: int,
) -> tuple[Table, list[Schedule | InfeasibleBudget]]:
    """The plans of every planner in a table, a row each, and the answers of `planner`."""
    from remat.simulation import store_all_peak
    from remat.solvers import make_solver
    from remat.solvers.floating import is_quick
    from remat.strategies import FIT, STRATEGIES

    console.print(
        f"{model}: {count(chain.length - 1, 'stage')} and the loss; plain PyTorch needs "
        f"{format_bytes(store_all_peak(chain))} and {format_seconds(chain.store_all_seconds)} a step.\n"
        "Predicted time / plain PyTorch:",
        highlight=False,
        markup=False,
    )
    table = columns_table("", "planner", "minimum\nbudget", *headings, "planning\ntime")
    chosen = {_named(solver, chain): solver for solver in (*asked, planner)}
    answers: list[Schedule | InfeasibleBudget] = []
    compared = [name for name, family in STRATEGIES.items() if family.plans and family.compared and name != FIT]
    for name in dict.fromkeys((*compared, *chosen)):
        solver = chosen.get(name) or make_solver(name, slots=slots, options=False)
        if name == "floating" and name not in chosen and not is_quick(chain, slots):
            console.print("(floating is left out, because it is slow here; try `--also floating --slots 50`)")
            continue
        with console.status(f"planning with {name}"):
            start = time.perf_counter()
            found = solver.solve_many(chain, sizes)
            seconds = time.perf_counter() - start
            least = solver.minimum_budget(chain)
        style = "bold" if solver is planner else ""
        cells = [_overhead(chain, answer) for answer in found]
        table.add_row(name, format_bytes(least), *cells, format_seconds(seconds), style=style)
        if solver is planner:
            answers = found
    bounds = _bounds(chain, sizes)
    if any(bounds):
        cells = ["-" if bound is None else f"{bound / chain.store_all_seconds:.3f}" for bound in bounds]
        table.add_row("lower bound", "", *cells, "")
    if planner.offloads:  # bounds are of plans without the host
        return table, answers
    return table, [_bounded(answer, bound) for answer, bound in zip(answers, bounds, strict=True)]


def _named(solver: Solver, chain: Chain) -> str:
    """As in comparisons: "persistent" is the paper's, "persistent+parts" may keep a part of a stage."""
    from remat.strategies import PARTS

    return f"{solver.name}{PARTS}" if getattr(solver, "options", False) and any(chain.options) else solver.name


def _bounded(answer: Schedule | InfeasibleBudget, bound: float | None) -> Schedule | InfeasibleBudget:
    """The answer with what no schedule can beat, so that its report can say how far from optimal it may be."""
    if isinstance(answer, InfeasibleBudget) or bound is None:
        return answer
    return replace(answer, bound_seconds=max(bound, answer.bound_seconds or 0.0))


def _overhead(chain: Chain, answer: Schedule | InfeasibleBudget) -> str:
    from remat.simulation import simulate

    if isinstance(answer, InfeasibleBudget):
        return "-"
    report = simulate(chain, answer)
    return f"{1.0 if report.overhead is None else report.overhead:.3f}{' over' if report.outcome == 'over' else ''}"


def _bounds(chain: Chain, sizes: Sequence[int]) -> list[float | None]:
    """The lower bound for each budget; None below the minimum budget, or if it is too slow or too coarse to help."""
    from remat.solvers import lower_bound
    from remat.solvers.floating import MODEST_WORK, work

    slots = int(min(MODEST_WORK / work(chain), 2000))
    bounds: list[float | None] = []
    for size in sizes:
        try:
            useful = slots >= 100 and chain.store_all_seconds > 0  # noqa: PLR2004  # see above
            bounds.append(lower_bound(chain, size, slots) if useful else None)
        except InfeasibleBudget:
            bounds.append(None)
    return bounds


def _draw(text: str, chain: Chain, schedule: Schedule) -> None:
    from remat.plotting.text import draw_memory, draw_plan, symbols_for
    from remat.simulation import simulate

    width = min(console.width, 120)
    report = simulate(chain, schedule)
    symbols = symbols_for(console.encoding)
    console.print(f"[bold]{text}[/bold]: {escape(str(report))}", highlight=False, soft_wrap=True)
    console.print(draw_plan(chain, schedule, width, symbols), highlight=False, markup=False)
    console.print(draw_memory(report, width, symbols=symbols) + "\n", highlight=False, markup=False)


def _is_estimated(device: str) -> bool:
    """Whether a device is one that need not be there, and not one that PyTorch puts tensors on."""
    import torch

    from remat.devices import device_named

    try:
        torch.device(device)
    except RuntimeError:
        device_named(device)
        return True
    return False


def _estimate(
    name: str, batch: int, device: str, optimizer: str, shards: int, largest: bool, room: int | None
) -> Chain:
    """The chain of a model on a device that need not be there; shows what it takes there."""
    from remat.cli.models import load_unplaced
    from remat.devices import device_named
    from remat.estimation.world import World
    from remat.training.estimate import estimated_in

    if name.endswith(".json"):
        raise RematError(f"{name} was measured on another device; leave out --device, or name the model")
    world = World(device_named(device))
    with world.entered():  # so that parameters take no memory
        example = load_unplaced(name, batch)
    with shown(True) as tell:
        found = estimated_in(
            world,
            example.model,
            example.sample,
            loss=example.loss,
            optimizer=optimizer,
            shards=shards,
            host_limit=room,
            progress=tell,
        )
        rows = found.largest_batch() if largest else None
    console.print(f"{found}", highlight=False, markup=False, soft_wrap=True)
    if rows is not None:
        console.print(f"largest batch that fits: {rows or 'none'}", highlight=False)
    return found.chain


@app.command(cls=Command)
def calibrate(
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda, cuda:1, ...", metavar="NAME")] = "cpu",
    out: Annotated[Path, typer.Option(help="File to write, for `remat plan --device FILE`.", metavar="FILE")] = Path(
        "device.json"
    ),
) -> None:
    """Measure how fast this machine's device runs operators, for estimates: half a minute."""
    from remat.estimation.calibration import calibrate as measure

    with console.status("measuring"):
        found = measure(device)
    found.save(out)
    table = columns_table("", "kind of operator", "share of peak")
    for kind, share in sorted(found.efficiency.items(), key=lambda entry: -entry[1]):
        table.add_row(kind, f"{share:.2f}")
    console.print(table)
    console.print(
        f"{found.name}: {found.flops_per_second['float32'] / 1e9:.0f} GFLOP/s of float32, "
        f"{found.bytes_per_second / 1e9:.0f} GB/s, {found.launch_seconds * 1e6:.1f} us an operator; wrote {out}",
        highlight=False,
    )
