"""What a stage holds of its own and its runs read and change: parameters, buffers, generators that it draws from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from remat.errors import ReplayError
from remat.runtime.accelerator import rounded
from remat.runtime.calls.early_stop import sum_of
from remat.runtime.calls.settled import Settled
from remat.runtime.calls.stages import Stage
from remat.runtime.fakes import in_earnest, is_fake
from remat.runtime.generators import RandomState
from remat.runtime.pytree import storage_of, version_of
from remat.runtime.surroundings import all_of

_RESCALING = (nn.Embedding, nn.EmbeddingBag)
_SMALL = 1 << 14  # bytes
_Key: TypeAlias = tuple[int, str]  # a buffer: position of its module among the stage's parts, and its name


class _Before(NamedTuple):
    """A buffer before a run: the object (or None), its version, and its old values where the run may change it.

    `copy`: the buffer itself where the run put another in its place, since nothing writes to it any more.
    """

    buffer: torch.Tensor | None
    version: int
    copy: torch.Tensor | None

    @property
    def intact(self) -> bool:
        """Whether the old values are still those: a buffer that was replaced may be changed by who else holds it."""
        return self.copy is None or self.copy is not self.buffer or version_of(self.copy) == self.version

    @property
    def can_be_undone(self) -> bool:
        """Whether the old values are still somewhere."""
        return self.buffer is None or self.copy is not None or version_of(self.buffer) == self.version

    @property
    def kept_bytes(self) -> int:
        return 0 if self.copy is None else rounded(self.copy.numel() * self.copy.element_size(), self.copy.device)


class BufferWatch:
    """Which buffers of a stage its forward changes, learned from its runs; tensors in attributes are buffers, too.

    A buffer must be copied before a run that writes to it. The first run in each combination of train and eval flags
    copies all of them; later ones only those that were seen to change. Versions alone do not tell: the kernels of
    BatchNorm write running statistics without counting one, so values are compared too, in that first run. A run that
    puts another tensor in a buffer's place, as modules do that set up a table for the shapes they meet, needs no copy:
    the old one is kept until the backward, and nothing after a run that leaves it alone. A parameter that the forward
    itself scales down (`max_norm` of embeddings) counts as such a buffer: a second time would change it once more.
    Small ones of the program's own layers count, too, since these may begin later to write to them by `.data`.

    Attributes:
        rewritten: which parameters runs write to without counting a version, as by `.data`; None while not known.
        settled: of modules whose attributes runs leave alone, by position, how they look.
    """

    def __init__(self) -> None:
        self.settled: dict[int, Settled | None] = {}
        self._changing: dict[tuple[bool, ...], set[_Key]] = {}
        self.rewritten: set[int] | None = None

    def before(
        self, stage: Stage, flags: tuple[bool, ...], attributes: Iterable[tuple[int, str, torch.Tensor]] = ()
    ) -> dict[_Key, _Before]:
        """Every buffer as it is now; `attributes`: tensors in attributes of which module of the stage."""
        known = self._changing.get(flags)
        buffers = [
            (position, name, buffer)
            for position, part in enumerate(stage.parts)
            if part._buffers or isinstance(part, _RESCALING)
            for name, buffer in (*part._buffers.items(), *rescaled(part).items())
        ]
        return {
            (position, name): _Before(None, 0, None)
            if buffer is None
            else _Before(
                *(buffer, version_of(buffer)),
                buffer.detach().clone()
                if known is None or (position, name) in known or _is_small_state(stage.parts[position], buffer)
                else None,
            )
            for position, name, buffer in (*buffers, *attributes)
        }

    def after(self, stage: Stage, flags: tuple[bool, ...], before: dict[_Key, _Before]) -> dict[_Key, _Before]:
        """The buffers that changed, or did so in an earlier run, as they were before this one."""
        known = self._changing.get(flags)
        written = {
            key: was
            for key, was in before.items()
            if (known is not None and key in known)
            or (was.buffer is not None and version_of(was.buffer) != was.version)
            or _is_running_statistic(stage.parts[key[0]], key[1], flags[key[0]])
            or key[1] in rescaled(stage.parts[key[0]])
            or (was.buffer is not None and _is_small_state(stage.parts[key[0]], was.buffer))
            or (known is None and _differ(was.buffer, was.copy))
        }
        replaced = {
            key: was._replace(copy=was.buffer)
            for key, was in before.items()
            if key not in written and stage.parts[key[0]]._buffers.get(key[1], was.buffer) is not was.buffer
        }
        self._changing.setdefault(flags, set()).update(written)
        return written | replaced


def _holder(part: nn.Module, name: str) -> dict[str, Any]:
    """What a module holds a parameter, a buffer or an attribute in."""
    holders: Sequence[dict[str, Any]] = (part._parameters, part._buffers)
    return next((each for each in holders if name in each), vars(part))


def _differ(buffer: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
    if buffer is None or copy is None or buffer.layout != torch.strided or is_fake(buffer):
        return False  # sparse tensors have no `equal`, and fake ones no values; their versions must do
    return not torch.equal(buffer, copy)


def rescaled(part: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that the module's own forward writes to."""
    if isinstance(part, _RESCALING) and part.max_norm is not None:
        return {"weight": part.weight}
    return {}


