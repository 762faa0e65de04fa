"""One DTR block, from its beginning to its end; either may be interrupted at any place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode

from remat.errors import OutOfBudget, Thrashing
from remat.formatting import format_bytes
from remat.report import Report
from remat.runtime.accelerator import accelerator_in_use, level_of, most_from_now_on
from remat.runtime.calls.saved import Packed, changed, unpack
from remat.runtime.dtr import _kernels as k
from remat.runtime.fakes import alias, in_earnest
from remat.runtime.live.choosing import Choice, choose
from remat.runtime.live.dispatcher import Dispatcher
from remat.runtime.live.nesting import claim, refuse_nested, release
from remat.runtime.live.outcomes import Advice, Stopwatch, advice_on, outcome_of, report_of, warn_of_more
from remat.runtime.live.raw_access import Guard, guard, unguard
from remat.runtime.live.repeating import cut_loose, preserve, revive
from remat.runtime.live.settings import Settings
from remat.runtime.live.sites import site_at
from remat.runtime.live.store import Store, living, unsafe
from remat.runtime.live.units.choosing import Observation
from remat.runtime.live.versions import SavedVersion, Version, no_autocast, no_autograd, on_storage
from remat.runtime.pytree import storage_of
from remat.runtime.raw_memory import Access

_AT_THE_END = "the end of the block, where all tensors of the program are in memory, as gradients that were made in it"


class SavingHooks:
    """The hooks that `torch.autograd.graph.saved_tensors_hooks` takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.was_asked = False  # for anything that was saved, as backwards do

    def pack(self, tensor: Tensor) -> SavedVersion | Packed:
        """What autograd is to keep for `tensor`."""
        if type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided:
            storage = storage_of(tensor)
            version = self._store.versions.get(id(storage))
            if version is not None and version.operator is not None:
                version.saves += 1
                self._store.numbers.saves += 1
                if version.resident and version.held is None:
                    version.held = storage
                return SavedVersion(tensor, version, self._store.dropped)
        # A leaf can be kept as it is; another might own, through its graph, the node that keeps it.
        return tensor if tensor.is_leaf else alias(tensor), None if tensor.is_inference() else tensor._version

    def unpack(self, saved: SavedVersion | Packed) -> Tensor:
        """The tensor again."""
        self.was_asked = True
        if not isinstance(saved, SavedVersion):
            return unpack(saved)
        if saved.witness._version != saved.changes:
            raise changed(saved.witness, saved.changes, saved.view[1])
        version = saved.handle.version
        if not version.resident:
            self._store.access(version, "backward")
        storage = self._store.lend(version)
        with in_earnest(), no_autograd(), no_autocast():
            return on_storage(saved.view, storage)


