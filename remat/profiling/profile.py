"""`profile`: measures what every stage of a model costs, and gives its `Chain`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.chain import Chain
from remat.devices import device_named
from remat.distributed import agree
from remat.errors import LeftChain, NoChain, RematError, ReplayError, UnsupportedModel
from remat.estimation.world import LOOKS_AT_VALUES, World
from remat.finding.find import SMALL, locate
from remat.finding.fusing import in_a_row
from remat.layout import Layout
from remat.measuring.isolating import saving_nothing, with_graph_of_its_own
from remat.measuring.preserving import aliased_parameters, preserved
from remat.measuring.stage_costs import (
    cast_bytes,
    casts_made_again,
    casts_of,
    own_autocast_cache,
    storage_bytes,
    with_casts,
)
from remat.profiling.carried import with_besides
from remat.profiling.loose import loose_state_is_steady
from remat.profiling.profiler import RECORDINGS, SWEEPS, Profiler, Wanted
from remat.profiling.remembered import remembered
from remat.runtime.caches import caches_off, configs_with_caches
from remat.runtime.calls.environment import accelerators
from remat.runtime.calls.places import Places
from remat.runtime.calls.stages import Stage, call_of, check_device, flatten, group, is_sequential
from remat.runtime.checks import Loss, check_count, check_model, check_sample, checked_loss, refuse_torchscript
from remat.runtime.logits import head_in_parts, is_in_parts
from remat.runtime.meter import instruments
from remat.runtime.patching import is_compiled
from remat.runtime.planned.patched_forward import unpatched
from remat.runtime.pytree import Arguments
from remat.runtime.sharding import (
    gathering_nothing_ahead,
    is_sharded,
    refuse_alone,
    refuse_flat_shards,
    refuse_shards_of_others,
)
from remat.runtime.variants import offer_variants
from remat.utils.progress import Passes, Progress
from remat.utils.ranks import Ranks


def profile(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int | None = None,
    loss: Loss | None = None,
    small: float = SMALL,
    stages: Sequence[str | nn.Module] | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    enough: Callable[[Chain], None] = lambda chain: None,
    output_held: bool = True,
    options: bool = True,
    offload: bool = False,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    device: str | None = None,
    estimate: bool = False,
    again: bool = True,
) -> Chain:
    """Measures the memory and time of every stage of `model` on `sample` (Beaumont et al., Section 5.1).

    The modules of an `nn.Sequential` are its stages. Of any other model the chains are found first (`find_chain`), and
    the code between their stages is measured too, as stages that are `fixed`.

    The model is measured in the mode it is in (train or eval) and left exactly as found: parameters, gradients,
    buffers, random number generators. No hook of a parameter is called; forward hooks of modules are.

    Args:
        model: any module.
        sample: its input: a tensor, a tuple of positional or a dict of keyword arguments; on the model's device.
        repeats: sweeps over the model whose median is each stage's time; None: 3, or fewer if they take over a second.
        loss: a function of the output that returns a scalar. Without one, the loss is the output's own where a model
            computes it (`output.loss`), else it is taken as free.
        small: modules whose forward has less to do than this share of the upper quartile (in bytes moved and
            operations) are fused with their neighbour.
        stages: names or modules to take for the stages, as in `find_chain`; None: they are found.
        output_held: count the output as held by the caller until the backward is over, as by
            `out = model(x); loss = criterion(out, y); loss.backward()`. False where the loop drops it before, or never
            names it: `criterion(model(x), y).backward()`.
        options: also measure ways to keep a part of a stage's saved tensors, and recompute the rest before its backward
            (`Chain.options`), which planners then choose from. One step of a stage for each of them, once for stages
            that do the same.
        offload: also measure which saved tensors can be offloaded to the host's memory, and the bandwidth; the planner
            `offload` uses copies that overlap with computation (`docs/offload.md`). Needs `options`.
        keep: names, or parts of names, of operators or module classes ("attention", "mm", "LayerNorm") that no option
            recomputes if autograd saves their results.
        recompute: names of operators that options may recompute although they are kept by default: "topk", "sort" and
            "router", which choose experts.
        estimate: run the model on fake tensors, without computing, and estimate its costs on `device`. Bytes are
            rounded as by PyTorch's allocator, with kernels' scratch memory if known; seconds follow from the
            operators' arithmetic and bytes (`remat.estimation`). Parameters may be on the meta device.
        device: to estimate for: "h100", "a100", "h200", "l4", "rtx4090", "mi300x", "cpu", or a file that
            `remat calibrate` wrote. By default "cpu".
        again: False: return the last profile of this model if no visible condition has changed: shapes, dtypes, flags,
            hooks, numbers and functions in attributes, but not the values of the sample.
        ranks: processes that train the model together: all measure the same options, and get the chain of the largest
            sizes and times that any of them has measured.
        enough: called with the chain as soon as its sizes are known, before its times; an exception from it ends the
            measuring.
        progress: called with what is being done, how many steps of it are done, and how many there are.

    Returns:
        The chain, with the layout of its stages on the model: modules that work in place on their input, return views
        of it, or are too small to matter are fused with their neighbour.

    Raises:
        UnsupportedModel: no chain, empty, on another device than the sample, or with a stage that returns no tensor.
        MeasurementError: a PyTorch profiler is running.
        RematError: no such device, or one is given although nothing is estimated.
    """
    check_model(model)
    if offload and not options:
        raise RematError("offload=True needs options=True: offloaded tensors are options of a stage")
    for name, words in {"keep": keep, "recompute": recompute}.items():
        if isinstance(words, str):
            raise RematError(f"{name}={words!r}: pass a list of names, {name}=[{words!r}]")
    given: Any = {"small": small, "stages": stages, "progress": progress}
    given |= {"output_held": output_held, "options": options, "offload": offload, "keep": keep, "recompute": recompute}
    several = ranks is not None and ranks.are_several  # what one remembers the others may not
    if estimate:
        world = World(device_named(device or "cpu"))
        estimated = partial(estimate_in, world, model, sample, loss, given | {"ranks": ranks})
        if again or several:
            return estimated()
        return remembered(model, sample, {**given, "loss": loss, "device": device}, estimated, again=False)
    if device is not None:
        raise RematError("device= is for estimates; a model is measured where it is. Pass estimate=True too")
    refuse_flat_shards(model)
    if not several:
        refuse_alone(model)
    _refuse_compiled_hooks(model)
    refuse_torchscript(model)
    check_sample(sample)
    if repeats is not None:
        check_count("repeats", repeats)
    if options:
        offer_variants(model)
    given |= {"repeats": repeats, "loss": loss}
    measure = partial(_profiled, model, sample, enough=enough, ranks=ranks or Ranks(), **given)
    if several:
        return measure()
    return remembered(model, sample, given, measure, again=again)


def _refuse_compiled_hooks(model: nn.Module) -> None:
    """Raises UnsupportedModel where a compiled call has FSDP's hooks in it, which a recomputation would run again."""
    if any(is_sharded(module) and is_compiled(module) for module in model.modules()):
        raise UnsupportedModel(
            "a sharded block that block.compile() has compiled gathers its parameters inside of the compiled "
            "call, so it cannot run again; compile it first, blocks[i] = torch.compile(block), and shard what that "
            "returns: fully_shard(blocks[i])"
        )


