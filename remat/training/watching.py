"""`watch`: what the steps of a training take against their limit, and warnings before it is met."""

from __future__ import annotations

import itertools
import mmap
import statistics
from collections import deque
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from remat.errors import OverBudgetWarning, RematError
from remat.formatting import count, format_bytes, table, text_table
from remat.runtime.accelerator import allocated_bytes, device_of, free_bytes, is_accelerator, reserved_bytes, rounded
from remat.runtime.checks import check_model
from remat.runtime.planned.patched_forward import PatchedForward, patched_forward_of
from remat.runtime.pytree import storage_of, tensors
from remat.runtime.sharding import local_part
from remat.utils.warn import warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEPT = 10_000  # steps that are remembered
_SHOWN = 8  # in the text, the last ones
_NEAR = 0.95  # of the limit, from which on the least memory of an input is near it
_GROWING = 8  # steps in a row between which more and more is held
_SOON = 500  # steps within which it is said that memory will end


class Step(NamedTuple):
    """One step, or the evaluation between two.

    Attributes:
        kind: "training" or "evaluation", of which several forwards are one.
        limit_bytes, planned_bytes: as `fit` and its plan for this input say; 0 in evaluation.
        peak_bytes: measured, of what the limit is of; on the CPU, whose allocator does not say, None.
        reserved_bytes: at its end, by the allocator; on the CPU what the process has in memory.
        held_bytes: allocated when it began; on the CPU None.
        recomputations: of the plan.
    """

    number: int
    kind: str
    limit_bytes: int
    planned_bytes: int
    peak_bytes: int | None
    reserved_bytes: int
    held_bytes: int | None
    recomputations: int


