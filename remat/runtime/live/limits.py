"""What happens when the budget cannot be kept, or only by recomputing again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from remat.errors import OutOfBudget, Thrashing, ThrashingWarning
from remat.formatting import format_bytes
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Instructions, Ledger
from remat.utils.warn import warn

_HOPELESS = 20  # times the operators' own time, spent on recomputing
_LEAST_NANOSECONDS = 10**7  # that is allowed however little the program has computed


class Over(NamedTuple):
    """What took more memory than the budget, and the peak then, as the ledger counts."""

    where: str
    peak_bytes: int


class Limits:
    """What the answers of the policy core are held to.

    Args:
        thrash_limit: multiple of the operators' own time above which their time, recomputation included, counts as
            thrashing; None for no such limit.
        reserved_bytes: what the budget holds besides what the ledger knows of.
        budget: that of the ledger as it begins, which may give way to what the device has.

    Attributes:
        thrashes: whether it was reached.
        gave_up: whether the program was told that the budget is too small.
        over: where most memory above the budget was taken, if any was.
        unmeasured: an operator that ran although its scratch memory is not known; empty where there is none.
        whole: what an earlier block at this place of the program did, from its beginning to its end.
    """

    def __init__(self, thrash_limit: float | None, reserved_bytes: int = 0, budget: int = 0) -> None:
        self.thrash_limit = thrash_limit
        self.reserved_bytes, self.budget = reserved_bytes, budget
        self.thrashes = self.gave_up = False
        self.over: Over | None = None
        self.unmeasured = ""
        self.whole: Instructions | None = None

    def went_over(self, where: str, peak_bytes: int) -> None:
        """Notes that more was taken than the budget allows."""
        if peak_bytes <= self.budget:
            return  # the device gives less, and nobody was promised that
        if self.over is None or peak_bytes > self.over.peak_bytes:
            self.over = Over(where, peak_bytes)

    def others_took(self, peak_bytes: int) -> None:
        """Notes that a backward has gone through what an earlier block has computed."""
        self.went_over("a backward of an earlier block's forward, which no budget limits", peak_bytes)

    def look_back(self, most: int) -> None:
        """The allocator says that it has given out so much at most: also what no account knows, as where it does not
        split a block that is larger than what was asked for."""
        self.went_over("the allocator's own record", most)

    def not_measured(self, label: str, memory: int, budget: int) -> None:
        """Notes an operator of unknown scratch memory that ran where that may matter."""
        if 2 * memory > budget:
            self.unmeasured = label

    def ask(self, ledger: Ledger) -> int:
        """Has the core decide, and not recompute without end."""
        if self.thrash_limit is not None:
            own, again = ledger.own_nanoseconds, ledger.core.scalar(k.AGAIN_COST)
            most = round(max(_HOPELESS, self.thrash_limit) * own) + _LEAST_NANOSECONDS
            ledger.core.limit_recomputation(max(most - again, 0))
        return ledger.consult()

    def judge(self, answer: int, ledger: Ledger, label: str, tensors: Sequence[Tensor]) -> None:
        """Raises what the answer asks for; warns of thrashing."""
        core = ledger.core
        if answer == k.DONE:
            own, again = core.scalar(k.MODEL_COST), core.scalar(k.AGAIN_COST)
            if not self.thrashes and self.thrash_limit is not None and again > (self.thrash_limit - 1) * own:
                self.thrashes = True
                warn(
                    f"DTR is thrashing within {format_bytes(ledger.budget + self.reserved_bytes)}: with recomputation, "
                    f"the block takes over {self.thrash_limit:g} x the program's own time; a larger budget would be "
                    "much faster",
                    ThrashingWarning,
                )
            return
        needed = core.scalar(k.NEEDED)
        core.abandon()
        self.gave_up = True
        shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        call = f"{label}({shapes})"
        reserved, budget = self.reserved_bytes, ledger.budget + self.reserved_bytes
        found = [ledger.least_budget()]
        if self.whole is not None and self.whole.begins_like(ledger.program()):  # what is yet to come is known
            found.append(ledger.least_budget(self.whole))
        least = max((least + reserved for least in found if least is not None), default=None)
        if ledger.budget < self.budget and answer == k.OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(
                f"the device has {format_bytes(budget)} for this block of DTR, and {call} needs "
                f"{format_bytes(needed + reserved)} with what cannot be evicted"
            )
        if answer == k.THRASHING:
            self.thrashes = True
            raise Thrashing(call, budget, max(_HOPELESS, self.thrash_limit or 0), least)
        raise OutOfBudget(call, budget, needed + reserved, least)
