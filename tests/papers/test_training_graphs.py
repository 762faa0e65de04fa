"""Static methods on training graphs: valid orders, the accounting of DTR, Checkmate against exhaustive search."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers import checkmate_graph as checkmate
from benchmarks.papers import classic, methods_at, plot_static
from benchmarks.papers.networks import mobilenet, unet, vgg16
from benchmarks.papers.training_graph import Layer, NodeStep, TrainingGraph, replay, steps_of, with_backward
from remat.errors import InvalidSchedule
from remat.runtime.dtr.simulator import Replay
from support.exhaustive import fastest


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> TrainingGraph:
    """Random forward graphs, each layer reading the one before and perhaps an earlier one."""
    count = draw(st.integers(2, most))
    layers = []
    for index in range(count):
        inputs = {index - 1, draw(st.integers(0, index - 1))} if index else set()
        layers.append(Layer(f"layer{index}", draw(st.integers(1, 9)), draw(st.integers(0, 9)) * 10_000, tuple(inputs)))
    return with_backward(layers)


@settings(max_examples=80, deadline=None)
@given(graphs(most=9), st.randoms(use_true_random=False))
def test_whatever_is_kept_the_order_is_valid(graph: TrainingGraph, random) -> None:
    kept = {(t, i): random.random() < 0.5 for t, i in itertools.product(range(len(graph)), repeat=2)}
    cost = replay(graph, steps_of(graph, lambda stage, node: kept[stage, node]))
    everything = replay(graph, classic.store_all(graph))
    assert cost.nanoseconds >= everything.nanoseconds == sum(graph.nanoseconds)
    baseline = Replay(graph.trace()).baseline
    assert (everything.peak_bytes, everything.nanoseconds) == (baseline.peak_bytes, baseline.nanoseconds)
    for method in (classic.chen_sqrt, classic.chen_greedy, classic.treeverse):
        for steps in method(graph):
            replay(graph, steps)


@settings(max_examples=15, deadline=None)
@given(graphs(most=4), st.floats(0.5, 1.0))
def test_checkmate_is_optimal(graph: TrainingGraph, share: float) -> None:
    """Its stages, which compute each node once in each, lose nothing on these graphs."""
    budget = int(replay(graph, classic.store_all(graph)).peak_bytes * share)
    solved = checkmate.optimal(graph, budget, gap=0.0)
    assert solved.proved
    expected = fastest(graph, budget)
    assert (solved.cost.nanoseconds if solved.cost else float("inf")) == expected
    if solved.cost:
        assert solved.cost.peak_bytes <= budget
        assert solved.bound_nanoseconds == pytest.approx(expected, rel=1e-4)
        rounded = checkmate.rounded(graph, budget)
        assert rounded.cost is None or expected <= rounded.cost.nanoseconds


def test_networks_have_the_layers_of_their_papers() -> None:
    for graph, layers in ((vgg16(), 22), (mobilenet(), 30), (unet(), 36)):
        assert graph.forward == layers
        assert len(graph) == 2 * layers - 1
    dense = sum(name.startswith("dense") for name in vgg16().names)
    convolutions = sum(name.startswith("conv") for name in vgg16().names)
    assert (dense, convolutions) == (3, 13)
    # 15.5 GFLOP multiply-adds for one image of VGG-16, 0.57 for MobileNet, two operations each.
    assert sum(vgg16(1).nanoseconds[:22]) == pytest.approx(2 * 15.5e9 / 1e4, rel=0.02)
    assert sum(mobilenet(1).nanoseconds[:30]) == pytest.approx(2 * 0.57e9 / 1e4, rel=0.03)
    assert sum(name.startswith("concat") for name in unet().names) == 4


@pytest.mark.slow
def test_dtr_is_close_to_the_optimum_and_all_methods_stand_side_by_side() -> None:
    graph = mobilenet()
    cells = {cell.heuristic: cell.report for cell in methods_at("MobileNet", graph, 0.8, 60.0)}
    chens = {f"chen, {rule}{where}" for rule in ("sqrt(n)", "greedy") for where in ("", ", articulation points")}
    assert set(cells) == {"checkmate", "checkmate, rounded", "treeverse", "h_dtr", "h_dtr_eq", "h_lru"} | chens
    optimum = cells["checkmate"]
    assert optimum.outcome == "pass" and optimum.note == ""
    for name, report in cells.items():
        assert report.peak_bytes <= report.budget_bytes
        assert report.outcome == "pass" and report.overhead >= optimum.overhead - 0.005, name
    assert cells["h_dtr"].overhead < 1.05 < cells["treeverse"].overhead


@pytest.mark.slow
def test_an_interrupted_program_is_a_bound_and_an_incumbent() -> None:
    graph = unet()
    cells = methods_at("U-Net", graph, 0.5, 0.5)
    report = cells[0].report
    assert report.outcome in ("timeout", "pass") and report.note == "stopped at the time limit of 0.5 s"
    figure = plot_static(cells, {"U-Net": Replay(graph.trace()).baseline})
    assert figure.axes


def test_invalid_orders_are_refused() -> None:
    graph = with_backward([Layer("a", 1, 0, ()), Layer("loss", 1, 0, (0,))])
    assert graph.names == ("a", "loss", "grad a")
    with pytest.raises(InvalidSchedule, match="a is not in memory"):
        replay(graph, [NodeStep(1)])
    with pytest.raises(InvalidSchedule, match="a is not in memory"):
        replay(graph, [NodeStep(0, free=True)])
    with pytest.raises(InvalidSchedule, match="2 nodes are never computed"):
        replay(graph, [NodeStep(0)])