class Block(Guard):
    """A block of a program that is kept within a budget.

    Args:
        observes: whether units are to be found for the next blocks there; root: of which module a call is under way.
    """

    def __init__(self, settings: Settings, *, observes: bool = False, root: nn.Module | None = None) -> None:
        self.settings = settings
        here = accelerator_in_use()
        self.ledger = settings.ledger()
        self._store, self._most = Store(self.ledger, settings.limits(), level_of(here)), most_from_now_on(here)
        self._mode = Dispatcher(self._store, by_model=settings.by_model)
        self._saving = SavingHooks(self._store)
        self._observation = Observation(self.ledger, settings.site.current_ways(), root) if observes else None
        self._store.limits.whole = site_at(settings.place).done  # whatever the budget was
        self._choice: Choice | None = None
        self._depth = 0  # of the stack of modes below this one
        self._materialised = False
        self.outcome = "pass"
        self.took = Stopwatch()

    def enter(self) -> None:
        """Begins; leaves nothing behind where that fails or is interrupted."""
        refuse_nested()
        self._depth = _len_torch_dispatch_stack()
        try:
            claim(self._others_take)
            guard(self)
            torch._C._autograd._push_saved_tensors_default_hooks(self._saving.pack, self._saving.unpack)
            self._mode.__enter__()
            if self._observation is not None:
                self._observation.begin()
            self.took.start()
        except BaseException:
            self._materialised = True  # there is nothing yet
            self._leave()
            raise

    def exit(self, error: BaseException | None) -> None:
        """Ends: all that the program still holds is in memory, and usable."""
        try:
            if error is not None:
                self.outcome = outcome_of(error)
                self._store.limited = False
            self._leave()
        except BaseException:
            self._store.limited = False
            self._leave()  # what was interrupted, or could not be done within the budget
            raise
        by_calls = False  # as the next blocks here run, which choose for themselves
        if self._observation is not None and self.outcome != "error":  # by calls it may fit where it did not
            ways = self._observation.ways(self.ledger.budget)
            by_calls = ways is not None and bool(ways.modules)
            if ways is not None and (by_calls or self._saving.was_asked):  # a forward alone does not tell of none
                self.settings.site.add_ways(ways)
        self._choose(by_calls=by_calls)
        warn_of_more(self._store.limits, self.outcome, self.settings.budget)

    def _others_take(self, more: int) -> None:
        """So many bytes are in use beside what the ledger knows of."""
        self.ledger.peak = max(self.ledger.peak, self.ledger.memory + more)
        self._store.limits.others_took(self.ledger.memory + more)

    def _leave(self) -> None:
        """Undoes what `enter` did. Each part may have been done already, or half of it."""
        try:
            if self._observation is not None:
                self._observation.end()
            self._pop_mode()
            self._pop_hooks()
            self._materialise()
        finally:
            self._store.limited = False
            try:
                for version in living(self._store):
                    if not version.resident:
                        revive(self._store, version)
                for version in unsafe(self._store):
                    revive(self._store, version)
                self._count()
            finally:  # even where the device has no memory left for that, the next block can run
                self._store.close()
                unguard(self)
                release()
                self.took.stop()

    def _pop_hooks(self) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and getattr(top[0], "__self__", None) is self._saving:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pop_mode(self) -> None:
        if _len_torch_dispatch_stack() > self._depth:
            if self._mode.old_dispatch_mode_flags:
                self._mode.__exit__(None, None, None)
            else:  # that was begun, and interrupted
                _pop_mode()

    def _materialise(self) -> None:
        """Has in memory all that the program still holds, within the budget if that is possible."""
        store = self._store
        if self._materialised:
            return
        self._materialised = True
        store.settle()
        if not store.limited:
            return
        self.ledger.consult()  # decides nothing, but its accounts are then complete
        held = [version for version in living(store) if version.operator is not None]
        for version in held:
            if version.resident:
                self.ledger.note(k.LOCK, version.tensor)
        try:
            for version in held:
                if not version.resident:
                    cut_loose(store, version)
        except OutOfBudget:
            self.outcome = "over"
        except Thrashing:
            self.outcome = "thrash"

    def _count(self) -> None:
        """Notes what the program holds, which is in memory whatever the budget."""
        self._store.limits.look_back(self._most())
        held = max(sum(version.size for version in living(self._store)), self._store.most_revived)
        self.ledger.peak = max(self.ledger.peak, held)
        if held > self.ledger.budget:
            self._store.limits.went_over(_AT_THE_END, held)
            if self.outcome == "pass":
                self.outcome = "over"

    def _choose(self, *, by_calls: bool) -> None:
        """Finds the heuristic for the next blocks here, once, and again where the one that was found thrashes."""
        core, site = self.ledger.core, self.settings.site
        thrashed = self._store.limits.thrashes or self.outcome == "thrash"
        if self.outcome in ("pass", "over"):
            site_at(self.settings.place).done = self.ledger.program()
        enough = thrashed or (self.outcome in ("pass", "over") and not site.heuristic)  # else only a part was run
        if self.settings.chooses and core.scalar(k.EVICTIONS) and enough and not by_calls:
            if thrashed:
                site.thrashed[self.settings.chooses] = self.ledger.overhead(gave_up=self.outcome == "thrash")
            self._choice = choose(self.ledger, site.thrashed, by_model=self.settings.by_model)
            site.heuristic = self._choice.name if self._choice is not None else site.heuristic

    def advice(self) -> Advice:
        following = ""
        if self._choice is not None and self._choice.overhead is not None:
            name, overhead = self._choice
            following = f"uses {name}: predicted {overhead:.2f} x the program's own time"
        return advice_on(self.ledger, self._store.limits.reserved_bytes, self.took.seconds, following)

    def report(self, strategy: str) -> Report:
        """What it cost; see `DTR.report`."""
        limits = self._store.limits
        over = limits.over
        more = 0 if over is None else over.peak_bytes - self.ledger.budget
        notes = [] if over is None else [f"over the budget by {format_bytes(more)} at {over.where}"]
        how: Any = {
            "learns": self._observation is not None or self._mode.carrying_out.first_calls > 0,
            "by_model": self.settings.by_model,
        }
        budget = self.settings.budget
        return report_of(strategy, self.outcome, self.ledger, limits, budget, self.took.seconds, notes, **how)

    def touched(self, tensor: Tensor, access: Access) -> None:
        """Has the memory of a tensor there before it is touched without an operator."""
        if tensor.layout != torch.strided:
            return
        store = self._store
        with store.lock:
            storage = storage_of(tensor)
            version = store.versions.get(id(storage))
            if version is not None and version.operator is not None:
                if not version.resident:
                    store.access(version, "memory of a tensor")
                if access is not Access.READS:
                    cut_loose(store, version)
            if access in (Access.WRITES, Access.SHARES):
                self._preserve(tensor, storage)

    def take_state(self, get_state: Callable[[], Tensor]) -> Tensor:
        """The state of PyTorch's generator, counted as long as the program holds it."""
        with self._store.lock, in_earnest():
            return self._mode.take_state(get_state)

    def _preserve(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """What was computed from a tensor that is about to change without an operator must not need it any more."""
        store = self._store
        known = store.versions.get(id(storage))
        brought = store.constants.known.get(id(storage))
        if isinstance(known, Version) or brought is not None:
            constant, fresh = store.constants.of(tensor, storage, known)
            if not fresh:
                preserve(store, constant)
            store.constants.forget(storage)