def _profiled(
    model: nn.Module,
    sample: Any,
    *,
    repeats: int | None,
    loss: Loss | None,
    small: float,
    stages: Sequence[str | nn.Module] | None,
    progress: Progress | None,
    ranks: Ranks,
    enough: Callable[[Chain], None],
    output_held: bool,
    options: bool,
    offload: bool,
    keep: Collection[str],
    recompute: Collection[str],
) -> Chain:
    """The chain of a model that is measured where it is."""
    loss_modules = [loss] if isinstance(loss, nn.Module) else []  # which may have parameters and buffers too
    end = checked_loss(loss)
    tell = progress or (lambda what, done, total: None)
    in_sequence = stages is None and is_sequential(model) and not any(map(is_in_parts, model.modules()))
    if in_sequence:
        refuse_shards_of_others(model, [Stage([module], name) for name, module in flatten(model)])
    call = with_graph_of_its_own(call_of(model, sample))
    everything = Stage([model], "model")
    place = check_device([everything], call)
    modules = [model, *loss_modules]
    with (
        torch.enable_grad(),
        unpatched(model),
        preserved(modules, accelerators(everything, call), call, loss) as replaced,
        caches_off(configs_with_caches(model.modules())),
        aliased_parameters(modules) as foreign,
        loose_state_is_steady(partial(_forward_only, model, call, end), ranks, own_hooks=in_sequence) as all_is_set_up,
        own_autocast_cache(),
    ):
        if in_sequence:
            # Which stages are too small may differ between processes, because their samples do.
            layout = in_a_row(model, call, 0.0 if ranks.are_several else small, tell)
        else:
            tell("finding chains", 0, 1)
            layout = locate(model, call, stages=stages, small=small).layout(call)
            tell("finding chains", 1, 1)
        forward = partial(_forward_only, model, call, end)
        recomputed = _recomputed(model, layout)
        copies = casts_of(forward) if not in_sequence or torch.is_autocast_enabled(place.type) else {}
        casts = casts_made_again(model, [*recomputed.values()], copies) + cast_bytes(place, forward)
        sweeps = SWEEPS if repeats is None else repeats
        of_options = RECORDINGS + 1 + (sweeps if instruments().computes else 0)
        passes = Passes(tell, 3 + sweeps + options * of_options + 2 * (layout.calls is not None))
        profiler = Profiler(model, call, layout, place, end, output_held, foreign, replaced, bool(copies), passes)
        with gathering_nothing_ahead(model):

            def goes_on(sizes: Chain) -> None:
                all_is_set_up([module for stage in recomputed.values() for module in stage.modules])
                enough(sizes)

            chain = profiler.chain(repeats, Wanted(options, keep, recompute, offload, ranks), goes_on)
        chain = with_casts(chain, recomputed, copies)
        set_up = storage_bytes(replaced.among(everything.parts))
        chain = replace(chain, reserve_bytes=chain.reserve_bytes + casts + set_up)
        chain = agree(chain, ranks)  # before the check, whose stages have to run in the same order in all processes
        if not any(chain.fixed) and not any(map(is_sharded, model.modules())):
            return chain
        passes.begin("checking", chain.length)(1)
        try:
            if any(map(is_sharded, model.modules())) and instruments().computes:
                found = ranks.all(profiler.besides(chain))
                chain = with_besides(chain, [min(each) for each in zip(*found, strict=True)])
            excess = profiler.excess(chain)
        except LeftChain as error:
            raise NoChain.varies(str(error)) from error
        except ReplayError as error:
            raise UnsupportedModel(str(error)) from error
    return agree(replace(chain, reserve_bytes=chain.reserve_bytes + excess), ranks)


