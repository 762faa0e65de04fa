"""`remat.compare`: planned and run, judged, shown and saved; and `remat.fit`."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

import remat
from remat import rotor
from remat.comparison.result import PLAIN, Comparison, Entry
from remat.errors import SolverStopped
from remat.profiling import whole_steps
from remat.schedule import Operation
from remat.solvers import make_solver
from remat.solvers.base import Plan, Solver
from remat.solvers.persistent import Persistent
from support.library_models import blocks
from support.steps import small_gpt

STATIC = ("store_all", "sequential", "chen", "revolve", "persistent", "floating", "fit")


def _loss(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), torch.zeros(output.shape[0] * output.shape[1]).long())


class Formula(nn.Module):
    """Code without modules: there is no chain, nor a call that could be made again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + x
        return x


@pytest.fixture(scope="module")
def compared() -> Comparison:
    model, sample = small_gpt()
    return remat.compare(model, sample, [0.1, 0.5, 1.0], loss=_loss, progress=False)


def test_every_strategy_at_every_budget(compared: Comparison) -> None:
    assert compared.strategies == [*STATIC, "dtr", "dtr-operators"]
    assert len(compared.entries) == 1 + 3 * len(compared.strategies)
    assert compared.complete
    assert compared.batch == 4


def test_measured_peaks_keep_their_budgets_and_gradients_are_equal(compared: Comparison) -> None:
    ran = [entry for entry in compared.entries if entry.measured is not None and entry.budget_bytes is not None]
    assert len(ran) >= 2 * (len(compared.strategies) - 2)
    for entry in ran:
        assert entry.measured is not None
        assert entry.budget_bytes is not None
        if entry.outcome == "pass":
            assert 0 < entry.measured.peak_bytes <= entry.budget_bytes
            assert entry.gradients == "equal"
            assert len(entry.times) == len(entry.ratios) == 3
            assert entry.measured.overhead == sorted(entry.ratios)[1]
            assert entry.measured.seconds == entry.measured.overhead * compared.plain.seconds  # one clock for all
            assert entry.interval == (min(entry.ratios), max(entry.ratios))


def test_what_fails_says_why(compared: Comparison) -> None:
    entry = compared.at("store_all", 0.5)
    assert entry.outcome == "infeasible"
    assert entry.measured is None
    assert entry.predicted is not None
    assert str(compared.least_bytes["store_all"]) in entry.predicted.note
    for name in STATIC:
        assert compared.at(name, 0.1).outcome == "infeasible"
    dtr = compared.at("dtr-operators", 0.1)
    assert dtr.outcome in ("oom", "thrash")
    assert dtr.report is not None
    assert dtr.report.note


