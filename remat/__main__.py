"""The command `remat`, or `python -m remat`."""

from __future__ import annotations

import sys

from remat.errors import RematError
from remat.utils.packages import require


def main() -> None:
    try:
        for package in ("typer", "rich"):
            require(package, "the command line")
    except RematError as error:
        sys.exit(f"remat: {error}")
    from remat.cli import main as run

    run()


if __name__ == "__main__":
    main()
