"""What a block of DTR is asked to do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from remat.runtime.accelerator import free_on_accelerator
from remat.runtime.dtr.heuristics import Heuristic
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.sites import Site, site_at
from remat.runtime.live.store import FLOAT_BYTES, NUMBERS


class Settings(NamedTuple):
    """What a block is asked to do.

    Attributes:
        budget: bytes; reserved: of these, for what the block does not allocate itself.
        chooses: the name of the heuristic, where what is best is to be found for the next blocks there; else empty.
        by_model: whether times are those of a fixed model, so that decisions can be repeated.
        options: of the policy core.
        place: where in the program it stands; None: it is the rest of another block, of which nothing is learned.
    """

    budget: int
    reserved: int
    heuristic: Heuristic
    chooses: str
    thrash_limit: float | None
    by_model: bool
    options: Mapping[str, Any]
    place: Hashable

    @property
    def _reserved(self) -> int:
        return self.reserved + NUMBERS * FLOAT_BYTES

    def ledger(self) -> Ledger:
        """A new one, of no more than the device has."""
        ledger, free = Ledger(self.budget - self._reserved, self.heuristic, **self.options), free_on_accelerator()
        if free is not None and free < ledger.budget:
            ledger.lower(free)
        return ledger

    def limits(self) -> Limits:
        """New ones."""
        return Limits(self.thrash_limit, self._reserved, self.budget - self._reserved)

    @property
    def site(self) -> Site:
        """What is known of the place with this budget."""
        return site_at((self.place, self.budget))
