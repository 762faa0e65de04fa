"""What a stage's forward depends on besides its input, so that running it again is the same run.

Random number generators, autocast, train/eval flags, flags of backends, hooks and attributes are as the first run met
them; buffers that it changes are changed once; parameters and other buffers are compared by their versions.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from remat.errors import ReplayError
from remat.runtime.accelerator import granule_of, is_accelerator, rounded
from remat.runtime.calls.attributes import Attributes, plain_tensors
from remat.runtime.calls.early_stop import sum_of
from remat.runtime.calls.hooks import Hooks
from remat.runtime.calls.settled import Settled
from remat.runtime.calls.stages import Stage, autocast_of
from remat.runtime.calls.steady import is_steady
from remat.runtime.fakes import in_earnest, is_fake
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.meter import instruments
from remat.runtime.pytree import objects_in, storage_of, tensors, version_of
from remat.runtime.surroundings import all_of, modes_now, present, under


def state_bytes(*, on_accelerator: bool = False) -> int:
    """Bytes of limited memory that the state of a generator takes while it is asked for, in the CPU's memory."""
    return 0 if on_accelerator else instruments().generator_bytes()


def working_bytes(stage: Stage) -> int:
    """Bytes that running a stage takes on top of its own while it is to be run again, at most.

    Buffers: the copies that `BufferWatch.before` makes, and those that a recomputation works on (`_buffers_again`).
    Generators: a state at a time, on its way out of PyTorch's memory.
    """
    found = [buffer for *_, buffer in stage.buffers()]
    found += [weight for part in stage.parts for weight in rescaled(part).values()]
    found += [tensor for part in stage.parts for _, tensor in plain_tensors(vars(part))]
    states = state_bytes(on_accelerator=bool(accelerators(stage, ())))
    dense = [buffer for buffer in found if buffer.layout == torch.strided]  # a stage does not write to others
    return 2 * sum(rounded(buffer.nbytes, buffer.device) for buffer in dense) + states


def accelerators(stage: Stage, value: Any) -> set[torch.device]:
    """The devices other than the CPU that a run of `stage` on `value` may draw random numbers on."""
    return _accelerators([*tensors(value), *stage.parameters()])


