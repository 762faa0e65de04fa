"""`fit(..., compile=True)`: the blocks that a plan is made of, compiled one by one, where that makes them faster."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from remat.chain import Chain
from remat.runtime.calls.places import Places
from remat.runtime.patching import COMPILED, is_compiled, outside_of_compiled
from remat.runtime.variants import offer_variants
from remat.simulation import store_all_peak
from remat.training.planned import Planned
from remat.training.setup import Setup
from remat.utils.warn import warn

_FASTER = 0.98  # of the seconds that a block takes as it is written, what the compiled one has to take
_made: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # the compiled calls that are remat's


class CompiledBlocks:
    """The blocks of a model that remat has compiled for a plan; those of an earlier plan are as written until then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {module: module.__dict__.get(COMPILED) for module in model.modules()}
        self._compiled: list[nn.Module] = []
        for module, call in self._before.items():
            if call is not None and _made.get(module) is call:
                del module.__dict__[COMPILED]

    def choose(self, sample: Any, setup: Setup, *, progress: bool) -> int:
        """Measures the blocks as they are written and compiled, and leaves each in the faster way.

        Returns:
            The peak of a step of the model as it is written, to which limits refer that are a share.

        Raises:
            NoChain: there are none.
        """
        from torch._dynamo.exc import TorchDynamoException

        whole = replace(setup, options=False, host_limit=None)
        planned = Planned(self._model, whole)
        planned.measure(sample, progress=progress, again=False)
        written = planned.measured
        blocks = dict(_blocks_of(self._model, written))
        for module in blocks:
            module.compile()
        self._compiled = [*blocks]
        offer_variants(self._model)
        _made.update({module: module.__dict__[COMPILED] for module in blocks})
        try:
            planned.measure(sample, progress=progress, again=False)
        except TorchDynamoException as error:
            self._leave(self._compiled)
            warn(f"compile=True: the compiler cannot compile blocks of this model, which stay as written: {error}")
            return store_all_peak(written)
        compiled = dict(_blocks_of(self._model, planned.measured, compiled=True))
        self._leave([block for block, took in blocks.items() if compiled.get(block, took) >= _FASTER * took])
        return store_all_peak(written)

    def _leave(self, blocks: list[nn.Module]) -> None:
        """These are as written."""
        for block in blocks:
            block.__dict__.pop(COMPILED, None)
            _made.pop(block, None)
        self._compiled = [block for block in self._compiled if block not in blocks]

    def give_up(self) -> None:
        """All blocks are as they were before."""
        self._leave(self._compiled)
        for module, call in self._before.items():
            if call is not None:
                module.__dict__[COMPILED] = call

    def removed(self) -> None:
        """The plan is gone; those that another one has compiled since stay."""
        self._leave([block for block in self._compiled if _made.get(block) is block.__dict__.get(COMPILED)])

    def __str__(self) -> str:
        return f"{len(self._compiled)} blocks compiled"


def _blocks_of(model: nn.Module, chain: Chain, *, compiled: bool = False) -> Iterator[tuple[nn.Module, float]]:
    """The modules of stages that the compiler may see, with the seconds of their stages."""
    places = Places(model, chain.layout)
    open_ones = outside_of_compiled(model)
    for index, stage in enumerate(places.stages):
        if places.fixed[index]:
            continue
        seconds = chain.fwd_seconds[index] + chain.bwd_seconds[index]
        for module in stage.modules:
            if module in open_ones and is_compiled(module) == compiled and any(module.children()):
                yield module, seconds
