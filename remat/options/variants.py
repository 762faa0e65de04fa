"""Options of compiled blocks: variants of them, which save less and whose backwards compute more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.layout import Option
from remat.measuring.facts import StageFacts
from remat.measuring.gauges import Gauge, Span
from remat.measuring.isolating import as_it_is, cut
from remat.measuring.stage_costs import Sizes, storage_bytes
from remat.options.units import Ends, Run, end_of_run, without_saving
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.stages import Stage, detached
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.meter import Region
from remat.runtime.patching import uncompiled
from remat.runtime.pytree import tensors
from remat.runtime.variants import compiled_for, draws_once, has_variants
from remat.utils.ranks import Ranks

MOST = 5  # variants of a stage that are compiled
_CLOSE = 0.02  # of gradients' norm, where kernels round or add in another order: dropout that is wrong is further off
_FULL = 4  # bytes
_SLIGHT = 0.1  # of what a stage saves: two variants that differ by less leave nothing worth compiling between them


class AlikeBlocks(NamedTuple):
    """Compiled stages that are alike; the first one is measured.

    Attributes:
        stages: their indices.
        budgets: what the variants are compiled for, from the one that saves most.
    """

    stages: list[int]
    budgets: list[float]


def alike_blocks(
    stages: Sequence[Stage], wanted: Iterable[int], draws: Collection[int], saved: Sequence[int]
) -> list[list[int]]:
    """The indices, of those that are `wanted`, of stages that are compiled, grouped by what they do; without those of
    which a variant may draw random numbers anew in its backward. `draws`: those that draw; `saved`: bytes."""
    found: dict[Any, list[int]] = {}
    for index in wanted:
        stage = stages[index - 1]
        compiled = [part for part in stage.parts if has_variants(part)]
        if compiled and (index not in draws or all(map(draws_once, compiled))):
            look = [(repr(module), module.training, *_shapes(module)) for module in stage.modules]
            found.setdefault((*look, saved[index - 1]), []).append(index)
    return [*found.values()]


def _shapes(module: nn.Module) -> list[Any]:
    return [(each.shape, each.dtype, each.requires_grad) for each in (*module.parameters(), *module.buffers())]


class _Seen(NamedTuple):
    """A run of a block, forward and backward.

    Attributes:
        saved_bytes: on the rank with the most.
        rounds: something that it saves is of less than 32 bits, and may be rounded or not where it is made again.
        gradients: of its inputs and parameters; random: generators behind it.
    """

    saved_bytes: int
    rounds: bool
    gradients: list[torch.Tensor | None]
    random: RandomState


class CompilingVisitor:
    """Compiles variants of the first stage of each group, as long as they differ in what they save.

    One whose gradients or random numbers are not those of the block is of no use.

    Attributes:
        found: what is worth measuring.
    """

    def __init__(
        self, stages: Sequence[Stage], groups: Sequence[list[int]], tell: Callable[[int, int], None], ranks: Ranks
    ) -> None:
        self._stages, self._groups = stages, {group[0]: group for group in groups}
        self._tell, self._compiled, self._ranks = tell, 0, ranks
        self.found: list[AlikeBlocks] = []

    def visit(self, index: int, run: Run, given: Sequence[Any], end_of: Ends) -> Any:
        output = without_saving(run, given)
        if index in self._groups:
            first, again = (self._run(None, index, run, given) for _ in range(2))
            exact = not first.rounds and _have_equal_bits(first, again)
            saves, right = {1.0: first.saved_bytes}, {1.0: first.saved_bytes}
            while len(saves) <= MOST:
                budget = _next(saves)
                if budget is None:
                    break
                self._compiled += 1
                self._tell(self._compiled, MOST * len(self._groups))
                seen = self._run(budget, index, run, given)
                saves[budget] = seen.saved_bytes
                if all(self._ranks.all(_is_right(seen, first, exact=exact))):
                    right[budget] = seen.saved_bytes
            budgets = [
                budget
                for budget in sorted(right, reverse=True)
                if all(right[budget] < right[other] for other in right if other > budget)
            ]
            if budgets[1:]:
                self.found.append(AlikeBlocks(self._groups[index], budgets[1:]))
        return output

    def _run(self, budget: float | None, index: int, run: Run, given: Sequence[Any]) -> _Seen:
        stage = self._stages[index - 1]
        random = RandomState(accelerators(stage, given), [*held_by(stage.parts, given), *of_python()])
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with compiled_for(budget), random.again():
            source = cut(detached(given))
            with saved_tensors_hooks(uncompiled(pack), as_it_is):
                output = run(source)
            size = int(max(self._ranks.all(storage_bytes(saved))))
            rounds = any(tensor.is_floating_point() and tensor.element_size() < _FULL for tensor in saved)
            ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
            leaves = [tensor for tensor in (*tensors(source), *stage.parameters()) if tensor.requires_grad]
            gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if ends and leaves:
                back = [end.detach() for end in ends]  # gradients that are not all the same
                gradients = torch.autograd.grad(ends, leaves, back, allow_unused=True)
            return _Seen(size, rounds, [*gradients], random.now())


def _is_right(seen: _Seen, expected: _Seen, *, exact: bool) -> bool:
    """Whether a variant has run as the block itself; `exact`: to the bit, else about."""
    if seen.random != expected.random:
        return False
    if exact or _have_equal_bits(seen, expected):
        return _have_equal_bits(seen, expected)
    pairs = zip(seen.gradients, expected.gradients, strict=True)
    apart = of = 0.0
    for one, other in pairs:
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None:
            apart += float((one.double() - other.double()).square().sum())
            of += float(other.double().square().sum())
    return apart <= _CLOSE**2 * of


def _have_equal_bits(seen: _Seen, expected: _Seen) -> bool:
    return all(
        one is other is None or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(seen.gradients, expected.gradients, strict=True)
    )


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
        following = without_saving(run, given)
        budgets = [None, *self._blocks[index].budgets] if index in self._blocks else []
        for number, budget in enumerate(budgets):
            with compiled_for(budget):
                source = cut(detached(given))
                with self.gauge.span(f"forward {number}", index):
                    output = run(source)
                del source
                end = end_of_run(index, output, end_of)
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
