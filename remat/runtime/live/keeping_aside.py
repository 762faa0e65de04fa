"""What must not depend on being computed again any more: it stays in memory, or what it is computed from is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.runtime.accelerator import bytes_of
from remat.runtime.dtr import _kernels as k
from remat.runtime.fakes import in_earnest
from remat.runtime.live.repeating import revive
from remat.runtime.live.versions import Given, Version, hand_over, no_autocast, no_autograd

if TYPE_CHECKING:
    from remat.runtime.live.store import Store


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
    (tensor,) = store.ledger.add("clone", max(size // 10, 1), [constant.argument], [size])
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
