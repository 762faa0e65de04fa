"""A model whose forward is patched in place, so that it trains by a plan; the model stays the same object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from remat.errors import LeftChain, OverBudgetWarning, RematError
from remat.runtime.patching import Forward, StandIn, beyond_compiler, intercepted, stand_in
from remat.runtime.planned.executor import Executor, Lock
from remat.utils.warn import warn


class Runs(Protocol):
    """Runs forwards of a model: an executor, or steps under DTR.

    Args:
        forward: the model's own.
        left: called with the reason where it runs as plain PyTorch.
    """

    def run(self, forward: Forward, args: Any, kwargs: Any, left: Callable[[str], None]) -> Any: ...


class ForwardListener(Protocol):
    """Is told of the forwards of a model: when the step before one is over, and when it begins, planned for."""

    def ends(self) -> None: ...

    def begins(self, kind: str, call: Any) -> None: ...

    def moves_to(self, patch: PatchedForward) -> None: ...


class Covered(NamedTuple):
    """What the limit of a model covers.

    Attributes:
        of: what it is of (`Setup.of`).
        besides: bytes of it that are not a step's.
        least: tells the least memory that a step with the present input takes.
    """

    of: str = "allocated"
    besides: int = 0
    least: Callable[[], int] = int


Choose = Callable[[tuple[Any, ...], dict[str, Any]], Runs | None]


class Undecided:
    """Chooses what runs the calls of a model that is planned for at the first of them in training.

    Attributes:
        was_called: in training.
        is_over: it has planned; where that fails, the model has its own forward again.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.was_called = self.is_over = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs | None:
        return self._choose(args, kwargs)


class OtherPath:
    """What is done where a forward takes another path than the chain's: `how` is "warn", once, or "error"."""

    def __init__(self, how: str) -> None:
        check_other_path(how)
        self._how, self._warned = how, False

    def taken(self, why: str) -> None:
        """A forward has."""
        message = (
            f"this forward left the chain of its plan: {why}. The rest runs as plain PyTorch, without the memory "
            "limit; if the path depends on data, train under remat.DTR"
        )
        if self._how == "error":
            raise LeftChain(message)
        if not self._warned:
            self._warned = True
            warn(message)


class PatchedForward:
    """Stands in for the forward of a model, until `remove`; the model stays the same object of the same class.

    Args:
        choose: what runs a call with these arguments; None: the model's own forward.
        lock: the one of the executors that are chosen.
        other_path: "warn" once where a forward takes another path than the chain's, or "error".

    Attributes:
        summary: a sentence on how the model trains, which notebooks show in place of its modules.
        figures: what loggers are told: bytes of the limit and of a step's peak, and how often something is recomputed.
        covered: what the limit covers.
        watch: is told of forwards.
        first_output: called with what the first forward in training returns, if at all.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        lock: Lock | None = None,
        *,
        other_path: str = "warn",
    ) -> None:
        self._other_path = OtherPath(other_path)
        refuse_patched(model)
        self.summary = ""
        self.figures: Callable[[], Mapping[str, int]] = dict
        self.covered = Covered()
        self.watch: ForwardListener | None = None
        self.first_output: Callable[[Any], None] | None = None
        self.model, self.choose = model, choose
        self._runs_in: int | None = None  # the thread in which the model's own forward runs
        self.lock = lock or Lock()
        self.forward: Forward = model.forward
        self._undo: ExitStack | None = ExitStack()  # until it is removed
        self._undo.callback(self._stand_back, stand_in(model, "forward", _Patch(self)))

    @property
    def standing_in(self) -> bool:
        """Whether it was not removed; something else may have been put around this forward since."""
        return self._undo is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model runs as it would by itself in this thread, and not in others."""
        with self.lock:
            before, self._runs_in = self._runs_in, get_ident()
            try:
                yield
            finally:
                self._runs_in = before

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Inside, calling the model runs nothing that others have put around its forward, since that runs already."""
        around = self.model.__dict__["forward"]
        self.model.__dict__["forward"] = self.forward
        try:
            yield
        finally:
            self.model.__dict__["forward"] = around

    def when_removed(self, ended: Callable[[], None]) -> None:
        """Has `ended` called when the model is to have its own forward again; what was asked for last comes first."""
        assert self._undo is not None
        self._undo.callback(ended)

    def remove(self) -> None:
        """Gives the model its own forward back."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def _stand_back(self, undo: Callable[[], None]) -> None:
        if isinstance(self.model.__dict__.get("forward"), _Patch):
            undo()
        else:  # something else has been put around this forward since
            self.model.__dict__.pop("__getstate__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runs_in == get_ident() or not self.standing_in:
            return self.forward(*args, **kwargs)
        if self.watch is not None:
            self.watch.ends()
        if not may_train():
            if self.watch is not None:
                self.watch.begins("evaluation", (args, kwargs))
            return self.forward(*args, **kwargs)
        with self.paused():
            choose = self.choose
            try:
                with self._bare():
                    executor = choose(args, kwargs)
            except BaseException:
                if isinstance(choose, Undecided) and not choose.is_over:
                    self.remove()
                raise
            if self.watch is not None:
                self.watch.begins("training" if executor is not None else "evaluation", (args, kwargs))
            if executor is not None:
                output = executor.run(self.forward, args, kwargs, self._other_path.taken)
                look, self.first_output = self.first_output, None
                if look is not None:
                    look(output)
                return output
        return self.forward(*args, **kwargs)


class _Patch(StandIn):
    """The forward of a patched model."""

    def __init__(self, patch: PatchedForward) -> None:
        super().__init__(patch.model, patch.model.__dict__.get("forward"), patch.forward, patch)
        self.patch = patch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiler that was given the model afterwards must not see what runs here.
        return beyond_compiler(self.patch)(*args, **kwargs)


def may_train() -> bool:
    """Whether a backward of what runs now can go by a plan; warns where it cannot although there is one."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # to be run elsewhere: the model as it is
        return False
    if torch._C._functorch.peek_interpreter_stack() is None:
        return True
    warn(
        "inside of torch.func the model runs as plain PyTorch, without its memory limit: no schedule can be part of "
        "such a gradient",
        OverBudgetWarning,
    )
    return False


def patched_forward_of(model: nn.Module) -> PatchedForward | None:
    """The patch of the model's forward, also where others have wrapped it since."""
    forward = model.__dict__.get("forward")
    while forward is not None:
        if isinstance(forward, _Patch):
            return forward.patch if forward.patch.standing_in else None
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "__func__", None)
    return None