class Stops(Solver):
    """A planner that gives up, by its time limit or for another reason."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def plan(self, chain: remat.Chain, budgets: Sequence[int]) -> list[Plan | None]:
        raise self.error

    def least_memory(self, chain: remat.Chain) -> tuple[Operation, ...]:
        return Persistent().least_memory(chain)


def test_planners_that_give_up_are_an_outcome_of_their_own() -> None:
    model, sample = small_gpt()
    slow = Stops("slow", SolverStopped("nothing was found in 3 s"))
    broken = Stops("broken", remat.RematError("no such thing"))
    found = remat.compare(model, sample, [0.9], [slow, broken, "persistent"], progress=False, repeats=1)
    outcomes = {entry.strategy: (entry.outcome, entry.report.note) for entry in found.entries}
    assert outcomes["slow"] == ("timeout", "nothing was found in 3 s")
    assert outcomes["broken"] == ("error", "no such thing")
    assert found.best(0.9).strategy == "persistent"


def test_seconds_are_medians_of_ratios_to_the_plain_step_of_the_round() -> None:
    model, sample = small_gpt()
    found = remat.compare(model, sample, [0.9], ["persistent"], repeats=5, progress=False)
    entry = found.at("persistent", 0.9)
    assert len(entry.times) == len(entry.ratios) == len(found.entries[0].times) == 5
    rounds = zip(entry.times, found.entries[0].times, strict=True)
    assert entry.ratios == pytest.approx([mine / plain for mine, plain in rounds])
    assert entry.measured.overhead == statistics.median(entry.ratios)
    assert found.plain.seconds == statistics.median(found.entries[0].times)


@pytest.mark.slow
def test_compiled_models_are_compared_without_a_budget() -> None:
    model, sample = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(16, 8)
    found = remat.compare(model, sample, [1.0], ["persistent", "torch.compile"], repeats=1, progress=False)
    compiled = [entry for entry in found.entries if "compile" in entry.strategy]
    assert len(compiled) > 2  # several values of its activation_memory_budget
    for entry in compiled:
        assert entry.budget_bytes is None
        assert entry.outcome == "pass"
        assert entry.measured.peak_bytes > 0
        assert entry.gradients == "equal" or float(entry.gradients.split()[2]) < 1e-3


def test_plans_are_those_of_the_planners(compared: Comparison) -> None:
    assert compared.chain is not None
    for name in STATIC[1:]:
        entry = compared.at(name, 0.5)
        planner = make_solver("fastest", options=True) if name == "fit" else make_solver(name, options=False)
        schedule = planner.solve(compared.chain, compared.budgets[1])
        assert entry.schedule == schedule
        assert entry.predicted is not None
        assert entry.predicted.peak_bytes == remat.simulate(compared.chain, schedule).peak_bytes
        assert compared.least_bytes[name] == planner.minimum_budget(compared.chain)


def _timed(entry: Entry, overhead: float) -> Entry:
    """The entry as if it had taken that long in each round."""
    assert entry.measured is not None
    return replace(entry, measured=replace(entry.measured, overhead=overhead), ratios=(overhead,) * 3)


def test_best_is_the_fastest_that_fits(compared: Comparison) -> None:
    assert compared.best(10**9).measured is not None
    budget = compared.budgets[1]
    fitting = [
        entry
        for entry in compared.entries
        if entry.outcome == "pass" and entry.measured is not None and entry.measured.peak_bytes <= budget
    ]
    assert compared.best(budget) in fitting
    for fastest in fitting:  # whatever the clock said, each is the best if it is the fastest
        timed = replace(compared, entries=tuple(_timed(entry, 1.0 if entry is fastest else 2.0) for entry in fitting))
        assert timed.best(budget).strategy == fastest.strategy
    with pytest.raises(remat.InfeasibleBudget, match="the minimum is"):
        compared.best(100)


def test_it_shows_itself(compared: Comparison) -> None:
    text = str(compared)
    assert repr(compared) == text
    assert max(map(len, text.splitlines())) <= 80
    for name in (PLAIN, *compared.strategies, "minimum", "are bit-identical to plain PyTorch's"):
        assert name in " ".join(text.split())
    html = compared._repr_html_()
    assert html.count("<tr>") == 1 + 1 + len(compared.strategies)  # one row each, and one column for each budget
    assert html.count("<th") == 2 + len(compared.budgets)
    assert all(line.split(":")[0] in text for line in compared.recommendations())


def test_it_is_saved_and_loaded(compared: Comparison, tmp_path: Path) -> None:
    compared.save(tmp_path / "comparison.json")
    loaded = Comparison.load(tmp_path / "comparison.json")
    assert loaded == compared
    with pytest.raises(remat.InvalidFile, match="expected a Chain"):
        remat.Chain.load(tmp_path / "comparison.json")
    compared.to_csv(tmp_path / "comparison.csv")
    with (tmp_path / "comparison.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["strategy"] for row in rows] == [entry.strategy for entry in compared.entries]
    content = json.loads((tmp_path / "comparison.json").read_text())
    del content["entries"]
    (tmp_path / "broken.json").write_text(json.dumps(content))
    with pytest.raises(remat.InvalidFile, match="entries"):
        Comparison.load(tmp_path / "broken.json")


def test_it_becomes_a_data_frame(compared: Comparison) -> None:
    frame = compared.to_pandas()
    assert len(frame) == len(compared.entries)
    assert frame["measured_peak_bytes"].max() == max(row["measured_peak_bytes"] or 0 for row in compared.rows())
    reports = [entry.report for entry in compared.entries]
    assert list(frame["evictions"]) == [report.evictions for report in reports if report is not None]
    assert list(frame["recomputations"]) == [report.recomputations for report in reports if report is not None]
    assert frame["evictions"].max() > 0


@pytest.mark.parametrize(
    ("kind", "strategy", "budget", "panels"),
    [
        (None, None, None, 2),
        ("throughput", None, None, 1),
        ("overhead", None, None, 1),
        ("memory", "dtr-operators", 0.5, 1),
        ("memory", None, None, 1),
        ("schedule", "chen", None, 1),
        (None, "persistent", 0.5, 2),
        (None, None, 0.5, 2),
        (None, "dtr-operators", 0.5, 1),
        ("schedule", None, None, 1),
        ("memory", "dtr-operators", None, 1),
    ],
)
def test_figures(
    compared: Comparison, kind: str | None, strategy: str | None, budget: float | None, panels: int
) -> None:
    figure = compared.plot(kind, strategy=strategy, budget=budget)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == panels
    assert all(ax.has_data() for ax in figure.axes)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_figure_shows_what_was_measured(compared: Comparison) -> None:
    (ax,) = compared.plot("throughput").axes
    lines = {line.get_label(): line for line in ax.get_lines()}
    entry = compared.at("persistent", 0.5)
    assert entry.measured is not None
    point = (entry.measured.peak_bytes / 2**20, 4 / entry.measured.seconds)
    assert point in [tuple(pair) for pair in lines["persistent"].get_xydata().tolist()]
    assert PLAIN in lines
    (ax,) = compared.plot("memory", strategy="persistent", budget=0.5).axes
    (limit,) = (line for line in ax.get_lines() if "budget" in line.get_label())
    assert limit.get_ydata()[0] == compared.budgets[1] / 2**20


def test_the_memory_of_dtr_over_time_keeps_the_budget(compared: Comparison) -> None:
    report = compared.with_timeline("dtr-operators", 0.5)
    assert report.budget_bytes == compared.budgets[1]
    peaks = [moment.peak_bytes for moment in report.timeline]
    assert 0.9 * report.peak_bytes < max(peaks) <= report.budget_bytes
    stored = [moment.stored_bytes for moment in report.timeline]
    assert all(after <= peak for after, peak in zip(stored, peaks, strict=True))
    assert max(stored) > 0.5 * max(peaks)
    steps = [abs(after - before) for before, after in itertools.pairwise(stored)]
    assert max(steps) < 0.5 * max(peaks)  # one operator makes, or frees, a part of it
    ends = [moment.end_seconds for moment in report.timeline]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(report.seconds, rel=1e-3)


def test_wrong_figures_and_entries(compared: Comparison) -> None:
    for call, message in (
        (lambda: compared.plot("pie"), "throughput, overhead, memory, schedule"),
        (lambda: compared.plot("schedule", strategy="dtr-operators", budget=0.5), "kind='memory'"),
        (lambda: compared.plot("memory", strategy="dtr", budget=0.5), "nothing was predicted"),
        (lambda: compared.plot("memory", strategy="store_all", budget=0.1), "infeasible|too small"),
        (lambda: compared.at("persistent", 0.77), "budgets are"),
        (lambda: compared.at("nobody", 0.5), "unknown strategy"),
    ):
        with pytest.raises(remat.RematError, match=message):
            call()


def test_the_model_is_left_as_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(5)
    )
    sample = torch.randn(4, 3, 12, 12)
    model(sample)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = remat.compare(model, sample, [1.0], ["persistent", "dtr"], progress=False)
    assert {entry.gradients for entry in found.entries[1:]} == {"equal"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2] is not None
    assert model[5].weight.grad is None
    assert torch.equal(random, torch.get_rng_state())


def test_predictions_alone_run_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger than single stages runs where memory is short: a model may be compared where it does not fit."""
    monkeypatch.setattr(whole_steps, "free_bytes", lambda device: 2**20)
    model, sample = small_gpt()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda module, args: calls.append("model"))
    found = remat.compare(model, sample, [0.4, 0.8], measure=False, progress=False)
    assert not calls
    assert not found.measured
    assert found.at("dtr-operators", 0.8).outcome == "pass"
    assert "dtr" not in found.strategies
    assert any("only a measurement shows its cost" in note for note in found.notes)
    assert {entry.outcome for entry in found.entries} >= {"pass", "infeasible"}
    assert found.best(0.8).predicted is not None
    assert "predicted" in found.plot("throughput").axes[0].get_title()


