"""`remat.watch` on the CPU, whose allocator keeps no statistics; with them: `tests/fake_device`."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import remat
from remat.errors import OverBudgetWarning, RematError
from remat.runtime.planned.patched_forward import patched_forward_of
from support.library_models import gpt2
from support.training import made


def _tokens(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 90, (4, length))
    return {"input_ids": tokens, "labels": tokens}


def _model() -> nn.Module:
    torch.manual_seed(0)
    model, _ = gpt2(n_positions=160)
    return model.train()


@pytest.mark.filterwarnings("ignore:.*measured and planned again")
def test_steps_evaluations_and_lengths() -> None:
    model = _model()
    remat.fit(model, _tokens(64), 0.6, quiet=True)
    with remat.watch(model) as watched:
        assert str(watched).startswith("no step of training yet")
        with pytest.raises(RematError, match="nothing to draw"):
            watched.plot()
        for length in (64, 64, 32, 64):
            model(**_tokens(length)).loss.backward()
        with torch.no_grad():
            for _ in range(3):
                model(**_tokens(64))
        model.eval()
        model(**_tokens(64))
        model.train()
        model(**_tokens(64)).loss.backward()
    kinds = [each.kind for each in watched.steps]
    assert kinds == ["training"] * 4 + ["evaluation", "training"]
    assert [each.number for each in watched.steps] == [1, 2, 3, 4, 5, 6]
    limits = {each.limit_bytes for each in watched.steps if each.kind == "training"}
    assert len(limits) == 1
    for each in watched.steps:
        assert each.peak_bytes is None and each.held_bytes is None
        assert each.reserved_bytes > 1 << 20
        assert each.planned_bytes <= each.limit_bytes
        assert (each.recomputations > 0) == (each.kind == "training")
    assert not watched.warnings
    text = str(watched)
    assert text.startswith("5 steps, at most ")
    assert "6 training" in text and "5 evaluation" in text
    assert "<table>" in watched._repr_html_()
    figure = watched.plot()
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [5, 5]
    model(**_tokens(64)).loss.backward()
    assert len(watched.steps) == 6, "it is over"


def test_an_input_near_the_limit_is_warned_of_once() -> None:
    model = _model()
    chain = remat.profile(model, _tokens(64))
    remat.fit(model, _tokens(48), int(1.02 * remat.minimum_budget(chain)), quiet=True)
    with remat.watch(model) as watched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (48, 64, 64):
            model(**_tokens(length)).loss.backward()
    said = [str(each.message) for each in caught if issubclass(each.category, OverBudgetWarning)]
    assert len(said) == len(watched.warnings) == 1
    assert re.search(r"step 2: this input needs at least .* a little larger will not fit", said[0])


def test_steps_under_dtr_are_watched_too() -> None:
    model, sample = made("unet")
    remat.fit(model, sample, 0.8, quiet=True)
    with remat.watch(model) as watched:
        for _ in range(3):
            output = model(sample)
            output.square().mean().backward()
            del output
    assert [each.kind for each in watched.steps] == ["training"] * 3
    assert all(each.limit_bytes > 0 for each in watched.steps)


def test_what_cannot_be_watched() -> None:
    model = _model()
    with pytest.raises(RematError, match=r"call remat\.fit"), remat.watch(model):
        pass
    remat.fit(model, _tokens(32), 0.8, quiet=True)
    with remat.watch(model):
        with pytest.raises(RematError, match="watched already"), remat.watch(model):
            pass
        assert patched_forward_of(model).watch is not None  # type: ignore[union-attr]
    with remat.watch(model) as watched:
        remat.remove(model)
        model(**_tokens(32)).loss.backward()
    assert not watched.steps


def test_a_watch_goes_on_under_another_plan() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(64, 64)
    remat.fit(model, x, 0.9, quiet=True)
    with remat.watch(model) as watched:
        for share in (0.95, 0.8):
            model(x).sum().backward()
            remat.fit(model, x, share, quiet=True)
        model(x).sum().backward()
    assert len(watched.steps) == 3
    model(x).sum().backward()
    assert len(watched.steps) == 3


def test_a_watch_goes_on_under_a_plan_of_the_first_call() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(64, 64)
    remat.fit(model, x, 0.9, quiet=True)
    with remat.watch(model) as watched:
        remat.fit(model, memory=0.95, quiet=True)
        for _ in range(2):
            model(x).sum().backward()
    assert len(watched.steps) == 2
