"""`DTR`: dynamic tensor rematerialisation around any part of a PyTorch program (Kirisame et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

from remat.budgets import resolve_budget
from remat.errors import InvalidBudget, RematError
from remat.formatting import card, format_bytes
from remat.report import Report
from remat.runtime.accelerator import make_workspaces
from remat.runtime.dtr.heuristics import Heuristic, make_heuristic
from remat.runtime.dtr.trace import Trace
from remat.runtime.live.block import Block
from remat.runtime.live.choosing import AUTO, FIRST
from remat.runtime.live.outcomes import Advice
from remat.runtime.live.raw_access import refuse_inside
from remat.runtime.live.settings import Settings
from remat.runtime.live.sites import place, site_at
from remat.runtime.live.traced import trace_of
from remat.runtime.live.units.block import UnitsBlock
from remat.runtime.live.units.choosing import Ways
from remat.runtime.live.units.roomy import RoomyBlock, repeats_for
from remat.utils.moved import deprecated
from remat.utils.tried import say_if_newer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn


class DTR:
    """Keeps the memory of a block of code within a budget, by evicting tensors and recomputing them on access.

        with remat.DTR(budget="3GiB") as dtr:
            loss = model(x).loss
            loss.backward()
        optimizer.step()
        dtr.report()

    The budget covers all that operators in the block allocate: activations, gradients of activations, scratch memory,
    and the gradients of parameters where they are not allocated beforehand. What was allocated before the block
    (parameters, optimiser state, the sample) is outside it. Room is made before an operator runs, so at granularity
    "operator" the budget is exceeded only by the scratch memory of an operator that is called with such shapes for the
    first time: that is measured then, and known to all later blocks. At "module" the first two blocks of a path that is
    longer than those before may take what plain PyTorch takes. What the program itself holds at the end counts, too.

    Inside the block tensors are plain tensors, some of whose memory is gone for a while. After it all that the program
    still holds is in memory. One object may be used for many blocks, one after the other.

    Args:
        budget: int (bytes) or string ("3GiB").
        heuristic: which storage to evict; a name, a `Ratio`, or a function of columns (`remat.runtime.dtr.heuristics`).
            "auto": h_dtr at first. A block in which something was evicted is then replayed, on paper, with several,
            and later blocks at that place of the program take the best of them; the report says which.
        deallocation: "eager": what the program drops is freed at once. The others of the simulator would need memory
            that PyTorch has given back.
        thrash_limit: warn when recomputation takes more than thrash_limit - 1 times the program's own time, and raise
            where there is no end to it; None for neither.
        costs: "measured", or "model": a fixed cost model, whose decisions do not depend on the clock.
        sampling: look at sqrt(n) random storages when evicting; skip_small: at none under 1 % of the mean size
            (Appendix E.2).
        seed: of random choices.
        granularity: "module": from the second block on at a place of the program, calls of modules are replayed as far
            as they are needed, which costs a hook for each tensor that autograd saves, and nothing but a look at each
            call where twice of what blocks there take fits the budget. "operator": every operator
            passes a dispatcher and is repeated by itself, as in the paper.

    Raises:
        InvalidBudget: a budget in another form.
        RematError: an unknown heuristic, deallocation, cost or granularity, or a block inside another.
        OutOfBudget: in the block: an operator does not fit, whatever is evicted.
        Thrashing: in the block: see `thrash_limit`.
    """

    def __init__(
        self,
        budget: int | str,
        heuristic: str | Heuristic = AUTO,
        deallocation: str = "eager",
        *,
        thrash_limit: float | None = 2.0,
        costs: str = "measured",
        sampling: bool = False,
        skip_small: bool = False,
        seed: int = 0,
        granularity: str = "module",
    ) -> None:
        if deallocation != "eager":
            raise RematError(
                f"deallocation={deallocation!r}: remat.DTR supports 'eager' only, because PyTorch frees tensors as "
                "the program drops them; try the others in remat.simulate_dtr"
            )
        if granularity not in ("module", "calls", "operator"):
            raise RematError(f"unknown granularity {granularity!r}; choose 'module' or 'operator'")
        self.granularity = "module" if granularity == "calls" else granularity  # its name until 0.2
        if costs not in ("measured", "model"):
            raise RematError(f"unknown costs {costs!r}; choose 'measured' or 'model'")
        if thrash_limit is not None and not thrash_limit > 1:
            raise RematError(f"thrash_limit={thrash_limit}: must be above 1 (a multiple of the program's own time)")
        if isinstance(budget, float):
            raise InvalidBudget(
                f"budget {budget!r}: DTR measures nothing beforehand, so it needs a budget in bytes. For a fraction, "
                "run one block `with remat.DTR('1TiB') as dtr:`, then use a share of its peak: "
                "remat.DTR(int(0.5 * dtr.report().peak_bytes))"
            )
        self.budget = resolve_budget(budget, None)
        self.chooses = heuristic == AUTO
        if self.chooses:
            heuristic = FIRST
        self.heuristic = make_heuristic(heuristic)
        self.name = heuristic if isinstance(heuristic, str) else getattr(heuristic, "__name__", str(heuristic))
        self.thrash_limit = thrash_limit
        self.costs = costs
        self.reserved_bytes = 0  # of the budget, for what the block does not allocate itself
        self.where: Hashable = None  # the key of what is learned, where it is not a place in the program
        self._options = {"sampling": sampling, "skip_small": skip_small, "seed": seed}
        self._block: Block | UnitsBlock | RoomyBlock | None = None
        self._place: Hashable = None

    def __enter__(self) -> DTR:
        refuse_inside()
        say_if_newer()
        make_workspaces()
        ways = self._begin_at(self.where or place())
        if ways:
            roomy = _roomy(self, ways)
            if roomy is not None and roomy.enter():
                self._block = roomy
                return self
            self._block = _by_calls(self, ways)
            self._block.enter()
        else:
            self._block = _by_operators(self, observes=self.granularity == "module")
        return self

    def _begin_at(self, here: Hashable) -> Sequence[Ways]:
        """Takes the heuristic for blocks there; returns the units, where there are any."""
        self._place = here
        if self.chooses:
            self.name = site_at((here, self.budget)).heuristic or FIRST
            self.heuristic = make_heuristic(self.name)
        ways = site_at((here, self.budget)).current_ways() if self.granularity == "module" else []
        return ways if any(each.modules for each in ways) else []

    def block_for(self, root: nn.Module, reserved_bytes: int) -> UnitsBlock | None:
        """A block at module granularity for one run of this model; the caller begins and ends it. None if it has no
        units that fit."""
        ways = [each for each in self._begin_at(self.where) if each.begins_with(root) and each.modules]
        if not ways:
            return None
        self.reserved_bytes = reserved_bytes
        self._block = block = _by_calls(self, ways)
        block.begin_with(root)
        return block

    @property
    def runs_by_calls(self) -> bool:
        """Whether the last block ran at module granularity."""
        return isinstance(self._block, UnitsBlock | RoomyBlock)

    @property
    def is_routine(self) -> bool:
        """Whether later blocks will run in the same way: all calls of the last one were already recorded, or there are
        none that could be units."""
        if isinstance(self._block, UnitsBlock | RoomyBlock):
            return self._block.is_routine
        known = site_at((self._place, self.budget)).current_ways()
        return self.granularity != "module" or (bool(known) and not any(each.modules for each in known))

    def _settings(self, held: int | None = None) -> Settings:
        """`held`: bytes of what has run already, where it is the rest of a block."""
        return Settings(
            self.budget,
            self.reserved_bytes + (held or 0),
            self.heuristic,
            self.name if self.chooses else "",
            self.thrash_limit,
            self.costs == "model",
            self._options,
            self._place if held is None else None,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block = self._block
        assert block is not None
        block.exit(error)
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise RematError(
                "torch.func.grad, vjp, jacrev and hessian do not work in a DTR block, because they disable PyTorch's "
                "saved tensor hooks; use torch.autograd.grad, or move that code out of the block"
            ) from error

    @property
    def _last(self) -> Block | UnitsBlock | RoomyBlock:
        if self._block is None:
            raise RematError("this DTR has not run a block yet; use it as `with remat.DTR(budget) as dtr:`")
        return self._block

    def _repr_html_(self) -> str:
        body = "" if self._block is None or not self._block.took.seconds else self.report()._repr_html_()
        return card("DTR", [("budget", format_bytes(self.budget)), ("heuristic", self.name)], body)

    def report(self) -> Report:
        """The memory and time of the last block: outcome "pass", "over" (the peak, or what is alive at its end,
        exceeds the budget), "oom", "thrash" or "error" (another exception); peak as counted by the runtime, in bytes;
        seconds of the whole block."""
        return self._last.report(f"dtr {self.name}")

    def advice(self) -> Advice:
        """Advice on the last block, to print: the minimum budget, the minimum budget for 10 % overhead, the most
        expensive recomputations, and the share of time spent on bookkeeping. Simulates the block, for up to a few
        seconds."""
        return self._last.advice()

    @property
    def trace(self) -> Trace:
        """The trace of the last block, in the paper's log format. Under the same budget and heuristic (`name`)
        `remat.simulate_dtr` repeats the block's decisions; memory allocated before the block is not counted there."""
        block = self._last
        return trace_of(block.ledger, self.budget - block.ledger.budget)

    def plot(self, budget: int | str | float | None = None, heuristic: str | Heuristic | None = None) -> Figure:
        """Deprecated: `remat.plot_evictions(dtr)`."""
        figure: Figure = deprecated("DTR.plot", "plot_evictions")(self, budget, heuristic)
        return figure

    @property
    def decisions(self) -> list[tuple[str, int]]:
        """The evictions ("evict") and recomputations ("recompute") of the last block in order, each with the number of
        its storage, in order of creation."""
        return [(d.kind, d.what) for d in self._last.ledger.core.decisions() if d.kind in ("evict", "recompute")]


