"""What a pass over the stages of a model finds out besides its measurements: sizes at the cuts, and who shares what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.measuring.isolating import Form
from remat.measuring.stage_costs import NO_MARKS, Boundary, Marks, storage_bytes
from remat.runtime.allocator import rounded
from remat.runtime.pytree import storage_of

Forms = tuple[Form | None, ...]


@dataclass
class Side:
    """A side input: a tensor passed to stages besides their activation, and the largest size of its gradient."""

    users: list[int]
    producer: int
    gradient_bytes: int


class Handed(NamedTuple):
    """A gradient that a piece of code outside hands back.

    Attributes:
        own_bytes: of its values; memory_bytes: of the memory that it is a view of, a concatenation's, say.
        memory: which that is.
    """

    own_bytes: int
    memory_bytes: int
    memory: StorageWeakRef | None

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Handed:
        own = rounded(gradient.numel() * gradient.element_size(), gradient.device)
        size = storage_bytes(gradient)
        return cls(min(own, size), size, StorageWeakRef(storage_of(gradient)))


NOTHING_HANDED = Handed(0, 0, None)


@dataclass
class Bypass:
    """Gradients that code outside hands to an earlier piece of it, past the stages between, as that of a residual.

    Attributes:
        end: the piece that they go to.
        by_piece: what each later piece hands on.
        shared: of the last of these pieces, it is the gradient of the stage before it, too.
    """

    end: int
    by_piece: dict[int, Handed] = field(default_factory=dict)
    shared: bool = False


class StageOutput(NamedTuple):
    """Something that a stage returned and that has a gradient; `position` 0 is its activation."""

    stage: int
    position: int


@dataclass
class StageFacts:
    """What is known of a stage, or of a piece of code outside of the stages.

    Attributes:
        act, grad: bytes of its activation, and of the gradients of that.
        forms: how the gradients that come back to its activation lie in memory.
        leaves: those that its backward reaches.
        marks, boundary: of a stage whose memory has been measured.
        saves: how many tensors autograd saves of a stage; None before that is known.
        ends_early: recomputations of it may end with the last of these.
        kept_input: code outside holds what it was handed.
        rebound: bytes of what stages returned and variables still named, gone by the end of a piece of code outside.
        passing: the same, of what was there when this stage of a run, or the code behind it, began, and was gone when
            the forward was over.
        drops_input: the input of its run, of which it is the first, went when the next stage began, as it does not
            where they are to be run again.
    """

    act: int = 0
    grad: int = 0
    forms: Forms = ()
    leaves: set[torch.Tensor] = field(default_factory=set)
    marks: Marks = NO_MARKS
    boundary: Boundary | None = None
    saves: int | None = None
    ends_early: bool = False
    kept_input: bool = True
    rebound: int = 0
    passing: int = 0
    drops_input: bool = False


class Facts:
    """What a pass found out, stage by stage, and what several stages share.

    Attributes:
        stages: 0 is the model's input, L+1 the loss.
        sides: side inputs, by identity.
        used: what stages returned, by which code outside, with the gradient that this hands back.
        bypasses: gradients that go from one piece of code outside to another.
        in_output: bytes of what stages returned and was there when a later one of the same run began, and only the
            output still holds.
        given_and_in_output: bytes of what stages were given by code outside, or handed on to it, and the output holds
            too: by the piece of that code, or a later one.
    """

    def __init__(self, last: int) -> None:
        self.stages = [StageFacts() for _ in range(last + 2)]
        self.sides: dict[int, Side] = {}
        self.used: dict[StageOutput, dict[int, Handed]] = {}
        self.bypasses: list[Bypass] = []
        self.in_output = 0
        self.given_and_in_output: dict[int, int] = {}

    def __getitem__(self, index: int) -> StageFacts:
        return self.stages[index]

    @property
    def forms(self) -> list[Forms]:
        """How gradients lie in memory, stage by stage."""
        return [stage.forms for stage in self.stages]

    @property
    def leaves(self) -> dict[int, set[torch.Tensor]]:
        """The leaves that the backward of each stage reaches."""
        return {index: stage.leaves for index, stage in enumerate(self.stages)}
