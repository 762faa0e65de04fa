"""What readers of several figures rely on: a strategy looks the same in all, and nothing lies on the data."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.cli.comparing import in_a_name
from remat.plotting.overview import plot_chain
from remat.plotting.style import style_at, styles
from remat.plotting.timeline import plot_schedule
from remat.runtime.dtr.heuristics import HEURISTICS
from remat.solvers import SOLVERS
from remat.strategies import CHECKPOINTING, COMPILE


@pytest.fixture
def chain() -> remat.Chain:
    return remat.Chain([4] * 7, [8, 8, 9, 8, 7, 4], [0] * 6, [0] * 6, [1.0] * 6, [2.0] * 6)


def _look(style: dict) -> tuple:
    return style["color"], style["marker"], style["linestyle"]


def test_a_strategy_looks_the_same_whatever_else_a_figure_shows() -> None:
    names = [*SOLVERS, *HEURISTICS, CHECKPOINTING, COMPILE]
    looks = dict(zip(names, map(_look, styles(names)), strict=True))
    assert len(set(looks.values())) == len(names)
    for some in itertools.combinations(names, 2):
        assert [_look(style) for style in styles(some)] == [looks[name] for name in some]
    assert _look(styles(["dtr h_lru"])[0]) == looks["h_lru"]


def test_strategies_of_ones_own_look_like_no_known_one() -> None:
    names = ["mine", "persistent", "yours", "dtr h_dtr_eq"]
    assert len(set(map(_look, styles(names)))) == 4
    assert {_look(style) for style in styles(["mine", "yours"])}.isdisjoint(map(_look, styles([*SOLVERS, *HEURISTICS])))
    assert len({_look(style_at(place)) for place in range(64)}) == 64


def test_a_comparison_and_its_overview_agree(chain: remat.Chain) -> None:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    strategies = ["sequential", "persistent", "h_dtr_eq"]
    found = remat.compare(model, torch.randn(64, 64), [0.7, 1.0], strategies=strategies, measure=False)
    _, ax = found.plot().axes
    colours = {line.get_label(): line.get_color() for line in ax.lines if not str(line.get_label()).startswith("_")}
    assert len(colours) == 3
    assert list(colours.values()) == [style["color"] for style in styles(list(colours))]
    bars = plot_chain(chain, 0.9, strategies=["persistent"]).axes[2]
    (bar,) = bars.patches
    assert bar.get_facecolor()[:3] == pytest.approx(_rgb(colours["persistent"]))


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


def test_stages_and_steps_have_whole_numbers(chain: remat.Chain) -> None:
    (ax,) = plot_schedule(remat.solve(chain, 1.0)).axes
    for ticks in (ax.get_xticks(), ax.get_yticks()):
        assert all(float(tick).is_integer() for tick in ticks)


def test_legends_of_a_plan_lie_beside_its_data(chain: remat.Chain, tmp_path: Path) -> None:
    figure = plot_chain(chain, 0.9, strategies=["persistent"])
    figure.savefig(tmp_path / "overview.png")
    for ax in figure.axes[:2]:
        assert not ax.get_legend().get_window_extent().overlaps(ax.get_window_extent())


def test_sizes_in_file_names_are_as_people_write_them() -> None:
    assert in_a_name(38915176, [38915176, 2**30]) == "37.1MiB"
    assert in_a_name(38915176, [38915176, 38915177]) == "37.1MiB_38915176"
