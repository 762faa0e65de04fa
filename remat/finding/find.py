"""`find_chain`: the chains of any model, found by running it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.errors import NoChain, UnsupportedModel
from remat.finding.found import MOST_OF_IT, FoundChain, FoundStage
from remat.finding.recording import ModuleCall, Recording, record
from remat.finding.selecting import Candidate, Selector
from remat.measuring.isolating import saving_nothing
from remat.measuring.preserving import preserved
from remat.measuring.work import warn_of_data
from remat.runtime.accelerator import device_of
from remat.runtime.caches import caches_off, configs_with_caches, refuse_checkpointing, switches_of
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.stages import Stage
from remat.runtime.checks import check_model, check_sample, refuse_torchscript
from remat.runtime.logits import logits_layer
from remat.runtime.meter import instruments
from remat.runtime.patching import Forward, blocks_as_written, intercepted, outside_of_compiled, refuse_compiled
from remat.runtime.planned.patched_forward import unpatched
from remat.runtime.pytree import Arguments, arguments

SMALL = 0.05  # share of the upper quartile of work under which a stage is fused with its neighbour
_MINOR = 0.25  # the same, if autograd saves nothing between the two
_SPARED = 0.05  # trimming the ends of a run may lose at most this share of the memory that the run can free
_SLIGHT = 0.01  # an end is trimmed only if it does little work, or can free less than this share of that memory
_LOGITS = 0.1  # share of the model's memory from which on logits are named
_SHOWN = 8  # calls outside the stages that are listed by name


def find_chain(
    model: nn.Module, sample: Any, *, stages: Sequence[str | nn.Module] | None = None, small: float = SMALL
) -> FoundChain:
    """Finds the chains of `model`: runs of module calls that each work on the output of the one before.

    The model runs forward twice, once recorded and once timed, and saves nothing for a backward. It is left as found.
    A call is replaced by the units inside it if no tensor bypasses them except their activations and tensors only they
    use: so a transformer gives its blocks, while a residual connection inside a block keeps the block whole. A call
    with a large part of the memory is cut all the same, if its units then need less. What lies outside the stages is
    stored, as in plain PyTorch, when the model trains by a plan.

    Args:
        model: any module, in the mode (train or eval) it will be used in.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        stages: names or modules to take for the stages instead; one that holds others (a ModuleList, an
            nn.Sequential) stands for these.
        small: units whose forward has less to do than this share of the upper quartile (in bytes moved and operations)
            are fused with their neighbour.

    Raises:
        NoChain: there is none. The message says why.
        UnsupportedModel: `stages` do not form one.
    """
    check_model(model)
    refuse_torchscript(model)
    check_sample(sample)
    with _untouched(model, sample), unpatched(model), caches_off(configs_with_caches(model.modules())):
        return locate(model, arguments(sample), stages=stages, small=small)


def locate(
    model: nn.Module, sample: Arguments, *, stages: Sequence[str | nn.Module] | None = None, small: float = SMALL
) -> FoundChain:
    """`find_chain` on a call of the model; changes buffers and random numbers."""
    refuse_checkpointing(switches_of(model))
    refuse_compiled(model)
    written = record(model, sample)
    selector = Selector(written)
    units = selector.choose() if stages is None else _chosen(model, selector, stages)
    if not units:
        raise NoChain(_no_chain(model, selector))
    if stages is None:
        units = _fused(selector, _trimmed(selector, units, small), small)
    warn_of_data({call.name: str(call.looks) for call in written.calls() if _takes_by_data(call, units)})
    seconds, total = _timed(model, sample, units)
    follows = [False, *(not selector.obstacle(one, other) for one, other in itertools.pairwise(units))]
    return FoundChain(
        model=type(model).__name__,
        stages=tuple(
            FoundStage(tuple(call.name for call in unit.calls), linked, selector.covered_bytes([unit]), spent)
            for unit, linked, spent in zip(units, follows, seconds, strict=True)
        ),
        outside=_outside(written, units),
        memory_share=selector.covered_bytes(units) / max(written.saved_bytes, 1),
        time_share=min(sum(seconds) / total, 1.0) if total else 1.0,
        aside=_aside(written, units),
        uncalled=_uncalled(model, written),
        skips=tuple(selector.skips(units)),
        crossing=_crossing(selector, units),
        logits=_logits(model, written, units),
    )


def _logits(model: nn.Module, written: Recording, units: Sequence[Candidate]) -> tuple[str, int]:
    """The layer outside of the units that computes logits, and their bytes, where these are many."""
    layer = logits_layer(model)
    for call in written.calls():
        if call.module is layer and call.returned and not call.uncomputed and not any(unit.has(call) for unit in units):
            size = written.storages[call.returned[0].storage].size
            if size > _LOGITS * written.saved_bytes:
                return call.name, size
    return "", 0


def _crossing(selector: Selector, units: Sequence[Candidate]) -> str:
    largest = max(units, key=lambda unit: unit.saved_bytes)
    if len(largest.calls) > 1 or largest.saved_bytes <= MOST_OF_IT * selector.record.saved_bytes:
        return ""
    return selector.crossing(largest.calls[0])


def _takes_by_data(call: ModuleCall, units: Sequence[Candidate]) -> bool:
    """Whether the call's memory may depend on data; outside the stages only data-dependent shapes count."""
    if call.looks is None:
        return False
    return torch.Tag.dynamic_output_shape in call.looks.tags or any(unit.has(call) for unit in units)


