"""Carries out the calls of operators within the budget: makes room, runs them, and writes down what they have made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remat.runtime.accelerator import bytes_of
from remat.runtime.calls.environment import state_bytes
from remat.runtime.dtr import _kernels as k
from remat.runtime.generators import RandomState
from remat.runtime.live.costs import SHARED, Observed, OperatorFacts, observe, working_device
from remat.runtime.live.made import can_be_evicted, storages_made
from remat.runtime.live.operator_calls import Action, OperatorCall, Pending, random_before
from remat.runtime.live.repeating import cut_loose, revive
from remat.runtime.live.store import Store
from remat.runtime.live.versions import OperatorRun, Version, hand_over
from remat.runtime.operators import tensors_in

STATE_BYTES = state_bytes()


class CarryingOut:
    """Carries out the calls of operators of one block.

    Args:
        store: of the block's tensors.
        by_model: whether times are taken from the cost model.

    Attributes:
        first_calls: how many calls were the first of their kind.
    """

    def __init__(self, store: Store, *, by_model: bool) -> None:
        self.store, self.ledger, self.by_model = store, store.ledger, by_model
        self.first_calls = 0

    def run(self, call: OperatorCall, action: Action) -> Any:
        """Makes room for a call, runs it and writes it down."""
        ledger, store = self.ledger, self.store
        traits, facts = call.traits, call.facts
        changed = action.changed
        scratch = facts.working_bytes + (STATE_BYTES if traits.random else 0) + action.discarded_bytes
        pending = Pending(
            traits.label,
            facts.model_nanoseconds if self.by_model else facts.nanoseconds,
            [source.argument for source in call.sources],
            scratch,
        )
        pending.changed = tuple([version.tensor for version, _ in changed])
        pending.overwritten = sum(version.size for version, _ in changed)
        if call.missing or ledger.memory + facts.total_bytes + scratch > ledger.ceiling:
            self._make_room(pending, call, changed)
        random = random_before(call) if traits.random and action.repeatable else None
        result, peak = self._result(call, pending, changed, random)
        made = storages_made(result, call.sources, self.store.versions)
        if action.repeatable and not can_be_evicted(result, made):
            for source in call.sources:  # it may be part of what was made
                if isinstance(source, Version):
                    cut_loose(store, source)
            action = replace(action, repeatable=False)
        sizes = [bytes_of(storage) for storage in made]
        if tuple(sizes) != facts.output_bytes:
            if pending.tensors is None:  # else what room was made for in vain is reported to the core below
                pending.scratch += max(facts.total_bytes - sum(sizes), 0)
            facts.expect(sizes)
        ledger.ceiling -= facts.slack_bytes
        plainly = facts.settled and facts.plain and not facts.slack_bytes
        facts.simple = plainly and len(made) == 1 and isinstance(result, Tensor)
        if peak is not None:
            self._learned(traits.label, facts, peak, ledger.memory - (sum(sizes) if pending.tensors is not None else 0))
            SHARED.learn_scratch(facts)
        sizes += [bytes_of(storage) for _, storage in changed]
        tensors = self._written_down(pending, sizes)
        operator = None
        if action.repeatable:
            operator = OperatorRun(call.function, call.template, call.surroundings, torch.is_grad_enabled())
            operator.kwargs = call.names
            if random is not None and (not traits.foreign or random != random.now()):
                operator.random = random
            operator.changes = [*(version for version, _ in changed), *action.discarded]
        self._enter(operator, tensors, made, changed)
        return result

    def _make_room(
        self, pending: Pending, call: OperatorCall, changed: list[tuple[Version, torch.UntypedStorage]]
    ) -> None:
        """Has the inputs of a call in memory, and room for its outputs."""
        if not self.store.limited:
            for source in call.sources:
                if isinstance(source, Version):
                    revive(self.store, source)
            return
        self.store.unseen.look(self.ledger)
        sizes = [*call.facts.output_bytes, *(version.size for version, _ in changed)]
        pending.tensors = self.ledger.add(
            *(pending.label, pending.nanoseconds, pending.arguments, sizes),
            *(pending.scratch, pending.overwritten, pending.changed),
        )
        try:
            self.store.consult(pending.label, tensors_in([*call.args, *call.kwargs.values()]))
        except BaseException:
            self._take_back(pending, resident=False)
            raise

    def _result(
        self,
        call: OperatorCall,
        pending: Pending,
        changed: list[tuple[Version, torch.UntypedStorage]],
        random: RandomState | None,
    ) -> Observed:
        """Runs a call; again where the device has no memory left for it and others can give way.

        Args:
            random: what it draws from, as it is before.
        """
        facts, ledger, function, args, kwargs = call.facts, self.ledger, call.function, call.args, call.kwargs
        while True:
            try:
                if facts.settled:
                    return Observed(function(*args, **kwargs), None)
                device = working_device(tensors_in([*args, *kwargs.values()]), kwargs)
                found = observe(facts, function, args, kwargs, device)
                if found.peak_bytes is None and not facts.measured:
                    taken = ledger.memory + facts.total_bytes
                    self.store.limits.not_measured(call.traits.label, taken, ledger.budget)
                return found
            except BaseException as error:
                self._take_back(pending, resident=True)
                again = isinstance(error, torch.OutOfMemoryError) and self.store.limited
                if not again or not call.traits.may_run_twice or (call.traits.random and random is None):
                    raise
                if random is not None:
                    random.restore()
                ledger.stay_below(ledger.memory + facts.total_bytes + pending.scratch)
                self._make_room(pending, call, changed)

    def _take_back(self, pending: Pending, *, resident: bool) -> None:
        """What was announced did not come to be."""
        for tensor in pending.tensors or ():
            self.ledger.note(k.RELEASE, tensor)
            if resident:
                self.ledger.memory -= self.ledger.graph.sizes[tensor]

    def _learned(self, label: str, facts: OperatorFacts, peak: int, memory: int) -> None:
        """Notes what the first call of an operator needed, which no room was made for."""
        facts.took(peak)
        self.first_calls += 1
        self.ledger.peak = max(self.ledger.peak, memory + peak)
        self.store.limits.went_over(f"the first call of {label}, with unknown scratch memory", memory + peak)

    def _written_down(self, pending: Pending, sizes: list[int]) -> range:
        """The tensors of what a call has made, in the ledger with their true sizes."""
        ledger = self.ledger
        if pending.tensors is not None:
            known = [ledger.graph.sizes[tensor] for tensor in pending.tensors]
            if len(sizes) == len(known) and all(a <= b for a, b in zip(sizes, known, strict=True)):
                for tensor, size, before in zip(pending.tensors, sizes, known, strict=True):
                    if size < before:
                        ledger.core.correct(tensor, size)
                        ledger.memory -= before - size
                return pending.tensors
            if not sizes and known == [0]:
                return pending.tensors
            self._take_back(pending, resident=True)
        tensors = ledger.add(
            *(pending.label, pending.nanoseconds, pending.arguments, sizes),
            *(pending.scratch, pending.overwritten, pending.changed),
        )
        memory = ledger.memory + sum(sizes)
        ledger.peak = max(ledger.peak, memory + pending.scratch - pending.overwritten)
        if memory - pending.overwritten > ledger.budget and self.store.limited:  # more than was expected
            self.store.consult(pending.label)
        else:
            ledger.memory = memory
        return tensors

    def _enter(
        self,
        operator: OperatorRun | None,
        tensors: range,
        made: list[torch.UntypedStorage],
        changed: list[tuple[Version, torch.UntypedStorage]],
    ) -> None:
        """Makes the versions of a call's outputs; those of changed storages take the place of the old ones."""
        store = self.store
        for tensor, storage in zip(tensors, made, strict=False):
            store.enter(tensor, storage, bytes_of(storage), operator)
        for tensor, (version, storage) in zip(tensors[len(made) :], changed, strict=False):
            hand_over(version, store.enter(tensor, storage, bytes_of(storage), operator), storage)
            version.where = version.held = None
            store.release(version)
        if not made and not changed:
            self.ledger.note(k.RELEASE, tensors[0])
