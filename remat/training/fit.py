"""`fit`: makes a model train within a memory limit, by the fastest plan of all planners, or else under DTR."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer

from remat.budgets import resolve_budget
from remat.chain import Chain
from remat.errors import InfeasibleBudget, NoChain, OverBudgetWarning, RematError, UnsupportedModel
from remat.formatting import format_bytes
from remat.runtime.accelerator import allocated_bytes, device_of, free_bytes, is_accelerator
from remat.runtime.calls.stages import call_of, is_sequential
from remat.runtime.checks import Loss, check_count, check_model
from remat.runtime.compacting import Compacting
from remat.runtime.logits import HeadInParts
from remat.runtime.meter import is_profiled
from remat.runtime.planned.lengths import length_of, with_length
from remat.runtime.planned.patched_forward import (
    Covered,
    PatchedForward,
    Runs,
    Undecided,
    patched_anew,
    patched_forward_of,
)
from remat.runtime.planned.wrapper import Wrapper
from remat.runtime.pytree import Arguments
from remat.runtime.sharding import refuse_first_forward
from remat.simulation import store_all_peak
from remat.solvers.bounds import least_of_any
from remat.solvers.fastest import compile_planners
from remat.solvers.persistent import Persistent
from remat.training.by_calls import fits_by_operators, train_by_calls
from remat.training.compiling import CompiledBlocks
from remat.training.head import as_asked, refuse_unused, said_of
from remat.training.holdings import Holdings, checked_optimizers, holdings_of
from remat.training.planned import FREE_SHARE, Limit, Planned, trains
from remat.training.said import PLAIN, choices, conclude, in_a_line, of_loss, say, what_is_outside
from remat.training.setup import Setup
from remat.utils.warn import warn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AUTO = "auto"
_HOPELESS = 4  # if the minimum of all plans exceeds the limit by this factor, DTR is not tried either


def fit(
    model: nn.Module,
    sample: Any = None,
    memory: int | str | float = AUTO,
    loss: Loss | None = None,
    *,
    longest: int | None = None,
    when_short: str = "error",
    slots: int = 500,
    quiet: bool = False,
    stages: Sequence[str | nn.Module] | None = None,
    other_path: str = "warn",
    group: ProcessGroup | None = None,
    output_held: bool = True,
    options: bool = True,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    host_limit: int | str | None = None,
    of: str | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    compile: bool | Mapping[str, Any] = False,
    chunk_head: bool | str = False,
) -> nn.Module:
    """Makes the training steps of `model` stay within `memory`, by the fastest plan of all planners.

        remat.fit(model, sample, memory="8GiB")

    Call it again on the same model for another limit or sample: the new plan replaces the old one. If a call with a
    sample fails, the model and its plan stay as they were; without one the old plan goes at once.

    If no chain is found in the model, or no plan of its chains fits, each training step runs under DTR at module
    granularity (`remat.DTR`), from the forward to the end of the backward; a message on stderr says so. Before that,
    some trial steps measure the module calls. With `stages`, `group` or of="reserved" it is an error instead; and,
    where there is a chain, for an `nn.Sequential`, for a limit far below the least plan's, and for one of all that an
    accelerator holds.

    Args:
        model: any module.
        sample: its input, as it will be in training: a tensor, a tuple of positional or a dict of keyword arguments.
            Without one, the first call in training is measured and planned for.
        memory: int (bytes), string ("8GiB"), float in (0, 1] of the peak without recomputation for this sample, or
            "auto": 0.9 of the free memory, less the size of gradients that are not allocated yet and of Adam's state.
            It covers the sample, activations, their gradients and scratch memory; not parameters, their gradients and
            optimiser state, unless `optimizer` is given, or of="device".
        loss: a function of the output that returns a scalar; without one, the output's own loss (`output.loss`) is
            measured, or the loss is assumed to take no memory or time.
        longest: the most tokens that a sequence will have. The sample is padded to that length before measuring, and
            shorter batches use the same plan. Without it, a batch that is longer than all before is measured anew.
        when_short: what to do if a later, longer input does not fit: "error" raises before the step runs and states
            what fits; "least" trains it with the schedule of least memory, with a warning.
        slots: memory units of the dynamic programs.
        quiet: do not print the possible limits, the chosen plan and its cost on stderr.
        stages: names or modules to take for the stages, as in `remat.find_chain`; None: they are found.
        other_path: what to do where a forward takes another path than the chain that was found: "warn" or "error".
        group: processes that train this model together, as for `rotor.Checkpointable`.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`; False where the loop never names it.
        options, keep, recompute: plan with ways to keep a part of what a stage saves, as for `rotor.Checkpointable`.
        host_limit: how much of the host's memory offloaded activations may take, as for `rotor.Checkpointable`; DTR
            does not offload.
        of: what the limit is of: what a step adds, in bytes "allocated", or on an accelerator in bytes "reserved" by
            PyTorch's allocator, which are more; or all that the process holds on the "device", in reserved bytes. None:
            reserved for "auto", else allocated. On an accelerator some steps by the plan are tried, and where they take
            more than the limit, it plans again. DTR keeps a limit of what is allocated.
        optimizer: the optimiser of the training loop, or all of them. The limit is then of the "device": parameters,
            gradients and state that will be there count, as does the memory that the optimiser's own step takes. A copy
            of it makes its first step on tensors without data to tell. `memory` is in bytes then, or "auto".
        compile: compile the blocks of the model one by one (`block.compile()`) and have the compiler choose what they
            save so that the limit holds, where a step within it is then faster; or the arguments of `torch.compile` to
            do so with. Blocks that you have compiled yourself are planned in the same way, by the backend that you
            chose for them. Bits are then those of the compiled blocks, the same at each limit; in bfloat16 but for
            rounding.
        chunk_head: compute the logits (of the layer that the model names as its output embeddings, or else of its
            widest linear layer) a part of the rows at a time, for a `cross_entropy` of class indices in the model's
            forward or in `loss`; or the name of another layer. A large vocabulary's logits then take next to no memory,
            and what reads them later (`output.logits`) has them computed. The loss and gradients differ from PyTorch's
            in the last digits, which a message states; they are the same at each limit, and a share as `memory` is of
            such a step.

    Returns:
        The model itself, the same object of the same class, trained within the limit until `remat.remove(model)`.

    Raises:
        InfeasibleBudget: nothing fits; `minimum` is the least memory that works.
        InvalidBudget: `memory` in another form.
        RematError: `model` is not a module, or is wrapped by remat already.
        UnsupportedModel: neither a plan nor DTR is possible, as for a model that is compiled as a whole or uses its
            own checkpointing; with `group`, `stages` or of="reserved": no chain was found.
    """
    setup = Setup(
        loss=loss,
        slots=slots,
        stages=stages,
        other_path=other_path,
        group=group,
        output_held=output_held,
        options=options,
        keep=keep,
        recompute=recompute,
        host_limit=host_limit,
        of=of or unit_of(memory, optimizer),
        when_short=when_short,
    )
    wish = Wish(setup, memory, longest, quiet, compile, chunk_head, checked_optimizers(optimizer)).checked()
    if sample is None:
        fit_at_first_call(model, wish)
    else:
        check_model(model)
        _refuse_wrapped(model)
        _fit(model, sample, wish)
    return model


def unit_of(memory: int | float | str, optimizer: Any) -> str:
    """What a limit is of where nobody says."""
    return "device" if optimizer is not None else "reserved" if memory == AUTO else "allocated"


class Wish(NamedTuple):
    """What `fit` is asked for.

    Attributes:
        holdings: what the device holds besides a step, where the limit is of the device.
    """

    setup: Setup
    memory: Limit = AUTO
    longest: int | None = None
    quiet: bool = False
    compile: bool | Mapping[str, Any] = False
    chunk_head: bool | str = False
    optimizers: tuple[Optimizer, ...] = ()
    holdings: Holdings | None = None

    def checked(self) -> Wish:
        """This request, after validation.

        Raises:
            RematError: an invalid value.
        """
        if self.longest is not None:
            check_count("longest", self.longest)
        if self.memory != AUTO:
            resolve_budget(self.memory, store_all_bytes=2**62)
        if self.setup.of != "device":
            if self.optimizers:
                raise RematError(
                    f"of={self.setup.of!r}: with optimizer= the limit is of the device; leave out one of both"
                )
        elif isinstance(self.memory, float):
            raise RematError(
                f"memory={self.memory}: a share is of what a step takes, and with optimizer= or of='device' the limit "
                "is of the device. Give it in bytes, such as '80GiB'"
            )
        return self

    def with_holdings(self, model: nn.Module, sample: Any) -> Wish:
        """This request, knowing what the device holds besides a step, where the limit is for all of it.

        Raises:
            InfeasibleBudget: the optimiser's own step does not fit.
        """
        if self.setup.of != "device":
            return self
        holdings = holdings_of(model, self.optimizers, sample)
        device = device_of(model)
        if self.memory == AUTO:
            memory = holdings.now + int(FREE_SHARE * free_bytes(device))
        else:
            memory = resolve_budget(self.memory)
            if is_accelerator(device):  # of what a device is said to have its context and other processes take a part
                memory = min(memory, allocated_bytes(device) + free_bytes(device))
        if holdings.total + holdings.working > memory:
            error = InfeasibleBudget(memory, holdings.total + holdings.working)
            error.args = (
                f"{error} Without any activation there are {format_bytes(holdings.total)}, and the optimiser's step "
                f"takes {format_bytes(holdings.working)} more. Shards (FSDP2), an optimiser with less state, "
                f"fused=True or foreach=False take less.\n{holdings}",
            )
            raise error
        return self._replace(memory=memory, holdings=holdings)

    @property
    def plain(self) -> str:
        """What messages call a step without recomputation."""
        return "without recomputation" if self.chunk_head else PLAIN

    @property
    def besides(self) -> int:
        """Bytes of the limit that a step has not."""
        return 0 if self.holdings is None else self.holdings.total

    def whole(self, figures: Mapping[str, int]) -> dict[str, int]:
        """Figures that trainers log, of the device where the limit is."""
        return {name: value + self.besides * (name in ("limit", "peak")) for name, value in figures.items()}

    def of_the_device(self, error: InfeasibleBudget) -> InfeasibleBudget:
        """The same error, of the device instead of a step."""
        assert self.holdings is not None and isinstance(self.memory, int)
        whole = InfeasibleBudget(self.memory, self.holdings.total + error.minimum, error.solver, exact=error.exact)
        left = format_bytes(max(self.memory - self.holdings.total, 0))
        whole.args = (
            f"{whole} What is there besides leaves {left} to a step, which needs {format_bytes(error.minimum)}."
            f"\n{self.holdings}",
        )
        return whole

    def limit_for(self, planned: Planned) -> Limit:
        """Of a step."""
        if self.holdings is not None:
            assert isinstance(self.memory, int)
            return max(self.memory - self.holdings.total, 1)
        return planned.automatic_limit() if self.memory == AUTO else self.memory


def fit_at_first_call(model: nn.Module, wish: Wish) -> PatchedForward:
    """Patches the model to plan at its first training call, which serves as the sample.

    If the user's profiler is running, measuring would distort its results. Such a call runs by an estimated plan, and
    the first call without a profiler is measured.
    """
    check_model(model)
    _refuse_wrapped(model)
    patch = patched_anew(model, lambda args, kwargs: None, other_path=wish.setup.other_path)

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs | None:
        call = Arguments(args, kwargs)
        if not trains(model, args, kwargs):
            return None
        undecided.was_called = True
        refuse_first_forward(model)
        if is_profiled(model):
            return _by_estimate(model, call, wish)
        _fit(model, call, wish, patch)
        undecided.is_over = True
        return patch.choose(args, kwargs)

    patch.choose = undecided = Undecided(choose)
    return patch


def _by_estimate(model: nn.Module, call: Arguments, wish: Wish) -> Runs | None:
    """What runs a single call by an estimated plan; None (plain PyTorch) if the model cannot be estimated."""
    planned = Planned(model, wish.setup)
    try:
        planned.estimate(call)
    except UnsupportedModel as error:
        warn(f"a profiler is running, so this step has no memory limit: {error}", OverBudgetWarning)
        return None
    try:
        planned.plan_with("fastest", wish.with_holdings(model, call).limit_for(planned))
    except InfeasibleBudget as error:  # which an estimate is not sure of
        warn(f"a profiler is running, so this step runs by the schedule of least memory: {error}", OverBudgetWarning)
        planned.plan_with("persistent", bounded=False)
    assert planned.plan is not None
    return planned.plan.executor


def _fit(model: nn.Module, sample: Any, wish: Wish, patch: PatchedForward | None = None) -> None:
    """Measures, plans, and makes the model follow the plan; `patch`: reuse this patch of its forward."""
    with as_asked(model, wish.chunk_head) as head:
        _fit_head(model, sample, wish, patch, head)
        if head is not None:
            fitted = patch or patched_forward_of(model)
            assert fitted is not None
            fitted.when_removed(head.remove)


def _fit_head(
    model: nn.Module, sample: Any, wish: Wish, patch: PatchedForward | None, head: HeadInParts | None
) -> None:
    """The same, with the head in parts or as it is."""
    setup, planned = wish.setup, Planned(model, wish.setup)
    blocks = CompiledBlocks(model, {} if isinstance(wish.compile, bool) else wish.compile)
    try:
        with planned.together():
            if wish.longest is not None:
                sample = _longest(model, sample, wish.longest)
            wish = wish.with_holdings(model, sample)
            if wish.compile is not False:
                with suppress(NoChain):
                    planned = blocks.choose(sample, setup, wish.limit_for, progress=not wish.quiet)
            try:
                limit = _planned(model, sample, wish, planned, patch, head)
            except InfeasibleBudget as error:
                if wish.holdings is None:
                    raise
                raise wish.of_the_device(error) from None
        if head is not None and not wish.quiet:
            say(said_of(head, model))
        if limit is not None:
            _train_by(planned, limit, wish, patch)
    except BaseException:
        blocks.give_up()
        raise
    fitted = patch or patched_forward_of(model)
    assert fitted is not None
    if limit is None:  # of DTR, which speaks of a step
        of_a_step = fitted.figures
        fitted.covered = fitted.covered._replace(of=setup.of)
        fitted.figures = lambda: wish.whole(of_a_step())
    fitted.when_removed(blocks.removed)


def _train_by(planned: Planned, limit: int, wish: Wish, patch: PatchedForward | None) -> None:
    """Makes the model follow the plan."""
    chain, kind = planned.measured, type(planned.model).__name__
    patch = planned.take_place(patch)
    assert planned.plan is not None
    least = planned.solver("fastest").minimum_budget(chain)
    rehearsal, schedule = planned.plan.rehearsal, planned.plan.schedule
    text = in_a_line(kind, chain, schedule, limit, least, rehearsal, besides=wish.besides, plain=wish.plain)
    if wish.holdings is not None and not wish.quiet:
        say(wish.holdings.table(planned.expected_bytes() if rehearsal is None else rehearsal.of(planned.of)))
    patch.covered = Covered(wish.setup.of, wish.besides, planned.least)
    device = device_of(planned.model)
    if is_accelerator(device) and wish.setup.of != "allocated":
        planned.on_training = Compacting(planned.model, wish.optimizers, device).begins
    if wish.setup.loss is None and not wish.quiet:
        patch.first_output = partial(of_loss, kind, limit)
    conclude(patch, text, wish.quiet, lambda: wish.whole({"limit": limit, **planned.figures()}))


def _planned(
    model: nn.Module, sample: Any, wish: Wish, planned: Planned, patch: PatchedForward | None, head: HeadInParts | None
) -> int | None:
    """Plans, for blocks compiled or not, as they are, and gives the limit; None where it trains by calls instead.

    `planned` may have been measured.
    """
    kind, quiet, setup = type(model).__name__, wish.quiet, wish.setup
    by_calls_too = setup.stages is None and setup.group is None and (setup.of != "reserved" or wish.memory == AUTO)
    limit = wish.limit_for(planned) if planned.limit is None else planned.limit
    reserved = planned.of == "reserved" and wish.memory != AUTO  # of which blocks of DTR leave much in pieces
    try:
        if planned.chain is None:
            planned.measure(sample, progress=not quiet, again=False, enough=partial(_refuse_hopeless, limit))
    except NoChain as error:
        if not by_calls_too:
            raise
        train_by_calls(model, sample, limit, setup, patch, f"{error.why} in {kind}", quiet=quiet)
        if reserved:
            warn(
                f"{kind} trains under DTR, whose blocks keep what is allocated within the limit; PyTorch's allocator "
                "may reserve more than that, in pieces. Ask for less where the device has no more than the limit"
            )
        return None
    if head is not None:
        refuse_unused(head, model)
    chain = planned.measured
    limit = resolve_budget(limit, store_all_peak(chain))  # of what comes later, too
    solver = planned.solver("fastest")
    if not quiet and patch is None:
        say(choices(kind, chain, solver, besides=wish.besides, plain=wish.plain))
    try:
        planned.plan_with("fastest", limit, tried_on=call_of(model, sample))
    except InfeasibleBudget as error:
        error.args = (f"{error}{what_is_outside(chain, error.minimum)}",)
        if not by_calls_too or reserved or _is_hopeless(error.budget, error.minimum):
            raise
        if is_sequential(model):
            error.args = (f"{error}{fits_by_operators(model, sample, limit, setup, quiet=quiet)}",)
            raise
        why = f"plans for {kind} need at least {format_bytes(error.minimum + wish.besides)}"
        try:
            train_by_calls(model, sample, limit, setup, patch, why, quiet=quiet, below=error.minimum)
        except (UnsupportedModel, InfeasibleBudget) as by_calls:
            last = by_calls if isinstance(by_calls, InfeasibleBudget) else error
            last.args = (f"{last}{fits_by_operators(model, sample, limit, setup, quiet=quiet)}",)
            raise last from None
        return None
    return limit


def _longest(model: nn.Module, sample: Any, length: int) -> Arguments:
    """The sample with sequences of this length.

    Raises:
        RematError: there are none in it.
    """
    call = call_of(model, sample)
    before = length_of(call)
    if before is None:
        raise RematError(
            f"longest={length}: no tensor of the call looks like sequences, (batch, length) or (batch, length, width). "
            "Leave `longest` out, and give the largest batch as the sample"
        )
    return with_length(call, max(length, before))


def _refuse_hopeless(limit: int | str | float, chain: Chain) -> None:
    """Raises an error for an infeasible limit as soon as the sizes are known, before times are measured.

    It also compiles the planners with numba, so that compilation does not disturb the measured times.
    """
    compile_planners()
    budget = resolve_budget(limit, store_all_peak(chain))
    if _is_hopeless(budget, least_of_any(chain)):
        raise InfeasibleBudget(budget, Persistent().minimum_budget(chain), exact=False)


def _is_hopeless(budget: int, least: int) -> bool:
    return _HOPELESS * budget < least


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, Wrapper):
        raise RematError(
            f"this model is wrapped in a {type(model).__name__} already; fit its `.wrapped`, or plan again with the "
            "wrapper's methods"
        )
    planned = [name for name, part in model.named_modules() if part is not model and patched_forward_of(part)]
    if planned:
        raise RematError(
            f"a part of this model, {planned[0]!r}, trains within a limit of its own; call `remat.remove` on it first, "
            "or fit the parts and not the whole"
        )