def _is_small_state(part: nn.Module, buffer: torch.Tensor) -> bool:
    """Whether it may be a counter or an average, which code of the program's own writes to without counting a version:
    larger ones are tables, of which a copy for each run would take too much."""
    own = not type(part).__module__.startswith("torch.nn.")
    return own and buffer.layout == torch.strided and buffer.nbytes <= _SMALL


def _is_running_statistic(part: nn.Module, name: str, training: bool) -> bool:
    # True even where a run leaves the values as they were, which the next one may not: a layer of the program's own may
    # have a switch besides `training` for that.
    if isinstance(part, _NormBase):
        return training and part.track_running_stats
    return name in ("running_mean", "running_var")


class Parameters:
    """The parameters of a stage as they are now."""

    __slots__ = ("_now",)

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Of each its version, and its memory, which `parameter.data = ...` puts another for.
        self._now = [(each, each._version, _memory_of(each)) for each in parameters]

    def all(self) -> list[nn.Parameter]:
        return [parameter for parameter, *_ in self._now]

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        return [parameter for parameter, version, _ in self._now if parameter._version != version]

    def are_others(self, stage: Stage) -> bool:
        """Whether the stage has others now."""
        return any([found is not was for found, (was, *_) in zip(stage.parameters(), self._now, strict=True)])

    @contextmanager
    def again(self, stage: Stage) -> Iterator[None]:
        """Inside, the stage has these."""
        # By place, and not by which is there now: one that is shared now may have been two.
        places = [(part._parameters, name) for part in stage.parts for name in part._parameters]
        held = [(holder, name, holder[name]) for holder, name in places if holder[name] is not None]
        for (holder, name, _), (was, *_) in zip(held, self._now, strict=True):
            holder[name] = was
        try:
            yield
        finally:
            for holder, name, now in held:
                holder[name] = now

    def refuse_others(self, stage: Stage, name: str, *, put_back: bool = False) -> None:
        """Raises ReplayError where the stage has others now, or other values in them, as far as can be known.

        Args:
            put_back: others are no problem, as these will take their place.
        """
        now = list(stage.parameters())
        if len(now) != len(self._now) or any(
            [
                (found is not was and (not put_back or _is_emptied(was))) or _memory_of(was) is not memory
                for found, (was, _, memory) in zip(now, self._now, strict=True)
            ]
        ):
            raise ReplayError(
                f"the parameters of {name} were replaced since its forward, so recomputing it would give another "
                "result; run backward() before replacing them (also by `parameter.data = ...`) and inside of "
                "torch.func.functional_call, or use the store_all schedule"
            )
        for parameter, version, _ in self._now:
            if parameter._version != version:
                raise ReplayError(
                    f"a parameter of {name} with shape {tuple(parameter.shape)} was modified in place since "
                    f"the forward (version {version} then, {parameter._version} now), so recomputing it would give "
                    "another result; call optimizer.step() after backward()"
                )


def _sums(stage: Stage) -> list[int]:
    """Of what each parameter holds, where that can be looked at."""
    with in_earnest():
        return [
            0 if _memory_of(each) is None or is_fake(each) else sum_of(each.detach()) for each in stage.parameters()
        ]


def _is_emptied(parameter: nn.Parameter) -> bool:
    """Whether its memory was given back, as FSDP does with gathered weights."""
    memory = _memory_of(parameter)
    return memory is not None and parameter.numel() > 0 and memory.nbytes() == 0


