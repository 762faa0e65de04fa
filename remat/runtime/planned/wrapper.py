"""Modules that run a schedule in place of the model they wrap, and otherwise pass for that model."""

from __future__ import annotations

from typing import Any

from torch import nn

from remat.errors import PlanMismatch, RematError
from remat.runtime.calls.stages import describe_call
from remat.runtime.patching import beyond_compiler, is_called_as_modules_are
from remat.runtime.planned.executor import Executor
from remat.runtime.planned.patched_forward import PatchedForward, may_train, refuse_other_path, unpatched
from remat.runtime.pytree import Arguments
from remat.schedule import Schedule


class Wrapper(nn.Module):
    """Shares parameters, buffers, children and hooks of `model`: same names, same `state_dict`, same objects.

    What the wrapper does not define itself, it answers as the model does (indexing, length, attributes).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        hooks = {name: own for name, own in self.__dict__.items() if name.startswith(("_forward_", "_backward_"))}
        # The dictionaries are shared, not copied, so whatever is registered on one is seen by both.
        self.__dict__.update(model.__dict__)
        if not is_called_as_modules_are(model):  # then its hooks run in that call
            self.__dict__.update(hooks)
        self.__dict__.pop("forward", None)  # one that others have put on the model; it runs when the model does
        self.__dict__["wrapped"] = model  # not through __setattr__, which would register it as a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "wrapped" not in self.__dict__:  # while it is being unpickled
                raise
            return getattr(self.wrapped, name)

    def __getitem__(self, index: Any) -> Any:
        return self.wrapped[index]

    def __len__(self) -> int:
        return len(self.wrapped)

    def __iter__(self) -> Any:
        return iter(self.wrapped)

    def train(self, mode: bool = True) -> Any:
        self.wrapped.train(mode)
        self.training = mode
        return self

    def _model(self) -> Any:
        """What runs the model: its forward, as its hooks are the wrapper's own and have run; or a call in its way."""
        return self.wrapped.forward if is_called_as_modules_are(self.wrapped) else self.wrapped

    def _by(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unpatched(self.wrapped):  # which may train by a plan of its own
            return executor.run(self._model(), args, kwargs, refuse_other_path)


class ScheduledModule(Wrapper):
    """A model that trains by a fixed schedule; made by `apply`.

    Without gradients (`torch.no_grad`, `inference_mode`) the model runs untouched.

    Attributes:
        schedule: the schedule.
        executor: what runs it.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, executor: Executor) -> None:
        super().__init__(model)
        self.schedule = schedule
        self.executor = executor

    def forward(self, input: Any) -> Any:
        if not may_train():
            return self._model()(input)
        _check_current(self.executor)
        _check_inputs(self.schedule, input)
        return beyond_compiler(self._by)(self.executor, (input,), {})


def _check_current(executor: Executor) -> None:
    if not executor.is_current:
        raise PlanMismatch(
            "modules of the model were replaced, added or removed since the schedule was applied; apply it again, "
            "or profile the model and solve again"
        )


def _check_inputs(schedule: Schedule, value: Any) -> None:
    layout = schedule.layout
    if layout is None:
        return
    found = describe_call(value)
    if sorted(found) != sorted(layout.inputs):  # keyword arguments come in any order
        raise PlanMismatch(
            f"the schedule was made for input {', '.join(layout.inputs)}, this one is {', '.join(found)}, which may "
            "exceed the budget. Profile with such an input and solve again, wrap the model in rotor.Checkpointable, "
            "which does so itself, or change the schedule with dataclasses.replace(schedule, layout=...)"
        )


def apply(
    model: nn.Module, schedule: Schedule, *, preserve_rng_state: bool = True, other_path: str = "warn"
) -> nn.Module:
    """Makes `model` train by `schedule`.

    Args:
        model: an `nn.Sequential`, nested or not; or any module, for a schedule of a chain found in it.
        schedule: for as many stages as the model has modules (and the loss), or made by `solve` for its chain.
        preserve_rng_state: recompute with the random numbers of the first run. Without it dropout draws anew.
        other_path: what to do where a forward takes another path than the chain that was found: "warn", once, and run
            as plain PyTorch from there on; or "error".

    Returns:
        For an `nn.Sequential` a `ScheduledModule` that shares everything with it. Any other model itself, whose
        forward is patched from then on, until `remat.remove(model)`.

    Raises:
        InvalidSchedule: the schedule breaks the rules of its operations.
        PlanMismatch: the schedule was made for another model. Raised in `forward` if it is another input's.
        UnsupportedModel: the model is not a chain.
        LeftChain: in `forward`, with other_path="error".
    """
    if not isinstance(model, nn.Module):
        raise RematError(f"the model is a {type(model).__name__}; pass a torch.nn.Module")
    executor = Executor(model, schedule, preserve_random=preserve_rng_state)
    if executor.stages.places.in_a_row:
        return ScheduledModule(model, schedule, executor)

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor:
        _check_current(executor)
        _check_inputs(schedule, Arguments(args, kwargs))
        return executor

    PatchedForward(model, choose, executor.shared.lock, other_path=other_path)
    return model
