"""The command line's one application: what all commands share, and how errors end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remat.errors import RematError
from remat.host.progress import shown

if TYPE_CHECKING:
    from remat.chain import Chain

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
HostLimit = Annotated[
    str | None,
    typer.Option(help="Of the host's memory, as 32GiB: what hides behind the computation may wait there meanwhile."),
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


def budget_in(text: str) -> int | str | float:
    """A budget as typed: a number with a point is a fraction, one without is bytes, anything else has a unit."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def profiled(name: str, batch: int, device: str, *, offload: bool = False) -> Chain:
    from remat.models.examples import load_example
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
        raise RematError(f"{model}: no such file; `remat profile MODEL --out DIR` writes DIR/chain.json")
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
