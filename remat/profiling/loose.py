"""Looks whether a model's forwards go on changing what recomputations would change once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from remat.distributed import Ranks
from remat.errors import UnsupportedModel
from remat.runtime.calls.loose import LooseState
from remat.utils.warn import warn


@contextmanager
def loose_state_is_steady(
    forward: Callable[[], None], ranks: Ranks, *, own_hooks: bool
) -> Iterator[Callable[[Iterable[nn.Module]], None]]:
    """Gives what is called with the modules that may run again, once all is set up that first forwards set up.

    Warns where only hooks have changed some, which a program may have for looking on.

    Args:
        forward: of the whole model.
        own_hooks: those modules' own hooks run again, too.

    Raises:
        UnsupportedModel: forwards have changed such state since then.
    """
    watched: list[nn.Module] = []
    since: list[LooseState] = []

    def begin(modules: Iterable[nn.Module]) -> None:
        watched[:] = modules
        since[:] = [LooseState(watched, own_hooks=own_hooks)]

    yield begin
    if not any(ranks.all(any(each.changed() or each.changed(by_hooks=True) for each in since))):
        return
    forward()  # what was measured last may have been a part of one
    now = LooseState(watched, own_hooks=own_hooks)
    forward()
    by_hooks, where = now.changed(by_hooks=True), now.changed()
    if by_hooks:
        warn(
            f"each forward changes something in {by_hooks}. Hooks run once more in each recomputation, so what they "
            "count or collect is more than in plain PyTorch"
        )
    if where:
        raise UnsupportedModel(
            f"each forward changes something in {where}, which would change once more in each recomputation. Let a "
            "module that is registered (nn.ModuleList, nn.ModuleDict), a buffer or a number in an attribute hold it, "
            "or train under remat.DTR(budget)"
        )