class Wrong(nn.Module):
    """Its library's checkpointing computes something else: everything a hundredth larger."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.off, self.on = off, False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.on = enable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * (1 + self.off) if self.on else x


@pytest.mark.parametrize("off", [0.01, 1e-5])
def test_wrong_gradients_are_said_to_differ_and_are_never_recommended(off: float) -> None:
    found = remat.compare(
        Wrong(off), torch.randn(32, 16), [1.0], ["persistent", "gradient_checkpointing"], progress=False
    )
    (wrong,) = (entry for entry in found.entries if entry.strategy == "gradient_checkpointing")
    assert wrong.gradients.startswith("differ by")
    assert float(wrong.gradients.split()[2]) == pytest.approx(off, rel=0.2)
    assert found.at("persistent", 1.0).gradients == "equal"
    best, tied, _ = found.verdict(2**40)
    assert wrong not in (best, *tied)


class LeafOfItsOwn(nn.Module):
    """Makes a leaf that needs a gradient in each forward, as speech models do with what they hear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heard = x.clone()
        heard.requires_grad = True
        return self.layers(heard)


def test_leaves_that_a_forward_makes_are_no_gradients_to_compare() -> None:
    found = remat.compare(LeafOfItsOwn(), torch.randn(64, 16), [0.9], ["fit", "dtr"], repeats=1, progress=False)
    assert {entry.gradients for entry in found.entries} - {""} == {"equal"}


