"""What a stage's forward depends on besides its input, so that running it again is the same run.

Random number generators, autocast, train/eval flags, flags of backends, hooks and attributes are as the first run met
them; buffers that it changes are changed once; parameters and other buffers are compared by their versions.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import nn

from remat.runtime.accelerator import granule_of, is_accelerator, rounded
from remat.runtime.calls.attributes import Attributes, plain_tensors
from remat.runtime.calls.hooks import Hooks
from remat.runtime.calls.objects import objects_in
from remat.runtime.calls.stages import Stage, autocast_of, parts_of
from remat.runtime.calls.state import BufferWatch, Parameters, StageState, rescaled
from remat.runtime.calls.steady import is_steady
from remat.runtime.generators import RandomState, held_by, of_python
from remat.runtime.meter import instruments
from remat.runtime.pytree import tensors
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


class FirstRun:
    """The context of a stage's first forward: what it depended on; `again` puts that back for a recomputation.

    Args:
        value: what it works on; beside: what else it is passed.
        own: generators of the program's own that it may draw from.

    Attributes:
        inputs: how the tensors look that it is passed.
        repeats: whether it is to give the same once more, its random numbers included.
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
        self._stage, self.repeats = stage, preserve_random
        self._flags = tuple([part.training for part in stage.parts])
        self._parameters = Parameters(stage.parameters())
        self._trained = tuple([each.requires_grad for each in stage.parameters()])
        self._autocast = autocast_now(value)
        self._surroundings, self._modes, self._hooks = present(), modes_now(), Hooks(stage.parts)
        self._variables = tuple(copy_context().items())
        passed = tensors((value, beside))
        self.inputs = tuple(map(_look, passed))
        steady = not (own or self._modes or self._hooks.any) and is_steady(stage.parts, passed)
        self._attributes = Attributes(stage.parts, changing=not steady, settled=watch.settled)
        objects = objects_in((value, beside))
        self._objects = Attributes(objects, changing=False) if objects else None
        self._state: StageState | None = None
        if not steady:
            held = held_by(self._attributes.may_draw)
            own = [*{id(each): each for each in (*own, *held)}.values(), *of_python()]
            devices = _accelerators([*passed, *self._parameters.all()]) if preserve_random else ()
            random = RandomState(devices, own, of_cpu=preserve_random)
            self._state = StageState(stage, watch, self._flags, self._attributes.tensors(), random)

    def parameters(self) -> list[nn.Parameter]:
        """Those that the stage had."""
        return self._parameters.all()

    @property
    def parameters_changed(self) -> bool:
        """Whether any was written to since."""
        return bool(self._parameters.changed())

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
        if self._state is None:
            return
        self._attributes.ended()
        self._state.ended(self._parameters.changed())
        self._parameters = Parameters(self._stage.parameters())
        self._hooks.ended()

    def undo(self) -> bool:
        """Puts back what a run that has failed in the middle has drawn and changed; False where it cannot."""
        if self._state is None:
            return True
        if self._parameters.changed() or not self._state.can_be_undone:
            return False
        self._state.undo()
        self._attributes.ended()
        self._attributes.undo()
        return True

    def release(self) -> None:
        """It will not be put back any more: lets go of objects that were passed, and of what variables held."""
        self._objects, self._variables = None, ()

    @property
    def rewrites(self) -> bool:
        """Whether the run, which has ended, has changed parameters, other than by scaling them down."""
        return self._state is not None and bool(self._state.rewritten)

    @property
    def draws(self) -> bool:
        """Whether the run, which has ended, has drawn random numbers."""
        return self._state is not None and self._state.random is not None

    def kept(self) -> list[torch.Tensor]:
        """Copies of what was there before the run, that lie in memory until it is gone."""
        return [] if self._state is None else self._state.kept()

    def again(self, *, with_parameters: bool = False) -> AbstractContextManager[Any]:
        """The surroundings of the first run; afterwards everything is as before, buffers changed once included.

        Args:
            with_parameters: where others are in their place, those of the first run are put back, too. No backward may
                run through what is computed then: they may have graphs.

        Raises:
            ReplayError: a parameter was modified in place since, a buffer changed in this run that never did before, or
                the stage writes other values to a parameter of its own each time.
        """
        self._parameters.refuse_others(self._stage, f"stage {self._stage.name!r}", put_back=with_parameters)
        contexts: list[AbstractContextManager[Any]] = []
        if with_parameters and self._parameters.are_others(self._stage):
            contexts.append(self._parameters.again(self._stage))
        if any([part.training is not flag for part, flag in zip(self._stage.parts, self._flags, strict=True)]):
            contexts.append(flags_again(self._stage.parts, self._flags))
        # As where a discriminator is frozen for a generator's forward, and no longer when its backward begins.
        pairs = zip(self._parameters.all(), self._trained, strict=True)
        others_trained = [each for each, trained in pairs if each.requires_grad is not trained]
        if others_trained:
            contexts.append(_switched(others_trained))
        if present() is not self._surroundings:
            contexts.append(self._surroundings.again())
        contexts += autocast_again(self._autocast)
        others_set = [(variable, value) for variable, value in self._variables if variable.get(None) is not value]
        if others_set:
            contexts.append(_set(others_set))
        if not self._hooks.are_present:
            contexts.append(self._hooks.again())
        others = self._attributes.others()
        if self._objects is not None:
            contexts.append(self._objects.again(self._objects.others()))
        if self._state is not None:
            contexts.append(self._changing_again(self._state, others))
        elif others:
            contexts.append(self._attributes.again(others))
        return all_of(contexts)

    @property
    def changed_buffer(self) -> str:
        """Which buffer, or tensor in an attribute, was changed in place and cannot be put back; empty where none."""
        found = "" if self._state is None else self._state.changed_buffer
        objects = self._objects
        return found or self._attributes.changed_tensor or ("" if objects is None else objects.changed_tensor)

    @contextmanager
    def _changing_again(self, state: StageState, others: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
        """What the first run met, drew on and changed."""
        switches = Switches(self._stage.parts)
        contexts = [under(self._modes)] if self._modes else []
        contexts += [self._attributes.again(others), state.again()]
        with all_of(contexts):
            try:
                yield
            finally:
                switches.put_back()
                if self._parameters.changed():
                    self._parameters = Parameters(self._parameters.all())


class Between:
    """What code between two calls of a stage has left for the second one: attributes, flags, objects that it is passed.

    The stage's `FirstRun` takes that for changes of its own run.
    """

    def __init__(self, module: nn.Module, passed: Any) -> None:
        self._parts = parts_of([module])
        self._flags = [part.training for part in self._parts]
        objects = objects_in(passed)
        self._attributes = [Attributes(self._parts, changing=True)]
        self._attributes += [Attributes(objects, changing=False)] if objects else []

    def ended(self) -> None:
        """The call is over."""
        for each in self._attributes:
            each.ended()

    def again(self) -> AbstractContextManager[Any]:
        """Inside, they are as the call met them; afterwards as they are now."""
        attributes = [each.again(each.others()) for each in self._attributes]
        return all_of([*attributes, flags_again(self._parts, self._flags)])


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
def _set(variables: Sequence[tuple[ContextVar[Any], Any]]) -> Iterator[None]:
    """Inside, context variables have these values; a backward on an accelerator runs in a thread that has none."""
    tokens = [(variable, variable.set(value)) for variable, value in variables]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


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
