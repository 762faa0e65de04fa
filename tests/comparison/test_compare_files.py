"""`remat.compare` interrupted, taken up again from its file, and with files of other models, plans and machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.comparison.result import Comparison
from remat.schedule import Operation, store_all_operations
from remat.solvers.base import Plan, Solver
from remat.solvers.persistent import Persistent
from support.steps import small_gpt


def test_an_interrupted_comparison_keeps_what_it_has_and_goes_on(tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("memory: dtr"):
            raise KeyboardInterrupt

    options = {"strategies": ["persistent", "dtr"], "file": file}
    with pytest.warns(UserWarning, match="interrupted: 2 of 3 entries"):
        first = remat.compare(model, sample, [0.6], progress=stop, **options)
    assert not first.complete
    assert first.at("persistent", 0.6).measured is not None
    assert first.at("dtr", 0.6).measured is None
    assert "incomplete" in str(first)
    assert Comparison.load(file) == first

    seen: list[str] = []
    second = remat.compare(model, sample, [0.6], progress=lambda what, done, total: seen.append(what), **options)
    assert second.complete
    assert not any("measuring" in what for what in seen)  # the profile was in the file
    assert second.chain == first.chain
    assert second.at("persistent", 0.6).measured.peak_bytes == first.at("persistent", 0.6).measured.peak_bytes
    assert second.at("dtr", 0.6).outcome == "pass"

    seen.clear()
    third = remat.compare(model, sample, [0.6], progress=lambda what, done, total: seen.append(what), **options)
    assert not any("time" in what for what in seen)
    assert [entry.measured for entry in third.entries] == [entry.measured for entry in second.entries]
    wider = remat.compare(model, sample, [0.6, 0.8], progress=False, **options)
    again, before = wider.at("persistent", 0.6), second.at("persistent", 0.6)
    assert (again.times, again.ratios) == (before.times, before.ratios)
    assert again.measured.seconds == again.measured.overhead * wider.plain.seconds  # of that run, not of the first
    assert wider.at("persistent", 0.8).measured is not None


class Changing(Solver):
    """A planner of one name whose plans change, as when its options do."""

    name = "mine"

    def __init__(self, least: bool) -> None:
        self.least = least

    def plan(self, chain: remat.Chain, budgets: Sequence[int]) -> list[Plan | None]:
        return [Plan(self.least_memory(chain) if self.least else store_all_operations(chain.length)) for _ in budgets]

    def least_memory(self, chain: remat.Chain) -> tuple[Operation, ...]:
        return Persistent().least_memory(chain)


def test_what_was_measured_of_another_plan_is_not_taken_over(tmp_path: Path) -> None:
    model, sample = small_gpt()
    options = {"file": tmp_path / "comparison.json", "progress": False, "repeats": 1}
    most = remat.compare(model, sample, [1.0], [Changing(least=False)], **options).at("mine", 1.0)
    least = remat.compare(model, sample, [1.0], [Changing(least=True)], **options).at("mine", 1.0)
    assert least.measured.peak_bytes < 0.9 * most.measured.peak_bytes


def test_a_file_measured_under_another_autocast_is_refused(tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"
    remat.compare(model, sample, [0.9], ["persistent"], measure=False, file=file, progress=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(remat.RematError, match="another model or sample"):
        remat.compare(model, sample, [0.9], ["persistent"], measure=False, file=file, progress=False)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"
    remat.compare(model, sample, [0.6], ["persistent"], measure=False, file=file, progress=False)
    with pytest.raises(remat.RematError, match="another model or sample"):
        remat.compare(model, sample[:2], [0.6], ["persistent"], file=file, progress=False)
    with pytest.raises(remat.RematError, match="another model or sample"):
        remat.compare(model[:3], sample, [0.6], ["persistent"], file=file, progress=False)
    content = json.loads(file.read_text())
    content["machine"]["processor"] = "an abacus"
    content["entries"][0]["measured"] = content["entries"][0]["predicted"]
    file.write_text(json.dumps(content))
    with pytest.raises(remat.RematError, match="abacus"):
        remat.compare(model, sample, [0.6], ["persistent"], file=file, progress=False)


def test_a_file_of_the_same_model_in_another_form_is_refused(tmp_path: Path) -> None:
    """Widths, flags and losses change what was measured, though names and numbers of modules do not."""
    file = tmp_path / "comparison.json"
    sample = torch.randn(8, 16)

    def model(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16), nn.Tanh())

    remat.compare(model(32), sample, [1.0], ["dtr"], file=file, progress=False)
    frozen = model(32)
    frozen[0].requires_grad_(False)
    for other, loss in ((model(64), None), (frozen, None), (model(32).eval(), None), (model(32), torch.sum)):
        with pytest.raises(remat.RematError, match="another model or sample"):
            remat.compare(other, sample, [1.0], ["dtr"], loss, file=file, progress=False)
    of_losses = tmp_path / "losses.json"
    remat.compare(model(32), sample, [1.0], ["dtr"], lambda out: out.sum(), file=of_losses, progress=False)
    with pytest.raises(remat.RematError, match="or of this one with other parameters, flags or loss"):
        remat.compare(model(32), sample, [1.0], ["dtr"], lambda out: out.var(), file=of_losses, progress=False)
    of_partial = tmp_path / "partial.json"
    remat.compare(model(32), sample, [1.0], ["dtr"], partial(torch.sum), file=of_partial, progress=False)
    with pytest.raises(remat.RematError, match="or of this one with other parameters, flags or loss"):
        remat.compare(model(32), sample, [1.0], ["dtr"], partial(torch.var), file=of_partial, progress=False)
    with pytest.raises(remat.RematError, match="folder does not exist"):
        remat.compare(model(32), sample, [1.0], file=tmp_path / "nowhere" / "comparison.json", progress=False)


@pytest.mark.parametrize(
    "moment",
    ["measuring memory", "recording", "minimum budget: pers", "planning: pers", "planning: dtr", "memory: pers"],
)
def test_an_interruption_at_any_moment_loses_nothing(moment: str, tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"
    options = {"strategies": ["sequential", "persistent", "dtr", "dtr-operators"], "file": file}

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith(moment):
            raise KeyboardInterrupt

    before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    if moment.startswith(("measuring", "recording", "minimum")):  # nothing was planned that could be returned
        with pytest.raises(KeyboardInterrupt):
            remat.compare(model, sample, [0.6, 1.0], progress=stop, **options)
    else:
        with pytest.warns(UserWarning, match="interrupted: "):
            found = remat.compare(model, sample, [0.6, 1.0], progress=stop, **options)
        assert not found.complete
        assert Comparison.load(file) == found
        for entry, row in zip(found.entries, found.rows(), strict=True):
            if entry.measured is None and found.measured:  # no prediction where measurements stand
                assert row["throughput"] is None
        assert ("predicted" in str(found).splitlines()[0]) or found.timed
    assert all(torch.equal(parameter, value) for parameter, value in before.items())
    seen: list[str] = []
    finished = remat.compare(model, sample, [0.6, 1.0], progress=lambda what, done, total: seen.append(what), **options)
    assert finished.complete
    assert finished.measured
    assert ("measuring memory" in seen) == (moment == "measuring memory")  # the profile is never measured twice


def test_an_interruption_while_planning_keeps_what_was_measured_before(tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"
    first = remat.compare(model, sample, [0.6], ["persistent"], file=file, progress=False)

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("planning: chen"):
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        remat.compare(model, sample, [0.6], ["persistent", "chen"], file=file, progress=stop)
    assert Comparison.load(file).at("persistent", 0.6).measured == first.at("persistent", 0.6).measured


def test_predictions_do_not_stand_where_measurements_do() -> None:
    model, sample = small_gpt()

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("memory: persistent at"):
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        found = remat.compare(model, sample, [0.6], ["persistent"], progress=stop)
    assert found.plain.measured
    waiting = next(line for line in str(found).splitlines() if line.startswith(" persistent"))
    assert waiting.split()[-1] == "?"
    assert "predicted" in str(found).splitlines()[0]
    assert "(predicted)" in str(remat.compare(model, sample, [0.6], ["persistent"], measure=False, progress=False))


def test_an_interruption_in_a_round_drops_that_round(tmp_path: Path) -> None:
    model, sample = small_gpt()
    file = tmp_path / "comparison.json"
    rounds = []

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("time: persistent"):
            rounds.append(what)
            if len(rounds) == 2:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        first = remat.compare(model, sample, [0.5], ["persistent"], file=file, progress=stop)
    entry = first.at("persistent", 0.5)
    assert len(entry.times) == len(entry.ratios) == 1
    second = remat.compare(model, sample, [0.5], ["persistent"], file=file, progress=False)
    entry = second.at("persistent", 0.5)
    assert len(entry.times) == len(entry.ratios) == 3
    assert second.complete
    # Another question to the same file leaves the answer to the first one in it.
    third = remat.compare(model, sample, [0.7], ["sequential"], file=file, progress=False)
    assert third.strategies == ["sequential"]
    kept = Comparison.load(file)
    assert set(kept.strategies) == {"persistent", "sequential"}
    assert kept.at("persistent", 0.5).measured == entry.measured


def test_untimed_comparisons_recommend_by_prediction() -> None:
    model, sample = small_gpt()

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("time"):
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        found = remat.compare(model, sample, [0.5, 1.0], ["persistent", "chen"], progress=stop)
    assert found.best(0.5).predicted is not None
    assert "predicted" in found.plot("overhead").axes[0].get_title()
