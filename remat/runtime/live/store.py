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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.errors import ReplayError
from remat.runtime.allocator import allocated_bytes
from remat.runtime.dtr import _kernels as k
from remat.runtime.fakes import in_earnest
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.versions import (
    Brought,
    Given,
    Operator,
    Source,
    StorageRef,
    Version,
    VersionRef,
    hand_over,
    on_storage,
)
from remat.runtime.operators import tensors_in
from remat.runtime.pytree import storage_of

NUMBERS = 16  # that PyTorch may make tensors of before room is made for them
FLOAT_BYTES, NUMBER_BYTES = 8, 16  # of a number, and of the largest, a complex one
_MORE_NUMBERS = 64  # for which room is made at once

# Operators inside of all three run as the kernels that they were when the dispatcher saw them. They stand in each
# `with` by themselves: a context manager of ours around them could be interrupted between them and leave some on.
no_autograd = torch._C._AutoDispatchBelowAutograd
no_autocast = torch._C._DisableAutocast


class Store:
    """Versions of all storages that operators have made, by storage and by number in the policy core.

    Args:
        level: the allocator's count of bytes that it has given out, where it has one.

    Attributes:
        versions: of storages that exist, by `id` of their Python object.
        by_tensor: of all, by number in the policy core.
        constants: of storages whose content no operator can compute, by `id`; dead ones included.
        dead: versions of which a reference was dropped, to be looked at by `settle`.
        gone: references to versions that exist no more.
        saves: how many tensors autograd has saved.
        numbers: of Python's, that operators have computed with since there were none: autograd makes tensors of them,
            and keeps these, without a word. Room was made for `most_numbers`.
        limited: whether the policy core is asked; no longer once it could not be obeyed, or the block has ended.
        closed: whether the block has ended; what autograd has saved can still be asked for.
    """

    def __init__(self, ledger: Ledger, limits: Limits, level: Callable[[], int] | None = None) -> None:
        self.ledger = ledger
        self._level, self._base = level, 0 if level is None else level()
        self._unseen, self._outside = 0, -1  # bytes besides, and their number in the policy core
        self.limits = limits
        self.versions: dict[int, Version] = {}
        self.dead: deque[Version] = deque()
        self.limited = True
        self.closed = False
        self.lock = threading.RLock()  # other threads ask for memory; backwards of several devices have one each
        self.by_tensor: dict[int, VersionRef] = {}
        self.gone: list[VersionRef] = []
        self.saves, self.numbers, self.most_numbers = 0, 0, NUMBERS
        self.constants: dict[int, Brought] = {}

    # Bookkeeping -----------------------------------------------------------------------------------------------------

    def enter(self, tensor: int, storage: torch.UntypedStorage, size: int, operator: Operator | None) -> Version:
        """Makes the version of a storage, or its next one. Without operator it is locked in the ledger."""
        version = Version(tensor, size, operator)
        reference = self.know(version)
        self._put(version, storage)
        if operator is None:
            self.ledger.note(k.LOCK, tensor)
        else:
            operator.outputs += (reference,)
        return version

    def adopt(self, tensor: Tensor) -> None:
        """Takes account of a tensor that was made behind the dispatcher's back."""
        storage = storage_of(tensor)
        size = allocated_bytes(storage)
        if id(storage) not in self.versions and not self.is_brought(storage) and size:
            self.settle()
            taken = self.ledger.memory + size
            if taken > self.ledger.budget:  # others can still give way to it, but it is there already
                self.limits.went_over("memory allocated outside of operators", taken)
            self.enter(self.announce("tensor", size), storage, size, None)

    def room_for_numbers(self, args: Sequence[Any]) -> None:
        """Makes room for more numbers, unless the arguments tell that they are not in the memory that is limited."""
        if not self.saves:
            self.numbers = 0
        elif all(tensor.device.type == "cpu" for tensor in tensors_in(args)):
            self.ledger.note(k.LOCK, self.announce("numbers", _MORE_NUMBERS * FLOAT_BYTES))
            self.most_numbers += _MORE_NUMBERS
        else:
            self.most_numbers = sys.maxsize

    def announce(self, label: str, size: int) -> int:
        """Makes room for a tensor that no operator makes; returns its number in the policy core."""
        (number,) = self.ledger.add(label, max(size // 10, 1), [], [size])
        self.hold(size, label)
        return number

    def know(self, version: Version) -> VersionRef:
        """Makes a version the one of its tensor."""
        self.by_tensor[version.tensor] = reference = VersionRef(version, self.gone.append)
        reference.tensor = version.tensor
        return reference

    def _put(self, version: Version, storage: torch.UntypedStorage) -> None:
        version.where = where = StorageRef(storage, self.died)
        where.version, where.key = version, id(storage)
        self.versions[where.key] = version

    def died(self, reference: StorageRef) -> None:
        version = reference.version
        if version.where is reference:
            version.where = None
            if self.versions.get(reference.key) is version:
                del self.versions[reference.key]
            if not self.closed:
                self.dead.append(version)

    def dropped(self, version: Version) -> None:
        """Autograd has dropped what it had saved."""
        version.saves -= 1
        self.saves -= 1
        if not self.saves:
            self.numbers = 0
        if version.saves == 0:
            if self.closed:
                version.held = None
            else:
                self.dead.append(version)

    def settle(self) -> None:
        """Tells the ledger of references that were dropped."""
        while self.dead:
            self._look_at(self.dead.popleft())
        if self.gone:
            self._forget_gone()

    def _look_at(self, version: Version) -> None:
        if version.released:
            return
        if version.saves:
            if version.where is None and not version.dropped:
                version.dropped = True
                self.ledger.note(k.DROP, version.tensor)
        elif version.where is None:
            self.release(version)
        else:
            version.held = None  # if that was the last reference, the storage dies and the version comes back here

    def _forget_gone(self) -> None:
        """Tells the ledger of versions that not even an operator refers to any more, so that it forgets them too."""
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

    def constant(self, tensor: Tensor, storage: torch.UntypedStorage, version: Version | None) -> tuple[Given, bool]:
        """The constant that a storage holds, and whether nothing was computed from it that may be computed again.

        Args:
            version: of the storage, if it has one.
        """
        brought = self.constants.get(id(storage))
        if brought is None or brought() is not storage:
            brought = self.constants[id(storage)] = Brought(storage)
            brought.constant = None
            if version is None:
                brought.argument = -1 - self.ledger.constants
                self.ledger.constants += 1
            else:
                brought.argument = version.tensor
        known = None if brought.constant is None else brought.constant()
        if known is not None and known.content is storage:
            return known, False
        if version is not None:
            brought.argument = version.tensor  # another one than before if its content was copied aside
        constant = Given(tensor, storage, brought.argument, None if version is None else version.tensor)
        brought.constant = weakref.ref(constant)
        return constant, True

    def is_brought(self, storage: torch.UntypedStorage) -> bool:
        """Whether the program brought this storage along, as far as operators have used it."""
        brought = self.constants.get(id(storage))
        return brought is not None and brought() is storage  # an `id` may have been another one's

    def forget(self, storage: torch.UntypedStorage) -> None:
        """The content of a constant has changed: what is computed from it next is computed from another one."""
        brought = self.constants.get(id(storage))
        if brought is not None:
            brought.constant = None

    def make_constant(self, storage: torch.UntypedStorage, tensor: int) -> Given:
        """The constant of a storage whose version is being cut loose."""
        constant = Given(None, storage, tensor, tensor)
        brought = self.constants[id(storage)] = Brought(storage)
        brought.argument, brought.constant = tensor, weakref.ref(constant)
        return constant

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

    def look(self) -> None:
        """Compares with the allocator's own count: what it has given out besides is told to the policy core."""
        ledger = self.ledger
        ledger.ceiling = ledger.budget
        if self._level is None:
            return
        unseen = max(self._level() - self._base - (ledger.memory - self._unseen), 0)
        if unseen == self._unseen:
            return
        if self._outside >= 0:
            ledger.note(k.UNLOCK, self._outside)
            ledger.note(k.RELEASE, self._outside)
        (self._outside,) = ledger.add("extra memory of the allocator", 0, [], [unseen])
        ledger.note(k.LOCK, self._outside)
        ledger.memory += unseen - self._unseen
        ledger.peak = max(ledger.peak, ledger.memory)
        self._unseen = unseen

    def access(self, version: Version, label: str) -> None:
        """Has a version in memory for the moment."""
        if not self.limited:
            self.revive(version)
            return
        self.settle()
        self.look()
        self.ledger.note(k.LOCK, version.tensor)
        self.ledger.note(k.UNLOCK, version.tensor)
        self.consult(label)

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
            self.look()
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
                    self.evict(version)
                elif version.operator is not None:
                    self.repeat(version.operator)
        except BaseException:
            self.limited = False  # what is in memory is no longer what the core believes
            raise

    def evict(self, version: Version) -> None:
        """Frees the memory of a version."""
        storage = version.storage()
        version.held = None
        version.resident = False
        if storage is not None:
            storage.resize_(0)

    # Computing again -------------------------------------------------------------------------------------------------

    def repeat(self, operator: Operator) -> None:
        """Runs an operator again and puts its results where they are missing.

        Raises:
            ReplayError: what it was computed from has changed, or the result is of another size.
        """
        with in_earnest(), no_autograd(), no_autocast():
            copies: dict[int, torch.UntypedStorage] = {}
            for source in operator.sources():
                if isinstance(source, Given) and source.changed():
                    raise ReplayError(
                        f"{operator.function} must run again, but one of its inputs was changed where DTR cannot see "
                        "it (outside of its block, in another thread, or through .data); change tensors inside the "
                        "block, or after the backward"
                    )
            for source in operator.changes:
                copies[id(source)] = _content(source).clone()
            args = [_filled(value, copies) for value in operator.args]
            kwargs = {name: _filled(value, copies) for name, value in operator.kwargs.items()}
            result = operator.run(args, kwargs)
            taken = {id(_content(source)) for source in operator.sources()} | {id(copy) for copy in copies.values()}
            made = new_storages(result, taken)
            made.extend(copies[id(source)] for source in operator.changes if isinstance(source, Version))
            del result, args, kwargs
            if len(made) != len(operator.outputs):
                raise ReplayError(
                    f"recomputing {operator.function} returned {len(made)} storages, its first run "
                    f"{len(operator.outputs)}; an operator must do the same each time it runs"
                )
            made.reverse()
            for reference in operator.outputs:
                storage, version = made.pop(), reference()
                if version is not None and not version.resident:
                    self._place(version, storage, operator)

    def _place(self, version: Version, made: torch.UntypedStorage, operator: Operator) -> None:
        size = allocated_bytes(made)
        if size != version.size:
            raise ReplayError(
                f"recomputing {operator.function} returned {size} bytes, its first run {version.size}; an operator "
                "must do the same each time it runs"
            )
        storage = None if version.where is None else version.where()
        if storage is None:
            version.held = made
            if version.saves:
                self._put(version, made)  # autograd will hand it out
            # Else only operators that may run again refer to the version; its content goes when the last of them does.
        else:
            storage.resize_(made.nbytes())  # what was asked for, and not what the allocator gives for that
            storage.copy_(made)
            version.held = storage if version.saves else None
        version.resident = True

    def revive(self, version: Version) -> None:
        """Computes a version again, with all that it needs, without regard to the budget."""
        todo: list[Version] = [version]
        temporary: list[Version] = []
        while todo:
            last = todo[-1]
            if last.resident or last.operator is None:
                todo.pop()
                continue
            missing = [s for s in last.operator.sources() if isinstance(s, Version) and not s.resident]
            if missing:
                todo.extend(missing)
                continue
            self.repeat(last.operator)
            todo.pop()
            temporary.extend(s for s in (reference() for reference in last.operator.outputs) if s is not None)
        for other in temporary:
            if other is not version and other.released and other.resident:
                self.evict(other)

    # What cannot be computed again -----------------------------------------------------------------------------------

    def cut_loose(self, version: Version) -> None:
        """Keeps a version in memory from now on, so that its operator is not needed for it.

        The version becomes that of a constant for all that was computed from it, and another one takes its place in the
        accounts until its storage dies.
        """
        if version.operator is None:
            return
        self.ledger.note(k.LOCK, version.tensor)
        if not version.resident:
            if self.limited:
                self.consult("lock")
            else:
                self.revive(version)
        storage = version.storage()
        assert storage is not None
        constant = self.make_constant(storage, version.tensor)
        heir = Version(version.tensor, version.size, None)
        hand_over(version, heir, storage)
        self.know(heir)
        version.constant, version.operator, version.where, version.held, version.released = (
            constant,
            None,
            None,
            None,
            True,
        )
        self._put(heir, storage)

    def preserve(self, constant: Given) -> None:
        """To be called before a constant is changed from which something was computed that may be computed again.

        Either its content is copied, or what depends on it is kept in memory from now on: that costs nothing where no
        backward is to come any more, as in an optimiser's step.
        """
        dependents = self._dependents(constant)
        if any(version.saves for version in dependents):
            self._copy_aside(constant)
        else:
            for version in dependents:
                self.cut_loose(version)

    def _dependents(self, constant: Given) -> list[Version]:
        """What the program can still ask for and might have to be computed again from `constant`."""
        reached: set[int] = set()
        found = []
        for tensor, reference in self.by_tensor.items():
            version = reference()
            if (
                version is not None
                and version.operator is not None
                and any(
                    source is constant
                    or (isinstance(source, Version) and (source.tensor in reached or source.constant is constant))
                    for source in version.operator.sources()
                )
            ):
                reached.add(tensor)
                if not version.released:
                    found.append(version)
        return found

    def _copy_aside(self, constant: Given) -> None:
        original, size = constant.content, allocated_bytes(constant.content)
        (tensor,) = self.ledger.add("clone", max(size // 10, 1), [constant.argument], [size])
        self.hold(size, "clone")
        with in_earnest(), no_autograd(), no_autocast():
            constant.content = copy = original.clone()
        if constant.tensor is None:
            self.enter(tensor, copy, size, None)
        else:  # the core has computed from it under its old number, so the new content gets the new one
            old = self.versions[id(original)]
            self.enter(tensor, original, size, None)
            self._put(old, copy)
        constant.witness = constant.version = None

    # The end ---------------------------------------------------------------------------------------------------------

    def living(self) -> list[Version]:
        """Versions whose storages the program holds, in the order in which they were made."""
        found = [reference() for reference in self.by_tensor.values()]
        return [
            version for version in found if version is not None and not version.released and version.where is not None
        ]

    def close(self) -> None:
        """Lets go of all that nobody refers to."""
        self.limited = False
        for reference in list(self.by_tensor.values()):
            version = reference()
            if version is None or version.constant is not None:
                continue
            if version.released and version.resident:
                self.evict(version)
            elif not version.saves:
                version.held = None
        self.settle()
        self.closed = True
        for version in list(self.versions.values()):
            version.where = None  # the reference refers back to the version; without it both are gone at once
        self.versions.clear()
        self.by_tensor.clear()


def new_storages(result: Any, taken: set[int]) -> list[torch.UntypedStorage]:
    """The storages of what an operator returned that are not in `taken` (`id`s), each once, but for empty ones."""
    found: list[torch.UntypedStorage] = []
    for tensor in tensors_in(result):
        for part in parts_of(tensor):
            storage = storage_of(part)
            if id(storage) not in taken and storage.nbytes():
                found.append(storage)
                taken.add(id(storage))
    return found


def sizes_of(values: Any) -> list[tuple[torch.UntypedStorage, int]]:
    """The storages of dense tensors, each once, and what was given for them."""
    found = {id(storage_of(each)): storage_of(each) for each in tensors_in(values) if each.layout == torch.strided}
    return [(storage, allocated_bytes(storage)) for storage in found.values()]


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor may stand for a number of Python's that is computed with: autograd makes and keeps such."""
    return tensor.layout == torch.strided and storage_of(tensor).nbytes() <= NUMBER_BYTES


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """The dense tensors that a sparse one consists of; a dense one itself."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _content(source: Source) -> torch.UntypedStorage:
    storage = source.storage()
    if storage is None or (isinstance(source, Version) and not source.resident):
        raise ReplayError("an input of an operator is missing; this is a bug of remat, please report it")
    return storage


def _filled(value: Any, copies: dict[int, torch.UntypedStorage]) -> Any:
    if type(value) is tuple:
        source = value[0]
        copy = copies.get(id(source))
        return on_storage(value, _content(source) if copy is None else copy)
    if isinstance(value, list):
        return [_filled(item, copies) for item in value]
    return value


def can_be_evicted(result: Any, made: Sequence[torch.UntypedStorage]) -> bool:
    """Whether what a call returned can be freed and put back: no parts of sparse tensors, no mapped files."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        return all(storage.resizable() for storage in made)
    strided = all(tensor.layout == torch.strided for tensor in tensors_in(result))
    return strided and all(storage.resizable() for storage in made)


def storages_made(
    result: Any, sources: Sequence[Source], versions: Mapping[int, Version]
) -> list[torch.UntypedStorage]:
    """Storages that a call has made: those that were neither ours nor the program's before."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        storage = storage_of(result)
        if id(storage) in versions or not storage.nbytes():
            return []
        return [storage] if all(source.storage() is not storage for source in sources) else []
    taken = {id(used) for source in sources if (used := source.storage()) is not None}
    return [storage for storage in new_storages(result, taken) if id(storage) not in versions]
