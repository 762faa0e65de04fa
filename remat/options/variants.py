"""Options of compiled blocks: variants of them, which save less and whose backwards compute more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.layout import Option
from remat.measuring.cuts import cut
from remat.measuring.facts import StageFacts
from remat.measuring.gauges import Gauge, Span
from remat.measuring.isolating import no_backward, saving_nothing
from remat.measuring.stage_costs import Sizes, storage_bytes
from remat.options.units import Ends, Run
from remat.runtime.calls.stages import Stage, detached
from remat.runtime.meter import Region
from remat.runtime.patching import uncompiled
from remat.runtime.pytree import tensors
from remat.runtime.variants import compiled_for, has_variants
from remat.utils.ranks import Ranks

MOST = 5  # variants of a stage that are compiled
_SLIGHT = 0.1  # of what a stage saves: two variants that differ by less leave nothing worth compiling between them


class AlikeBlocks(NamedTuple):
    """Compiled stages that are alike; the first one is measured.

    Attributes:
        stages: their indices.
        budgets: what the variants are compiled for, from the one that saves most.
    """

    stages: list[int]
    budgets: list[float]


def alike_blocks(stages: Sequence[Stage], wanted: Iterable[int], saved: Sequence[int]) -> list[list[int]]:
    """The indices, of those that are `wanted`, of stages that are compiled, grouped by what they do; `saved`: bytes."""
    found: dict[Any, list[int]] = {}
    for index in wanted:
        stage = stages[index - 1]
        if any(map(has_variants, stage.parts)):
            look = [(repr(module), module.training, *_shapes(module)) for module in stage.modules]
            found.setdefault((*look, saved[index - 1]), []).append(index)
    return [*found.values()]


def _shapes(module: nn.Module) -> list[Any]:
    return [(each.shape, each.dtype, each.requires_grad) for each in (*module.parameters(), *module.buffers())]


class CompilingVisitor:
    """Compiles variants of the first stage of each group, as long as they differ in what they save.

    Attributes:
        found: what is worth measuring.
    """

    def __init__(self, groups: Sequence[list[int]], tell: Callable[[int, int], None], ranks: Ranks) -> None:
        self._groups = {group[0]: group for group in groups}
        self._tell, self._compiled, self._ranks = tell, 0, ranks
        self.found: list[AlikeBlocks] = []

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        output = _without_saving(run, given)
        if index in self._groups:
            saves = {1.0: self._saves(None, index, run, given, end_of)}
            while len(saves) <= MOST:
                budget = _next(saves)
                if budget is None:
                    break
                self._compiled += 1
                self._tell(self._compiled, MOST * len(self._groups))
                saves[budget] = self._saves(budget, index, run, given, end_of)
            budgets = [
                budget
                for budget in sorted(saves, reverse=True)
                if all(saves[budget] < saves[other] for other in saves if other > budget)
            ]
            if budgets[1:]:
                self.found.append(AlikeBlocks(self._groups[index], budgets[1:]))
        return output

    def _saves(self, budget: float | None, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> int:
        """Bytes, on the rank with the most; forward and backward run, so that both are compiled."""
        with compiled_for(budget):
            saved: list[torch.Tensor] = []
            with saved_tensors_hooks(uncompiled(saved.append), no_backward):
                run(cut(detached(given)))
            source = cut(detached(given))
            end = _end(index, run(source), end_of)
            if end is not None:
                end.backward()
            return int(max(self._ranks.all(storage_bytes(saved))))


def _next(saves: Mapping[float, int]) -> float | None:
    """The budget to try next: the least one, then the middle of the two that differ most in what they save."""
    if len(saves) == 1:
        return 0.0
    known = sorted(saves)
    gap, middle = max((saves[high] - saves[low], (low + high) / 2) for low, high in pairwise(known))
    return middle if gap > _SLIGHT * saves[1.0] else None


class VariantsVisitor:
    """Measures the variants of the first stage of each group, and the stage as it was compiled, as number 0."""

    def __init__(self, blocks: Sequence[AlikeBlocks]) -> None:
        self._blocks = {each.stages[0]: each for each in blocks}
        self.gauge: Gauge | None = None

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        assert self.gauge is not None
        following = _without_saving(run, given)
        budgets = [None, *self._blocks[index].budgets] if index in self._blocks else []
        for number, budget in enumerate(budgets):
            with compiled_for(budget):
                source = cut(detached(given))
                with self.gauge.span(f"forward {number}", index):
                    output = run(source)
                del source
                end = _end(index, output, end_of)
                del output
                with self.gauge.span(f"backward {number}", index):
                    if end is not None:
                        end.backward()
                del end
        return following


class MeasuredVariants(NamedTuple):
    """What was measured of them: bytes, and the seconds of each sweep."""

    blocks: list[AlikeBlocks]
    regions: Mapping[Span, Region]
    seconds: Sequence[Mapping[Span, float]]

    def options(self, block: AlikeBlocks, size: Sizes, facts: StageFacts) -> list[Option]:
        """The terms of its variants, as of a stage of this size; without those that another one beats in both."""
        found: list[Option] = []
        for number, budget in enumerate(block.budgets, start=1):
            option = self._option(number, block.stages[0], size, facts)
            found.append(replace(option, variant=budget))
        return [
            each
            for position, each in enumerate(found)
            if all(
                each.saved_bytes < other.saved_bytes or each.replay_seconds < other.replay_seconds
                for other in (*found[:position], *found[position + 1 :])
            )
        ]

    def _option(self, number: int, measured: int, size: Sizes, facts: StageFacts) -> Option:
        boundary = facts.boundary
        assert boundary is not None

        def of(what: str, number: int) -> Region:
            return self.regions[Span(f"{what} {number}", measured)]

        def beyond(what: str, number: int) -> tuple[int, int]:
            """Above the level before the forward: at the peak, and at the end."""
            start = of("forward", number).start_bytes
            return of(what, number).peak_bytes - start, of(what, number).end_bytes - start

        (peak_0, end_0), (peak, end) = beyond("forward", 0), beyond("forward", number)
        saved = max(size.saved - max(end_0, boundary.act) + max(end, boundary.act), 0)
        highest = size.saved + size.save_overhead + peak - peak_0
        backward = size.saved + size.bwd_extra + beyond("backward", number)[0] - beyond("backward", 0)[0]
        return Option(
            saved_bytes=saved,
            save_overhead_bytes=max(highest - saved, 0),
            bwd_overhead_bytes=backward - saved,
            replay_seconds=max(self._takes(number, measured) - self._takes(0, measured), 0.0),
        )

    def _takes(self, number: int, measured: int) -> float:
        spans = [Span(f"{what} {number}", measured) for what in ("forward", "backward")]
        return statistics.median(sum(sweep[span] for span in spans) for sweep in self.seconds)


def _end(index: int, output: Any, end_of: Ends) -> torch.Tensor | None:
    ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
    return end_of(index, ends) if ends else None


def _without_saving(run: Run, given: Sequence[Any]) -> Any:
    source = cut(detached(given))
    with saving_nothing():
        return detached(run(source))
