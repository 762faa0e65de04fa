"""The command line's one application: what all commands share, and how errors end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from remat.errors import RematError
from remat.utils.progress import shown

if TYPE_CHECKING:
    from remat.chain import Chain

NOTHING_FITS, INTERRUPTED = 1, 130  # exit statuses


class _HelpWithoutType:
    """Lists `--help` without a type beside it."""

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        if found is not None:
            found.metavar = ""
        return found


class Command(_HelpWithoutType, TyperCommand):
    """A command, as `typer` makes it."""


class _Group(_HelpWithoutType, TyperGroup):
    """The application, as `typer` makes it."""


app = typer.Typer(
    cls=_Group,
    help="Train PyTorch models within a memory limit: measure a model, plan for budgets, compare methods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

MODELS = (  # the names of remat.cli.models.EXAMPLES, which imports PyTorch
    *("gpt", "gpt96", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200", "resnet1001"),
)
_MODELS = f"One of {', '.join(MODELS)}; or your own as package.module:function or file.py:function"
BUDGETS = "Comma-separated fractions of plain PyTorch's peak, bytes, or sizes with a unit."
SLOTS = "Resolution of the planners: the number of memory units."


def _model(name: str) -> str:
    """Refuses a misspelt name at once, before PyTorch is imported."""
    if name not in MODELS and ":" not in name and not name.endswith(".json"):
        raise RematError(
            f"unknown model {name!r}; choose one of {', '.join(MODELS)}, or write package.module:function or "
            "file.py:function for a function that returns (model, sample) or (model, sample, loss)"
        )
    return name


Model = Annotated[str, typer.Argument(help=f"{_MODELS}.", callback=_model)]
ModelOrChain = Annotated[
    str,
    typer.Argument(
        help=f"{_MODELS}; or a chain.json of `remat profile`, which is not measured again.", callback=_model
    ),
]
Batch = Annotated[int, typer.Option(help="Batch size, for the models named here.", metavar="N", min=1)]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...", metavar="NAME")]
Planned = Annotated[
    str,
    typer.Option(
        help="Where the model runs (cpu, cuda, ...), or a device to estimate for: a100, h100, h200, l4, rtx4090, "
        "mi300x, or a file written by `remat calibrate`.",
        metavar="NAME",
    ),
]
HostLimit = Annotated[
    str | None,
    typer.Option(help="Offload up to this much to CPU memory, where computation hides the copies.", metavar="SIZE"),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results as JSON, created if missing.", metavar="FOLDER")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        from remat import __version__

        console.print(f"remat {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True, metavar=""),
    ] = False,
) -> None:
    """What all commands have in common."""


def budget_in(text: str) -> int | str | float:
    """A budget as typed: a number with a point is a fraction, one without is bytes, anything else has a unit."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def columns_table(title: str, *columns: str) -> Table:
    """Numbers in columns that do not wrap, narrow enough for a terminal of 80 columns."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("planner", "") else "right", no_wrap=True)
    return table


def profiled(name: str, batch: int, device: str, *, offload: bool = False) -> Chain:
    from remat.cli.models import load_example
    from remat.profiling.profile import profile as profile_model

    example = load_example(name, batch, device)
    with shown(True) as tell:
        return profile_model(example.model, example.sample, loss=example.loss, offload=offload, progress=tell)


def chain_in(model: str, batch: int, device: str, *, offload: bool = False) -> Chain:
    """A chain that was written before, or that of a model, measured now."""
    from remat.chain import Chain

    if not model.endswith(".json"):
        return profiled(model, batch, device, offload=offload)
    if not Path(model).is_file():
        raise RematError(f"{model}: no such file; `remat profile MODEL --out FOLDER` writes FOLDER/chain.json")
    return Chain.load(model)


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
