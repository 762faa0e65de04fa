"""Gauges, which measure the bytes or the seconds of each span of a pass over a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from remat.runtime.meter import Region, instruments


class Span(NamedTuple):
    """The name of a measured interval: its kind, such as "full" or "backward", and its stage."""

    what: str
    stage: int


class Gauge(ABC):
    """Measures the spans of a pass, which do not overlap.

    Attributes:
        of_memory: it measures bytes, not seconds.
    """

    of_memory: bool

    @abstractmethod
    def span(self, what: str, stage: int) -> AbstractContextManager[None]: ...


class Bytes(Gauge):
    """Measures bytes; and the seconds, too, where they are reckoned, which reckoning bytes does not lengthen."""

    of_memory = True

    def __init__(self, device: torch.device) -> None:
        self.meter = instruments().meter(device)
        self.order: list[Span] = []
        self._reckoned = None if instruments().computes else Seconds(device)

    @contextmanager
    def span(self, what: str, stage: int) -> Any:
        self.order.append(Span(what, stage))
        with self.meter.region(), nullcontext() if self._reckoned is None else self._reckoned.span(what, stage):
            yield

    def sweeps(self) -> list[Mapping[Span, float]]:
        """The seconds of each span, once, where they are reckoned; else nothing."""
        return [] if self._reckoned is None else [self._reckoned.seconds]

    def regions(self) -> dict[Span, Region]:
        return dict(zip(self.order, self.meter.regions, strict=True))


class Seconds(Gauge):
    of_memory = False

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Span, float] = {}
        self._device = device

    @contextmanager
    def span(self, what: str, stage: int) -> Any:
        start = instruments().now(self._device)
        yield
        self.seconds[Span(what, stage)] = instruments().now(self._device) - start
