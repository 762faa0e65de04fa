"""What the times of stages, each measured by itself, leave out of a step, told by a few whole steps.

Python's own work counts where stages are short, as on a fast GPU. Stages that run one after the other take less of it
than stages with measurements between them; and a recomputation takes more than its operators: what the first run met is
noted in that run, and put back in the other. So times are scaled to a step of plain PyTorch, and what a step in which
every stage is recomputed takes beyond what it should then take is shared out among the recomputations. For small layers
that can run as one (`runtime.planned.rows`), which costs less, another step tells it, in which they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add

import torch

from remat.chain import Chain
from remat.errors import RematError
from remat.layout import Option
from remat.runtime.accelerator import free_bytes
from remat.schedule import Schedule, rows_recomputed
from remat.simulation import simulate, store_all_peak

_SHORT = 0.01  # seconds of a stage's forward, on average, up to which what is left out counts
_FREE = 8  # times what a step of plain PyTorch takes: so much memory has to be free for one


def is_worth_it(chain: Chain, device: torch.device) -> bool:
    """Whether the stages that are recomputed are short, and a step in which none is fits the free memory."""
    forward = [seconds for seconds, fixed in zip(chain.fwd_seconds[:-1], chain.fixed, strict=False) if not fixed]
    if not 0 < sum(forward) < _SHORT * len(forward):
        return False
    try:
        return _FREE * store_all_peak(chain) <= free_bytes(device)
    except RematError:  # the operating system does not say
        return False


def recomputing_each(chain: Chain) -> Schedule:
    """The schedule in which every stage that may be is recomputed right before its backward."""
    return recomputing_rows(chain, [False] * chain.length)


def recomputing_rows(chain: Chain, joined: Sequence[bool]) -> Schedule:
    """The same, but neighbours that are `joined` are recomputed as one."""
    stored = {stage for stage, fixed in enumerate(chain.fixed, start=1) if fixed} | {chain.length}
    rows: list[range] = []
    goes_on = False
    for stage, own in enumerate(joined, start=1):
        own = own and stage not in stored
        rows.append(range(rows.pop().start if own and goes_on else stage, stage + 1))
        goes_on = own
    return Schedule(rows_recomputed(rows, stored), layout=chain.layout)


def as_steps_take(
    chain: Chain, plain: float, recomputing: float, in_rows: float, saves: Sequence[int], joined: Sequence[bool]
) -> Chain:
    """The chain with times by which a step of plain PyTorch, one by `recomputing_each` and one by `recomputing_rows`
    take these seconds.

    Args:
        saves: how many tensors each stage saves. Each of them, and each run, has its share in what recomputations take
            besides.
        joined: whether a stage can run as one with its neighbour. Running all of it again is charged with what the step
            in rows took, and a part of it, which runs by itself, with what the other did.
    """
    share = plain / chain.store_all_seconds

    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(share * seconds for seconds in times)

    chain = replace(
        chain,
        fwd_seconds=scaled(chain.fwd_seconds),
        replay_seconds=scaled(chain.replay_seconds),
        bwd_seconds=scaled(chain.bwd_seconds),
    )
    shares = [(1 + count) * (not fixed) for count, fixed in zip(saves, chain.fixed, strict=True)]
    shares[-1] = 0
    more = _shared_out(recomputing - simulate(chain, recomputing_each(chain)).seconds, shares)
    chain = replace(
        chain,
        again_seconds=tuple(each * (not row) for each, row in zip(more, joined, strict=True)),
        options=tuple(map(_with_more, chain.options, more)),
    )
    beyond = in_rows - simulate(chain, recomputing_rows(chain, joined)).seconds
    of_rows = _shared_out(beyond, [share * row for share, row in zip(shares, joined, strict=True)])
    return replace(chain, again_seconds=tuple(map(add, chain.again_seconds, of_rows)))


def _shared_out(seconds: float, shares: Sequence[int]) -> list[float]:
    return [max(seconds, 0.0) * share / max(sum(shares), 1) for share in shares]


def _with_more(options: Sequence[Option], seconds: float) -> tuple[Option, ...]:
    """The options of a stage, where running it in part takes as much besides as running it does."""
    return tuple(
        replace(each, replay_seconds=each.replay_seconds + seconds) if each.without else each for each in options
    )
