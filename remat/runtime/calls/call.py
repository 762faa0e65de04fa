"""A call that can be made again: what it was passed, and what else it depends on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import ReplayError
from remat.runtime.calls.early_stop import EarlyStop
from remat.runtime.calls.environment import FirstRun
from remat.runtime.calls.hooks import not_hooked_again
from remat.runtime.calls.partial import Differs, Parts, Refusing, Replaying
from remat.runtime.calls.passed import Input, Passed, given_again
from remat.runtime.calls.recompute import Collector
from remat.runtime.calls.saved import never
from remat.runtime.calls.stages import Stage, attached
from remat.runtime.meter import instruments
from remat.runtime.sharding import unsharded


class Call(ABC):
    """The module calls of a stage, or one call of a module, as long as its graph lives.

    Attributes:
        stage: the modules; number: of the call among those of the step.
        passed: what they were passed.
        context: what they depended on besides; None where it is not known, or will not be made again.
    """

    __slots__ = ("__weakref__", "_left_over", "context", "number", "passed", "stage")
    hint = ""  # what to do where it does something else when it is made again
    puts_parameters_back = False  # where the modules have others now, as after `torch.func.functional_call`

    def __init__(self, stage: Stage, number: int, passed: Passed, context: FirstRun | None) -> None:
        self.stage, self.number, self.passed, self.context = stage, number, passed, context
        self._left_over: list[torch.Tensor] = []  # of a run in part: what it skipped, and somebody holds

    @property
    def name(self) -> str:
        """For messages."""
        return f"stage {self.stage.name!r}"

    @abstractmethod
    def kept(self, number: int) -> torch.Tensor | None:
        """What autograd saved as this number, where it is in memory."""

    def surroundings(self) -> AbstractContextManager[Any]:
        """Inside, all that it depends on besides what it was passed is as it was.

        Raises:
            ReplayError: that cannot be.
        """
        assert self.context is not None
        changed = self.context.changed_buffer
        if changed:
            self.distrusted()
            raise ReplayError(
                f"{changed} in {self.name} was modified in place since the forward, so recomputing it would give "
                "another result; put another tensor in its place, or modify it after backward()"
            )
        return self.context.again(with_parameters=self.puts_parameters_back)

    def distrusted(self) -> None:  # noqa: B027  # there may be nothing to do
        """What it reads was changed, which nobody has said."""

    def missing(self, number: int, parts: Parts | None) -> torch.Tensor:
        """What is passed for the input of this number, which is not there."""
        raise ReplayError("an input of a module is missing; this is a bug of remat, please report it")

    def unchanged(self, found: Input) -> torch.Tensor | None:
        """An input, where it is in memory.

        Raises:
            ReplayError: it was changed since.
        """
        tensor = found.there()
        if found.is_changed:
            self.distrusted()
            shape = "" if tensor is None else f" of shape {tuple(tensor.shape)}"
            raise ReplayError(
                f"a tensor{shape} passed to {self.name} was modified in place since the forward, so a recomputation "
                "would read it changed; modify a copy"
            )
        return tensor

    def again(
        self,
        collector: Collector,
        parts: Parts | None = None,
        activation: Any = None,
        inside: AbstractContextManager[Any] | None = None,
    ) -> list[Any] | None:
        """Makes the call again as far as `collector` wants it; what its modules return, None where it ends before.

        Args:
            parts: how, where only a part of it runs.
            activation: what the stage works on.
            inside: what the run is watched by, where all of it runs.

        Raises:
            Differs: the run was not what the first one was.
            ReplayError: what it depends on has changed.
        """
        replaying, outputs = None, None
        whole = unsharded(self.stage.modules)
        with whole, torch.enable_grad(), not_hooked_again(self._leaves), self.surroundings(), suppress(EarlyStop):
            there = [self.unchanged(each) for each in self.passed.inputs]
            given = [
                self.missing(number, parts)
                if tensor is None
                else given_again(tensor, needs_gradient=self.passed.inputs[number].needs_gradient)
                for number, tensor in enumerate(there)
            ]
            activation = attached(activation)
            if parts is not None:
                lacking = [tensor for tensor, found in zip(given, there, strict=True) if found is None]
                replaying = collector.replaying = Replaying(parts, self.kept, lacking)
            instruments().recomputes(0 if parts is None else parts.ends_at)
            with saved_tensors_hooks(collector, never), replaying or inside or nullcontext():
                returned = self.passed.again(given, activation)
            collector.finish(returned)
            outputs = returned
        if replaying is not None:
            replaying.check()
        collector.was_right = True
        return outputs

    def _leaves(self) -> list[torch.Tensor]:
        """What it may register hooks to that outlive it."""
        assert self.context is not None
        return [*self.context.parameters(), *self.passed.held()]

    def in_part(self, collector: Collector, parts: Parts, activation: Any = None) -> str:
        """Makes a part of the call again. Returns why that was not right; empty where it was."""
        why = ""
        try:
            self.again(collector, parts, activation)
        except (ReplayError, torch.OutOfMemoryError):
            raise
        except (Differs, Exception) as error:  # of code that met what was skipped
            why = str(error) or type(error).__name__
        if collector.replaying is not None:
            self._left_over = collector.replaying.handed_out.given_memory()
        return why

    def as_a_whole(
        self, collector: Collector, activation: Any = None, inside: AbstractContextManager[Any] | None = None
    ) -> list[Any] | None:
        """Makes all of it again.

        Raises:
            ReplayError: it was not what the first run was, or what it depends on has changed.
        """
        held, self._left_over = self._left_over, []
        try:
            return self.again(collector, None, activation, Refusing(held) if held else inside)
        except Differs as error:
            raise ReplayError(f"recomputing {self.name} {error}. {self.hint}") from None
