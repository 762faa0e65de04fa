"""The command line: `remat profile`, `plan`, `compare`, `simulate`, `experiment`, also as `python -m remat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from remat.budgets import resolve_budget
from remat.errors import InfeasibleBudget, RematError
from remat.formatting import format_bytes, format_seconds
from remat.plotting.terminal import columns_table, stage_table, sweep_table

if TYPE_CHECKING:
    from remat.chain import Chain
    from remat.comparison.result import Comparison
    from remat.runtime.dtr.simulator import Cell
    from remat.runtime.dtr.trace import Trace
    from remat.schedule import Schedule
    from remat.solvers.base import Solver

_PLACES = ("cpu", "cuda", "mps", "xpu")  # where a model can be put, if the machine has such a device
NOTHING_FITS, INTERRUPTED = 1, 130  # exit statuses

app = typer.Typer(
    help="Train PyTorch models inside a memory limit: measure a model, plan for budgets, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[str, typer.Argument(help="A model of remat.models (gpt, resnet50, ...) or package.module:function.")]
ModelOrChain = Annotated[
    str, typer.Argument(help="A model as for `remat profile`, or a chain.json that it wrote, which measures nothing.")
]
Batch = Annotated[int, typer.Option(help="Batch size of the sample, for the models of remat.models.", min=1)]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")]
Planned = Annotated[
    str, typer.Option(help="Where the model runs: cpu, cuda, ...; or what to estimate for: h100, l4, device.json, ...")
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results as JSON; made if it is not there.")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        from remat import __version__

        console.print(f"remat {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """What all commands have in common."""


@app.command()
def profile(model: Model, batch: Batch = 8, device: Device = "cpu", out: Out = None) -> None:
    """Measure every stage of a model: bytes and seconds."""
    chain = _profile(model, batch, device)
    console.print(stage_table(model, chain))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        chain.save(out / "chain.json")
        console.print(f"wrote {out / 'chain.json'}")


@app.command()
def plan(
    model: ModelOrChain,
    budgets: Annotated[
        str, typer.Option(help="Comma-separated: fractions of the store-all peak, bytes, or amounts with a unit.")
    ] = "0.3,0.5,0.8",
    solver: Annotated[str, typer.Option(help="The planner whose plans are drawn and written.")] = "persistent",
    also: Annotated[str, typer.Option(help="Comma-separated planners to compare too: ilp, checkmate, floating.")] = "",
    slots: Annotated[int, typer.Option(help="Memory units of the dynamic programs.", min=1)] = 500,
    pictures: Annotated[bool, typer.Option(help="Draw each plan and its memory over time.")] = True,
    batch: Batch = 8,
    device: Planned = "cpu",
    optimiser: Annotated[
        str, typer.Option(help="Of a device that is estimated: none, sgd, momentum, adam or adam-mixed.")
    ] = "adam",
    shards: Annotated[int, typer.Option(help="Devices over which parameters are spread, as by FSDP.", min=1)] = 1,
    largest: Annotated[
        bool, typer.Option("--largest-batch", help="Also look for the largest batch that fits an estimated device.")
    ] = False,
    out: Out = None,
) -> None:
    """Plan for several budgets: what every planner's plans cost, and what those of one look like.

    With the name of a device that need not be there (h100, a100, h200, l4, rtx4090, mi300x), or a file that
    `remat calibrate` wrote, nothing is computed: bytes and seconds are estimated.
    """
    from remat.solvers import make_solver
    from remat.solvers.base import store_all_peak

    planner = make_solver(solver, slots=slots)
    asked = [make_solver(name.strip(), slots=slots) for name in also.split(",") if name.strip()]
    texts = [text.strip() for text in budgets.split(",")]
    wanted = [_budget(text) for text in texts]
    for budget in wanted:
        resolve_budget(budget, store_all_bytes=sys.maxsize)  # its form, before anything is measured
    if _is_estimated(device):
        chain = _estimate(model, batch, device, optimiser, shards, largest)
    else:
        chain = _chain(model, batch, device)
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


_COMPARED = ("store_all", "recompute_all", "sequential", "chen", "revolve", "persistent", "floating")


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
    from remat.solvers import make_solver
    from remat.solvers.base import store_all_peak
    from remat.solvers.floating import is_quick

    console.print(
        f"{model}: {chain.length - 1} stages and the loss, {format_bytes(store_all_peak(chain))} and "
        f"{format_seconds(chain.store_all_seconds)} when everything is stored.\n"
        "Predicted seconds of a step over those of storing everything:",
        highlight=False,
        markup=False,
    )
    table = columns_table("", "planner", "least\nbudget", *headings, "planned\nin")
    chosen = {_named(solver, chain): solver for solver in (*asked, planner)}
    answers: list[Schedule | InfeasibleBudget] = []
    for name in dict.fromkeys((*_COMPARED, *chosen)):
        solver = chosen.get(name) or make_solver(name, slots=slots, options=False)
        if name == "floating" and name not in chosen and not is_quick(chain, slots):
            console.print("(floating is left out: it takes long here; `--also floating --slots 50` tries it)")
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
    return table, [_bounded(answer, bound) for answer, bound in zip(answers, bounds, strict=True)]


def _named(solver: Solver, chain: Chain) -> str:
    """As in comparisons: "persistent" is the paper's, "persistent, options" may keep a part of a stage."""
    from remat.runtime.strategies import OPTIONS

    return f"{solver.name}{OPTIONS}" if getattr(solver, "options", False) and any(chain.options) else solver.name


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
    """What no plan can beat, by budget; None below the least, or where telling takes long or is too coarse to help."""
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


