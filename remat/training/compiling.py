"""`fit(..., compile=True)`: the blocks that a plan is made of, compiled one by one, where that makes them faster."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget
from remat.runtime.calls.places import Places
from remat.runtime.patching import COMPILED, is_compiled, outside_of_compiled
from remat.runtime.sharding import is_sharded
from remat.runtime.variants import offer_variants
from remat.simulation import simulate, store_all_peak
from remat.training.planned import Limit, Planned
from remat.training.setup import Setup
from remat.utils.warn import warn

_SLOWER = 1.25  # times what a block takes as it is written, from which on no limit makes the compiled one worth it
# The compiled calls that are remat's; they refer to their modules.
_made: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class CompiledBlocks:
    """The blocks of a model that remat has compiled for a plan; those of an earlier plan are as written until then.

    Args:
        how: arguments of `torch.compile`.
    """

    def __init__(self, model: nn.Module, how: Mapping[str, Any]) -> None:
        self._model, self._how = model, how
        self._before = {module: module.__dict__.get(COMPILED) for module in model.modules()}
        self._compiled: dict[nn.Module, Any] = {}
        for module, call in self._before.items():
            made = _made.get(module)
            if call is not None and made is not None and made() is call:
                del module.__dict__[COMPILED]

    def choose(self, sample: Any, setup: Setup, limit: Callable[[Planned], Limit], *, progress: bool) -> Planned:
        """Plans for the model as it is written and for its blocks compiled, and leaves it in the way that is faster.

        Args:
            limit: as `fit` is given it; of a share, that of the model as it is written.

        Returns:
            What was measured of that way, with its limit.

        Raises:
            NoChain: there are no blocks.
        """
        from torch._dynamo.exc import TorchDynamoException

        how: Any = {"progress": progress, "again": False}
        written = Planned(self._model, setup)
        asked = limit(written)
        written.measure(sample, **how)
        written.limit = resolve_budget(asked, store_all_peak(written.measured))
        took = dict(_blocks_of(self._model, written.measured))
        self._compile([*took])
        try:
            quickly = Planned(self._model, replace(setup, options=False, host_limit=None))
            quickly.measure(sample, **how)
            takes = dict(_blocks_of(self._model, quickly.measured, compiled=True))
            self._leave([block for block in took if takes.get(block, math.inf) > _SLOWER * took[block]])
            if self._compiled:
                compiled = Planned(self._model, setup, written.limit)
                compiled.measure(sample, **how)
                if _seconds(compiled) < _seconds(written):
                    return compiled
        except TorchDynamoException as error:
            warn(f"compile=True: the compiler cannot compile blocks of this model, which stay as written: {error}")
        self.removed()
        return written

    def _compile(self, blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            block.compile(**self._how)
        offer_variants(self._model)
        self._compiled = {block: block.__dict__[COMPILED] for block in blocks}
        _made.update({block: weakref.ref(call) for block, call in self._compiled.items()})

    def _leave(self, blocks: Iterable[nn.Module]) -> None:
        """These are as written, unless somebody has compiled them since."""
        for block in blocks:
            call = self._compiled.pop(block)
            if block.__dict__.get(COMPILED) is call:
                del block.__dict__[COMPILED]

    def give_up(self) -> None:
        """All blocks are as they were before."""
        self.removed()
        for module, call in self._before.items():
            if call is not None:
                module.__dict__[COMPILED] = call

    def removed(self) -> None:
        """The plan is gone."""
        self._leave([*self._compiled])


def _seconds(planned: Planned) -> float:
    """Of a step within the limit; without end where nothing fits."""
    assert planned.limit is not None
    try:
        schedule = planned.solver("fastest").solve(planned.measured, planned.limit)
    except InfeasibleBudget:
        return math.inf
    return simulate(planned.measured, schedule).seconds


def _blocks_of(model: nn.Module, chain: Chain, *, compiled: bool = False) -> Iterator[tuple[nn.Module, float]]:
    """The modules of stages that the compiler may see, with the seconds of their stages; none in shards, which FSDP
    gathers in hooks that would be compiled with them."""
    places = Places(model, chain.layout)
    open_ones = [
        module
        for module in outside_of_compiled(model)
        if is_compiled(module) == compiled and any(module.children()) and not _is_in_shards(module)
    ]
    for index, stage in enumerate(places.stages):
        if places.fixed[index]:
            continue
        seconds = chain.fwd_seconds[index] + chain.bwd_seconds[index]
        for module in stage.modules:
            if module in open_ones:
                yield module, seconds


def _is_in_shards(module: nn.Module) -> bool:
    return any(map(is_sharded, module.modules()))