def test_steps_are_timed_in_changing_order() -> None:
    model, sample = small_gpt()
    rounds: list[list[str]] = []

    def note(what: str, done: int, total: int) -> None:
        if what.startswith("time: "):
            if not rounds or what in rounds[-1]:
                rounds.append([])
            rounds[-1].append(what)

    remat.compare(model, sample, [0.6], ["persistent", "sequential", "revolve"], repeats=4, progress=note)
    assert len(rounds) == 4
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len({each[0] for each in rounds}) > 2
    assert len({each[-1] for each in rounds}) > 2


def test_any_module_under_dtr_alone() -> None:
    model, sample = Formula(), torch.randn(64, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = remat.compare(model, sample, [0.9, 1.0], progress=False)
    assert found.strategies == ["dtr", "dtr-operators"]
    assert any("no chain was found" in note for note in found.notes)
    assert found.at("dtr", 1.0).gradients == found.at("dtr-operators", 1.0).gradients == "equal"
    with pytest.raises(remat.RematError, match="need a chain of stages"):
        remat.compare(model, sample, [0.9], ["persistent"], progress=False)


def test_solvers_heuristics_and_wrong_names() -> None:
    model, sample = small_gpt()

    def patient(c):  # type: ignore[no-untyped-def]
        return c.cost / (c.bytes + 1.0)

    found = remat.compare(
        model, sample, ["10GiB"], [remat.solvers.Chen(), patient, "h_lru", "h_dtr_eq"], measure=False, progress=False
    )
    assert found.strategies == ["chen", "dtr patient", "dtr h_lru", "dtr h_dtr_eq"]
    for strategies, budgets, message in (
        (["persistant"], [0.5], "persistant"),
        ([], [0.5], "no strategies"),
        (None, [], "no budgets"),
        (None, ["12 parsecs"], "parsecs"),
        (None, [1.5], "float must be in"),
    ):
        with pytest.raises(remat.RematError, match=message):
            remat.compare(model, sample, budgets, strategies, measure=False, progress=False)
    with pytest.raises(remat.RematError, match="repeats=0"):
        remat.compare(model, sample, [0.5], repeats=0)


def test_budgets_of_its_own_go_from_the_least_to_the_most() -> None:
    model, sample = small_gpt()
    found = remat.compare(model, sample, strategies=["persistent"], measure=False, progress=False)
    assert len(found.budgets) == 5
    assert found.budgets[0] == found.least_bytes["persistent"]
    assert found.budgets[-1] == found.store_all_bytes
    assert all(entry.outcome == "pass" for entry in found.entries)


def test_fit_takes_the_fastest_plan(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = small_gpt()
    assert remat.fit(model, sample, 0.5, _loss) is model
    line = capsys.readouterr().err
    *table, said = line.splitlines()
    assert table[0].split() == ["remat.fit:", "limit", "predicted", "time"] and len(table) == 6
    assert said.startswith("remat.fit: Sequential now trains in ") and "predicted" in said
    handle = rotor.Checkpointable(copy.deepcopy(model), sample, loss=_loss)
    handle.plan_with("fastest", 0.5)
    answers = [make_solver(name).solve_many(handle.chain, [0.5])[0] for name in STATIC[:-1]]
    plans = [answer for answer in answers if isinstance(answer, remat.Schedule)]
    best = min(remat.simulate(handle.chain, plan).seconds for plan in plans)
    assert handle.get_expected_makespan() == best
    _loss(model(sample)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    remat.fit(model, sample, "1GiB", quiet=True)
    assert capsys.readouterr().err == ""


def test_fit_says_what_it_cannot_do() -> None:
    model, sample = small_gpt()
    with pytest.raises(remat.InfeasibleBudget, match="the minimum is") as caught:
        remat.fit(model, sample, 1000)
    assert caught.value.minimum > 1000
    module = remat.fit(model, sample, 1.0, quiet=True)  # the model is as usable as before
    _loss(module(sample)).backward()
    with pytest.raises(remat.UnsupportedModel, match=r"remat\.DTR"):
        remat.fit(Formula(), torch.randn(64, 32), 0.5, quiet=True)
    with pytest.raises(remat.InvalidBudget):
        remat.fit(model, sample, "plenty")


def test_what_fails_while_it_is_timed_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.comparison.bench import Bench, TrainingStep

    timed = Bench.seconds

    def seconds(bench: Bench, step: TrainingStep) -> float:
        if step.report() is not None:
            raise remat.OutOfBudget("addmm", 1, 2, 3)
        return timed(bench, step)

    monkeypatch.setattr(Bench, "seconds", seconds)
    model, sample = small_gpt()
    found = remat.compare(model, sample, [0.9], ["persistent", "dtr"], progress=False)
    assert found.at("dtr", 0.9).outcome == "oom"
    assert "addmm does not fit" in found.at("dtr", 0.9).measured.note
    assert found.at("persistent", 0.9).outcome == "pass"
    assert found.complete


def test_fit_plans_for_other_shapes_too() -> None:
    """Not with the planner that won on the sample, which may have nothing that fits a larger one."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    module = remat.fit(model, torch.randn(256, 64), "1MiB", quiet=True)
    with pytest.warns(UserWarning, match="measured and planned again"):
        module(torch.randn(400, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_strategies_of_one_name_and_a_sequential_with_a_forward_of_its_own() -> None:
    model, sample = small_gpt()
    with pytest.raises(remat.RematError, match="two strategies are called"):
        remat.compare(model, sample, [0.5], [remat.solvers.Persistent(100), "persistent"], progress=False)

    class Doubled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    found = remat.compare(Doubled(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), [1.0], progress=False)
    assert found.strategies == ["dtr", "dtr-operators"]


def test_a_loss_with_buffers_is_left_as_found() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            self.centre += 0.1 * output.detach().mean(0)
            return (output - self.centre).square().mean()

    loss = Centred()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = remat.compare(model, torch.randn(4, 8), [1.0], ["persistent", "dtr"], loss, progress=False)
    assert {entry.gradients for entry in found.entries[1:]} == {"equal"}
    assert torch.equal(loss.centre, torch.zeros(8))


def test_checkpointing_of_pytorch_itself_stands_beside() -> None:
    torch.manual_seed(0)
    model, sample = blocks()
    found = remat.compare(model, sample, [1.0], ["block_checkpointing", "selective_checkpointing"], progress=False)
    plain, every, selective = found.entries[:3]
    assert plain.measured and every.measured and selective.measured
    assert (every.strategy, selective.strategy) == ("block_checkpointing", "selective_checkpointing")
    assert every.budget_bytes is None and every.gradients == selective.gradients == "equal"
    assert every.measured.peak_bytes < selective.measured.peak_bytes < plain.measured.peak_bytes
    assert not any("forward" in vars(block) for block in model.modules())
    lonely = remat.compare(nn.Linear(8, 8), torch.randn(2, 8), [1.0], ["dtr", "block_checkpointing"], progress=False)
    (entry,) = [each for each in lonely.entries if each.strategy == "block_checkpointing"]
    assert entry.outcome == "error" and entry.measured and "no list of blocks" in entry.measured.note


def test_errors_of_two_parameters_that_cancel_are_seen() -> None:
    class Wrong(remat.Execution):
        name = "wrong"

        def prepared(self, model: nn.Module) -> object:
            first, second = model[0].first, model[0].second
            return lambda x: model(x) + (first - first.detach()).sum() - (second - second.detach()).sum()

    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model[0].first, model[0].second = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
    found = remat.compare(
        model,
        torch.randn(8, 16),
        [1.0],
        ["persistent", Wrong()],
        loss=lambda output: (output + 1).square().mean(),
        repeats=1,
    )
    assert [entry.gradients.split()[0] for entry in found.entries[1:]] == ["equal", "differ"]


def test_each_strategy_meets_the_buffers_that_a_forward_replaces_as_they_were() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return x - self.average

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), Average(), nn.Tanh(), nn.Linear(32, 32))
    found = remat.compare(
        model,
        torch.randn(64, 32) + 1,
        [0.9],
        ["persistent", "dtr"],
        loss=lambda output: output.square().mean(),
        repeats=1,
    )
    assert [entry.gradients for entry in found.entries[1:]] == ["equal", "equal"]
    assert not model[3].average.any()
