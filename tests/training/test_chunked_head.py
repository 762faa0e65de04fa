"""`fit(..., chunk_head=True)`: logits that are computed a part at a time, and what else code does with logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import remat
from remat.comparison.bench import Bench
from remat.errors import InfeasibleBudget, RematError
from remat.runtime import logits as runtime
from remat.runtime.logits import HeadInParts, Logits, head_in_parts
from remat.simulation import store_all_peak
from support.library_models import gpt2
from support.processes import spawn

WIDTH, CLASSES, BATCH, LENGTH = 16, 96, 3, 40
NEAR = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_FEWEST", 32)


class Body(nn.Module):
    """A body and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)

    def forward(self, rows: torch.Tensor) -> Any:
        return self.head(self.body(rows))


def _given(dtype: torch.dtype = torch.float32) -> tuple[Body, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = Body(dtype)
    rows, target = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype), torch.randint(CLASSES, (BATCH, LENGTH))
    target[0, :7] = -100
    return model, rows, target


def _step(model: nn.Module, rows: torch.Tensor, target: torch.Tensor, use: Use) -> list[torch.Tensor]:
    model.zero_grad()
    loss = use(model(rows), target)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def _in_parts(model: Body) -> HeadInParts:
    head = HeadInParts.of(model.head)
    head.stand()
    return head


def _alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) <= NEAR[a.dtype] * float(a.abs().max())


