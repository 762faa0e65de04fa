"""The tensors of a running program: evicts them, computes them again, and keeps what cannot be computed again.

What happens to a storage that the program (a variable, a module, C++) still holds: evicting it frees its memory and
leaves it empty; recomputing makes the result anew and copies it there. What only autograd has saved is dropped and
made again without a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.errors import ReplayError
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.ledger import Ledger
from remat.runtime.live.limits import Limits
from remat.runtime.live.schemas import tensors_in
from remat.runtime.live.slots import (
    Brought,
    Constant,
    Operator,
    Slot,
    SlotRef,
    Source,
    StorageRef,
    on_storage,
    storage_of,
)

# Operators inside of all three run as the kernels that they were when the dispatcher saw them. They stand in each
# `with` by themselves: a context manager of ours around them could be interrupted between them and leave some on.
no_modes = torch._C._DisableTorchDispatch
no_autograd = torch._C._AutoDispatchBelowAutograd
no_autocast = torch._C._DisableAutocast


class Store:
    """Slots of all storages that operators have made, by storage and by number in the policy core.

    Attributes:
        slots: of storages that exist, by `id` of their Python object.
        by_tensor: of all, by number in the policy core.
        constants: of storages whose content no operator can compute, by `id`; dead ones included.
        dead: slots of which a reference was dropped, to be looked at by `settle`.
        gone: references to slots that exist no more.
        limited: whether the policy core is asked; no longer once it could not be obeyed, or the block has ended.
        closed: whether the block has ended; what autograd has saved can still be asked for.
    """

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self.ledger = ledger
        self.limits = limits
        self.slots: dict[int, Slot] = {}
        self.dead: deque[Slot] = deque()
        self.limited = True
        self.closed = False
        self.lock = threading.RLock()  # other threads ask for memory; backwards of several devices have one each
        self.by_tensor: dict[int, SlotRef] = {}
        self.gone: list[SlotRef] = []
        self.constants: dict[int, Brought] = {}

    # Bookkeeping -----------------------------------------------------------------------------------------------------

    def enter(self, tensor: int, storage: torch.UntypedStorage, size: int, operator: Operator | None) -> Slot:
        """Makes the slot of a storage, or of its next version. Without operator it is locked in the ledger."""
        slot = Slot(tensor, size, operator)
        reference = self.know(slot)
        self._put(slot, storage)
        if operator is None:
            self.ledger.note(k.LOCK, tensor)
        else:
            operator.outputs += (reference,)
        return slot

    def know(self, slot: Slot) -> SlotRef:
        """Makes a slot the one of its tensor."""
        self.by_tensor[slot.tensor] = reference = SlotRef(slot, self.gone.append)
        reference.tensor = slot.tensor
        return reference

    def _put(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        slot.where = where = StorageRef(storage, self.died)
        where.slot, where.key = slot, id(storage)
        self.slots[where.key] = slot

    def died(self, reference: StorageRef) -> None:
        slot = reference.slot
        if slot.where is reference:
            slot.where = None
            if self.slots.get(reference.key) is slot:
                del self.slots[reference.key]
            if not self.closed:
                self.dead.append(slot)

    def dropped(self, slot: Slot) -> None:
        """Autograd has dropped what it had saved."""
        slot.saves -= 1
        if slot.saves == 0:
            if self.closed:
                slot.held = None
            else:
                self.dead.append(slot)

    def settle(self) -> None:
        """Tells the ledger of references that were dropped."""
        while self.dead:
            self._look_at(self.dead.popleft())
        if self.gone:
            self._forget_gone()

    def _look_at(self, slot: Slot) -> None:
        if slot.released:
            return
        if slot.saves:
            if slot.where is None and not slot.dropped:
                slot.dropped = True
                self.ledger.note(k.DROP, slot.tensor)
        elif slot.where is None:
            self.release(slot)
        else:
            slot.held = None  # if that was the last reference, the storage dies and the slot comes back here

    def _forget_gone(self) -> None:
        """Tells the ledger of slots that not even an operator refers to any more, so that it forgets them too."""
        gone = self.gone[:]
        del self.gone[: len(gone)]  # not a new list: references call its `append`
        for reference in gone:
            if self.by_tensor.get(reference.tensor) is reference:
                del self.by_tensor[reference.tensor]
                self.ledger.note(k.FORGET, reference.tensor)

    def release(self, slot: Slot) -> None:
        """Nothing refers to the slot any more, and its memory is gone or another's."""
        slot.released = True
        if slot.operator is None:
            self.ledger.note(k.UNLOCK, slot.tensor)
        self.ledger.note(k.RELEASE, slot.tensor)
        if slot.resident:
            slot.resident = False
            self.ledger.memory -= slot.size

    def constant(self, tensor: Tensor, storage: torch.UntypedStorage, slot: Slot | None) -> tuple[Constant, bool]:
        """The constant that a storage holds, and whether nothing was computed from it that may be computed again.

        Args:
            slot: of the storage, if it has one.
        """
        brought = self.constants.get(id(storage))
        if brought is None or brought() is not storage:
            brought = self.constants[id(storage)] = Brought(storage)
            brought.constant = None
            if slot is None:
                brought.argument = -1 - len(self.ledger.constant_bytes)
                self.ledger.constant_bytes.append(storage.nbytes())
            else:
                brought.argument = slot.tensor
        known = None if brought.constant is None else brought.constant()
        if known is not None and known.content is storage:
            return known, False
        if slot is not None:
            brought.argument = slot.tensor  # another one than before if its content was copied aside
        constant = Constant(tensor, storage, brought.argument, None if slot is None else slot.tensor)
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

    def make_constant(self, storage: torch.UntypedStorage, tensor: int) -> Constant:
        """The constant of a storage whose slot is being cut loose."""
        constant = Constant(None, storage, tensor, tensor)
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

    def access(self, slot: Slot, label: str) -> None:
        """Has a slot in memory for the moment."""
        if not self.limited:
            self.revive(slot)
            return
        self.settle()
        self.ledger.note(k.LOCK, slot.tensor)
        self.ledger.note(k.UNLOCK, slot.tensor)
        self.consult(label)

    def lend(self, slot: Slot) -> torch.UntypedStorage:
        """The storage of a slot that is in memory, for somebody to hold who did not make it."""
        storage = slot.storage()
        assert storage is not None
        if slot.dropped:
            slot.dropped = False
            self.ledger.note(k.HOLD, slot.tensor)
        return storage

    def hold(self, size: int, label: str) -> None:
        """Counts bytes that are in memory already, and makes others give way to them."""
        if self.limited and self.ledger.memory + size > self.ledger.budget:
            self.consult(label)
        else:
            self.ledger.memory += size
            self.ledger.peak = max(self.ledger.peak, self.ledger.memory)

    def _obey(self) -> None:
        decisions = self.ledger.decided()
        try:
            for kind, what in decisions:
                slot = self.by_tensor[what]() if what in self.by_tensor else None
                if slot is None:
                    continue  # released, and no operator that may run again needs it: its memory is gone already
                if kind == k.EVICTED:
                    self.evict(slot)
                elif slot.operator is not None:
                    self.repeat(slot.operator)
        except BaseException:
            self.limited = False  # what is in memory is no longer what the core believes
            raise

    def evict(self, slot: Slot) -> None:
        """Frees the memory of a slot."""
        storage = slot.storage()
        slot.held = None
        slot.resident = False
        if storage is not None:
            storage.resize_(0)

    # Computing again -------------------------------------------------------------------------------------------------

    def repeat(self, operator: Operator) -> None:
        """Runs an operator again and puts its results where they are missing.

        Raises:
            ReplayError: what it was computed from has changed, or the result is of another size.
        """
        with no_modes(), no_autograd(), no_autocast():
            copies: dict[int, torch.UntypedStorage] = {}
            for source in operator.sources():
                if isinstance(source, Constant) and source.changed():
                    raise ReplayError(
                        f"{operator.function} must run again, but a tensor that it used was changed by something that "
                        "DTR does not see (outside of its block, in another thread, or through .data); change tensors "
                        "inside of the block, or after all that depends on them is done"
                    )
            for source in operator.changes:
                copies[id(source)] = _content(source).clone()
            args = [_filled(value, copies) for value in operator.args]
            kwargs = {name: _filled(value, copies) for name, value in operator.kwargs.items()}
            result = operator.run(args, kwargs)
            taken = {id(_content(source)) for source in operator.sources()} | {id(copy) for copy in copies.values()}
            made = new_storages(result, taken)
            made.extend(copies[id(source)] for source in operator.changes if isinstance(source, Slot))
            del result, args, kwargs
            if len(made) != len(operator.outputs):
                raise ReplayError(f"{operator.function} made {len(made)} storages, but {len(operator.outputs)} before")
            made.reverse()
            for reference in operator.outputs:
                storage, slot = made.pop(), reference()
                if slot is not None and not slot.resident:
                    self._place(slot, storage, operator)

    def _place(self, slot: Slot, made: torch.UntypedStorage, operator: Operator) -> None:
        if made.nbytes() != slot.size:
            raise ReplayError(f"{operator.function} made {made.nbytes()} bytes where it had made {slot.size} before")
        storage = None if slot.where is None else slot.where()
        if storage is None:
            slot.held = made
            if slot.saves:
                self._put(slot, made)  # autograd will hand it out
            # Else only operators that may run again refer to the slot, and its content goes when the last of them does.
        else:
            storage.resize_(slot.size)
            storage.copy_(made)
            slot.held = storage if slot.saves else None
        slot.resident = True

    def revive(self, slot: Slot) -> None:
        """Computes a slot again, with all that it needs, without regard to the budget."""
        todo: list[Slot] = [slot]
        temporary: list[Slot] = []
        while todo:
            last = todo[-1]
            if last.resident or last.operator is None:
                todo.pop()
                continue
            missing = [s for s in last.operator.sources() if isinstance(s, Slot) and not s.resident]
            if missing:
                todo.extend(missing)
                continue
            self.repeat(last.operator)
            todo.pop()
            temporary.extend(s for s in (reference() for reference in last.operator.outputs) if s is not None)
        for other in temporary:
            if other is not slot and other.released and other.resident:
                self.evict(other)

    # What cannot be computed again -----------------------------------------------------------------------------------

    def cut_loose(self, slot: Slot) -> None:
        """Keeps a slot in memory from now on, so that its operator is not needed for it.

        The slot becomes that of a constant for all that was computed from it, and another one takes its place in the
        accounts until its storage dies.
        """
        if slot.operator is None:
            return
        self.ledger.note(k.LOCK, slot.tensor)
        if not slot.resident:
            if self.limited:
                self.consult("lock")
            else:
                self.revive(slot)
        storage = slot.storage()
        assert storage is not None
        constant = self.make_constant(storage, slot.tensor)
        heir = Slot(slot.tensor, slot.size, None)
        self.know(heir)
        slot.constant, slot.operator, slot.where, slot.held, slot.released = constant, None, None, None, True
        self._put(heir, storage)

    def preserve(self, constant: Constant) -> None:
        """To be called before a constant is changed from which something was computed that may be computed again.

        Either its content is copied, or what depends on it is kept in memory from now on: that costs nothing where no
        backward is to come any more, as in an optimiser's step.
        """
        dependents = self._dependents(constant)
        if any(slot.saves for slot in dependents):
            self._copy_aside(constant)
        else:
            for slot in dependents:
                self.cut_loose(slot)

    def _dependents(self, constant: Constant) -> list[Slot]:
        """What the program can still ask for and might have to be computed again from `constant`."""
        reached: set[int] = set()
        found = []
        for tensor, reference in self.by_tensor.items():
            slot = reference()
            if (
                slot is not None
                and slot.operator is not None
                and any(
                    source is constant
                    or (isinstance(source, Slot) and (source.tensor in reached or source.constant is constant))
                    for source in slot.operator.sources()
                )
            ):
                reached.add(tensor)
                if not slot.released:
                    found.append(slot)
        return found

    def _copy_aside(self, constant: Constant) -> None:
        original, size = constant.content, constant.content.nbytes()
        (tensor,) = self.ledger.add("clone", max(size // 10, 1), [constant.argument], [size])
        self.hold(size, "clone")
        with no_modes(), no_autograd(), no_autocast():
            constant.content = copy = original.clone()
        if constant.tensor is None:
            self.enter(tensor, copy, size, None)
        else:  # the core has computed from it under its old number, so the new content gets the new one
            old = self.slots[id(original)]
            self.enter(tensor, original, size, None)
            self._put(old, copy)
        constant.witness = constant.version = None

    def move(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """The content of a slot that only autograd wants is in another storage from now on."""
        slot.held = storage
        self._put(slot, storage)

    # The end ---------------------------------------------------------------------------------------------------------

    def living(self) -> list[Slot]:
        """Slots whose storages the program holds, in the order in which they were made."""
        found = [reference() for reference in self.by_tensor.values()]
        return [slot for slot in found if slot is not None and not slot.released and slot.where is not None]

    def close(self) -> None:
        """Lets go of all that nobody refers to."""
        self.limited = False
        for reference in list(self.by_tensor.values()):
            slot = reference()
            if slot is None or slot.constant is not None:
                continue
            if slot.released and slot.resident:
                self.evict(slot)
            elif not slot.saves:
                slot.held = None
        self.settle()
        self.closed = True
        for slot in list(self.slots.values()):
            slot.where = None  # the reference refers back to the slot; without it both are gone at once
        self.slots.clear()
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
    if storage is None or (isinstance(source, Slot) and not source.resident):
        raise ReplayError("an operator was to run again before what it needs was there; please report this")
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


def storages_made(result: Any, sources: Sequence[Source], slots: Mapping[int, Slot]) -> list[torch.UntypedStorage]:
    """Storages that a call has made: those that were neither ours nor the program's before."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        storage = storage_of(result)
        if id(storage) in slots or not storage.nbytes():
            return []
        return [storage] if all(source.storage() is not storage for source in sources) else []
    taken = {id(used) for source in sources if (used := source.storage()) is not None}
    return [storage for storage in new_storages(result, taken) if id(storage) not in slots]
