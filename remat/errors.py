"""Every error that remat raises on purpose; `RematError` stands above them all."""

from __future__ import annotations

from functools import partial
from typing import Any

from remat.formatting import format_bytes


class RematError(Exception):
    """Base of all errors of remat."""


class InvalidBudget(RematError, ValueError):
    """A budget that is neither bytes, nor a string with a unit, nor a fraction of plain PyTorch's peak."""


class InvalidSample(RematError, ValueError):
    """A sample that cannot be measured, or on which the model fails."""


class InvalidLoss(RematError, ValueError):
    """A loss that is not a function, or does not return a scalar with a graph."""


class InvalidChain(RematError, ValueError):
    """Invalid numbers for a chain: wrong lengths, negative or non-integer sizes, NaN times."""


class InvalidSchedule(RematError, ValueError):
    """A schedule breaks the rules of its operations (Beaumont et al., Table 1).

    Attributes:
        step: position of the offending operation in the schedule, counted from 0; None where
            no single operation is to blame.
        operation: that operation, or None.
        missing: what was missing or wrong, as a phrase.
    """

    def __init__(self, missing: str, *, step: int | None = None, operation: object = None) -> None:
        self.step = step
        self.operation = operation
        self.missing = missing
        where = "" if step is None else f"step {step} ({operation}): "
        super().__init__(f"invalid schedule: {where}{missing}")


_FEW_BYTES = 4096  # a smaller int was probably not meant as bytes


class InfeasibleBudget(RematError, ValueError):
    """The solver has no schedule that fits the budget.

    Attributes:
        budget: the budget asked for, in bytes.
        minimum: the minimum budget of the same solver, in bytes.
        exact: False where the budget was refused before everything was measured, and `minimum` is an estimate.
    """

    def __init__(self, budget: int, minimum: int, solver: str = "", *, exact: bool = True) -> None:
        self.budget, self.minimum, self.solver, self.exact = budget, minimum, solver, exact
        by = f" with solver {solver!r}" if solver and solver not in ("fastest", "dtr") else ""
        by = " for DTR at module granularity" if solver == "dtr" else by
        forms = " (An int counts bytes; write '5GiB', or a share of what plain PyTorch needs, 0.5.)"
        hint = forms if budget < _FEW_BYTES else ""
        least = f"{format_bytes(minimum)} ({minimum} bytes)" if exact else f"about {format_bytes(minimum)}"
        super().__init__(
            f"{format_bytes(budget)} ({budget} bytes) is too small{by}: the minimum is {least}. Use that, a smaller "
            f"batch, or shorter inputs.{hint}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), exact=self.exact), (self.budget, self.minimum, self.solver)


class OutOfBudget(RematError, MemoryError):
    """An operator does not fit into a live DTR budget, with its inputs, outputs and tensors that cannot be evicted.

    Attributes:
        operator: its name, with types and shapes of its arguments.
        budget: bytes.
        needed: bytes in use if it ran now, after all evictable storages were evicted.
        minimum: the least budget found, in bytes, with which the program gets past this operator; None if none was
            found.
    """

    def __init__(self, operator: str, budget: int, needed: int, minimum: int | None) -> None:
        self.operator = operator
        self.budget = budget
        self.needed = needed
        self.minimum = minimum
        least = "with its inputs, outputs, scratch memory and tensors that cannot be evicted it needs "
        least += f"{format_bytes(needed)} ({needed} bytes)"
        if minimum is not None:  # which is no less
            least = f"the minimum budget to get past it is {format_bytes(minimum)} ({minimum} bytes)"
        super().__init__(
            f"{operator} does not fit into {format_bytes(budget)} ({budget} bytes): {least}. Raise the budget, use a "
            "smaller batch or shorter inputs, or keep fewer tensors alive"
        )

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int | None]]:
        return type(self), (self.operator, self.budget, self.needed, self.minimum)


class Thrashing(RematError, RuntimeError):
    """A live DTR run would spend almost all of its time on recomputation.

    Attributes:
        budget: bytes.
        minimum: the least budget found, in bytes, with which the run does not thrash; None if none was found.
    """

    def __init__(self, operator: str, budget: int, times: float, minimum: int | None) -> None:
        self.operator, self.budget, self.times, self.minimum = operator, budget, times, minimum
        least = "" if minimum is None else f" to {format_bytes(minimum)} ({minimum} bytes)"
        super().__init__(
            f"stopped at {operator}: within {format_bytes(budget)}, recomputation has taken more than {times:g} x the "
            f"time of the program itself. Raise the budget{least}; or enter the block again: DTR then knows the "
            "program and may choose another heuristic (or pass one: heuristic=); or set thrash_limit=None to continue"
        )

    def __reduce__(self) -> tuple[type, tuple[str, int, float, int | None]]:
        return type(self), (self.operator, self.budget, self.times, self.minimum)


class ThrashingWarning(UserWarning):
    """A live DTR run spends more time on recomputation than its `thrash_limit` allows."""


class OverBudgetWarning(UserWarning):
    """Training used, or may use, more memory than its limit, which could not be known or prevented beforehand."""


class SolverStopped(RematError, TimeoutError):
    """A solver that reached its time limit with neither a schedule nor a proof that none exists."""


class UnsupportedModel(RematError, TypeError):
    """remat cannot run the model as a chain: it is empty, has no chain, or has a stage that cannot be recomputed."""


class NoChain(UnsupportedModel):
    """No chain of module calls was found in the model, or another one each time.

    Attributes:
        why: in a few words.
    """

    def __init__(self, message: str = "", why: str = "no chain of blocks found") -> None:
        super().__init__(message)
        self.why = why

    @classmethod
    def varies(cls, found: str) -> NoChain:
        """The error of a model whose path is not the same each time; `found`: how that was seen."""
        return cls(
            f"{found}: the model takes another path each time, as with LayerDrop or stochastic depth. Train it "
            "under remat.DTR, or turn that off",
            "another path in each forward",
        )


class LeftChain(RematError, RuntimeError):
    """A forward left the chain of its plan, and `other_path="error"` was given."""


class PlanMismatch(RematError, ValueError):
    """A schedule was used with a model or an input that it was not made for."""


class MeasurementError(RematError, RuntimeError):
    """A measurement failed, or would have been wrong."""


class ReplayError(RematError, RuntimeError):
    """A stage cannot be recomputed, or its recomputation did not repeat its first run."""


class InvalidTrace(RematError, ValueError):
    """A log that cannot be read as a trace, or a trace that uses a name before it is defined.

    Attributes:
        line: number of the offending line, counted from 1; None where the trace did not come from a log.
    """

    def __init__(self, message: str, *, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


class InvalidFile(RematError, ValueError):
    """A file without the expected kind of object, or of a version that this release cannot read."""
