"""Operators run again: what they make is put where it is missing; and what must not depend on that any more: it stays
in memory, or what it is computed from is copied."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from remat.errors import ReplayError
from remat.runtime.accelerator import bytes_of
from remat.runtime.dtr import _kernels as k
from remat.runtime.fakes import in_earnest
from remat.runtime.live.made import new_storages
from remat.runtime.live.versions import Given, OperatorRun, Version, hand_over, no_autocast, no_autograd, on_storage

if TYPE_CHECKING:
    from remat.runtime.live.store import Store


def repeat(store: Store, operator: OperatorRun) -> None:
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
                _place(store, version, storage, operator)


def _place(store: Store, version: Version, made: torch.UntypedStorage, operator: OperatorRun) -> None:
    size = bytes_of(made)
    if size != version.size:
        raise ReplayError(
            f"recomputing {operator.function} returned {size} bytes, its first run {version.size}; an operator "
            "must do the same each time it runs"
        )
    storage = None if version.where is None else version.where()
    if storage is None:
        version.held = made
        if version.saves:
            store.put(version, made)  # autograd will hand it out
        # Else only operators that may run again refer to the version; its content goes when the last of them does.
    else:
        storage.resize_(made.nbytes())  # what was asked for, and not what the allocator gives for that
        storage.copy_(made)
        version.held = storage if version.saves else None
    version.resident = True


def revive(store: Store, version: Version) -> None:
    """Computes a version again, with all that it needs, without regard to the budget; tells the store what that takes.

    What is made on the way and nobody else holds is let go of as soon as nothing that is left to do reads it.
    """
    order = _to_make(version)
    if not order:
        return
    read = Counter(id(source) for each in order for source in _made_of(each))
    passing: dict[int, Version] = {}
    present = most = 0
    for each in order:
        done = _made_of(each)
        if not each.resident:
            assert each.operator is not None
            repeat(store, each.operator)
            made = [other for other in (reference() for reference in each.operator.outputs) if other is not None]
            present += sum(other.size for other in made)
            most = max(most, present)
            for other in made:
                # Not what was cut loose, whose memory is somebody else's now.
                if other is not version and other.released and other.resident and other.constant is None:
                    passing[id(other)] = other
            done = [*done, *made]
        read.subtract(map(id, _made_of(each)))
        for other in done:
            if not read[id(other)] and passing.pop(id(other), None) is not None:
                other.evict()
                present -= other.size
    store.revived(most, present)


def _to_make(version: Version) -> list[Version]:
    """What is missing for a version, and itself, each after what it is made of."""
    order: list[Version] = []
    seen: set[int] = set()
    todo = [(version, False)]
    while todo:
        each, is_next = todo.pop()
        if is_next:
            order.append(each)
        elif not (each.resident or each.operator is None or id(each) in seen):
            seen.add(id(each))
            todo.append((each, True))
            todo += [(source, False) for source in _made_of(each)]
    return order


def _made_of(version: Version) -> list[Version]:
    """What a version is computed from and operators have made, too."""
    operator = version.operator
    return [] if operator is None else [each for each in operator.sources() if isinstance(each, Version)]


def _content(source: Given | Version) -> torch.UntypedStorage:
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


def cut_loose(store: Store, version: Version) -> None:
    """Keeps a version in memory from now on, so that its operator is not needed for it.

    The version becomes that of a constant for all that was computed from it, and another one takes its place in the
    accounts until its storage dies.
    """
    if version.operator is None:
        return
    store.ledger.note(k.LOCK, version.tensor)
    if not version.resident:
        if store.limited:
            store.consult("lock")
        else:
            revive(store, version)
    storage = version.storage()
    assert storage is not None
    constant = store.constants.cut_loose(storage, version.tensor)
    heir = Version(version.tensor, version.size, None)
    hand_over(version, heir, storage)
    store.know(heir)
    version.constant, version.released = constant, True
    version.operator = version.where = version.held = None
    store.put(heir, storage)


def preserve(store: Store, constant: Given) -> None:
    """To be called before a constant is changed from which something was computed that may be computed again.

    Either its content is copied, or what depends on it is kept in memory from now on: that costs nothing where no
    backward is to come any more, as in an optimiser's step.
    """
    dependents = _dependents(store, constant)
    if any(version.saves for version in dependents):
        _copy_aside(store, constant)
    else:
        for version in dependents:
            cut_loose(store, version)


def _dependents(store: Store, constant: Given) -> list[Version]:
    """What the program can still ask for and might have to be computed again from `constant`."""
    reached: set[int] = set()
    found = []
    for tensor, reference in store.by_tensor.items():
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


def _copy_aside(store: Store, constant: Given) -> None:
    original, size = constant.content, bytes_of(constant.content)
    tensor = store.ledger.add_beside("clone", max(size // 10, 1), [constant.argument], size)
    store.hold(size, "clone")
    with in_earnest(), no_autograd(), no_autocast():
        constant.content = copy = original.clone()
    if constant.tensor is None:
        store.enter(tensor, copy, size, None)
    else:  # the core has computed from it under its old number, so the new content gets the new one
        old = store.versions[id(original)]
        store.enter(tensor, original, size, None)
        store.put(old, copy)
    constant.witness = constant.version = None