def _strategies_in(text: str) -> list[str]:
    """Names of strategies, of which some have a comma in them."""
    names: list[str] = []
    for part in text.split(","):
        if names and part.strip() in ("options", "operators"):
            names[-1] += f", {part.strip()}"
        else:
            names.append(part.strip())
    return names


@app.command()
def compare(
    model: Model,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: fractions of the store-all peak, bytes, or amounts with a unit. By default five, "
            "from the least that works to that peak."
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated planners, also as 'persistent, options'; dtr; 'dtr, operators'; heuristics of DTR."
        ),
    ] = None,
    measure: Annotated[bool, typer.Option(help="Run every plan, or stop after the predictions.")] = True,
    repeats: Annotated[int, typer.Option(help="Steps that are timed for each.", min=1)] = 3,
    slots: Annotated[int, typer.Option(help="Memory units of the dynamic programs.", min=1)] = 500,
    batch: Batch = 8,
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table as JSON and CSV and the figures; what it holds already is taken up."),
    ] = None,
) -> None:
    """Compare strategies at several budgets: plan with each, run each next to plain PyTorch, name the best."""
    from remat.comparison.compare import compare as compare_strategies
    from remat.models.examples import load_example

    sizes = None if budgets is None else [_budget(text) for text in budgets.split(",")]
    names = None if strategies is None else _strategies_in(strategies)
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
    """The table as CSV, and the figures: of all, and of the best plan at each budget."""
    found.to_csv(out / "comparison.csv")
    paths = [out / "comparison.json", out / "comparison.csv", out / "comparison.png"]
    found.plot().savefig(paths[-1], dpi=150)
    for size in sorted(set(found.budgets)):
        planned = [entry for entry in found.entries if entry.budget_bytes == size and entry.schedule is not None]
        working = [entry.report for entry in planned if entry.outcome == "pass" and entry.report is not None]
        timed = [report for report in working if report.seconds and report.measured == found.timed]
        if timed:
            best = min(timed, key=lambda report: report.seconds)
            paths.append(out / f"plan_{_in_a_name(size, found.budgets)}.png")
            found.plot(strategy=best.strategy, budget=size).savefig(paths[-1], dpi=150)
    return paths


def _in_a_name(size: int, among: Iterable[int]) -> str:
    """A budget in a file name, as people write it; with its bytes where others among them would be called the same."""
    text = format_bytes(size).replace(" ", "")
    alike = {other for other in among if format_bytes(other).replace(" ", "") == text}
    return text if alike == {size} else f"{text}_{size}"


