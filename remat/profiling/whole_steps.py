"""What the times of stages, each measured by itself, leave out of a step, told by two whole steps.

Python's own work counts where stages are short, as on a fast GPU. Stages that run one after the other take less of it
than stages with measurements between them; and a recomputation takes more than its operators: what the first run met is
noted in that run, and put back in the other. So times are scaled to a step of plain PyTorch, and what a step in which
every stage is recomputed takes beyond what it should then take is shared out among the recomputations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from remat.chain import Chain
from remat.errors import RematError
from remat.layout import Option
from remat.runtime.accelerator import free_bytes
from remat.schedule import Schedule, each_recomputed
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
    return Schedule(each_recomputed(chain.fixed), layout=chain.layout)


def as_steps_take(
    chain: Chain, plain: float, recomputing: float, saves: Sequence[int], joined: Sequence[bool]
) -> Chain:
    """The chain with times by which a step of plain PyTorch, and one by `recomputing_each`, take these seconds.

    Args:
        saves: how many tensors each stage saves. Each of them, and each run, has its share in what recomputations take
            besides.
        joined: whether a stage can run as one with its neighbour (`runtime.planned.rows`). Then running all of it again
            is charged with no share, which is paid once for a row of many.
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
    besides = max(recomputing - simulate(chain, recomputing_each(chain)).seconds, 0.0)
    shares = [(1 + count) * (not fixed) for count, fixed in zip(saves[:-1], chain.fixed, strict=False)]
    more = [besides * each / sum(shares) for each in shares]
    again = (*(0.0 if row else each for each, row in zip(more, joined, strict=True)), 0.0)
    return replace(chain, again_seconds=again, options=tuple(map(_with_more, chain.options, (*more, 0.0))))


def _with_more(options: Sequence[Option], seconds: float) -> tuple[Option, ...]:
    """The options of a stage, where running it in part takes as much besides as running it does."""
    return tuple(
        replace(each, replay_seconds=each.replay_seconds + seconds) if each.without else each for each in options
    )