@contextmanager
def _untouched(model: nn.Module, sample: Any) -> Iterator[None]:
    devices = accelerators(Stage([model], "model"), sample)
    with preserved([model], devices, sample):
        yield


def _no_chain(model: nn.Module, selector: Selector) -> str:
    reasons = [
        reason
        for call in selector.record.root.children
        if call.saved_bytes > 0 and (reason := selector.why_not_again(Candidate((call,))))
    ] or [selector.crossing(selector.record.root)]
    why = f" ({reasons[0]})" if reasons[0] else ""
    return (
        f"no chain of module calls was found in this {type(model).__name__}{why}: a plan needs modules that pass one "
        "activation to each other and save more than that for their backward. DTR trains any model within a "
        "budget:\n\n    with remat.DTR(budget=...):\n        loss = model(...)\n        loss.backward()"
    )


# The ends of runs, and stages too small to decide on -----------------------------------------------------------------


def _trimmed(selector: Selector, units: Sequence[Candidate], small: float) -> list[Candidate]:
    """The units, without small ones at the ends of runs, such as a dropout before and a norm after the blocks.

    The removed units are never recomputed, which costs little memory and makes the chain shorter.
    """
    quick = _threshold(units, small)
    kept: list[Candidate] = []
    for run in selector.runs(units):
        whole = selector.freed_bytes(run)
        while len(run) > 1:
            ends = [(selector.freed_bytes(rest), rest, end) for rest, end in ((run[1:], run[0]), (run[:-1], run[-1]))]
            freed, rest, end = max(ends, key=lambda entry: entry[0])
            slight = end.work < quick or selector.freed_bytes([end]) < _SLIGHT * whole
            if freed < (1 - _SPARED) * whole or not slight:
                break
            run = rest
        kept += run
    return kept


def _fused(selector: Selector, units: Sequence[Candidate], small: float) -> list[Candidate]:
    """The units, with small ones fused with the previous unit of their run, or the first with the next.

    Units up to `_MINOR` are fused too if autograd saves nothing between the two, because a stage boundary there would
    add a saved activation.
    """
    threshold, most = _threshold(units, small), _threshold(units, _MINOR)
    fused: list[Candidate] = []
    for run in selector.runs(units):
        first = len(fused)
        for unit in run:
            least = min(unit.work, fused[-1].work) if len(fused) > first else math.inf
            if least < threshold or (least < most and not selector.keeps_between(fused[-1])):
                fused[-1] = Candidate((*fused[-1].calls, *unit.calls))
            else:
                fused.append(unit)
    return fused