class Watch:
    """The steps of a model that trains within a limit:

        with remat.watch(model) as watched:
            for batch in loader:
                ...
        print(watched)
        watched.plot()

    A step begins with a forward of the model in training, and ends where the next forward begins; forwards without
    gradients in between are an evaluation. It warns once of each of these: a step took more than the limit; what is
    held between steps grows, and when there will be no room for it; others have taken so much of the device that a step
    does not fit any more; an input needs nearly the limit with all recomputation, so that longer ones will not fit.

    On an accelerator it resets the allocator's peak with each step. On the CPU, whose allocator does not count, peaks
    are those of plans.

    Attributes:
        steps: the last 10,000, oldest first.
        warnings: what was warned of.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps, self.warnings = model, deque[Step](maxlen=_KEPT), list[str]()
        self.device = device_of(model)
        self._counts = is_accelerator(self.device)
        self._patch: PatchedForward | None = None
        self._open: _Open | None = None
        self._number = 0
        self._said: set[str] = set()
        self._held: deque[int] = deque(maxlen=_GROWING + 1)

    def __enter__(self) -> Watch:
        patch = patched_forward_of(self.model)
        if patch is None:
            raise RematError("watch: this model does not train within a limit; call remat.fit(model, ...) first")
        if patch.watch is not None:
            raise RematError("watch: this model is watched already")
        self.moves_to(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self.ends()
        if self._patch is not None and self._patch.watch is self:
            self._patch.watch = None

    def moves_to(self, patch: PatchedForward) -> None:
        """The model follows another plan from now on."""
        self._patch, patch.watch = patch, self

    def begins(self, kind: str, call: Any) -> None:
        """A forward begins; what was measured and planned for its input is there."""
        if self._counts:
            torch.accelerator.reset_peak_memory_stats(self.device)
            held = allocated_bytes(self.device)
            self._open = _Open(kind, held, _sample_bytes(call, self.device) - _gradients_to_come(self.model))
        else:
            self._open = _Open(kind, 0, 0)
        if kind == "training":
            self._look_ahead()

    def ends(self) -> None:
        """The step under way is over."""
        begun, self._open = self._open, None
        patch = self._patch
        if begun is None or patch is None:
            return
        figures = patch.figures() if begun.kind == "training" else {}
        peak = self._peak(begun, patch.covered.of) if self._counts else None
        if begun.kind == "evaluation" and self.steps and self.steps[-1].kind == "evaluation":
            before = self.steps.pop()
            peak = None if peak is None else max(peak, before.peak_bytes or 0)
        else:
            self._number += 1
        limit = figures.get("limit", 0)
        self.steps.append(
            Step(
                *(self._number, begun.kind, limit, figures.get("peak", 0), peak),
                reserved_bytes(self.device) if self._counts else _resident_bytes(),
                begun.held if self._counts else None,
                figures.get("recomputations", 0),
            )
        )
        if peak is not None and limit and peak > limit:
            self._warn("over", f"a step took {format_bytes(peak)}, more than the limit of {format_bytes(limit)}")

    def _peak(self, begun: _Open, of: str) -> int:
        allocated = torch.accelerator.max_memory_allocated(self.device)
        if of == "device":
            return max(torch.accelerator.max_memory_reserved(self.device), allocated)
        return allocated - begun.held + begun.counted

    # Warnings --------------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Whether the step that begins, and those after it, will fit."""
        patch, begun = self._patch, self._open
        assert patch is not None
        assert begun is not None
        figures = patch.figures()
        limit, planned = figures.get("limit", 0), figures.get("peak", 0)
        least = patch.covered.least()
        if least > _NEAR * (limit - patch.covered.besides):
            self._warn(
                "near",
                f"this input needs at least {format_bytes(least + patch.covered.besides)} of the limit of "
                f"{format_bytes(limit)}, with all recomputation: one that is a little larger will not fit",
            )
        if not self._counts:
            return
        needs = planned - (begun.held if patch.covered.of == "device" else begun.counted)
        free = free_bytes(self.device)
        if needs > free:
            self._warn(
                "others",
                f"the device has {format_bytes(free)} left, and the step that begins needs {format_bytes(needs)}: "
                "another process may have taken memory",
            )
        self._held.append(begun.held)
        held = list(self._held)
        growth = [later - earlier for earlier, later in itertools.pairwise(held)]
        if len(growth) < _GROWING or min(growth) <= 0:
            return
        room = (limit - begun.held if patch.covered.of == "device" else free) - max(needs, 0)
        steps = max(room, 0) / statistics.median(growth)
        if steps < _SOON:
            self._warn(
                "growing",
                f"what is held between steps grows by {format_bytes(statistics.median(growth))} a step; in about "
                f"{steps:.0f} steps there is no room for one. Is a loss kept with its graph?",
            )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.warnings.append(message)
            warn(f"step {self._number + 1}: {message}", OverBudgetWarning)

    # What it shows ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join([self._summary(), *text_table(self._columns(), self._rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._summary())}</p>{table(self._columns(), self._rows())}"

    def plot(self) -> Figure:
        """A figure: limit, peaks, what the allocator holds, and recomputations, by step."""
        from remat.plotting.steps import plot_steps

        return plot_steps(self)

    def _summary(self) -> str:
        training = [each for each in self.steps if each.kind == "training"]
        if not training:
            return "no step of training yet"
        most = max(training, key=lambda each: each.peak_bytes or each.planned_bytes)
        taken = most.peak_bytes or most.planned_bytes
        how = "measured" if most.peak_bytes else "planned"
        share = f" ({taken / most.limit_bytes:.0%})" if most.limit_bytes else ""
        return (
            f"{count(len(training), 'step')}, at most {format_bytes(taken)} {how} of {format_bytes(most.limit_bytes)}"
            f"{share}; {count(len(self.warnings), 'warning')}"
        )

    def _columns(self) -> tuple[str, ...]:
        return ("step", "limit", "planned", "peak", "reserved" if self._counts else "resident", *_LAST_COLUMNS)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{each.number} {each.kind}",
                *("-" if not size else format_bytes(size) for size in each[2:7]),
                str(each.recomputations) if each.kind == "training" else "-",
            )
            for each in list(self.steps)[-_SHOWN:]
        ]


_LAST_COLUMNS = ("held before", "recomputations")


def watch(model: nn.Module) -> Watch:
    """Watches the training steps of a model that trains within a limit, by `fit` or a trainer's callback.

    Raises:
        RematError: it does not, or is watched already.
    """
    check_model(model)
    return Watch(model)


class _Open(NamedTuple):
    """A step under way.

    Attributes:
        held: bytes allocated when it began.
        counted: of these, bytes that a limit of what a step adds counts: the sample, less gradients to come.
    """

    kind: str
    held: int
    counted: int


def _sample_bytes(call: Any, device: torch.device) -> int:
    given = [storage_of(each) for each in tensors(call) if each.layout == torch.strided and each.device == device]
    return sum(rounded(each.nbytes(), device) for each in {each._cdata: each for each in given}.values())


def _gradients_to_come(model: nn.Module) -> int:
    return sum(local_part(each).nbytes for each in model.parameters() if each.requires_grad and each.grad is None)


def _resident_bytes() -> int:
    """What the process has in memory; 0 where the operating system does not say."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * mmap.PAGESIZE
