"""The common part of all trainers' callbacks: a model trains within a limit from its first call until the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from remat.errors import OverBudgetWarning, RematError
from remat.runtime.caches import SWITCHES
from remat.runtime.planned.patched_forward import PatchedForward, Undecided
from remat.training.fit import AUTO, Wish, fit_at_first_call
from remat.training.holdings import checked_optimizers
from remat.training.setup import Setup
from remat.training.watching import Watch
from remat.utils.warn import warn

_OWN = ("longest", "quiet", "chunk_head")
_OF_ROTOR = {"in_flight", "preserve_random"}  # which `fit` does not take


class Training:
    """A model in training within a limit.

    Args:
        memory, fit: as for `remat.fit`; a fractional `memory` refers to the first call. With `watch=True` in `fit` its
            steps are watched.

    Attributes:
        watched: the steps of the last training (`remat.watch`); None where they are not watched.

    Raises:
        RematError: `fit` takes no such argument.
    """

    def __init__(self, memory: int | str | float, fit: Mapping[str, Any]) -> None:
        known = {*(field.name for field in fields(Setup)), *_OWN, "watch"} - _OF_ROTOR
        unknown = [name for name in fit if name not in known]
        if unknown:
            raise RematError(
                f"unknown argument {unknown[0]!r}; choose from {', '.join(sorted(known))}, as for remat.fit"
            )
        given = dict(fit)
        self._watches = given.pop("watch", False)
        self.watched: Watch | None = None
        own = {name: given.pop(name) for name in _OWN if name in given}
        self.wish = Wish(Setup(**given), memory, **own).checked()
        self._patch: PatchedForward | None = None
        self._switched: list[tuple[Any, str]] = []
        self._said = self._warned = False

    def begin(self, model: nn.Module, settings: Any = None, optimizers: Iterable[Any] = ()) -> None:
        """From now on the model trains within the limit; checkpointing of its own is off until `end`.

        Args:
            settings: what else has a switch for that.
            optimizers: the trainer's, for limits of the whole device, and of what is free.
        """
        self.end()
        wish, optimizers = self.wish, [each for each in optimizers if each is not None]
        if optimizers and (wish.memory == AUTO or wish.setup.of == "device"):
            setup = replace(wish.setup, of="device")
            wish = wish._replace(setup=setup, optimizers=checked_optimizers(optimizers))
        try:
            self._switch_off([*model.modules(), *([] if settings is None else [settings])])
            self._patch = fit_at_first_call(model, wish)
            self._patch.when_removed(self._switch_on)
            self.watched = Watch(model).__enter__() if self._watches else None
        except BaseException:
            self._switch_on()
            raise

    def _switch_off(self, holders: Iterable[Any]) -> None:
        for holder in holders:
            for name in SWITCHES:
                if vars(holder).get(name) is True:
                    self._switched.append((holder, name))
                    setattr(holder, name, False)
        if self._switched and not self._said:
            self._said = True
            print("remat: the model's own checkpointing is off while it trains within a limit", file=sys.stderr)

    def _switch_on(self) -> None:
        switched, self._switched = self._switched, []
        for holder, name in switched:
            setattr(holder, name, True)

    @property
    def session(self) -> PatchedForward | None:
        """The present patch, which `end` takes so that a later session is not ended by mistake."""
        return self._patch

    def end(self, session: PatchedForward | None = None) -> None:
        """The model is as it was before; `session`: only if that is under way."""
        if session is not None and session is not self._patch:
            return
        patch, self._patch = self._patch, None
        if patch is not None and self.watched is not None:
            self.watched.__exit__()
        if patch is not None and patch.standing_in:
            patch.remove()

    def figures(self) -> dict[str, float]:
        """For loggers: bytes of a step's peak and of the limit, and how often something is recomputed in a step."""
        patch = self._patch
        choose = None if patch is None else patch.choose
        if patch is not None and isinstance(choose, Undecided) and not choose.was_called and not self._warned:
            self._warned = True
            warn(
                f"the forward of {type(patch.model).__name__} is not called in training, so it has no memory limit: "
                "the training step calls its submodules directly, or calls another module",
                OverBudgetWarning,
            )
        found = {} if patch is None else patch.figures()
        return {f"remat/{name}": float(value) for name, value in found.items()}
