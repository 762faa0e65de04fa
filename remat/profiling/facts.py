"""What a pass over a found chain finds out besides its measurements: sizes at the cuts, and who shares what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from remat.profiling.preserving import Form
from remat.profiling.stage_costs import Boundary, Marks


@dataclass
class Side:
    """A side input: a tensor passed to stages besides what they work on, with a gradient, of so many bytes at most."""

    users: list[int]
    producer: int
    gradient_bytes: int


class Made(NamedTuple):
    """Something that a stage returned and that has a gradient; `position` 0 is its activation."""

    stage: int
    position: int


@dataclass
class Facts:
    """What a pass found out besides its measurements."""

    boundaries: dict[int, Boundary] = field(default_factory=dict)
    marks: dict[int, Marks] = field(default_factory=dict)
    act: dict[int, int] = field(default_factory=dict)  # bytes of a stage's activation
    grad: dict[int, int] = field(default_factory=dict)
    kept_input: dict[int, bool] = field(default_factory=dict)  # code outside holds what it was handed
    leaves: dict[int, set[torch.Tensor]] = field(default_factory=dict)  # those that the backward of a stage reaches
    sides: dict[int, Side] = field(default_factory=dict)
    used: dict[Made, dict[int, int]] = field(default_factory=dict)  # by which code outside; bytes of its gradient
    # Of what stages returned and variables still named: gone by the end of a piece of code outside; and there when a
    # stage of the same run, or the code behind it, began, but gone when the forward was over.
    rebound: dict[int, int] = field(default_factory=dict)
    passing: dict[int, int] = field(default_factory=dict)
    # First stages of runs whose input went when the next one began, as it does not where they are to be run again.
    drops_input: set[int] = field(default_factory=set)
    # Of what stages returned and was there when a later one of the same run began: what only the output still holds.
    in_output: int = 0
    # What stages were given by code outside and the output holds too: by the piece of that code, or a later one.
    given_and_in_output: dict[int, int] = field(default_factory=dict)
    # How the gradient lies in memory that comes back to what a stage handed on (to the model's input: 0).
    forms: dict[int, Form] = field(default_factory=dict)
