"""The simulated experiments of the DTR paper and their figures: `python -m benchmarks.papers NAME ... --out FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.papers.runs import WITH_TRACES, WITHOUT_TRACES
from remat.cli.replaying import traces_in, write_cells
from remat.utils.progress import shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the figures that are named, and writes the tables behind them."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.papers", description="The DTR paper's simulated experiments."
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        choices=[*WITH_TRACES, *WITHOUT_TRACES],
        help="with --traces: overhead (Figure 2), ablation (7-10), deallocation (11), paper-accesses (12, counted as "
        "in the paper; takes minutes), accesses (12, counted by remat); without: linear (5), adversary (6), static (3)",
    )
    parser.add_argument(
        "--traces", action="append", default=[], metavar="LOG", help="as for `remat simulate-dtr`; repeatable"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for figures (PNG) and tables (JSON, CSV)"
    )
    asked = parser.parse_args(arguments)
    needing = [name for name in asked.names if name in WITH_TRACES]
    if needing and not asked.traces:
        parser.error(f"experiment {needing[0]!r} needs logs; name them with --traces")
    traces = traces_in(asked.traces)
    for name in asked.names:
        with shown(True) as tell:
            told = partial(tell, name)
            made = WITH_TRACES[name](traces, progress=told) if name in WITH_TRACES else WITHOUT_TRACES[name]()
        for path in made.save(asked.out):
            print(f"wrote {path}")
        if made.cells:
            (asked.out / name).mkdir(exist_ok=True)
            write_cells(asked.out / name, made.cells)


if __name__ == "__main__":
    main()