def _threshold(units: Sequence[Candidate], small: float) -> float:
    """The work under which a unit is not worth a decision of its own."""
    return small * sorted(unit.work for unit in units)[3 * len(units) // 4]


def _timed(model: nn.Module, sample: Arguments, units: Sequence[Candidate]) -> tuple[list[float], float]:
    """Seconds of each unit's forward and of the whole, in a forward of their own."""
    place = {call.name: index for index, unit in enumerate(units) for call in unit.calls}
    names = {call.module: call.name.partition("#")[0] for unit in units for call in unit.calls}
    seconds = [0.0] * len(units)
    counts: dict[nn.Module, int] = {}
    device = device_of(model)
    now = partial(instruments().now, device)

    def call(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = counts[module] = counts.get(module, 0) + 1
        index = place.get(names[module] + (f"#{count}" if count > 1 else ""))
        start = now()
        output = forward(*args, **kwargs)
        if index is not None:
            seconds[index] += now() - start
        return output

    with torch.enable_grad(), blocks_as_written(), intercepted(names, call), saving_nothing():
        start = now()
        model(*sample.args, **sample.kwargs)
        total = now() - start
    return seconds, total


# Stages that the caller names ----------------------------------------------------------------------------------------


def _chosen(model: nn.Module, selector: Selector, wanted: Sequence[str | nn.Module]) -> list[Candidate]:
    """The units that the caller names.

    Raises:
        UnsupportedModel: no such module, one that is not called, or modules of one list that cannot be cut apart.
    """
    if isinstance(wanted, (str, nn.Module)):
        wanted = [wanted]
    groups = [_group(model, selector, item) for item in wanted]
    units = sorted((unit for group in groups for unit in group), key=lambda unit: unit.begin)
    for one, other in itertools.pairwise(units):
        if other.begin < one.end:
            raise UnsupportedModel(f"the stage {other.name!r} is inside the stage {one.name!r}; name one of them")
    for unit in units:
        reason = selector.why_not_again(unit)
        if reason:
            raise UnsupportedModel(f"{unit.name!r} cannot be a stage, because it cannot run twice: {reason}")
    together = groups if any(len(group) > 1 for group in groups) else [units]
    for group in together:
        for one, other in itertools.pairwise(group):
            reason = selector.obstacle(one, other)
            if reason:
                raise UnsupportedModel(f"{one.name!r} and {other.name!r} cannot be stages of one chain: {reason}")
    return units


def _group(model: nn.Module, selector: Selector, item: str | nn.Module) -> list[Candidate]:
    named = dict(model.named_modules(remove_duplicate=False))
    if isinstance(item, str):
        if item not in named:
            raise UnsupportedModel(f"the model has no module {item!r}; see [name for name, _ in model.named_modules()]")
        module = named[item]
    else:
        module = item
        if module not in named.values():
            raise UnsupportedModel(f"the {type(module).__name__} in `stages` is not a module of this model")
    wanted = set(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else {module}
    calls = sorted((call for call in selector.record.calls() if call.module in wanted), key=lambda call: call.begin)
    if not calls:
        name = item if isinstance(item, str) else type(item).__name__
        lists = any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in wanted)
        hint = ": it holds lists; name what is called of these, in this order" if lists else ""
        raise UnsupportedModel(f"{name!r} is not called in the forward{hint}")
    return selector.joined_where_needed([Candidate((call,)) for call in calls])


# What is left --------------------------------------------------------------------------------------------------------


def _aside(written: Recording, units: Sequence[Candidate]) -> tuple[str, ...]:
    """Calls outside the units whose modules also have calls in units."""
    modules = {call.module for unit in units for call in unit.calls}
    stages = {call for unit in units for call in unit.calls}
    return tuple(call.name for call in written.calls() if call.module in modules and call not in stages)


def _uncalled(model: nn.Module, written: Recording) -> tuple[str, ...]:
    """The outermost modules with a forward that was not called."""
    called = {call.module for call in written.calls()}
    found: list[str] = []
    for module, name in outside_of_compiled(model).items():
        has_forward = type(module).forward is not nn.Module.forward
        inside = any(name.startswith(f"{outer}.") for outer in found)
        holds_called = any(part in called for part in module.modules())
        if has_forward and not inside and not holds_called:
            found.append(name)
    return tuple(found)


def _outside(written: Recording, units: Sequence[Candidate]) -> tuple[tuple[str, int], ...]:
    """The outermost calls outside the units, and the code around the units, with the bytes that autograd saves."""
    found: list[tuple[str, int]] = []

    def visit(call: ModuleCall) -> None:
        if any(unit.has(call) for unit in units):
            return
        if any(call.has(own) for unit in units for own in unit.calls):
            own_bytes = call.saved_bytes - sum(child.saved_bytes for child in call.children)
            found.append((f"{call.name or 'the model'}'s own forward", own_bytes))
            for child in call.children:
                visit(child)
        else:
            found.append((call.name, call.saved_bytes))

    visit(written.root)
    shown = sorted((entry for entry in found if entry[1]), key=lambda entry: -entry[1])
    rest = sum(size for _, size in shown[_SHOWN:])
    return (*shown[:_SHOWN], ("other code", rest)) if rest else tuple(shown)
