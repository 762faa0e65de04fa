"""`remat.largest`: sizes that fit, found from few, and measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import remat
from remat.errors import InfeasibleBudget, NoChain, RematError
from remat.runtime.logits import Logits
from remat.simulation import store_all_peak
from remat.training.holdings import holdings_of
from remat.training.searching import largest_within

Takes = Callable[[int], float]


@given(
    st.integers(1, 10**5),
    st.floats(1, 2.5),
    st.floats(0, 1e4),
    st.integers(1, 300),
    st.dictionaries(st.integers(1, 200), st.none(), max_size=2),
)
def test_sizes_are_found_from_few(slope: int, power: float, fixed: float, wanted: int, known: dict[int, None]) -> None:
    asked = list[int]()

    def takes(size: int) -> float:
        asked.append(size)
        return fixed + slope * size**power

    limit = fixed + slope * wanted**power * 1.0000001
    found = largest_within(takes, limit, {size: fixed + slope * size**power for size in known})
    assert found.fits <= wanted < found.fails <= max(found.fits + 1, found.fits * (1 + 1 / 64))
    assert len(asked) == len(set(asked)) <= 20


def test_nothing_fits_and_everything_does() -> None:
    assert largest_within(lambda size: 10.0, 5, {}) == (0, 1)
    found = largest_within(lambda size: 10.0, 50, {}, tries=8)
    assert found.fits > 100 and found.fails == math.inf


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    return nn.Sequential(*blocks)


def _model_of(width: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)]


def _rows(size: int) -> torch.Tensor:
    return torch.randn(8 * size, 32)


def _least(model: nn.Module, sample: Any) -> int:
    return remat.minimum_budget(remat.profile(model, sample))


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def test_the_largest_batch_is_measured_and_the_next_one_does_not_fit() -> None:
    model = _model()
    limit = int(1.02 * _least(model, _rows(20)))
    before = _state(model)
    found = remat.largest(model, _rows, limit, quiet=True)
    assert found.too_large is not None
    assert found.size in (19, 20) and found.too_large == found.size + 1
    assert [each.size for each in found.tried] == sorted(each.size for each in found.tried)
    assert found.tried[-1].size == found.size and len(found.tried) > 3
    for each in found.tried:
        chain = remat.profile(model, _rows(each.size))
        assert each.peak_bytes <= limit
        for size, measured in (
            (each.plain_bytes, store_all_peak(chain)),
            (each.least_bytes, remat.minimum_budget(chain)),
        ):
            assert measured <= size <= 1.02 * measured + 2048
        assert (each.recomputations == 0) == (each.plain_bytes <= limit)
        assert each.rate == each.size / each.seconds <= found.fastest.rate
    assert found.knee.size <= found.fastest.size and found.knee.rate >= 0.95 * found.fastest.rate
    assert _least(model, _rows(found.too_large + 1)) > limit
    assert all(map(torch.equal, before, _state(model)))
    assert model.training and not any(each.grad is not None for each in model.parameters())
    assert "forward" not in vars(model)


def test_what_it_says() -> None:
    found = remat.largest(_model(), _rows, "300KiB", quiet=True)
    text, html = str(found), found._repr_html_()
    assert f"{found.size} fits 300 KiB ({found.too_large} does not)" in text
    assert text.count("\n") == 1 + len(found.tried)
    assert "<table>" in html and f"{found.size} fits" in html
    axes = found.plot().axes[0]
    assert list(axes.lines[0].get_xdata()) == [each.size for each in found.tried]


def test_the_longest_sequence_with_an_optimizer_and_a_head_in_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2048, 32), *_model()[:2], nn.Linear(32, 2048))

    def sample(length: int) -> torch.Tensor:
        return torch.zeros((8, length), dtype=torch.int64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), torch.ones(len(output) * output.shape[1]).long())

    optimizer = torch.optim.AdamW(model.parameters())
    there = 4 * sum(each.nbytes for each in model.parameters())
    how: dict[str, Any] = {"of": "device", "optimizer": optimizer, "quiet": True}
    whole, parts = (
        remat.largest(
            model, sample, holdings_of(model, [optimizer], None).total + (6 << 20), loss, chunk_head=each, **how
        )
        for each in (False, True)
    )
    assert 1 < whole.size < 0.8 * parts.size
    for found in (whole, parts):
        assert found.besides_bytes >= there
        assert all(each.peak_bytes + found.besides_bytes <= found.limit_bytes for each in found.tried)
    assert not optimizer.state
    assert "forward" not in vars(model[-1])


class _ByData(nn.Module):
    """Runs as many of its blocks as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: 5 + bool(x.detach().square().mean() > 0.1)]:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore::remat.OverBudgetWarning")
def test_a_forward_that_cannot_be_estimated_is_measured() -> None:
    model = _ByData()
    with pytest.raises(RematError):
        remat.estimate(model, _rows(2), device="cpu")
    found = remat.largest(model, _rows, int(1.1 * _least(model, _rows(6))), quiet=True)
    assert found.size in (6, 7)
    assert all(each.peak_bytes <= found.limit_bytes for each in found.tried)


def test_a_model_that_trains_by_a_plan_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(512, 16), *_model_of(16), nn.Linear(16, 512))
    tokens = torch.zeros((4, 64), dtype=torch.int64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), torch.ones(len(output) * output.shape[1]).long())

    remat.fit(model, tokens, 0.9, loss=loss, chunk_head=True, quiet=True)
    for parts in (False, True):
        remat.largest(model, lambda size: tokens[:1].expand(size, -1), "2MiB", loss, chunk_head=parts, quiet=True)
        assert isinstance(model(tokens), Logits)
    remat.remove(model)
    assert type(model(tokens)) is torch.Tensor


def test_wrong_arguments() -> None:
    model = _model()
    with pytest.raises(InfeasibleBudget) as raised:
        remat.largest(model, _rows, 1000, quiet=True)
    assert raised.value.minimum == pytest.approx(_least(model, _rows(1)), abs=2048)
    with pytest.raises(RematError, match="in bytes, such as"):
        remat.largest(model, _rows, 0.5)  # type: ignore[arg-type]
    with pytest.raises(RematError, match="function of a size"):
        remat.largest(model, _rows(1), "1MiB")  # type: ignore[arg-type]
    with pytest.raises(NoChain):
        remat.largest(nn.Linear(4, 4), lambda size: torch.randn(size, 4), "1MiB", quiet=True)
    copied = copy.deepcopy(model)
    remat.fit(copied, _rows(4), 1.0, quiet=True)
    assert remat.largest(copied, _rows, "300KiB", quiet=True).size > 1


def test_a_model_that_comes_in_eval_mode_is_looked_at_as_it_trains() -> None:
    layers = [(nn.Linear(64, 256), nn.Dropout(), nn.GELU(), nn.Dropout(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*(nn.Sequential(*each) for each in layers))
    sizes, takes = [], []
    for trains in (True, False):
        model.train(trains)
        sizes.append(remat.largest(model, lambda size: torch.randn(8 * size, 64), "1MiB", quiet=True).size)
        takes.append(remat.estimate(model, torch.randn(64, 64), device="cpu").chain.store_all_bytes)
    assert sizes[0] == sizes[1] and takes[0] == takes[1]
    assert not any(module.training for module in model.modules())
