"""Offloading options: saved tensors that wait in the host's memory until the backward (`runtime.offload`).

A copy out overlaps with the next stage's forward, and the copy back with its backward. So a stage may offload as many
bytes as the link can copy in the shorter of the two, largest storages first. The full stage and each of its partial
options get such an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from remat.chain import Chain
from remat.layout import Option
from remat.runtime.accelerator import rounded
from remat.runtime.calls.partial import TapeStructure
from remat.runtime.calls.tape import Tape
from remat.simulation import everything
from remat.solvers.offload import beside

COPY_SECONDS = 2e-5  # that each storage takes, however small
_HIDDEN = 0.8  # of the overlapping operation's time; copies slow down each other and the computation
_LEAST_GAIN = 0.01  # of what a stage saves, below which sending is not worth an option


class Parcel(NamedTuple):
    """A storage that a stage may send.

    Attributes:
        numbers: of the saved tensors that lie in it.
        size_bytes: of it, as the allocator counts.
    """

    numbers: frozenset[int]
    size_bytes: int


def parcels(tape: Tape, held: frozenset[int]) -> list[Parcel]:
    """What a run of a stage has made and only autograd holds, the largest first; `held`: storages that others hold."""
    if tape.whole or tape.is_spread:
        return []
    held = held | tape.returned
    found = [
        Parcel(frozenset(numbers), rounded(tape.storages[storage].nbytes, tape.storages[storage].device))
        for storage, numbers in TapeStructure(tape).saved.items()
        if storage not in held
    ]
    return sorted(found, key=lambda parcel: -parcel.size_bytes)


def common(offers: Iterable[Mapping[int, Sequence[Parcel]]]) -> dict[int, list[Parcel]]:
    """What each stage may send in all of several processes, in the sizes of the largest."""
    first, *others = ({stage: dict(each) for stage, each in by_stage.items()} for by_stage in offers)
    found: dict[int, list[Parcel]] = {}
    for stage, sizes in first.items():
        rest = [other.get(stage, {}) for other in others]
        shared = [numbers for numbers in sizes if all(numbers in each for each in rest)]
        largest = [Parcel(numbers, max(each[numbers] for each in (sizes, *rest))) for numbers in shared]
        found[stage] = sorted(largest, key=lambda parcel: -parcel.size_bytes)
    return found


def with_offload(chain: Chain, offers: Mapping[int, Sequence[Parcel]], bytes_per_second: float) -> Chain:
    """The chain with options that send something.

    Args:
        offers: what each stage may send, by number.
        bytes_per_second: of the link, one way.
    """
    layout = chain.layout
    assert layout is not None
    stages = chain.length - 1
    options = list(chain.options)
    dropped = list(layout.dropped or ((),) * stages)
    sent = [(frozenset[int](),) * len(each) for each in options[:-1]]
    for stage in range(1, stages):
        if chain.fixed[stage - 1] or chain.fixed[stage]:
            continue
        limit = _HIDDEN * beside(chain, stage)
        ways = [(everything(chain, stage), frozenset[int]())]
        ways += zip(options[stage - 1], dropped[stage - 1], strict=True)
        least = chain.saved_bytes[stage - 1]
        for way, without in ways:  # in order of increasing recomputation
            kept = [parcel for parcel in offers.get(stage, ()) if not parcel.numbers <= without]
            chosen = _chosen(kept, limit, bytes_per_second)
            option = _sending(chain, stage, way, chosen, bytes_per_second)
            if option is not None and option.saved_bytes <= least - _LEAST_GAIN * chain.saved_bytes[stage - 1]:
                least = option.saved_bytes
                options[stage - 1] = (*options[stage - 1], option)
                dropped[stage - 1] = (*dropped[stage - 1], without)
                sent[stage - 1] = (*sent[stage - 1], frozenset().union(*(parcel.numbers for parcel in chosen)))
    if not any(any(each) for each in sent):
        return chain
    named = replace(layout, dropped=tuple(dropped), offloaded=tuple(sent))
    return replace(chain, options=tuple(options), layout=named)


def _chosen(parcels: Sequence[Parcel], limit: float, bytes_per_second: float) -> list[Parcel]:
    """Of these, as much as the link carries in `limit` seconds."""
    chosen = []
    for parcel in parcels:
        spent = COPY_SECONDS + parcel.size_bytes / bytes_per_second
        if spent <= limit and parcel.size_bytes > COPY_SECONDS * bytes_per_second:
            chosen.append(parcel)
            limit -= spent
    return chosen


def _sending(chain: Chain, stage: int, way: Option, chosen: Sequence[Parcel], bytes_per_second: float) -> Option | None:
    """A way to keep what a stage saves of which these are sent; None where that is not worth it."""
    saved, act = chain.saved_bytes[stage - 1], chain.act_bytes[stage]
    away = sum(parcel.size_bytes for parcel in chosen)
    if away < max(_LEAST_GAIN * saved, 1) or way.saved_bytes - away < min(act, way.saved_bytes):
        return None
    seconds = len(chosen) * COPY_SECONDS + away / bytes_per_second
    return replace(way, saved_bytes=way.saved_bytes - away, host_bytes=away, link_seconds=seconds)
