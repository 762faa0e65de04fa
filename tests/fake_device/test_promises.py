"""What remat promises holds on a device: bits, limits by its statistics, no waiting that PyTorch does not do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import remat
from fake_device.models import MODELS, Training, mean

IN_A_ROW = [name for name in MODELS if name != "LSTM"]  # which is one module, so that no plan frees anything
SHARES = (0.8, 0.5)
late_and_early = pytest.mark.parametrize("late", [True, False], ids=["late", "early"])

_training = functools.cache(Training)


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Training:
    return _training(request.param)


def of_models(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trained", names, indirect=True)


@contextmanager
def fitted(trained: Training, limit: int, **options: object) -> Iterator[None]:
    remat.fit(trained.model, trained.sample, limit, mean, quiet=True, **options)
    yield
    remat.remove(trained.model)


@late_and_early
@of_models(*IN_A_ROW)
@pytest.mark.parametrize("options", [{}, {"host_limit": "1GiB"}], ids=["here", "offloaded"])
def test_fit(trained: Training, options: dict[str, str], late: bool) -> None:
    torch.fake.switches.set_late(late)
    for share in SHARES:
        limit = int(share * trained.plain.peak_bytes)
        with fitted(trained, limit, **options):
            steps = [trained.step() for _ in range(2)]
        for seen in steps:
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= limit
            assert seen.waits <= trained.plain.waits or trained.blocks_wait


@of_models("MLP", "GPT-2")
def test_whole_stages(trained: Training) -> None:
    for share in SHARES:
        limit = int(share * trained.plain.peak_bytes)
        with fitted(trained, limit, options=False):
            seen = trained.step()
        assert trained.has_equal_bits(seen)
        assert seen.peak_bytes <= limit
        assert seen.waits <= trained.plain.waits


@late_and_early
@of_models(*MODELS)
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_dtr(trained: Training, granularity: str, late: bool) -> None:
    torch.fake.switches.set_late(late)
    for share in SHARES:
        budget = int(share * trained.plain.peak_bytes)
        for _ in range(4):
            block = remat.DTR(budget, granularity=granularity, thrash_limit=100)
            seen = trained.under(block)
            assert trained.has_equal_bits(seen)
            assert seen.peak_bytes <= budget
            assert block.report().outcome == "pass"


@of_models(*MODELS)
@pytest.mark.parametrize("granularity", ["module", "operator"])
def test_dtr_that_evicts_nothing_waits_for_nothing(trained: Training, granularity: str) -> None:
    for _ in range(2):  # in which it learns what calls take
        trained.under(remat.DTR(4 * trained.plain.peak_bytes, granularity=granularity))
    seen = trained.under(remat.DTR(4 * trained.plain.peak_bytes, granularity=granularity))
    assert seen.waits <= trained.plain.waits
    assert seen.peak_bytes <= 1.01 * trained.plain.peak_bytes
    assert trained.has_equal_bits(seen)


def _reserved(trained: Training) -> int:
    """By a step on a stream of its own, where no hole between the model's parameters is used."""
    current, own = torch.accelerator.current_stream(), torch.Stream("fake")
    own.wait_stream(current)
    with own:
        trained.step()  # whose products leave workspaces
        found = trained.step().reserved_bytes
    current.wait_stream(own)
    return found


@of_models("MLP", "convolutions", "GPT-2")
def test_a_limit_of_what_is_reserved(trained: Training) -> None:
    limit = int(0.8 * _reserved(trained))
    with fitted(trained, limit, of="reserved"):
        assert _reserved(trained) <= limit
        seen = trained.step()
    assert seen.reserved_bytes <= limit
    assert trained.has_equal_bits(seen)