def _chain(model: str, batch: int, device: str) -> Chain:
    """A chain that was written before, or that of a model, measured now."""
    from remat.chain import Chain

    if not model.endswith(".json"):
        return _profile(model, batch, device)
    if not Path(model).is_file():
        raise RematError(f"{model}: no such file; `remat profile MODEL --out DIR` writes DIR/chain.json")
    return Chain.load(model)


@app.command()
def simulate(
    traces: Annotated[
        list[str], typer.Argument(help="Logs: files, .gz files, members of a zip (logs.zip/unet.log), or a chain.json.")
    ],
    budgets: Annotated[
        str, typer.Option(help="Comma-separated: fractions of the unconstrained peak, bytes, or amounts with a unit.")
    ] = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0",
    heuristics: Annotated[str, typer.Option(help="Comma-separated names.")] = "h_dtr,h_dtr_eq,h_dtr_local,h_lru",
    deallocation: Annotated[str, typer.Option(help="eager, banish or ignore.")] = "eager",
    thrash_limit: Annotated[float, typer.Option(help="Overhead above which a run ends.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the table as JSON and CSV.")] = None,
) -> None:
    """Replay traces under budgets as dynamic tensor rematerialisation (DTR) would run them."""
    from remat.runtime.dtr.heuristics import make_heuristic
    from remat.runtime.dtr.simulator import Replay, sweep

    names = [name.strip() for name in heuristics.split(",")]
    for name in names:
        make_heuristic(name)
    sizes = [_budget(text) for text in budgets.split(",")]
    replays = {name: Replay(trace) for name, trace in _traces(traces).items()}
    with _progress() as progress:
        task = progress.add_task("simulating")

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        chosen = {name: name for name in names}
        cells = sweep(replays, sizes, chosen, [deallocation], thrash_limit=thrash_limit, progress=tell)
    for model, replay in replays.items():
        shown = [cell for cell in cells if cell.model == model]
        peak, constants = map(format_bytes, (replay.baseline.peak_bytes, replay.baseline.constant_bytes))
        console.print(f"{model}: peak {peak}, of which constants {constants}; overhead by heuristic:", highlight=False)
        console.print(sweep_table(shown, names))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write_cells(out, cells)
        console.print(f"wrote the table to {out}")


