"""What tests of sending to the host share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import remat
from remat.chain import Chain
from remat.options import sending
from remat.runtime.meter import Instruments
from remat.schedule import F_ALL, Schedule, store_all_operations


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of small models run so briefly that no copy of theirs would hide."""
    monkeypatch.setattr(sending, "COPY_SECONDS", 0.0)
    monkeypatch.setattr(Instruments, "link_bytes_per_second", lambda self, device: 1e18)


def profiled(model: nn.Module, sample: Any, **options: Any) -> Chain:
    return remat.profile(model, sample, offload=True, **options)


def sending_all(chain: Chain, number: int = 0) -> Schedule:
    """Storing everything, each stage with its option `number` of those that send something, where it has any."""
    operations = []
    for operation in store_all_operations(chain.length):
        if operation.kind == F_ALL:
            options = enumerate(chain.options[operation.stage - 1], start=1)
            away = [at for at, option in options if option.host_bytes]
            operation = operation._replace(option=away[min(number, len(away) - 1)] if away else 0)
        operations.append(operation)
    return Schedule(tuple(operations), strategy="sending", layout=chain.layout)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("remat: copies")]