def _by_operators(dtr: DTR, *, observes: bool, root: nn.Module | None = None, held: int = 0) -> Block:
    settings = dtr._settings()
    block = Block(settings._replace(reserved=settings.reserved + held), observes=observes, root=root)
    block.enter()
    return block


def _roomy(dtr: DTR, ways: Sequence[Ways]) -> RoomyBlock | None:
    """Where blocks there have far more room than they need: one that goes on as an ordinary one where it must."""
    settings = dtr._settings()
    known = repeats_for(settings)
    if not known:
        return None
    this = ref(dtr)  # blocks do not hold what holds them: no step leaves garbage for the collector

    def gives_way(root: nn.Module, held: int | None, began: float) -> Callable[..., Any]:
        own = this()
        assert own is not None
        own._block = block = _by_calls(own, ways, held)
        return block.go_on(root, began)

    return RoomyBlock(settings, known, gives_way)


def _by_calls(dtr: DTR, ways: Sequence[Ways], held: int | None = None) -> UnitsBlock:
    this = ref(dtr)

    def other_model(root: nn.Module, more: int) -> None:
        own = this()
        assert own is not None
        own._block = _by_operators(own, observes=True, root=root, held=more + (held or 0))

    return UnitsBlock(dtr._settings(held), ways, other_model)
