"""The tensors of a running program: evicts them, computes them again, and keeps what cannot be computed again.

What happens to a storage that the program (a variable, a module, C++) still holds: evicting it frees its memory and
leaves it empty; recomputing makes the result anew and copies it there. What only autograd has saved is dropped and
made again without a copy.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.runtime.accelerator import bytes_of
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.nesting import tell
from remat.runtime.live.repeating import repeat, revive
from remat.runtime.live.versions import Brought, Given, OperatorRun, StorageRef, Version, VersionRef
from remat.runtime.operators import tensors_in
from remat.runtime.pytree import storage_of

NUMBERS = 16  # that PyTorch may make tensors of before room is made for them
FLOAT_BYTES = 8  # of a number
_MORE_NUMBERS = 64  # for which room is made at once


class Constants:
    """The constants of a block, by storage.

    Attributes:
        known: storages that have one, or had one, by `id`; dead ones included.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.known: dict[int, Brought] = {}

    def of(self, tensor: Tensor, storage: torch.UntypedStorage, version: Version | None) -> tuple[Given, bool]:
        """The constant that a storage holds, and whether nothing was computed from it that may be computed again.

        Args:
            version: of the storage, if it has one.
        """
        brought = self.known.get(id(storage))
        if brought is None or brought() is not storage:
            brought = self.known[id(storage)] = Brought(storage)
            brought.constant = None
            if version is None:
                brought.argument = -1 - self._ledger.constants
                self._ledger.constants += 1
            else:
                brought.argument = version.tensor
        constant = None if brought.constant is None else brought.constant()
        if constant is not None and constant.content is storage:
            return constant, False
        if version is not None:
            brought.argument = version.tensor  # another one than before if its content was copied aside
        constant = Given(tensor, storage, brought.argument, None if version is None else version.tensor)
        brought.constant = weakref.ref(constant)
        return constant, True

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether the program brought this storage along, as far as operators have used it."""
        brought = self.known.get(id(storage))
        return brought is not None and brought() is storage  # an `id` may have been another one's

    def forget(self, storage: torch.UntypedStorage) -> None:
        """The content of a storage has changed: what is computed from it next is computed from another constant."""
        brought = self.known.get(id(storage))
        if brought is not None:
            brought.constant = None

    def cut_loose(self, storage: torch.UntypedStorage, tensor: int) -> Given:
        """The constant of a storage whose version is being cut loose."""
        constant = Given(None, storage, tensor, tensor)
        brought = self.known[id(storage)] = Brought(storage)
        brought.argument, brought.constant = tensor, weakref.ref(constant)
        return constant


class Numbers:
    """Python's numbers that operators have computed with: autograd makes tensors of them and keeps these, unseen.

    Attributes:
        saves: how many tensors autograd has saved.
        count: of the numbers since there were none; most: for how many room was made.
    """

    def __init__(self) -> None:
        self.saves = self.count = 0
        self.most = NUMBERS

    def make_room(self, store: Store, args: Sequence[Any]) -> None:
        """Makes room for more, unless the arguments tell that they are not in the memory that is limited."""
        if not self.saves:
            self.count = 0
        elif all(tensor.device.type == "cpu" for tensor in tensors_in(args)):
            store.ledger.note(k.LOCK, store.announce("numbers", _MORE_NUMBERS * FLOAT_BYTES))
            self.most += _MORE_NUMBERS
        else:
            self.most = sys.maxsize

    def dropped(self) -> None:
        """Autograd has dropped a tensor that it had saved."""
        self.saves -= 1
        if not self.saves:
            self.count = 0


class Unseen:
    """What the allocator has given out besides what the ledger knows of.

    Args:
        level: its own count of bytes, where it has one.
    """

    def __init__(self, level: Callable[[], int] | None) -> None:
        self._level, self._base = level, 0 if level is None else level()
        self._bytes, self._number = 0, -1  # in the policy core

    def look(self, ledger: Ledger) -> None:
        """Tells the policy core of it."""
        ledger.ceiling = ledger.budget
        if self._level is None:
            return
        unseen = max(self._level() - self._base - (ledger.memory - self._bytes), 0)
        if unseen == self._bytes:
            return
        if self._number >= 0:
            ledger.note(k.UNLOCK, self._number)
            ledger.note(k.RELEASE, self._number)
        self._number = ledger.add_beside("extra memory of the allocator", 0, [], unseen)
        ledger.note(k.LOCK, self._number)
        ledger.memory += unseen - self._bytes
        ledger.peak = max(ledger.peak, ledger.memory)
        self._bytes = unseen


class Store:
    """Versions of all storages that operators have made, by storage and by number in the policy core.

    Args:
        level: the allocator's count of bytes that it has given out, where it has one.

    Attributes:
        versions: of storages that exist, by `id` of their Python object.
        by_tensor: of all, by number in the policy core.
        constants: of storages whose content no operator can compute.
        dead: versions of which a reference was dropped, to be looked at by `settle`.
        gone: references to versions that exist no more.
        numbers: of Python's, that operators have computed with.
        unseen: what the allocator has given out besides.
        limited: whether the policy core is asked; no longer once it could not be obeyed, or the block has ended.
        closed: whether the block has ended; what autograd has saved can still be asked for.
        most_revived: bytes in use at most while something was made again without a limit.
        again: bytes that were made again since the block has ended, and are still held by somebody.
    """

    def __init__(self, ledger: Ledger, limits: Limits, level: Callable[[], int] | None = None) -> None:
        self.ledger, self.limits = ledger, limits
        self.unseen, self.numbers = Unseen(level), Numbers()
        self.versions: dict[int, Version] = {}
        self.dead: deque[Version] = deque()
        self.limited = True
        self.closed = False
        self.most_revived = self.again = 0
        self.lock = threading.RLock()  # other threads ask for memory; backwards of several devices have one each
        self.by_tensor: dict[int, VersionRef] = {}
        self.gone: list[VersionRef] = []
        self.constants = Constants(ledger)

    # Bookkeeping -----------------------------------------------------------------------------------------------------

    def enter(self, tensor: int, storage: torch.UntypedStorage, size: int, operator: OperatorRun | None) -> Version:
        """Makes the version of a storage, or its next one. Without operator it is locked in the ledger."""
        version = Version(tensor, size, operator)
        reference = self.know(version)
        self.put(version, storage)
        if operator is None:
            self.ledger.note(k.LOCK, tensor)
        else:
            operator.outputs += (reference,)
        return version

    def announce(self, label: str, size: int) -> int:
        """Makes room for a tensor that no operator makes; returns its number in the policy core."""
        number = self.ledger.add_beside(label, max(size // 10, 1), [], size)
        self.hold(size, label)
        return number

    def know(self, version: Version) -> VersionRef:
        """Makes a version the one of its tensor."""
        self.by_tensor[version.tensor] = reference = VersionRef(version, self.gone.append)
        reference.tensor = version.tensor
        return reference

    def put(self, version: Version, storage: torch.UntypedStorage) -> None:
        """The content of a version is in this storage from now on."""
        version.where = where = StorageRef(storage, self.died)
        where.version, where.key = version, id(storage)
        self.versions[where.key] = version

    def died(self, reference: StorageRef) -> None:
        version = reference.version
        if version.where is reference:
            version.where = None
            if self.versions.get(reference.key) is version:
                del self.versions[reference.key]
            if self.closed:
                self.again -= version.size
            else:
                self.dead.append(version)

    def dropped(self, version: Version) -> None:
        """Autograd has dropped what it had saved."""
        version.saves -= 1
        self.numbers.dropped()
        if version.saves == 0:
            if self.closed:
                _let_go(version)
            else:
                self.dead.append(version)

    def settle(self) -> None:
        """Tells the ledger of references that were dropped."""
        while self.dead:
            _look_at(self, self.dead.popleft())
        # Of versions that not even an operator refers to any more: it forgets them too.
        gone = self.gone[:]
        del self.gone[: len(gone)]  # not a new list: references call its `append`
        for reference in gone:
            if self.by_tensor.get(reference.tensor) is reference:
                del self.by_tensor[reference.tensor]
                self.ledger.note(k.FORGET, reference.tensor)

    def release(self, version: Version) -> None:
        """Nothing refers to the version any more, and its memory is gone or another's."""
        version.released = True
        if version.operator is None:
            self.ledger.note(k.UNLOCK, version.tensor)
        self.ledger.note(k.RELEASE, version.tensor)
        if version.resident:
            version.resident = False
            self.ledger.memory -= version.size

    # Deciding --------------------------------------------------------------------------------------------------------

    def consult(self, label: str, tensors: Sequence[Tensor] = ()) -> None:
        """Tells the policy core what has happened and does what it decides.

        Args:
            label, tensors: the operator that needs room, and its arguments, for the message of an error.

        Raises:
            OutOfBudget: not everything fits.
            Thrashing: hardly anything is done but recomputing.
            ReplayError: an operator cannot run again. From then on there is no limit.
        """
        answer = self.limits.ask(self.ledger)
        self._obey()
        self.limits.judge(answer, self.ledger, label, tensors)

    def access(self, version: Version, label: str) -> None:
        """Has a version in memory for the moment."""
        if not self.limited:
            revive(self, version)
            return
        self.settle()
        self.unseen.look(self.ledger)
        self.ledger.note(k.LOCK, version.tensor)
        self.ledger.note(k.UNLOCK, version.tensor)
        self.consult(label)

    def revived(self, more: int, left: int) -> None:
        """So many bytes more were in use at most while something was made again without a limit, and still are."""
        if self.closed:
            tell(self.again + more)
            self.again += left
            return
        held = sum(version.size for version in _all_of(self) if version.resident) - left
        self.most_revived = max(self.most_revived, held + more)

    def lend(self, version: Version) -> torch.UntypedStorage:
        """The storage of a version that is in memory, for somebody to hold who did not make it."""
        storage = version.storage()
        assert storage is not None
        if version.dropped:
            version.dropped = False
            self.ledger.note(k.HOLD, version.tensor)
        return storage

    def hold(self, size: int, label: str) -> None:
        """Counts bytes that are in memory already, and makes others give way to them."""
        if self.limited and self.ledger.memory + size > self.ledger.ceiling:
            self.unseen.look(self.ledger)
            self.consult(label)
        else:
            self.ledger.memory += size
            self.ledger.peak = max(self.ledger.peak, self.ledger.memory)

    def _obey(self) -> None:
        decisions = self.ledger.decided()
        try:
            for kind, what in decisions:
                version = self.by_tensor[what]() if what in self.by_tensor else None
                if version is None:
                    continue  # released, and no operator that may run again needs it: its memory is gone already
                if kind == k.EVICTED:
                    version.evict()
                elif version.operator is not None:
                    repeat(self, version.operator)
        except BaseException:
            self.limited = False  # what is in memory is no longer what the core believes
            raise

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of all that nobody refers to."""
        self.limited = False
        for reference in list(self.by_tensor.values()):
            version = reference()
            if version is None or version.constant is not None:
                continue
            if version.released and version.resident:
                version.evict()
            elif not version.saves:
                version.held = None
        self.settle()
        self.closed = True
        for version in list(self.versions.values()):
            version.where = None  # the reference refers back to the version; without it both are gone at once
            if version.held is None:
                _let_go(version)
        self.versions.clear()
        self.by_tensor.clear()


def adopt(store: Store, tensor: Tensor) -> None:
    """Takes account of a tensor that was made behind the dispatcher's back."""
    storage = storage_of(tensor)
    size = bytes_of(storage)
    if id(storage) not in store.versions and not store.constants.hold(storage) and size:
        store.settle()
        # Others can still give way to it, but it is there already.
        store.limits.went_over("memory allocated outside of operators", store.ledger.memory + size)
        store.enter(store.announce("tensor", size), storage, size, None)


