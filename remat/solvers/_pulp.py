"""Linear programs through PuLP: the choice of a backend, and the reliable status of its result."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from remat.errors import RematError
from remat.utils.packages import require

BACKENDS = ("highs", "cbc")


class Answer(NamedTuple):
    """What a backend said of a problem.

    Attributes:
        found: there is a solution, optimal or not.
        proved: it is optimal, up to the gap asked for.
        infeasible: there is none, and that is proved.
        bound: no solution has an objective below; None where the backend does not tell.
    """

    found: bool
    proved: bool
    infeasible: bool
    bound: float | None


def choose_backend(wanted: str | None) -> str:
    """`wanted`, or HiGHS where it is installed, or CBC.

    Raises:
        RematError: it is not there.
    """
    pulp = require("pulp", "integer programming")

    available = {"highs": pulp.HiGHS(msg=False).available(), "cbc": pulp.PULP_CBC_CMD(msg=False).available()}
    backend = wanted or next((name for name in BACKENDS if available[name]), "none")
    if not available.get(backend, False):
        raise RematError(
            f"ILP backend {backend!r} is not available; 'highs' comes with `pip install highspy`, 'cbc' with PuLP"
        )
    return backend


def run(problem: Any, backend: str, time_limit: float, gap: float) -> Answer:
    """Solves `problem` to an absolute gap of `gap`.

    PuLP's `status` calls an incumbent at the time limit "optimal"; only its `sol_status` distinguishes the two.
    HiGHS goes without its presolve, which in 1.15 maps some of these programs to points that violate a row, and then
    calls a schedule optimal that is not, or stops with an error.
    """
    pulp = require("pulp", "integer programming")

    if backend == "highs":
        problem.solve(pulp.HiGHS(msg=False, timeLimit=time_limit, gapAbs=gap, gapRel=0.0, presolve="off"))
        bound = problem.solverModel.getInfo().mip_dual_bound
    else:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "cbc.log"
            options = {"timeLimit": time_limit, "gapAbs": gap, "gapRel": 0.0, "logPath": str(log)}
            problem.solve(pulp.PULP_CBC_CMD(msg=False, **options))
            bound = _bound_in_cbc_log(log.read_text(), gap)
    status = problem.sol_status
    found = status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    # CBC's "integer infeasible" is a proof, though PuLP's `sol_status` then says "no solution found".
    infeasible = not found and problem.status == pulp.LpStatusInfeasible
    return Answer(found, status == pulp.LpSolutionOptimal, infeasible, bound)


def _bound_in_cbc_log(log: str, gap: float) -> float | None:
    """CBC writes its bound with three decimals, and only where it stopped early; else the gap asked for holds."""
    bound = re.search(r"^Lower bound:\s+(\S+)", log, re.MULTILINE)
    if bound:
        return float(bound[1]) - 0.0005
    objective = re.search(r"^Objective value:\s+(\S+)", log, re.MULTILINE)
    return float(objective[1]) - gap if objective else None