def estimate_in(world: World, model: nn.Module, sample: Any, loss: Loss | None, options: dict[str, Any]) -> Chain:
    """`profile` of a copy of the model with fake tensors, in `world`.

    Args:
        options: arguments of `profile`, and `chunk_head` of `fit`.
    """
    names = {module: name for name, module in model.named_modules()}
    if options.get("stages") is not None:  # modules of the copy have the same names
        found = options["stages"]
        options["stages"] = [names.get(each, each) if isinstance(each, nn.Module) else each for each in found]
    copy = world.stand_in_for(model)
    which = options.pop("chunk_head", False)
    if which:
        head_in_parts(copy, which).stand()
    given, end = world.stand_in(sample), world.stand_in_for(loss) if isinstance(loss, nn.Module) else loss
    try:
        with world.entered():
            chain = profile(copy, given, loss=end, repeats=1, **options)
    except RematError as error:
        if isinstance(error.__cause__, LOOKS_AT_VALUES):
            raise UnsupportedModel(
                f"the forward of {type(model).__name__} depends on values that an estimate does not compute "
                f"({error.__cause__}): profile it where it runs"
            ) from error
        raise
    return world.finished(chain)


def _recomputed(model: nn.Module, layout: Layout) -> dict[int, Stage]:
    """The stages that may run again, by number."""
    if layout.calls is None:
        return dict(enumerate(group(model, layout, len(layout.modules) + 1), start=1))
    places = Places(model, layout)
    return {number: stage for number, stage in enumerate(places.stages, start=1) if not places.fixed[number - 1]}


def _forward_only(model: nn.Module, call: Arguments, loss: Loss | None) -> None:
    with saving_nothing():
        output = model(*call.args, **call.kwargs)
        if loss is not None:
            loss(output)