def _flat(found: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    return functional.cross_entropy(found.view(-1, CLASSES), target.view(-1), **how)


def _shifted(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(found[..., :-1, :].contiguous().view(-1, CLASSES), target[..., 1:].reshape(-1))


def _across(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(found.transpose(1, 2), target)


def _selected(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    there = target != -100
    return functional.cross_entropy(found[there], target[there], reduction="sum") / there.sum()


def _capped(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _flat(torch.tanh(found / 30) * 30, target)


def _upcast(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _flat(found.float(), target)


def _each(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (_flat(found, target, reduction="none") * torch.linspace(0, 1, target.numel()).to(found.dtype)).sum()


def _last_of_each(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(found[:, -1], target[:, -1])


IN_PARTS: dict[str, Use] = {
    "flat": _flat,
    "sum": lambda found, target: _flat(found, target, reduction="sum"),
    "smoothed": lambda found, target: _flat(found, target, label_smoothing=0.1),
    "weighted": lambda found, target: _flat(found, target, weight=torch.linspace(0, 1, CLASSES).to(found.dtype)),
    "ignoring": lambda found, target: _flat(found, target.clamp(min=0), ignore_index=0),
    "scaled": lambda found, target: _flat(found * 0.5, target) * 3,
    "twice": lambda found, target: _flat(found, target) + _flat(found, target.roll(1), reduction="sum"),
    **{"shifted": _shifted, "across": _across, "selected": _selected, "capped": _capped, "upcast": _upcast},
    **{"each": _each, "last": _last_of_each},
}
OTHERWISE: dict[str, Use] = {
    "log_softmax": lambda found, target: -torch.log_softmax(found, -1)[..., 3].mean() + 0 * target.sum(),
    "probabilities": lambda found, target: functional.cross_entropy(
        found.flatten(0, 1), functional.one_hot(target.clamp(min=0).flatten(), CLASSES).to(found.dtype)
    ),
    "classes": lambda found, target: functional.cross_entropy(
        found[..., :20].reshape(-1, 20), target.clamp(0, 19).flatten()
    ),
    "bytes": lambda found, target: functional.cross_entropy(
        found.flatten(0, 1), target.clamp(min=0).flatten().to(torch.uint8)
    ),
    "square": lambda found, target: (found**2).mean() + 0 * target.sum(),
    "operator": lambda found, target: torch.ops.aten.mul(found, found).mean() + 0 * target.sum(),
    "reshaped": lambda found, target: found.view(BATCH, LENGTH, CLASSES // 2, 2).amax(-1).sum() + 0 * target.sum(),
}


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("use", list(IN_PARTS))
def test_a_loss_in_parts_is_that_of_pytorch(use: str, dtype: torch.dtype) -> None:
    model, rows, target = _given(dtype)
    plain = _step(model, rows, target, IN_PARTS[use])
    head = _in_parts(model)
    _alike(plain, _step(model, rows, target, IN_PARTS[use]))
    assert head.losses == 1 + (use == "twice")
    head.remove()
    assert all(map(torch.equal, plain, _step(model, rows, target, IN_PARTS[use])))


@pytest.mark.parametrize("use", list(OTHERWISE))
def test_other_uses_get_the_logits_to_the_bit(use: str) -> None:
    model, rows, target = _given()
    plain = _step(model, rows, target, OTHERWISE[use])
    head = _in_parts(model)
    assert all(map(torch.equal, plain, _step(model, rows, target, OTHERWISE[use])))
    assert not head.losses


def test_what_needs_no_gradient_gets_none() -> None:
    for frozen in ("body", "head"):
        model, rows, target = _given()
        getattr(model, frozen).requires_grad_(False)
        plain = _step(model, rows, target, _flat)
        _in_parts(model)
        _alike(plain, _step(model, rows, target, _flat))


def test_shapes_and_kinds_are_those_of_the_logits() -> None:
    model, rows, _ = _given()
    plain = model(rows)
    _in_parts(model)
    found = model(rows)
    assert isinstance(found, Logits)
    assert (found.shape, found.dtype, found.device, found.requires_grad) == (
        *(plain.shape, plain.dtype, plain.device),
        True,
    )
    assert (found.dim(), found.numel(), len(found), found.size(-1)) == (3, plain.numel(), BATCH, CLASSES)
    assert [each.shape for each in found.split(2)] == [each.shape for each in plain.split(2)]
    assert torch.equal(found.argmax(-1), plain.argmax(-1))
    assert (found.detach().numpy() == plain.detach().numpy()).all()
    with torch.no_grad():
        assert type(model(rows)) is torch.Tensor
    model.eval()
    assert type(model(rows)) is torch.Tensor


def test_half_precision_is_scaled_before_it_gets_too_small() -> None:
    model, rows, target = _given()

    def scaled(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _flat(found.float(), target) * 2.0**14

    with torch.autocast("cpu", torch.float16):
        plain = _step(model, rows, target, scaled)
        _in_parts(model)
        parts = _step(model, rows, target, scaled)
    for one, other in zip(plain, parts, strict=True):
        assert float((one - other).abs().max()) <= 5e-3 * float(one.abs().max())


def test_autocast_is_that_of_the_forward() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, rows, target = _given()
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            plain = _flat(model(rows).float(), target, reduction="none")
        plain.sum().backward()
        expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        _in_parts(model)
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            found = _flat(model(rows).float(), target, reduction="none")
        found.sum().backward()  # outside of autocast, where the logits are computed again
        for one, other in zip(expected, [each.grad for each in model.parameters()], strict=True):
            assert other is not None
            assert float((one - other).abs().max()) <= 1e-2 * float(one.abs().max())


@pytest.mark.parametrize("use", ["flat", "each", "own"])
@pytest.mark.parametrize("inside", ["head", "loss"])
def test_autocast_of_the_head_may_be_another_than_that_of_the_loss(use: str, inside: str) -> None:
    """As where a trainer wraps the model's forward in autocast, and computes its loss behind it."""

    def step(model: Body) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside == "head"):
            found = model(rows)
        assert found.dtype == (torch.bfloat16 if inside == "head" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside == "loss"):
            if use == "own":
                loss = found.float().log_softmax(-1)[..., 3].mean() + 0 * target.sum()
            else:
                loss = IN_PARTS[use](found.float(), target)
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]

    model, rows, target = _given()
    plain = step(model)
    head = _in_parts(model)
    found = step(model)
    assert bool(head.losses) == (use != "own")
    if use == "own":
        assert all(map(torch.equal, plain, found))
    assert float(plain[0]) == pytest.approx(float(found[0]), rel=1e-6)
    for one, other in zip(plain, found, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max()) <= (1e-2 if inside == "head" else 1e-5) * float(one.abs().max())


def test_arguments_may_be_named() -> None:
    model, rows, target = _given()

    def use(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first, *_ = found.clone(memory_format=torch.contiguous_format).split(split_size=2)
        moved = found.transpose(dim0=1, dim1=2).contiguous(memory_format=torch.contiguous_format)
        assert torch.flatten(input=found, start_dim=0, end_dim=1).argmax(dim=-1).shape == (BATCH * LENGTH,)
        return functional.cross_entropy(input=moved, target=target) + first.square().mean()

    plain = _step(model, rows, target, use)
    _in_parts(model)
    _alike(plain, _step(model, rows, target, use))


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(found + 0)
        return (found + 0).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def _overwritten(found: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    found[..., 0] = 0
    return found.sum()


NEVER: dict[str, Use] = {
    "in place": lambda found, _: found.mul_(2).sum(),
    "item": _overwritten,
    "hook": lambda found, _: found.register_hook(print) and found.sum(),
    "memory": lambda found, _: found.sum() * found.data_ptr(),
    "out": lambda found, _: torch.mul(found.detach(), 2, out=found.detach()).sum(),
    "function": lambda found, _: _Squared.apply(found),
    "mutating operator": lambda found, _: torch.ops.aten.mul_.Scalar(found, 2).sum(),
}


@pytest.mark.parametrize("use", list(NEVER))
def test_what_cannot_be_right_is_an_error(use: str) -> None:
    model, rows, target = _given()
    _in_parts(model)
    with pytest.raises(RematError, match="chunk_head"):
        _step(model, rows, target, NEVER[use])


def test_gradients_of_gradients_and_second_backwards_are_errors() -> None:
    model, rows, target = _given()
    _in_parts(model)
    with pytest.raises(RematError, match="gradients of gradients"):
        torch.autograd.grad(_flat(model(rows), target), model.body.weight, create_graph=True)
    loss = _flat(model(rows), target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_that_do_not_count_and_no_rows() -> None:
    for rows, target in ((torch.randn(2, 50, WIDTH), torch.full((2, 50), -100)), (torch.randn(0, 50, WIDTH),) * 2):
        model = Body()
        labels = target if target.dtype == torch.int64 else torch.zeros(0, 50, dtype=torch.int64)
        plain = _step(model, rows, labels, _flat)
        _in_parts(model)
        for one, other in zip(plain, _step(model, rows, labels, _flat), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_a_compiled_loss_gets_the_logits() -> None:
    model, rows, target = _given()
    loss = torch.compile(lambda found, target: _flat(found.float(), target), backend="eager")
    plain = _step(model, rows, target, loss)
    _in_parts(model)
    _alike(plain, _step(model, rows, target, loss))
    torch._dynamo.reset()


def test_logits_of_parameters_or_rows_that_have_changed_are_an_error() -> None:
    model, rows, target = _given()
    head = _in_parts(model)
    found = model(rows)
    _flat(found, target).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(RematError, match="changed or gone"):
        found.sum()
    inputs = rows.clone()
    found = head(inputs)
    inputs.add_(1)
    with pytest.raises(RematError, match="changed or gone"):
        _flat(found, target)


# In `fit` ------------------------------------------------------------------------------------------------------------


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(1)
    model, _ = gpt2(vocab_size=2048, n_positions=64)
    tokens = torch.randint(2048, (4, 64))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def _trained(model: nn.Module, sample: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**sample).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def test_fit_trains_in_less_than_the_logits_take(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = _gpt2()
    plain = _trained(model, sample)
    most = store_all_peak(remat.profile(model, sample))
    least = remat.minimum_budget(remat.profile(model, sample))
    limit = int(0.3 * most)
    assert limit < least
    with pytest.raises(InfeasibleBudget, match="chunk_head=True"):
        remat.fit(model, sample, limit, quiet=True)
    found = []
    for share in (0.3, 0.4, 1.0):
        remat.fit(model, sample, int(share * most), chunk_head=True)
        with Bench(copy.deepcopy(model), sample) as bench:  # of a copy, which has its own head
            assert bench.peak_bytes(bench.step(None)) > 0.9 * most
        found.append(_trained(model, sample))
    _alike(plain, found[0])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    said = capsys.readouterr().err
    assert "2048 logits of lm_head are computed in parts" in said
    assert "without recomputation" in said
    assert "plain PyTorch" not in said
    remat.remove(model)
    assert all(map(torch.equal, plain, _trained(model, sample)))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_measured_peaks_are_within_the_limit(share: float) -> None:
    model, sample = _gpt2()
    head = head_in_parts(model, which=True)
    head.stand()
    chain = remat.profile(model, sample)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    limit = int(least + share * (most - least))
    with Bench(model, sample) as bench:
        assert bench.peak_bytes(bench.step(remat.solve(chain, limit))) <= limit
        assert 0.97 * most <= bench.peak_bytes(bench.step(None)) <= most


def test_the_loss_may_be_outside_of_the_model() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(512, 32), *blocks, nn.Linear(32, 512))
    tokens = torch.randint(512, (4, 64))
    uses: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda found: functional.cross_entropy(found.flatten(0, 1), tokens.flatten()),
        lambda found: functional.cross_entropy(found.transpose(1, 2), tokens),
    )
    for loss in uses:

        def step(loss: Callable[[torch.Tensor], torch.Tensor] = loss) -> list[torch.Tensor]:
            model.zero_grad()
            found = loss(model(tokens))
            found.backward()
            return [found.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

        plain = step()
        remat.fit(model, tokens, 0.8, loss=loss, chunk_head=True, quiet=True)
        assert isinstance(model(tokens), Logits)
        _alike(plain, step())
        remat.remove(model)


def test_a_plan_takes_the_head_with_it_and_a_failed_one_leaves_it() -> None:
    model, sample = _gpt2()

    def kind() -> type:
        return type(model(**sample).logits)

    for loss, why in ((lambda found: found.logits.square().mean(), "in another way"), (None, "not called")):
        name = "transformer.h.0.mlp.unused" if loss is None else True
        model.transformer.h[0].mlp.unused = nn.Linear(8, 8)  # type: ignore[union-attr, index]
        with pytest.raises(RematError, match=why):
            remat.fit(model, {"input_ids": sample["input_ids"]}, 0.9, loss=loss, chunk_head=name, quiet=True)
        assert kind() is torch.Tensor
    del model.transformer.h[0].mlp.unused  # type: ignore[union-attr, index]
    remat.fit(model, sample, 0.9, chunk_head=True, quiet=True)
    assert kind() is Logits
    with pytest.raises(InfeasibleBudget):
        remat.fit(model, sample, 1000, quiet=True)
    assert kind() is Logits
    remat.fit(model, sample, 0.9, quiet=True)
    assert kind() is torch.Tensor
    remat.fit(model, sample, 0.9, chunk_head="lm_head", quiet=True)
    remat.fit(model, sample, 0.8, chunk_head=True, quiet=True)
    assert kind() is Logits
    remat.remove(model)
    assert kind() is torch.Tensor
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_layers_that_are_no_heads_are_refused() -> None:
    model, sample = _gpt2()
    for name in ("nope", "transformer.wte"):
        with pytest.raises(RematError, match="chunk_head"):
            remat.fit(model, sample, 0.9, chunk_head=name)
    with pytest.raises(RematError, match=r"no torch\.nn\.Linear was found"):
        remat.fit(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), 0.9, chunk_head=True)


def test_a_first_call_in_training_has_its_head_in_parts_too() -> None:
    model, sample = _gpt2()
    plain = _trained(model, sample)
    remat.fit(model, memory=0.9, chunk_head=True, quiet=True)
    _alike(plain, _trained(model, sample))
    assert isinstance(model(**sample).logits, Logits)


def test_a_model_without_blocks_trains_under_dtr_with_its_head_in_parts() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell, self.head = nn.Embedding(256, 32), nn.GRUCell(32, 32), nn.Linear(32, 256)

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            state, states = torch.zeros(len(tokens), 32), []
            for each in self.embedding(tokens).unbind(1):
                state = self.cell(each, state)
                states.append(state)
            found = self.head(torch.stack(states, 1))
            return {"loss": functional.cross_entropy(found.flatten(0, 1), tokens.flatten())}

    torch.manual_seed(0)
    model, tokens = Recurrent(), torch.randint(256, (8, 24))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(tokens)["loss"]
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    plain = step()
    remat.fit(model, tokens, 0.9, chunk_head=True, quiet=True)
    _alike(plain, step())


def test_find_chain_names_the_head_and_estimates_count_it() -> None:
    model, sample = _gpt2()
    found = remat.find_chain(model, sample)
    assert found.logits == ("lm_head", 4 * 64 * 2048 * 4)
    assert "chunk_head=True" in str(found)
    assert "chunk_head=True" in found._repr_html_()
    assert "chunk_head" not in str(remat.find_chain(*gpt2()))
    whole, parts = (remat.estimate(model, sample, device="cpu", chunk_head=each) for each in (False, True))
    head = head_in_parts(model, which=True)
    for estimate in (whole, parts):
        measured = store_all_peak(remat.profile(model, sample))
        assert store_all_peak(estimate.chain) == pytest.approx(measured, rel=0.03)
        head.stand()


def _in_a_group(rank: int) -> None:
    """Under DDP, and in shards whose root has the head: as plain PyTorch."""
    runtime._FEWEST = 32
    for shards in (False, True):
        losses = {}
        for parts in (False, True):
            model, sample = _gpt2()
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # shards are not tied
            if shards:
                for block in model.transformer.h:
                    fully_shard(block)
                fully_shard(model)
            trained: Any = model if shards else nn.parallel.DistributedDataParallel(model)
            part = {name: each[2 * rank : 2 * rank + 2] for name, each in sample.items()}
            if parts:
                remat.fit(model, part, 0.7, chunk_head=True, quiet=True, group=dist.group.WORLD)
            optimizer, losses[parts] = torch.optim.Adam(trained.parameters(), 1e-2), []
            for _ in range(3):
                optimizer.zero_grad()
                loss = trained(**part).loss
                loss.backward()
                optimizer.step()
                losses[parts].append(float(loss))
        assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_a_head_in_parts_in_a_group(tmp_path: Path) -> None:
    spawn(_in_a_group, tmp_path)


def test_no_gradient_goes_through_what_is_made_without_gradients() -> None:
    model, rows, target = _given()

    def use(found: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher, first = found / 2, found[:1]
        assert not teacher.requires_grad
        probabilities = functional.softmax(teacher, -1)
        return functional.kl_div(functional.log_softmax(found, -1), probabilities) + first.square().mean()

    plain = _step(model, rows, target, use)
    _in_parts(model)
    _alike(plain, _step(model, rows, target, use))


def test_what_fsdp_asks_of_an_output_computes_nothing() -> None:
    head = HeadInParts.of(nn.Linear(8, 1000))
    head.stand()
    found = head.layer(torch.randn(4, 8, requires_grad=True))
    assert found._base is None and torch.is_floating_point(found) and not found.is_leaf
    assert head.others == 0


def _with_a_sink(rank: int) -> None:
    """DDP hands outputs through a Function of its own, whose gradient would be lost."""
    model, sample = _gpt2()
    remat.fit(model, sample, 0.9, chunk_head=True, quiet=True, loss=lambda output: output.loss)
    trained = nn.parallel.DistributedDataParallel(model, static_graph=True)
    logits, labels = trained(**sample).logits, sample["labels"]
    with pytest.raises(RematError, match="leave out chunk_head"):
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


def test_a_head_in_parts_behind_a_sink(tmp_path: Path) -> None:
    spawn(_with_a_sink, tmp_path)