def patched_anew(model: nn.Module, choose: Choose, lock: Lock | None = None, *, other_path: str) -> PatchedForward:
    """Patches the model; an earlier patch is removed, and who watches that goes on with the new one."""
    before = patched_forward_of(model)
    if before is not None:
        before.remove()
    patch = PatchedForward(model, choose, lock, other_path=other_path)
    if before is not None and before.watch is not None:
        before.watch.moves_to(patch)
    return patch


def refuse_patched(model: nn.Module) -> None:
    """Raises RematError where the model trains by a plan already."""
    if patched_forward_of(model) is not None:
        raise RematError(
            "this model already trains by a plan; call remat.remove(model) first, or remat.fit(model, ...) to plan "
            "again"
        )


def remove(model: nn.Module) -> nn.Module:
    """Undoes what `remat.fit`, `rotor.Checkpointable` or `remat.apply` did to a model in place; returns the model.

    Raises:
        RematError: this model trains by no plan.
    """
    if not isinstance(model, nn.Module):
        raise RematError(f"the model is a {type(model).__name__}; pass the torch.nn.Module that trains by a plan")
    wrapped = model.__dict__.get("wrapped", model)
    patch = patched_forward_of(wrapped)
    if patch is None:
        raise RematError(f"this {type(wrapped).__name__} does not train by a plan, so there is nothing to remove")
    patch.remove()
    return wrapped


@contextmanager
def trained_by(model: nn.Module, executor: Executor) -> Iterator[None]:
    """Inside, the model trains by this executor, whatever it does otherwise, and leaving the chain is an error."""

    def run(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return executor.run(forward, args, kwargs, refuse_other_path)

    with unpatched(model), intercepted([model], run):
        yield


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs as it would by itself."""
    patch = patched_forward_of(model)
    with patch.paused() if patch is not None else nullcontext():
        yield


def refuse_other_path(why: str) -> None:
    """Raises LeftChain."""
    raise LeftChain(f"this forward left the chain of its plan: {why}")


def check_other_path(other_path: str) -> None:
    """Whether this is one of the two ways to deal with a forward that leaves its chain."""
    if other_path not in ("warn", "error"):
        raise RematError(f"other_path={other_path!r}: must be 'warn' or 'error'")
