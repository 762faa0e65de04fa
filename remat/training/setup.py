"""`Setup`: the options of training within a memory limit, without the limit itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from remat.budgets import resolve_budget
from remat.errors import RematError
from remat.runtime.checks import Loss, check_count, check_when_short, checked_loss
from remat.runtime.planned.patched_forward import check_other_path
from remat.utils.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Setup:
    """The options for measuring and planning; `rotor.Checkpointable` documents each of them.

    Raises:
        RematError: an invalid option, or options that exclude each other.
    """

    loss: Loss | None = None
    slots: int = 500
    stages: Sequence[str | nn.Module] | None = None
    other_path: str = "warn"
    group: ProcessGroup | None = None
    in_flight: int = 1
    output_held: bool = True
    options: bool = True
    keep: Collection[str] = ()
    recompute: Collection[str] = ()
    host_limit: int | str | None = None
    of: str = "allocated"
    when_short: str = "error"
    preserve_random: bool = True

    def __post_init__(self) -> None:
        check_count("slots", self.slots)
        check_count("in_flight", self.in_flight)
        check_other_path(self.other_path)
        check_when_short(self.when_short)
        checked_loss(self.loss)
        if self.of not in ("allocated", "reserved", "device"):
            raise RematError(
                f"of={self.of!r}: a limit is of what a step has 'allocated' or 'reserved', or of the whole 'device'"
            )
        if self.host_limit is not None:
            resolve_budget(self.host_limit)
            if not self.options:
                raise RematError(
                    "host_limit needs options=True: offloaded tensors are options of a stage; leave out host_limit"
                )

    @cached_property
    def ranks(self) -> Ranks:
        """Those of `group`."""
        return Ranks(self.group)
