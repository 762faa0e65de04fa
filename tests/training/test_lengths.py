"""Batches longer than those before: what calls are padded to, how often is measured; the first call as the sample."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.runtime.planned.lengths import Lengths, is_padded, length_of, shapes_of, with_length
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.runtime.planned.validity import Validity
from remat.runtime.pytree import Arguments
from remat.training import planned
from remat.training.by_input import PlansByInput
from remat.training.planned import RunningPlan
from support.memory import peak_of
from support.trainers import llama


def call(length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.randint(4, 200, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "labels": tokens, **more}


def step(model: nn.Module, **given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_alike(model: nn.Module, plain: nn.Module, **given: Any) -> None:
    assert all(map(torch.equal, step(model, **given), step(plain, **given)))


def test_a_call_is_padded_in_every_dimension_of_its_sequences() -> None:
    given = Arguments(
        (),
        {
            "input_ids": torch.tensor([[5, 6, 7]]),
            "attention_mask": torch.tensor([[[[True, False, False]] * 3]]),
            "labels": torch.tensor([[5, 6, -100]]),
            "bias": torch.ones(3),
            "logits_to_keep": 2,
            "nested": [None, {"position_ids": torch.tensor([[0, 1, 2]])}],
        },
    )
    assert length_of(given) == 3
    longer = with_length(given, 5)
    assert longer.kwargs["input_ids"].tolist() == [[5, 6, 7, 7, 7]]
    assert longer.kwargs["labels"].tolist() == [[5, 6, -100, -100, -100]]
    assert longer.kwargs["attention_mask"].shape == (1, 1, 5, 5)
    several = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3)}  # three labels, not tokens
    assert shapes_of(with_length(Arguments((), several), 5)) == [(2, 5), (2, 3)]
    masked = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    assert with_length(Arguments((), masked), 5).kwargs["attention_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert longer.kwargs["nested"][1]["position_ids"].tolist() == [[0, 1, 2, 2, 2]]
    assert longer.kwargs["bias"].shape == (3,) and longer.kwargs["logits_to_keep"] == 4
    assert with_length(given, 2).kwargs["input_ids"].tolist() == [[5, 6]]
    vectors = torch.randn(2, 4, 8, requires_grad=True)
    assert with_length(Arguments((vectors,), {}), 6).args[0].shape == (2, 6, 8)
    assert with_length(Arguments((vectors,), {}), 6).args[0].requires_grad
    images = Arguments((torch.randn(2, 3, 8, 8),), {})
    assert length_of(images) is None and with_length(images, 9).args[0] is images.args[0]


def test_the_sizes_to_plan_for_grow_by_more_each_time() -> None:
    def of(length: int) -> Arguments:
        return Arguments((torch.zeros(1, length, dtype=torch.long),), {})

    lengths = Lengths(nn.Linear(1, 1), of(100))
    planned, length = [100], 100
    while length < 1600:
        length += 1
        if length > planned[-1]:
            (shape,) = lengths.for_batch(of(length))
            planned.append(shape[1])
            lengths.planned([shape])
    assert planned == [100, 126, 190, 382, 766, 1534, 3070]
    lengths.failed([(1, 4000)])
    assert lengths.for_batch(of(3900)) == [(1, 3950)]
    assert Lengths(llama(), of(100)).for_batch(of(500)) == [(1, 512)]  # as many positions as the model has


def test_two_lengths_grow_each_by_itself() -> None:
    """As of an encoder and a decoder; the number of rows does not."""

    def of(rows: int, first: int, second: int) -> Arguments:
        return Arguments((torch.zeros(rows, first), torch.zeros(rows, second)), {})

    lengths = Lengths(nn.Linear(1, 1), of(4, 20, 10))
    assert lengths.for_batch(of(8, 15, 10)) == [(8, 20), (8, 10)]
    assert lengths.for_batch(of(2, 24, 8)) == [(2, 30), (2, 10)]
    lengths.planned([(2, 30), (2, 10)])
    assert lengths.for_batch(of(6, 28, 12)) == [(6, 30), (6, 18)]
    given = {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    assert shapes_of(with_length(Arguments((), given), 9)) == [(2, 9), (2, 9)]


def test_the_first_call_is_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = llama(), llama()
    remat.fit(model, memory=0.6)
    assert not capsys.readouterr().err
    with torch.no_grad():
        model(**call(20))
    assert not capsys.readouterr().err
    assert_alike(model, plain, **call(32))
    assert "LlamaForCausalLM now trains in" in capsys.readouterr().err
    patch = patched_forward_of(model)
    assert patch is not None
    limit = patch.figures()["limit"]
    assert_alike(model, plain, **call(24))
    assert patched_forward_of(model) is patch and patch.figures()["limit"] == limit
    assert patched_forward_of(remat.remove(model)) is None and "forward" not in vars(model)


def test_a_first_call_that_does_not_fit_leaves_the_plain_model() -> None:
    model = llama()
    remat.fit(model, memory="20KiB", quiet=True)
    with pytest.raises(remat.InfeasibleBudget):
        model(**call(32))
    assert patched_forward_of(model) is None and "forward" not in vars(model)
    assert_alike(model, llama(), **call(32))


def test_the_longest_is_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    profile = remat.training.planned.profile
    monkeypatch.setattr(
        remat.training.planned, "profile", lambda *args, **kwargs: [ran.append(1), profile(*args, **kwargs)][1]
    )
    model, plain = llama(), llama()
    remat.fit(model, call(16), 0.6, longest=64, quiet=True, other_path="error")
    for length in (16, 64, 40, 63):
        assert_alike(model, plain, **call(length))
    assert len(ran) == 1


def test_a_batch_beyond_the_limit_leaves_those_that_fit_their_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[RunningPlan] = []
    plan_for = PlansByInput.plan_for
    monkeypatch.setattr(
        PlansByInput, "plan_for", lambda self, given: [plan := plan_for(self, given), took.append(plan)][0]
    )
    model, plain = llama(), llama()
    limit = remat.minimum_budget(remat.profile(model, call(128), options=False)) * 2 // 3
    remat.fit(model, call(16), limit, quiet=True, when_short="least", other_path="error")
    with pytest.warns(remat.OverBudgetWarning, match="schedule of least memory"):
        for length in (128, 120, 125):  # the last one is longer than one that does not fit
            assert_alike(model, plain, **call(length))
    assert len(set(map(id, took))) == 2 and took[0] is took[2]
    with pytest.warns(UserWarning, match="measured and planned again"):
        assert_alike(model, plain, **call(32))
    assert remat.simulate(took[-1].chain, took[-1].schedule).peak_bytes <= limit


def test_what_is_longest_of_what_has_no_length() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises(remat.RematError, match="longest=64: no tensor of the call looks like sequences"):
        remat.fit(model, torch.randn(2, 3, 16, 16), 0.9, longest=64, quiet=True)


def test_a_model_without_positions_for_more_is_planned_for_what_comes() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(50, 32), nn.Embedding(40, 32)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Positions()
    remat.fit(model, torch.randint(0, 50, (4, 20)), "400KiB", lambda output: output.sum(), quiet=True)
    with pytest.warns(UserWarning, match="as for other batches that are larger still") as caught:
        for length in (35, 38, 39):
            model(torch.randint(0, 50, (4, length))).sum().backward()
    assert len(caught) == 1


def test_fewer_logits_are_covered_and_more_are_not() -> None:
    model = llama()
    states = {count: Validity.of(model, Arguments((), call(32, logits_to_keep=count))) for count in (0, 4, 8)}
    assert states[8].covers(states[4]) and states[0].covers(states[8])
    assert not states[4].covers(states[8]) and not states[8].covers(states[0])
    assert Validity.of(model, Arguments((), call(32))).covers(states[8])


@pytest.mark.filterwarnings("ignore:remat. a batch is longer")
def test_a_longer_batch_beside_a_profiler_runs_by_an_estimate() -> None:
    model, plain = llama(layers=4), llama(layers=4)
    remat.fit(model, call(16), "4MiB", quiet=True)
    with torch.profiler.profile():
        found = step(model, **call(24))
    assert all(map(torch.equal, found, step(plain, **call(24))))
    with pytest.warns(UserWarning, match="a batch is longer than all before"):  # so it was not taken for measured
        assert_alike(model, plain, **call(24))


def _masked(length: int, masked: int) -> dict[str, Any]:
    given = call(length)
    mask = torch.ones_like(given["input_ids"])
    mask[:, length - masked :] = 0
    return {**given, "attention_mask": mask}


def _peak(model: nn.Module, given: dict[str, Any]) -> int:
    """Of a step, gradients there before it."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_of(lambda: model(**given).loss.backward())  # noqa: PLW0108  # the forward is part of it


