"""The fake device is there for all tests of a process or for none, so these run in a process of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fake_device
from remat.errors import OverBudgetWarning, ThrashingWarning

_HERE = Path(__file__).parent
_OF_THE_FAKE = ("test_device", "test_checks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("fake_device")
            if fake_device.KIND != "fake" and item.path.stem in _OF_THE_FAKE:
                item.add_marker(pytest.mark.skip(reason="says something of the fake device alone"))


@pytest.fixture(scope="session", autouse=True)
def _the_device(request: pytest.FixtureRequest) -> None:
    if fake_device.KIND == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        return
    if fake_device.COMPILER is None:
        pytest.skip("the fake device is built by g++, which is not here")
    if any("fake_device" not in item.keywords for item in request.session.items):
        pytest.skip('in a process of its own: pytest -m fake_device, as in "make test"')
    os.environ.setdefault("FAKE_DEVICES", "2")
    fake_device.load()


@pytest.fixture(autouse=True)
def _as_it_begins() -> Iterator[None]:
    """Copies as late as allowed, plenty of memory; afterwards: nothing was used without an order."""
    switches = fake_device.switches()
    switches.set_late(True)
    switches.set_limit(8 << 30)
    switches.races()
    torch.accelerator.empty_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverBudgetWarning)  # of first calls of operators
        warnings.simplefilter("ignore", ThrashingWarning)  # times say nothing
        if fake_device.KIND == "cuda":
            switches.counts_warnings()
        yield
    assert switches.races() == []