def living(store: Store) -> list[Version]:
    """Versions whose storages the program holds, in the order in which they were made."""
    return [version for version in _all_of(store) if not version.released and version.where is not None]


def unsafe(store: Store) -> list[Version]:
    """What autograd has saved and would be made again later, when the program may have changed what that reads."""
    return [each for each in _all_of(store) if each.saves and not each.resident and _reads_unwatched(each)]


def _all_of(store: Store) -> list[Version]:
    references = store.by_tensor.values()
    return [version for version in (reference() for reference in references) if version is not None]


def _look_at(store: Store, version: Version) -> None:
    """A reference to it was dropped."""
    if version.released:
        return
    if version.saves:
        if version.where is None and not version.dropped:
            version.dropped = True
            store.ledger.note(k.DROP, version.tensor)
    elif version.where is None:
        store.release(version)
    else:
        version.held = None  # if that was the last reference, the storage dies and the version comes back here


def _let_go(version: Version) -> None:
    """Where it is needed again it is computed again: the program may have changed its memory since, or dropped it."""
    version.held = None
    if version.operator is not None:
        version.resident = False


def _reads_unwatched(version: Version) -> bool:
    """Whether it would be computed again from memory of which nobody sees changes."""
    todo, seen = [version], set[int]()
    while todo:
        last = todo.pop()
        if last.operator is None or id(last) in seen:
            continue
        seen.add(id(last))
        for source in last.operator.sources():
            if isinstance(source, Version) and source.constant is None:
                todo.append(source)
            elif isinstance(source, Version) or source.version is None:
                return True
    return False
