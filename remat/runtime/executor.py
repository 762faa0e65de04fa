"""`executing`: the entrance to training steps that are measured or compared, whatever runs them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from torch import nn

from remat.errors import OverBudgetWarning, RematError
from remat.report import Report
from remat.runtime.execution import Execution
from remat.runtime.live.context import DTR
from remat.runtime.planned.executor import Executor
from remat.runtime.planned.patched_forward import trained_by
from remat.schedule import Schedule

How: TypeAlias = Schedule | DTR | Execution | None


class Running:
    """A model that is run in one way, step by step:

        running = executing(model, schedule)
        with running.around():
            with running.step():
                loss(running(x), y).backward()

    Attributes:
        execution: the way.
    """

    def __init__(self, model: nn.Module, execution: Execution) -> None:
        self._model, self.execution = model, execution
        self._forward = execution.prepared(model)

    def around(self) -> AbstractContextManager[Any]:
        """A context around steps, set up before they are measured."""
        return self.execution.around(self._model)

    def step(self) -> AbstractContextManager[Any]:
        """What one step runs in, from the beginning of its forward to the end of its backward."""
        return self.execution.step()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._forward(*args, **kwargs)


def executing(model: nn.Module, how: How, *, held_bytes: int = 0) -> Running:
    """`model`, to be run in a way: by a schedule, under DTR, as an `Execution` says, or, for None, as it is.

    The model stays the same object, and is as before outside of the contexts of what is returned.

    Args:
        held_bytes: of what is in memory before a step and the budget of a DTR is to cover, as a sample.

    Raises:
        InvalidSchedule, PlanMismatch, UnsupportedModel: as `remat.apply`.
        RematError: `how` is none of these.
    """
    if how is None:
        how = Execution()
    elif isinstance(how, Schedule):
        how = BySchedule(how)
    elif isinstance(how, DTR):
        how = UnderDTR(how, held_bytes)
    elif not isinstance(how, Execution):
        raise RematError(f"pass a Schedule, a DTR or an Execution, not a {type(how).__name__}")
    return Running(model, how)


class BySchedule(Execution):
    """Steps by a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.name = schedule.strategy
        self.executor: Executor | None = None  # once it is prepared

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        executor = self.executor = Executor(model, self.schedule)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with trained_by(model, executor):
                return model(*args, **kwargs)

        return forward

    @contextmanager
    def observed_by(self, observer: Callable[[str], None]) -> Iterator[None]:
        """Inside, `observer` is called with each operation that begins on stages; once more where the loss's two do.

        Code of the model between stages belongs to the operation before it.
        """
        executor = self.executor
        assert executor is not None
        fixed = executor.stages.places.fixed
        executor.observer = lambda operation: None if fixed[operation.stage - 1] else observer(str(operation))
        try:
            yield
        finally:
            executor.observer = None

    def host_bytes(self) -> int:
        return 0 if self.executor is None else self.executor.shared.host.bytes


class UnderDTR(Execution):
    """Steps in a block of DTR each.

    Attributes:
        dtr: a copy of what is given, whose budget covers what is in memory before a step too.
    """

    def __init__(self, dtr: DTR, held_bytes: int = 0) -> None:
        self.dtr = copy.copy(dtr)  # its other blocks reserve nothing
        self.dtr.reserved_bytes = held_bytes
        self.name = f"dtr {dtr.name}"
        # The scratch memory of operators is known from the second step on, what calls of modules do from the third.
        self.warm_up = 3 if dtr.granularity == "module" else 2

    @contextmanager
    def step(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverBudgetWarning)  # the report says so
            with self.dtr:
                yield

    def is_warm(self) -> bool:
        return self.dtr.is_routine

    def report(self) -> Report:
        return self.dtr.report()