def _accelerators(found_on: Iterable[torch.Tensor]) -> set[torch.device]:
    found = {device for device in {tensor.device for tensor in found_on} if is_accelerator(device)}
    for device in found:
        granule_of(device)  # refuses those whose limits would not be kept
    return found


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

    def refuse_others(self, stage: Stage, name: str) -> None:
        """Raises ReplayError where the stage has others now, or other values in them, as far as can be known."""
        now = list(stage.parameters())
        if len(now) != len(self._now) or any(
            [
                found is not was or _memory_of(found) is not memory
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


def _memory_of(parameter: nn.Parameter) -> torch.UntypedStorage | None:
    """None for parameters that are parts of tensors of several processes, whose memory comes and goes."""
    return storage_of(parameter) if type(parameter) is nn.Parameter and parameter.layout == torch.strided else None


class FirstRun:
    """The context of a stage's first forward: what it depended on; `again` puts that back for a recomputation.

    Args:
        value: what it works on; beside: what else it is passed.
        own: generators of the program's own that it may draw from.

    Attributes:
        inputs: how the tensors look that it is passed.
    """

    def __init__(
        self,
        stage: Stage,
        value: Any,
        watch: BufferWatch,
        *,
        preserve_random: bool,
        beside: Any = (),
        own: Sequence[Any] = (),
    ) -> None:
        self._stage, self._watch = stage, watch
        self._flags = tuple([part.training for part in stage.parts])
        self._parameters = Parameters(stage.parameters())
        self._trained = tuple([each.requires_grad for each in stage.parameters()])
        self._autocast = autocast_now(value)
        self._surroundings, self._modes, self._hooks = present(), modes_now(), Hooks(stage.parts)
        passed = tensors((value, beside))
        self.inputs = tuple(map(_look, passed))
        self._is_steady = not (own or self._modes or self._hooks.any) and is_steady(stage.parts, passed)
        self._sums: list[int] | None = None
        self._rewritten: list[torch.Tensor] = []  # parameters that the forward itself wrote to
        self._random: RandomState | None = None
        self._before: dict[_Key, _Before] = {}
        self._changed: dict[_Key, _Before] = {}
        self._unchanged: list[tuple[_Key, torch.Tensor | None, int]] = []  # buffers that the run leaves as they are
        self._attributes = Attributes(stage.parts, changing=not self._is_steady, settled=watch.settled)
        objects = objects_in((value, beside))
        self._objects = Attributes(objects, changing=False) if objects else None
        if not self._is_steady:
            self._note_state(passed, own, preserve_random=preserve_random)

    def _note_state(self, passed: Sequence[torch.Tensor], own: Sequence[Any], *, preserve_random: bool) -> None:
        """What a run may draw on and change."""
        stage, watch = self._stage, self._watch
        self._sums = None if watch.rewritten is not None else _sums(stage)
        held = held_by(self._attributes.may_draw)
        own = [*{id(each): each for each in (*own, *held)}.values(), *of_python()]
        devices = _accelerators([*passed, *self._parameters.all()]) if preserve_random else ()
        self._random = RandomState(devices, own, of_cpu=preserve_random)
        self._before = watch.before(stage, self._flags, self._attributes.tensors())

    @property
    def situation(self) -> Hashable:
        """What runs of the stage have in common that do the same: shapes, flags of modules, parameters and backends,
        autocast."""
        autocast = tuple((state["device_type"], state["enabled"], state["dtype"]) for state in self._autocast)
        return self.inputs, self._flags, self._trained, self._surroundings, autocast

    def ended(self) -> None:
        """To be called when the first run is over: keeps only what it really drew on and changed."""
        if self._objects is not None:
            self._objects.ended()
        if self._is_steady:
            return
        self._attributes.ended()
        # A stage may change a parameter itself (Embedding's max_norm); only what comes after its run is an error.
        if self._sums is not None:
            pairs = zip(self._sums, _sums(self._stage), strict=True)
            self._watch.rewritten = {number for number, (before, now) in enumerate(pairs) if before != now}
            self._sums = None
        self._rewritten = self._parameters.changed()
        if self._watch.rewritten:
            also = [each for number, each in enumerate(self._stage.parameters()) if number in self._watch.rewritten]
            self._rewritten = list({id(each): each for each in (*self._rewritten, *also)}.values())
        if self._rewritten:
            kept_aside = {id(weight) for part in self._stage.parts for weight in rescaled(part).values()}
            self._rewritten = [weight for weight in self._rewritten if id(weight) not in kept_aside]
        self._parameters = Parameters(self._stage.parameters())
        self._changed = self._watch.after(self._stage, self._flags, self._before)
        self._unchanged = [
            (key, was.buffer, was.version) for key, was in self._before.items() if key not in self._changed
        ]
        self._before = {}
        self._hooks.ended()
        if self._random is not None and not self._random.keep_changed(self._random.now()):
            self._random = None

    def undo(self) -> bool:
        """Puts back what a run that has failed in the middle has drawn and changed; False where it cannot."""
        if self._is_steady:
            return True
        if self._parameters.changed() or not all(was.can_be_undone for was in self._before.values()):
            return False
        for (position, name), was in self._before.items():
            _holder(self._stage.parts[position], name)[name] = was.buffer
            if was.buffer is not None and was.copy is not None:
                was.buffer.detach().copy_(was.copy)
        self._attributes.ended()
        self._attributes.undo()
        if self._random is not None:
            self._random.restore()
        return True

    def release(self) -> None:
        """It will not be put back any more: lets go of objects that were passed."""
        self._objects = None

    @property
    def rewrites(self) -> bool:
        """Whether the run, which has ended, has changed parameters, other than by scaling them down."""
        return bool(self._rewritten)

    @property
    def draws(self) -> bool:
        """Whether the run, which has ended, has drawn random numbers."""
        return self._random is not None

    def kept(self) -> list[torch.Tensor]:
        """Copies of what was there before the run, that lie in memory until it is gone."""
        return [was.copy for was in self._changed.values() if was.copy is not None and was.copy is not was.buffer]

    def again(self) -> AbstractContextManager[Any]:
        """The surroundings of the first run; afterwards everything is as before, buffers changed once included.

        Raises:
            ReplayError: a parameter was modified in place since, a buffer changed in this run that never did before, or
                the stage writes other values to a parameter of its own each time.
        """
        self._parameters.refuse_others(self._stage, f"stage {self._stage.name!r}")
        contexts: list[AbstractContextManager[Any]] = []
        if any([part.training is not flag for part, flag in zip(self._stage.parts, self._flags, strict=True)]):
            contexts.append(flags_again(self._stage.parts, self._flags))
        # As where a discriminator is frozen for a generator's forward, and no longer when its backward begins.
        pairs = zip(self._stage.parameters(), self._trained, strict=True)
        others_trained = [each for each, trained in pairs if each.requires_grad is not trained]
        if others_trained:
            contexts.append(_switched(others_trained))
        if present() is not self._surroundings:
            contexts.append(self._surroundings.again())
        contexts += autocast_again(self._autocast)
        if not self._hooks.are_present:
            contexts.append(self._hooks.again())
        others = self._attributes.others()
        if self._objects is not None:
            contexts.append(self._objects.again(self._objects.others()))
        if not self._is_steady:
            contexts.append(self._state_again(others))
        elif others:
            contexts.append(self._attributes.again(others))
        return all_of(contexts)

    @property
    def changed_buffer(self) -> str:
        """Which buffer, or tensor in an attribute, was changed in place and cannot be put back; empty where none."""
        for (position, name), buffer, version in self._unchanged:
            if buffer is None or version_of(buffer) == version:
                continue
            # DDP writes the same values to buffers in each forward, so that versions tell nothing.
            by_ddp = torch.distributed.is_available() and torch.distributed.is_initialized()
            if not by_ddp or name not in self._stage.parts[position]._buffers:
                return f"{name!r} of a {type(self._stage.parts[position]).__name__}"
        return self._attributes.changed_tensor or (self._objects.changed_tensor if self._objects is not None else "")

    @contextmanager
    def _state_again(self, others: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
        """What the first run met, drew on and changed."""
        switches = Switches(self._stage.parts)
        written = [(weight, weight.detach().clone()) for weight in self._rewritten]
        contexts = [under(self._modes)] if self._modes else []
        contexts.append(self._attributes.again(others))
        if self._changed or self._unchanged:
            contexts.append(self._buffers_again())
        if self._random is not None:
            contexts.append(self._random.again())
        with all_of(contexts):
            try:
                yield
            finally:
                switches.put_back()
                if self._parameters.changed():
                    self._parameters = Parameters(self._parameters.all())
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
            for (position, name), buffer, _ in self._unchanged:
                holder = _holder(self._stage.parts[position], name)
                if holder.get(name) is not buffer and holder is not vars(self._stage.parts[position]):
                    originals.append((holder, name, holder.get(name)))
                    holder[name] = buffer
            yield
        finally:
            for holder, name, buffer in originals:
                holder[name] = buffer


class Switches:
    """What a forward may switch and switch back: train flags, which parameters are trained, flags of backends.

    A run that ends early, or fails, does not come to the second.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._flags = [(part, part.training) for part in parts]
        parameters = [each for part in parts for each in part._parameters.values() if each is not None]
        self._trained = [(each, each.requires_grad) for each in parameters]
        self._surroundings = present()

    def put_back(self) -> None:
        for part, flag in self._flags:
            if part.training is not flag:
                part.training = flag
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
        if present() is not self._surroundings:
            self._surroundings.establish()


@contextmanager
def flags_again(parts: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Inside, modules are in train or eval mode as these flags say."""
    now = [(part, part.training) for part in parts]
    other = [(part, flag) for (part, is_now), flag in zip(now, flags, strict=True) if is_now != flag]
    for part, flag in other:
        part.training = flag
    try:
        yield
    finally:
        for part, flag in now if other else ():
            part.training = flag


@contextmanager
def _switched(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, those of them are trained that are not, and the other way round."""
    now = [(each, each.requires_grad) for each in parameters]
    for each, flag in now:
        each.requires_grad_(not flag)
    try:
        yield
    finally:
        for each, flag in now:
            each.requires_grad_(flag)


def autocast_now(passed: Any) -> list[dict[str, Any]]:
    """What casts, for the devices of tensors in `passed` and the CPU; nothing where nothing does anywhere."""
    if not torch._C._is_any_autocast_enabled():
        return []
    return autocast_states({tensor.device.type for tensor in tensors(passed)} | {"cpu"})


def autocast_again(states: list[dict[str, Any]]) -> list[AbstractContextManager[Any]]:
    """Contexts in which that is in force, where it is not; a backward usually runs outside of it."""
    if not states:
        here = kinds_here() if torch._C._is_any_autocast_enabled() else ()
        return [torch.autocast(kind, enabled=False) for kind in here if autocast_of(kind) is not None]
    if autocast_states([state["device_type"] for state in states]) == states:
        return []
    return [torch.autocast(**state) for state in states]


def kinds_here() -> set[str]:
    """Of devices: the CPU, and the accelerator if there is one."""
    here = torch.accelerator.current_accelerator()
    return {"cpu"} if here is None else {"cpu", here.type}


def _look(tensor: torch.Tensor) -> Hashable:
    stride = tensor.stride() if tensor.layout == torch.strided else None
    return tensor.shape, stride, tensor.dtype, tensor.requires_grad


def autocast_states(device_types: Collection[str]) -> list[dict[str, Any]]:
    """Arguments of `torch.autocast` that bring back the present state."""
    return [
        {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device_type in sorted(device_types)
        if torch.amp.is_autocast_available(device_type)
    ]