def _place_of(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.layout != torch.strided else storage_of(buffer)._cdata


def _memory_of(parameter: nn.Parameter) -> torch.UntypedStorage | None:
    """None for parameters that are parts of tensors of several processes, whose memory comes and goes."""
    return storage_of(parameter) if type(parameter) is nn.Parameter and parameter.layout == torch.strided else None


class StageState:
    """What one run of a stage may change of its stage's own, and what it draws on: as it was before.

    Args:
        flags: of train and eval mode, of the stage's modules.
        attributes: tensors in attributes, of which module of the stage.
        random: of the generators that the run may draw from.

    Attributes:
        random: None once the run has drawn nothing.
        rewritten: parameters that the run itself wrote to, other than by scaling them down.
    """

    def __init__(
        self,
        stage: Stage,
        watch: BufferWatch,
        flags: tuple[bool, ...],
        attributes: Iterable[tuple[int, str, torch.Tensor]],
        random: RandomState,
    ) -> None:
        self._stage, self._watch, self._flags = stage, watch, flags
        self._sums = None if watch.rewritten is not None else _sums(stage)
        self.random: RandomState | None = random
        self.rewritten: list[torch.Tensor] = []
        self._changed: dict[_Key, _Before] = {}
        # Buffers that the run leaves as they are: their versions, and which memory is theirs (`.data = other`).
        self._unchanged: list[tuple[_Key, torch.Tensor | None, int, int]] = []
        self._before = watch.before(stage, flags, attributes)

    def ended(self, changed: Sequence[torch.Tensor]) -> None:
        """The run is over: keeps only what it really drew on and changed; `changed`: parameters of another version."""
        stage, watch = self._stage, self._watch
        if self._sums is not None:
            pairs = zip(self._sums, _sums(stage), strict=True)
            watch.rewritten = {number for number, (before, now) in enumerate(pairs) if before != now}
            self._sums = None
        # A stage may change a parameter itself (Embedding's max_norm); only what comes after its run is an error.
        self.rewritten = list(changed)
        if watch.rewritten:
            also = [each for number, each in enumerate(stage.parameters()) if number in watch.rewritten]
            self.rewritten = list({id(each): each for each in (*changed, *also)}.values())
        if self.rewritten:
            kept_aside = {id(weight) for part in stage.parts for weight in rescaled(part).values()}
            self.rewritten = [weight for weight in self.rewritten if id(weight) not in kept_aside]
        self._changed = watch.after(stage, self._flags, self._before)
        self._unchanged = [
            (key, was.buffer, was.version, _place_of(was.buffer))
            for key, was in self._before.items()
            if key not in self._changed
        ]
        self._before = {}
        if self.random is not None and not self.random.keep_changed(self.random.now()):
            self.random = None

    @property
    def can_be_undone(self) -> bool:
        """Whether what a run has changed that has failed in the middle can be put back."""
        return all(was.can_be_undone for was in self._before.values())

    def undo(self) -> None:
        """Puts it back."""
        for (position, name), was in self._before.items():
            _holder(self._stage.parts[position], name)[name] = was.buffer
            if was.buffer is not None and was.copy is not None:
                was.buffer.detach().copy_(was.copy)
        if self.random is not None:
            self.random.restore()

    def kept(self) -> list[torch.Tensor]:
        """Copies of what was there before the run, that lie in memory until it is gone."""
        return [was.copy for was in self._changed.values() if was.copy is not None and was.copy is not was.buffer]

    @property
    def changed_buffer(self) -> str:
        """Which buffer, or tensor in an attribute, was changed in place and cannot be put back; empty where none."""
        for (position, name), buffer, version, place in self._unchanged:
            if buffer is None or (version_of(buffer) == version and _place_of(buffer) == place):
                continue
            # DDP writes the same values to buffers in each forward, so that versions tell nothing.
            by_ddp = torch.distributed.is_available() and torch.distributed.is_initialized()
            if not by_ddp or name not in self._stage.parts[position]._buffers:
                return f"{name!r} of a {type(self._stage.parts[position]).__name__}"
        return ""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, it is what the first run met; afterwards as before.

        Raises:
            ReplayError: a buffer changed in this run that never did before, or the stage writes other values to a
                parameter of its own each time.
        """
        written = [(weight, weight.detach().clone()) for weight in self.rewritten]
        contexts = [self._buffers_again()] if self._changed or self._unchanged else []
        if self.random is not None:
            contexts.append(self.random.again())
        with all_of(contexts):
            yield
        for weight, was in written:
            if not is_fake(weight) and not torch.equal(weight, was):
                weight.detach().copy_(was)
                raise ReplayError(
                    f"stage {self._stage.name!r} changes its own parameter of shape {tuple(was.shape)} in its "
                    "forward, so recomputing it would give another result; use the store_all schedule"
                )

    @contextmanager
    def _buffers_again(self) -> Iterator[None]:
        """Runs on scratch copies of the old values, so that the module's own buffers are not changed a second time."""
        originals: list[tuple[dict[str, Any], str, Any]] = []
        copies: dict[int, torch.Tensor] = {}  # of buffers that have several names
        try:
            for (position, name), was in self._changed.items():
                part = self._stage.parts[position]
                if not was.intact or (was.buffer is not None and was.copy is None):
                    raise ReplayError(
                        f"buffer {name!r} of stage {self._stage.name!r} changed in this forward but not in the ones "
                        "before, so its old value was not kept; use the store_all schedule"
                    )
                holder = _holder(part, name)
                originals.append((holder, name, holder.get(name)))
                scratch = copies.get(id(was.buffer))
                if scratch is None and was.copy is not None:
                    scratch = copies[id(was.buffer)] = was.copy.clone()
                if isinstance(holder.get(name), nn.Parameter) and scratch is not None:
                    scratch = nn.Parameter(scratch, holder[name].requires_grad)
                holder[name] = scratch
            for (position, name), buffer, *_ in self._unchanged:
                holder = _holder(self._stage.parts[position], name)
                if holder.get(name) is not buffer and holder is not vars(self._stage.parts[position]):
                    originals.append((holder, name, holder.get(name)))
                    holder[name] = buffer
            yield
        finally:
            for holder, name, buffer in originals:
                holder[name] = buffer
