"""What calls read, or have made, is changed: what was made of it could not be made again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from remat.runtime.live.units.pieces import Piece
from remat.runtime.live.units.unit import INPUT_CHANGED, OUTPUT_CHANGED

if TYPE_CHECKING:
    from remat.runtime.live.units.pool import Pool


def about_to_change(pool: Pool, storage: torch.UntypedStorage) -> None:
    """A storage is about to be changed."""
    pool.log.wake()
    counted = pool.account.of(storage)
    changed = None if counted is None else counted.piece
    if changed is not None:
        changed.call.unit.kept = OUTPUT_CHANGED
    for call in pool.readers.pop(storage):
        call.unit.kept = INPUT_CHANGED
        # Brings back what it waits for, as long as what that is made of is as it was.
        pool.room("in-place change", 0, call.row.waiting())
    if changed is not None:
        was_changed(pool, changed)


def was_changed(pool: Pool, piece: Piece) -> None:
    """What a call has returned was changed in place."""
    pool.log.wake()
    piece.call.unit.kept = OUTPUT_CHANGED
    piece.changes += 1


def distrust(pool: Pool) -> None:
    """What a call reads was changed where nobody was watching: so may that of others have been. Of calls whose backward
    is over nobody knows; those of modules of the same class are taken for changed, too."""
    gone = []
    for row in pool.log.rows:
        call = row.call()
        if call is None:
            gone.append(row.unit)
        elif call.is_distrusted:
            row.unit.kept = INPUT_CHANGED
    caught = {row.unit.name for row in pool.log.rows if row.unit.kept == INPUT_CHANGED}
    for unit in gone:
        if unit.name in caught:
            unit.kept = unit.kept or INPUT_CHANGED


def never_again(pool: Pool, name: str, why: str) -> None:
    """Calls of modules of this class must not run again."""
    for row in pool.log.rows:
        if row.unit.name == name:
            row.unit.never_again(why)
