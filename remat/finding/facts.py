"""What a pass over a found chain finds out beside its measurements: sizes at the cuts, and who shares what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from remat.preserving import Form
from remat.stage_costs import Boundary, Marks


@dataclass
class Side:
    """A tensor passed to stages beside what they work on, with a gradient, of so many bytes at most."""

    users: list[int]
    producer: int
    gradient_bytes: int


class Made(NamedTuple):
    """Something that a stage returned and that has a gradient; `position` 0 is what the stage hands on."""

    stage: int
    position: int


@dataclass
class Facts:
    """What a pass found out beside its measurements."""

    boundaries: dict[int, Boundary] = field(default_factory=dict)
    marks: dict[int, Marks] = field(default_factory=dict)
    act: dict[int, int] = field(default_factory=dict)  # bytes of what a stage hands on
    grad: dict[int, int] = field(default_factory=dict)
    kept_input: dict[int, bool] = field(default_factory=dict)  # code outside holds what it was handed
    leaves: dict[int, set[torch.Tensor]] = field(default_factory=dict)  # those that the backward of a stage reaches
    sides: dict[int, Side] = field(default_factory=dict)
    used: dict[Made, dict[int, int]] = field(default_factory=dict)  # by which code outside; bytes of its gradient
    # Of what stages returned and variables still named: gone by the end of a piece of code outside, and there when a
    # stage of a run began but gone when the forward was over.
    rebound: dict[int, int] = field(default_factory=dict)
    passing: dict[int, int] = field(default_factory=dict)
    # How the gradient lies in memory that comes back to what a stage handed on (to the model's input: 0).
    forms: dict[int, Form] = field(default_factory=dict)