@app.command()
def experiment(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Of the DTR paper: overhead (Figure 2), ablation (7-10), deallocation (11) and accesses (12), which "
            "take --traces; linear (5), adversary (6) and static (3)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures, as PNG, and the simulations, as JSON and CSV.")],
    traces: Annotated[list[str] | None, typer.Option(help="A log, as for `remat simulate`; may be repeated.")] = None,
) -> None:
    """Make the simulated experiments of the DTR paper again, with their figures."""
    from remat.experiments import WITH_TRACES, WITHOUT_TRACES

    for name in names:
        if name not in WITH_TRACES and name not in WITHOUT_TRACES:
            raise RematError(f"unknown experiment {name!r}; choose from {', '.join((*WITH_TRACES, *WITHOUT_TRACES))}")
        if name in WITH_TRACES and not traces:
            raise RematError(f"experiment {name!r} replays logs; name them with --traces")
    loaded = _traces(traces or [])
    for name in names:
        with _progress() as progress:
            task = progress.add_task(name, total=None)

            def tell(done: int, total: int, progress: Progress = progress, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            made = WITH_TRACES[name](loaded, progress=tell) if name in WITH_TRACES else WITHOUT_TRACES[name]()
        for path in made.save(out):
            console.print(f"wrote {path}")
        if made.cells:
            (out / name).mkdir(exist_ok=True)
            _write_cells(out / name, made.cells)


def _traces(paths: Sequence[str]) -> dict[str, Trace]:
    """Traces by name: of the file, or of the path where several files have the same name."""
    stems = [Path(path).stem for path in paths]
    return {stem if stems.count(stem) == 1 else path: _trace(path) for stem, path in zip(stems, paths, strict=True)}


def _trace(path: str) -> Trace:
    from remat.runtime.dtr.trace import Trace

    if path.endswith(".json"):
        return Trace.from_chain(_chain(path, 1, "cpu"))
    try:
        return Trace.load(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise RematError(f"cannot read {path}: {error}") from error


def _write_cells(out: Path, cells: Sequence[Cell]) -> None:
    """One row a simulation, as JSON and as CSV."""
    import csv
    import io
    import json

    from remat.files import write_whole

    keep = ("outcome", "budget_bytes", "peak_bytes", "overhead", "evictions", "recomputations", "accesses")
    rows = [
        {
            "model": cell.model,
            "heuristic": cell.heuristic,
            "deallocation": cell.deallocation,
            **{name: getattr(cell.report, name) for name in keep},
        }
        for cell in cells
    ]
    write_whole(out / "simulations.json", (json.dumps(rows, indent=1) + "\n").encode())
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(out / "simulations.csv", text.getvalue().encode())


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _budget(text: str) -> int | str | float:
    """A budget as typed: a number with a point is a fraction, one without is bytes, anything else has a unit."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _profile(name: str, batch: int, device: str) -> Chain:
    from remat.models.examples import load_example
    from remat.profiling.profile import profile as profile_model

    example = load_example(name, batch, device)
    with _progress() as progress:
        task = progress.add_task("starting")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return profile_model(example.model, example.sample, loss=example.loss, progress=tell)


def _is_estimated(device: str) -> bool:
    """Whether a device is one that need not be there."""
    from remat.devices import device_named

    if device.partition(":")[0] in _PLACES and device.removeprefix("cuda:").isdigit() | (":" not in device):
        return False
    device_named(device)
    return True


def _estimate(name: str, batch: int, device: str, optimiser: str, shards: int, largest: bool) -> Chain:
    """The chain of a model on a device that need not be there; shows what it takes there."""
    from remat.devices import device_named
    from remat.estimation.world import World
    from remat.models.examples import load_unplaced
    from remat.profiling.estimate import estimated_in

    if name.endswith(".json"):
        raise RematError(
            f"{name} holds what a model costs where it was measured; leave out --device, or name the model"
        )
    world = World(device_named(device))
    with world.entered():  # so that parameters take no memory
        example = load_unplaced(name, batch)
    with _progress() as progress:
        task = progress.add_task("starting")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        found = estimated_in(
            world,
            example.model,
            example.sample,
            loss=example.loss,
            optimiser=optimiser,
            shards=shards,
            progress=tell,
        )
        rows = found.largest_batch() if largest else None
    console.print(f"{found}", highlight=False, markup=False, soft_wrap=True)
    if rows is not None:
        console.print(f"largest batch that fits: {rows or 'none'}", highlight=False)
    return found.chain


@app.command()
def calibrate(
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="The file to write, for `remat plan --device FILE`.")] = Path("device.json"),
) -> None:
    """Measure what operators get of a device that is here, for estimates: half a minute."""
    from remat.estimation.calibration import calibrate as measure

    with console.status("measuring"):
        found = measure(device)
    found.save(out)
    table = columns_table("", "kind of operator", "of the peak")
    for kind, share in sorted(found.efficiency.items(), key=lambda entry: -entry[1]):
        table.add_row(kind, f"{share:.2f}")
    console.print(table)
    console.print(
        f"{found.name}: {found.flops_per_second['float32'] / 1e9:.0f} GFLOP/s of float32, "
        f"{found.bytes_per_second / 1e9:.0f} GB/s, {found.launch_seconds * 1e6:.1f} us an operator; wrote {out}",
        highlight=False,
    )


def main() -> None:
    """Entry point. Exit status 2 and a line on stderr for errors of remat, 1 where nothing fits, 130 for Ctrl-C."""
    try:
        app()
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", highlight=False)
        sys.exit(INTERRUPTED)
    except RematError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        sys.exit(2)
