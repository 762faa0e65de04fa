"""What is known of one call of an operator: while its arguments are looked at, and while it is run and written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remat.runtime.accelerator import default_generator
from remat.runtime.generators import RandomState, of_python
from remat.runtime.live.costs import OperatorFacts
from remat.runtime.live.versions import Given, Source, Version
from remat.runtime.operators import Traits, drawn_from
from remat.runtime.surroundings import Surroundings

CPU = torch.device("cpu")


class OperatorCall:
    """A call, and what is learned of it while its arguments are looked at.

    Attributes:
        traits: what is known of its operator.
        facts: what is known of calls like this one; set once all arguments were looked at.
        template, names: the arguments, with views in the place of tensors.
        key: what calls like this one have in common.
        sources: what the arguments look at.
        fresh: constants that nothing else was computed from.
        surroundings: flags that the operator may depend on besides its arguments.
        opaque: whether an argument has no storage of its own, so that versions in it might go unnoticed.
    """

    __slots__ = (
        *("args", "device", "facts", "floats", "fresh", "function", "kwargs", "key"),
        *("names", "opaque", "traits", "sources", "surroundings", "template"),
    )
    facts: OperatorFacts
    template: list[Any]
    names: dict[str, Any]

    def __init__(
        self, traits: Traits, surroundings: Surroundings, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.traits = traits
        self.surroundings = surroundings
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.key: list[Any] = [function, surroundings]
        self.sources: list[Source] = []
        self.fresh: list[Given] = []
        self.floats: list[float] = []
        self.opaque = False
        self.device: torch.device | None = None

    @property
    def made_on(self) -> torch.device:
        """Where what it makes is: that may be elsewhere than what it is made like."""
        given = self.kwargs.get("device")
        return self.device or CPU if given is None else torch.device(given)

    @property
    def missing(self) -> bool:
        """Whether a source is not in memory now: making room for another one may have evicted it."""
        return any(isinstance(source, Version) and not source.resident for source in self.sources)


@dataclass
class Action:
    """What a call does besides making outputs.

    Attributes:
        changed: versions whose content it changes, with their storages.
        discarded: sources that it changes too, but whose old and new values are nobody's concern.
        discarded_bytes: of those; running again works on copies of them.
        repeatable: whether it can run again.
    """

    changed: list[tuple[Version, torch.UntypedStorage]] = field(default_factory=list)
    discarded: list[Source] = field(default_factory=list)
    discarded_bytes: int = 0
    repeatable: bool = True


USUAL = Action()


class Pending:
    """A call as the ledger will have it, or has it already: then `tensors` are its outputs there."""

    def __init__(self, label: str, nanoseconds: int, arguments: list[int], scratch: int) -> None:
        self.label = label
        self.nanoseconds = nanoseconds
        self.arguments = arguments
        self.scratch = scratch
        self.overwritten = 0
        self.changed: tuple[int, ...] = ()
        self.tensors: range | None = None


def device_among(kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    return CPU if device is None else torch.device(device)


def entries_of(tensor: Tensor) -> int:
    """How many entries a sparse tensor has."""
    return tensor._nnz() if tensor.is_sparse or tensor.layout in _COMPRESSED else 0


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def random_before(call: OperatorCall) -> RandomState:
    """The states of the generators that a call may draw from."""
    given = drawn_from(call.function, call.args, call.kwargs)
    if given:
        return RandomState(own=given, of_cpu=False)
    own = default_generator(call.made_on)
    if call.traits.foreign:  # it may draw from any
        return RandomState(
            own={id(each): each for each in (own, torch.default_generator, *of_python())}.values(), of_cpu=False
        )
    return RandomState(own=[own], of_cpu=False)
