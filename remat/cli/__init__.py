"""The command line, `remat` or `python -m remat`: profile, plan, compare, simulate-dtr, calibrate."""

from remat.cli import planning, comparing, replaying  # noqa: I001  # commands, in the order in which help lists them
from remat.cli.app import app, main

__all__ = ["app", "comparing", "main", "planning", "replaying"]
