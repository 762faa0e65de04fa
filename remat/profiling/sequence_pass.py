"""A pass over an `nn.Sequential`: its modules run one after the other, each on all that the one before returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from remat.finding.fusing import cannot_unpack
from remat.measuring.facts import Forms
from remat.measuring.isolating import Form, contiguous_forms, differentiable
from remat.measuring.stage_costs import storage_bytes
from remat.profiling.stage_pass import Pass
from remat.runtime.calls.stages import detached, input_of
from remat.runtime.checks import Loss
from remat.runtime.pytree import Arguments, tensors


class SequencePass(Pass):
    """One forward of an `nn.Sequential`, stage by stage."""

    def run(self, model: nn.Module, call: Arguments, loss: Loss | None) -> None:
        runs: list[Callable[[Any], Any]] = [*self.stages] if loss is None else [*self.stages, loss]
        value = detached(input_of(call))
        self.facts[0].act, self.facts[0].grad = storage_bytes(value), self._gradient_bytes(0, value)
        for index, run in enumerate(runs, start=1):
            value = self._stage(index, run, value)
        if loss is None:
            self.odd_ends = bool(contiguous_forms(differentiable(value)))

    def _stage(self, index: int, run: Callable[[Any], Any], value: Any) -> Any:
        found: dict[int, Form] = {}
        output = self._measure(index, lambda given: run(given[0]), [value], partial(_note_form, found))
        differentiable = [position for position, tensor in enumerate(tensors(value)) if tensor.requires_grad]
        self.facts[index - 1].forms = tuple(found.get(position) for position in differentiable)
        return output

    def _activation(self, output: Any) -> Any:
        return output

    def _forms_of(self, index: int, ends: Sequence[torch.Tensor]) -> Forms:
        is_output = index == len(self.stages)
        return contiguous_forms(ends) if self._contiguous and is_output else super()._forms_of(index, ends)

    def _refuse_unpacking(self, nothing: None) -> torch.Tensor:
        return cannot_unpack(nothing)


def _note_form(found: dict[int, Form], position: int, gradient: torch.Tensor) -> None:
    found[position] = Form.of(gradient)
