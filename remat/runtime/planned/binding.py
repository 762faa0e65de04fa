"""`bound`: a schedule bound to a model. The one place that asks whether its stages are modules or module calls."""

from __future__ import annotations

from torch import nn

from remat.runtime.planned.call_executor import CallExecutor
from remat.runtime.planned.forward_run import Executor
from remat.runtime.planned.sequence_executor import SequenceExecutor
from remat.schedule import Schedule


def bound(model: nn.Module, schedule: Schedule, *, preserve_random: bool = True) -> Executor:
    """What runs `model` by `schedule`: module after module where that names no calls, else in the model's own forward.

    Raises:
        PlanMismatch: the schedule was made for another model.
        InvalidSchedule: it breaks the rules of its operations.
        UnsupportedModel: it names no module calls, and the model is not an `nn.Sequential`.
    """
    kind = SequenceExecutor if schedule.layout is None or schedule.layout.calls is None else CallExecutor
    return kind(model, schedule, preserve_random=preserve_random)
