"""Where the stages of a found chain lie in a model: which calls of which modules they are, and in what order; and how
far one forward has come among them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.errors import PlanMismatch
from remat.layout import Layout
from remat.runtime.calls.stages import Stage, by_stages, stage_name
from remat.runtime.pytree import activation_of, first_tensor, key_of, tensors, version_of


class Place(NamedTuple):
    """A call of the chain: its name, its stage, and whether it is the first and the last call of that."""

    name: str
    stage: int
    first: bool
    last: bool


class Places:
    """The calls of a layout, bound to a model.

    Of an `nn.Sequential` whose layout names no calls they are those of its modules, as many of them in a stage as the
    layout says, else one. Each is passed all that the one before has returned.

    Args:
        length: of the schedule: the stages and the loss; None: as many as the layout has.

    Attributes:
        stages: 1..L, of which those without modules stand for the code between the others.
        fixed: L+1 flags: the stages that are such code.
        follows: stages that take the activation of the stage before them.
        in_a_row: the model is an `nn.Sequential`, whose activations are whole values.
        calls: in the order in which they come; of an `nn.Sequential`, one for each stage.
        aside: calls of the same modules that are no part of a stage.
        names: of the modules of stages, and of those that are not called on the chain's path.

    Raises:
        PlanMismatch: the layout is that of another model.
        UnsupportedModel: it names no calls, and the model is not an `nn.Sequential`.
    """

    def __init__(self, model: nn.Module, layout: Layout | None, length: int | None = None) -> None:
        self.in_a_row = layout is None or layout.calls is None
        calls = _in_a_row(model, layout, length) if layout is None or layout.calls is None else layout.calls
        modules = dict(model.named_modules(remove_duplicate=False))
        self.stages: list[Stage] = []
        self.calls: list[Place] = []
        for index, names in enumerate(calls, start=1):
            missing = [name for name in names if module_of(name) not in modules]
            if missing:
                raise PlanMismatch(f"the schedule was made for another model: this one has no module {missing[0]!r}")
            found = [modules[module_of(name)] for name in names]
            if not self.in_a_row:
                found = list(dict.fromkeys(found))
            self.stages.append(Stage(found, stage_name(names) if names else "(outside)"))
            called = names[:1] if self.in_a_row else names
            last = len(called) - 1
            self.calls += [Place(name, index, part == 0, part == last) for part, name in enumerate(called)]
        self.fixed = (*(not names for names in calls), False)
        self.follows = frozenset(
            index for index in range(2, len(calls) + 1) if not self.fixed[index - 1] and not self.fixed[index - 2]
        )
        self.aside = frozenset(() if layout is None else layout.aside)
        self._stage_names = {modules[module_of(place.name)]: module_of(place.name) for place in self.calls}
        uncalled = {modules[name]: name for name in (() if layout is None else layout.uncalled) if name in modules}
        self.names = {**uncalled, **self._stage_names}

    def runs(self) -> list[range]:
        """The stages, by the runs in which they follow each other; behind each lies code outside."""
        found: list[range] = []
        for index, fixed in enumerate(self.fixed[:-1], start=1):
            if index in self.follows:
                found[-1] = range(found[-1].start, index + 1)
            elif not fixed:
                found.append(range(index, index + 1))
        return found

    def activation_of(self, output: Any) -> Any:
        """The part of what a stage returned that the next one works on; None where there is no tensor."""
        return (output if tensors(output) else None) if self.in_a_row else first_tensor(output)


def _in_a_row(model: nn.Module, layout: Layout | None, length: int | None) -> list[tuple[str, ...]]:
    """The calls of the modules of an `nn.Sequential`, by stages."""
    names: dict[nn.Module, str] = {}
    seen: Counter[nn.Module] = Counter()

    def called(name: str, module: nn.Module) -> str:
        seen[module] += 1
        return call_name(names.setdefault(module, name), seen[module])

    return [tuple([called(*each) for each in part]) for part in by_stages(model, layout, length)]


def call_name(module: str, count: int) -> str:
    """The name of the call of a module that comes as this one, counted from 1."""
    return module + (f"#{count}" if count > 1 else "")


def module_of(call: str) -> str:
    """The name of the module of a call."""
    return call.partition("#")[0]


def among(handed: torch.Tensor, given: object) -> torch.Tensor | None:
    """What stands for `handed` among arguments: itself, or a tensor of the same data; None where there is neither."""
    found = tensors(given)
    same = next((tensor for tensor in found if tensor is handed), None)
    if same is None:
        key = key_of(handed)
        same = next((tensor for tensor in found if key_of(tensor) == key), None)
    return same


class Route:
    """Matches the calls of one forward, in order, with those of the chain, and tracks the activation between stages.

    Attributes:
        counts: how often each module was called so far.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.counts: dict[nn.Module, int] = {}
        self._position = 0
        self._handed: torch.Tensor | None = None  # the last activation, where the next stage takes it
        self._version = -1  # of that

    def name(self, module: nn.Module) -> str | None:
        """The name of a call that has begun; None where it belongs to no stage and runs as it is."""
        count = self.counts[module] = self.counts.get(module, 0) + 1
        name = call_name(self._places.names[module], count)
        return None if name in self._places.aside else name

    def count_also(self, counts: dict[nn.Module, int]) -> None:
        """As if each module had been called at least so often."""
        self.counts = {module: max(count, counts.get(module, 0)) for module, count in (counts | self.counts).items()}

    @property
    def place(self) -> Place | None:
        """Of the call that comes next; None where no more do."""
        calls = self._places.calls
        return calls[self._position] if self._position < len(calls) else None

    def passed(self) -> None:
        """The call that comes next has begun."""
        self._position += 1

    def activation(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The activation among the arguments of a stage's first call; None if it is missing or was modified."""
        if place.stage not in self._places.follows:
            return activation_of(args, kwargs)
        if self._handed is None or version_of(self._handed) != self._version:
            return None
        return among(self._handed, (args, kwargs))

    def hand_on(self, stage: int, activation: Any) -> None:
        """Remembers the output of stage `stage` as the input of the next one, if that follows it."""
        if isinstance(activation, torch.Tensor) and stage + 1 in self._places.follows:
            self._handed, self._version = activation, version_of(activation)

    def let_go(self) -> None:
        """Forgets the last activation."""
        self._handed = None
