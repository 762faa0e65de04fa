"""The results of a pass other than its measurements: sizes of activations and gradients, and shared tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.measuring.isolating import Form, StageOutput
from remat.measuring.stage_costs import NO_MARKS, Boundary, Marks, storage_bytes
from remat.runtime.accelerator import rounded
from remat.runtime.pytree import storage_of

Forms = tuple[Form | None, ...]


class Handed(NamedTuple):
    """A gradient that the backward of a stage, or of code outside, returns.

    Attributes:
        own_bytes: size of its values.
        memory_bytes: size of its storage, which is larger for a view, such as one of a concatenation's gradient.
        memory: that storage; None if it has no single one.
    """

    own_bytes: int
    memory_bytes: int
    memory: StorageWeakRef | None

    @property
    def is_part(self) -> bool:
        """Whether it is a view of larger memory."""
        return self.own_bytes < self.memory_bytes

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Handed:
        own = rounded(gradient.numel() * gradient.element_size(), gradient.device)
        if gradient.layout != torch.strided:  # it has no single storage
            return cls(own, own, None)
        size = storage_bytes(gradient)
        return cls(min(own, size), size, StorageWeakRef(storage_of(gradient)))


NOTHING_HANDED = Handed(0, 0, None)


@dataclass
class Receiver:
    """A tensor that gets gradients of several stages and pieces of code, or of another than the one behind it.

    Attributes:
        made_by: the stage or piece that computed the tensor.
        end: the stage or piece whose backward needs the sum.
        handed: the gradient that each later stage or piece contributes.
        activation_of: those stages that work on the tensor, as their activation and not besides it.
    """

    made_by: int
    end: int
    handed: dict[int, Handed] = field(default_factory=dict)
    activation_of: set[int] = field(default_factory=set)

    def takes(self, source: int, gradient: torch.Tensor) -> None:
        """`source` has computed this gradient, of which the largest counts: a view's memory is that of the whole."""
        found = Handed.of(gradient)
        self.handed[source] = max(self.handed.get(source, found), found, key=lambda each: each.memory_bytes)


@dataclass
class StageFacts:
    """What is known of a stage, or of a piece of code outside of the stages.

    Attributes:
        act, grad: bytes of its activation, and of the activation's gradients.
        forms: memory layouts of the gradients of its activation.
        leaves: the leaves that its backward reaches.
        marks, boundary: of a stage whose memory has been measured.
        keeps: positions of the returned tensors that autograd saves.
        saves: number of tensors that autograd saves for a stage; None before that is known.
        ends_early: whether its recomputations may end with the last saved tensor.
        kept_input: whether code outside the stages still holds its input when it ends.
        rebound: bytes of earlier stage inputs and outputs that variables still held when this code outside began, and
            that were freed by its end.
        passing: bytes of earlier stage outputs of the same run that were alive when this stage, or the code after the
            run, began, and that were freed by the end of the forward.
        passing_input: the same of the run's input, for the code after it.
        gone_from_before: bytes of outputs of earlier runs that were alive when the run began, and that were freed when
            this stage, or the code after the run, began.
        drops_input: for the first stage of a run: its input was freed when the next stage began. It is not freed if the
            run is to be recomputed.
    """

    act: int = 0
    grad: int = 0
    forms: Forms = ()
    leaves: set[torch.Tensor] = field(default_factory=set)
    marks: Marks = NO_MARKS
    boundary: Boundary | None = None
    keeps: frozenset[int] = frozenset()
    saves: int | None = None
    ends_early: bool = False
    kept_input: bool = True
    rebound: int = 0
    passing: int = 0
    passing_input: int = 0
    gone_from_before: int = 0
    drops_input: bool = False


class Facts:
    """What a pass found out, stage by stage, and what several stages share.

    Attributes:
        stages: 0 is the model's input, L+1 the loss.
        receivers: the tensors that gradients come back to, other than from each stage to the one before it.
        backs: for each stage or piece, the gradient of its activation as the one behind it computes it.
        in_output: bytes of stage outputs that were alive when a later stage of the same run began, and that are freed
            only with the model's output.
        given_and_in_output: bytes of tensors that code outside passed to stages or got from them, and that the model's
            output also holds, by piece of that code.
    """

    def __init__(self, last: int) -> None:
        self.stages = [StageFacts() for _ in range(last + 2)]
        self.receivers: list[Receiver] = []
        self._of_stages: dict[StageOutput, Receiver] = {}
        self.backs: dict[int, Handed] = {}
        self.in_output = 0
        self.given_and_in_output: dict[int, int] = {}

    def __getitem__(self, index: int) -> StageFacts:
        return self.stages[index]

    def receiver(self, made: StageOutput) -> Receiver:
        """The one of something that a stage returned."""
        if made not in self._of_stages:
            # The gradient of an activation is summed up in the backward of the next stage, whose own share comes last.
            self._of_stages[made] = self.new_receiver(made.stage, made.stage if made.position else made.stage + 1)
        return self._of_stages[made]

    def new_receiver(self, made_by: int, end: int) -> Receiver:
        self.receivers.append(Receiver(made_by, end))
        return self.receivers[-1]

    @property
    def forms(self) -> list[Forms]:
        """How gradients lie in memory, stage by stage."""
        return [stage.forms for stage in self.stages]

    @property
    def leaves(self) -> dict[int, set[torch.Tensor]]:
        """The leaves that the backward of each stage reaches."""
        return {index: stage.leaves for index, stage in enumerate(self.stages)}