def test_a_batch_with_padding_needs_more_than_one_without() -> None:
    """Attention runs without a mask where nothing is masked; that depends on what is in the mask, not on its shape."""
    model, plain = llama(width=32), llama(width=32)
    full, padded = _masked(256, 0), _masked(256, 5)
    assert _peak(plain, padded) > 1.3 * _peak(plain, full)
    limit = int(0.7 * _peak(plain, padded))
    remat.fit(model, full, limit, quiet=True, other_path="error")
    with pytest.warns(UserWarning, match="tokens of this batch are masked, and none were in what was measured"):
        model(**padded).loss.backward()
    assert _peak(model, padded) <= limit
    assert_alike(model, plain, **padded)
    assert_alike(model, plain, **full)


def test_what_is_a_mask_that_leaves_out_tokens() -> None:
    ones = torch.ones(2, 4)
    for dtype in (torch.long, torch.bool, torch.int32, torch.float32):
        for name in ("attention_mask", "decoder_attention_mask"):
            full, part = ones.to(dtype), ones.to(dtype).clone()
            part[1, 3] = 0
            assert not is_padded(Arguments((), {name: full})) and is_padded(Arguments((), {name: part}))
    assert not is_padded(Arguments((), {"attention_mask": torch.zeros(2, 1, 4, 4), "decoder_attention_mask": None}))
    assert not is_padded(Arguments((torch.zeros(2, 4),), {"labels": torch.zeros(2, 4)}))


