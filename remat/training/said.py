"""The messages of `fit`: the possible limits, the chosen plan, and the memory that no plan can free."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any

from torch import nn

from remat.chain import Chain
from remat.errors import InfeasibleBudget
from remat.formatting import count, format_bytes, text_table
from remat.runtime.planned.patched_forward import PatchedForward, patched_forward_of
from remat.runtime.pytree import loss_in, tensors
from remat.schedule import Schedule
from remat.simulation import simulate, store_all_peak
from remat.solvers.base import Solver
from remat.training.rehearsal import Rehearsal

_OVERHEADS = (0.05, 0.1, 0.2)  # whose limits the table shows
PLAIN = "plain PyTorch"
_TRIED = 64  # limits between the least and storing everything


def conclude(patch: PatchedForward, text: str, quiet: bool, figures: Callable[[], dict[str, int]]) -> None:
    """Reports how the model trains now: on stderr unless `quiet`, and in the model's HTML in Jupyter."""
    if not patch.model.training:
        text += ". It is in eval mode, where it runs as before: call model.train() to train within the limit"
    patch.summary, patch.figures = text, figures
    shown_in_a_sentence()
    if not quiet:
        say(text)


def of_loss(kind: str, limit: int, output: Any) -> None:
    """Says that a loss is not counted, where it may matter; `output`: of the model."""
    size = sum(tensor.nbytes for tensor in tensors(output) if tensor.requires_grad)
    if loss_in(output) is None and size > limit // 100:
        say(
            f"remat.fit: the loss is computed outside of {kind}, and what it takes is not in the limit. Tell it: "
            "fit(..., loss=function), of the output"
        )


def in_a_line(
    name: str,
    chain: Chain,
    schedule: Schedule,
    limit: int,
    least: int,
    rehearsal: Rehearsal | None,
    *,
    besides: int = 0,
    plain: str = PLAIN,
) -> str:
    """How the model trains.

    Args:
        besides: bytes that the device holds besides a step, if the limit is of the device.
        plain: what a step without recomputation is called.
    """
    report, most = simulate(chain, schedule), store_all_peak(chain) + besides
    limit, least = limit + besides, least + besides
    takes = format_bytes(report.peak_bytes + besides)
    if rehearsal is not None:
        allocated, reserved = rehearsal.peak_bytes + besides, rehearsal.reserved_bytes + besides
        takes = f"{format_bytes(allocated)} ({format_bytes(reserved)} reserved)"
    if not schedule.recomputations and not report.host_bytes:
        needs = format_bytes(most) if rehearsal is None else takes
        return f"remat.fit: {name} needs {needs} and fits {format_bytes(limit)}: nothing is recomputed"
    slower = "" if report.overhead is None else f", predicted {report.overhead - 1:.0%} slower"
    whole = schedule.recomputations - schedule.parts
    what = [f"{count(whole, 'recomputation')} of whole stages"] * (whole > 0)
    what += [f"{count(schedule.parts, 'stage')} partly recomputed"] * (schedule.parts > 0)
    what += [f"{format_bytes(report.host_bytes)} offloaded to CPU memory"] * (report.host_bytes > 0)
    return (
        f"remat.fit: {name} now trains in {takes} (limit {format_bytes(limit)}, least "
        f"{format_bytes(least)}, {plain} {format_bytes(most)}){slower}: {', '.join(what)}"
    )


def choices(kind: str, chain: Chain, solver: Solver, *, besides: int = 0, plain: str = PLAIN) -> str:
    """The table of possible limits: the minimum, and the limits for the overheads in `_OVERHEADS`; `besides`, `plain`:
    as for `in_a_line`."""
    least, most = solver.minimum_budget(chain), store_all_peak(chain)
    if least >= most:
        return f"remat.fit: plans free nothing of the {format_bytes(most)} that {kind} needs"
    limits = sorted({least + (most - least) * step // _TRIED for step in range(_TRIED + 1)})
    found = [
        (limit, simulate(chain, answer).overhead or 1.0)
        for limit, answer in zip(limits, solver.solve_many(chain, limits), strict=True)
        if not isinstance(answer, InfeasibleBudget)
    ]
    rows = [("minimum", *found[0])]
    rows += [(f"{wanted:.0%} slower", *next(each for each in found if each[1] <= 1 + wanted)) for wanted in _OVERHEADS]
    rows.append((plain, most, 1.0))
    shown = [(f"  {name}", format_bytes(limit + besides), f"{overhead:.2f} x") for name, limit, overhead in rows]
    return "\n".join(text_table(("remat.fit:", "limit", "predicted time"), shown))


def what_is_outside(chain: Chain, least: int) -> str:
    """Advice for a minimum that is mostly memory outside the stages, which no plan can free; else an empty string."""
    outside = sum(size for size, fixed in zip(chain.saved_bytes, chain.fixed, strict=True) if fixed)
    if 2 * outside < least:
        return ""
    return (
        f" {format_bytes(outside)} of it belong to code outside of the blocks, such as logits, and are never "
        "recomputed (`print(remat.find_chain(model, sample))` lists them). chunk_head=True computes "
        "logits in parts, and output_held=False leaves out the output if the training loop does not keep it during the "
        "backward."
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)


def shown_in_a_sentence() -> None:
    """Tells the notebook that runs, if one does; nothing about the model changes for that.

    Where somebody else has said how modules are shown, it stays so.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        if nn.Module not in formatter.type_printers:
            formatter.for_type(nn.Module, html_of)


def html_of(model: nn.Module) -> str | None:
    """The sentence of a model that trains by a plan; None for any other, which is shown as ever."""
    patch = patched_forward_of(model)
    if patch is None or not patch.summary:
        return None
    modules = f"<details><summary>{type(model).__name__}</summary><pre>{escape(repr(model))}</pre></details>"
    return f"<p>{escape(patch.summary)}</p>{modules}"