def test_the_longest_is_planned_for_with_padding() -> None:
    model = llama(width=32)
    remat.fit(model, _masked(128, 0), 0.6, longest=256, quiet=True, other_path="error")
    patch = patched_forward_of(model)
    assert patch is not None
    for given in (_masked(256, 5), _masked(256, 0), _masked(100, 20)):
        model(**given).loss.backward()
        assert _peak(model, given) <= patch.figures()["limit"]


def test_calls_that_differ_in_what_they_name_are_measured_apart() -> None:
    model, plain = llama(), llama()
    tokens = call(32)["input_ids"]
    mask = torch.ones_like(tokens)
    states = [
        Validity.of(model, Arguments((), given))
        for given in (
            {"input_ids": tokens, "attention_mask": mask},
            {"input_ids": tokens, "labels": tokens, "attention_mask": None},
            {"input_ids": tokens, "labels": tokens, "output_hidden_states": True},
        )
    ]
    assert not any(one.covers(other) for one in states for other in states if one is not other)
    remat.fit(model, {"input_ids": tokens, "labels": tokens}, "4MiB", quiet=True)
    with pytest.warns(UserWarning, match="called with input_ids, labels, output_hidden_states=True, but was measured"):
        model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    assert_alike(model, plain, input_ids=tokens, labels=tokens)


class Way(Enum):
    TWICE = 2


class EitherWay(nn.Module):
    """Works on `rows`, on `few`, which it repeats, or in a way that has a name, or one of those in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(
        self,
        rows: torch.Tensor | None = None,
        few: torch.Tensor | None = None,
        way: str | Way = "once",
        ways: dict[str, bool] | None = None,
    ) -> torch.Tensor:
        x = rows if rows is not None else few.repeat(8, 1)  # type: ignore[union-attr]
        for block in [*self.blocks] * (1 + (way in ("twice", Way.TWICE) or ways == {"twice": True})):
            x = x + block(x)
        return x


def test_a_call_with_another_argument_is_another_call() -> None:
    """A tensor of the same shape by another name, or another word: what was measured says nothing of it."""
    torch.manual_seed(0)
    model, x = EitherWay(), torch.randn(64, 16)
    remat.fit(model, {"rows": x}, 0.5, quiet=True)
    limit = patched_forward_of(model).figures()["limit"]  # type: ignore[union-attr]
    before = len(remat.profile(model, {"rows": x}).act_bytes)
    model(x).sum().backward()  # the same argument, by its place
    ways = [("way", "twice", "way=twice"), ("way", Way.TWICE, "way=Way.TWICE")]
    ways.append(("ways", {"twice": True}, r"ways\['twice'\]=True"))
    twice = [({"rows": x, name: value}, said) for name, value, said in ways]
    for other, named in (({"few": x}, "few"), *twice):
        with pytest.raises(remat.InfeasibleBudget, match="this batch"):
            model(**other)
        remat.fit(model, {"rows": x}, 1.0, quiet=True)
        with pytest.warns(UserWarning, match=rf"called with .*{named}, but was measured with rows"):
            remat.fit(model, {"rows": x}, "8MiB", quiet=True)
            model(**other).sum().backward()
        remat.fit(model, {"rows": x}, limit, quiet=True)
    remat.remove(model)
    assert len(remat.profile(model, {"rows": x}, again=False).act_bytes) == before
    with pytest.raises(remat.InvalidSample, match="fails on this sample: TypeError"):
        remat.profile(model, {"lines": x}, again=False)


@pytest.mark.parametrize("first", [False, True], ids=["planned", "first call"])
def test_a_call_in_which_nothing_needs_a_gradient_runs_as_it_is(first: bool) -> None:
    """As of the network that a GAN does not train at the moment."""
    model = llama()
    remat.fit(model, None if first else call(32), 0.6, quiet=True)
    model.requires_grad_(requires_grad=False)
    output = model(**call(32))
    assert not output.loss.requires_grad
    model.requires_grad_()
    assert_alike(model, llama(), **call(32))


def test_more_rows_are_measured_for_the_longest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    profile = planned.profile
    monkeypatch.setattr(planned, "profile", lambda *args, **kwargs: [ran.append(1), profile(*args, **kwargs)][1])
    model = llama(layers=4)
    remat.fit(model, call(30), "30MiB", quiet=True)
    with pytest.warns(UserWarning, match="a batch is longer than all before, or has more rows") as caught:
        for length in (20, 24, 28, 30):
            tokens = torch.randint(4, 200, (4, length))
            model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(ran) == 2 and len(caught) == 1
