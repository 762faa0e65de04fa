"""Models and uses that are nothing special, each of which once failed."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_limits import Blocks, Residual
from torch import nn
from torch.nn import functional

import remat
from remat import rotor
from remat.chain import Chain
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.runtime.pytree import arguments
from remat.simulation import peak_and_makespan
from support.steps import assert_same, gradients_of, train_step


def sequential(count: int = 6, width: int = 32) -> nn.Sequential:
    return nn.Sequential(*(Residual(width) for _ in range(count)))


def check(model: nn.Module, sample: Any, share: float = 0.85, *, steps: int = 2, **options: Any) -> nn.Module:
    """Trains by a plan that recomputes something, with plain PyTorch's gradients."""
    plain = copy.deepcopy(model)
    chain = remat.profile(model, sample, **options)
    least = remat.minimum_budget(chain)
    limit = max(round(share * remat.minimum_budget(chain, "store_all")), round(1.05 * least))
    assert remat.fit(model, sample, limit, quiet=True, other_path="error", **options) is model
    for _ in range(steps):
        for each in (plain, model):
            torch.manual_seed(1)
            output = each(**sample) if isinstance(sample, dict) else each(sample)
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
            loss = output.logits if loss is None else loss
            loss.float().square().mean().backward()
    assert_same(gradients_of(plain), gradients_of(model))
    return model


# In-place code on what a stage returned ------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if layer == 0 else 8, 8, 3, padding=1) for layer in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)), inplace=True)
        return x.mean((2, 3))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.positions = nn.Parameter(torch.randn(32))
        self.blocks = nn.ModuleList(Residual(32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x += self.positions
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


class Between(nn.Module):
    """Code in place between two modules of which the second works in place on what the first returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5))
        self.ends = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, end in zip(self.layers, self.ends, strict=True):
            x = layer(x)
            x.mul_(1.5)
            x = end(x)
        return x


def _note(module: nn.Module, args: object, output: torch.Tensor) -> None:
    module.noted = output


class Beside(nn.Module):
    """Works on what was computed inside of its blocks too, which a hook there hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(64) for _ in range(6))
        for block in self.blocks:
            block.inner[1].register_forward_hook(_note)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        noted = [block.inner[1].__dict__.pop("noted") for block in self.blocks]
        return x * torch.stack([tensor.square().mean() for tensor in noted]).sum()


def test_what_a_stage_returned_is_changed_in_place() -> None:
    check(Between(), torch.randn(256, 64))
    check(Beside(), torch.randn(256, 64))
    check(InPlace(), torch.randn(4, 3, 16, 16))
    check(Positions(), torch.randn(64, 32))


# Inputs, loops, threads, compilers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sequential, lambda: Blocks(6, 32)], ids=["sequential", "found"])
def test_an_input_with_a_graph(make: Any) -> None:
    """A head that is fitted behind a backbone that is not."""
    backbone, head, x = nn.Linear(16, 32), make(), torch.randn(8, 16)
    plain = copy.deepcopy(nn.Sequential(backbone, head))
    remat.fit(head, backbone(x).detach(), 1.0, quiet=True)
    with pytest.warns(UserWarning, match="measured and planned again"):  # a gradient flows on to the input now
        head(backbone(x)).sum().backward()
    head(backbone(x)).sum().backward()
    for _ in range(2):
        plain(x).sum().backward()
    assert_same(gradients_of(plain), [*gradients_of(backbone), *gradients_of(head)])
    report = remat.run(head, backbone(x), remat.solve(remat.profile(head, backbone(x)), 1.0), repeats=1)
    assert report.outcome == "pass"


class Looped(nn.Module):
    def __init__(self, layers: int, rounds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(32) for _ in range(layers))
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return x


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 7])
def test_blocks_in_a_loop(layers: int) -> None:
    check(Looped(layers, 3), torch.randn(64, 32))


@pytest.mark.filterwarnings("ignore:.*forwards wait for their backward at once")  # the limit counts one
@pytest.mark.parametrize("make", [sequential, lambda: Blocks(6, 32)], ids=["sequential", "found"])
def test_one_fitted_model_in_several_threads(make: Any) -> None:
    model, x = make(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    least = remat.minimum_budget(remat.profile(model, x))
    remat.fit(model, x, round(1.1 * least), quiet=True)
    outputs: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                output = model(x)
                output.sum().backward()
                with torch.no_grad():
                    outputs.append(model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = plain(x).detach()
    assert len(outputs) == 60 and all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("how", ["fit", "fit, found", "rotor", "apply"])
def test_compiling_what_trains_by_a_plan(how: str) -> None:
    model, x = (Blocks(4, 32) if how == "fit, found" else sequential(4)), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    if how == "rotor":
        trained: nn.Module = rotor.Checkpointable(model, x, 1.0)
        trained.compute_min_sequence()
    elif how == "apply":
        chain = remat.profile(model, x)
        trained = remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    else:
        trained = remat.fit(model, x, 0.9, quiet=True)
    compiled: Any = torch.compile(trained, backend="eager")
    for _ in range(2):
        for each in (plain, compiled):
            each(x).square().mean().backward()
    assert_same(gradients_of(plain), gradients_of(model))


def test_compiled_blocks_stay_compiled() -> None:
    torch.compiler.reset()  # or what was compiled before counts against its limit
    runs = []

    def counting(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(None)
            return graph(*args)

        return run

    model, x = Blocks(3, 32), torch.randn(64, 32)
    for block in model.blocks:
        block.compile(backend=counting)
    model(x).sum().backward()
    assert len(runs) == 3
    remat.fit(model, x, 1.0, quiet=True)
    runs.clear()
    model(x).sum().backward()
    assert len(runs) == 3


# Encoders and decoders, mixtures of experts --------------------------------------------------------------------------

_SMALL = {"vocab_size": 96, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "max_position_embeddings": 64}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_EXPERTS = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def _tokens() -> torch.Tensor:
    return torch.randint(3, 96, (2, 24))


def bart() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(**_SMALL, **_HEADS)), {"input_ids": _tokens()}


def marian() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(**_SMALL, **_HEADS, pad_token_id=0, decoder_start_token_id=0)
    return MarianMTModel(config), {"input_ids": _tokens()}


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {key: value for key, value in _SMALL.items() if key != "max_position_embeddings"}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}
    config = WhisperConfig(**small, **_HEADS, **lengths, **special)
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 16, 64)}


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (bart, "labels"),
        (marian, "no labels"),
        (whisper, "labels"),
        (whisper, "a loss of its own"),
        (whisper, "no labels"),
    ],
)
def test_an_encoder_whose_output_is_returned_as_well(make: Any, how: str) -> None:
    model, sample = make()
    model.train()
    if how == "no labels":
        sample["decoder_input_ids"] = _tokens()
    else:
        sample["labels"] = _tokens()
    options = {"loss": lambda output: output.loss.square().mean()} if how == "a loss of its own" else {}
    check(model, sample, **options)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_what_routers_compute_is_used_in_the_loss(kind: str) -> None:
    import transformers

    experts = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "Qwen2Moe":
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**_EXPERTS, **experts, **sizes, output_router_logits=True)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    tokens = _tokens()
    check(model, {"input_ids": tokens, "labels": tokens})


# fit in place, and plans for other limits ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sequential, lambda: Blocks(6, 32)], ids=["sequential", "found"])
def test_fit_has_one_rule(make: Any) -> None:
    """In place, without a return value too; again for another limit; and what fails leaves what was there."""
    model, x = make(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    assert remat.fit(model, x, 1.0, quiet=True) is model
    first = patched_forward_of(model)
    assert first is not None
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.fit(model, x, 10, quiet=True)
    assert patched_forward_of(model) is first
    remat.fit(model, x, round(1.02 * caught.value.minimum), quiet=True)
    assert patched_forward_of(model) not in (None, first)
    for each in (plain, model):
        each(x).square().mean().backward()
    assert_same(gradients_of(plain), gradients_of(model))
    assert patched_forward_of(copy.deepcopy(model)) is None
    assert type(model) is type(plain) and list(model.state_dict()) == list(plain.state_dict())
    remat.remove(model)
    assert "forward" not in model.__dict__


def test_fit_takes_the_memory_that_is_free() -> None:
    model, x = sequential(), torch.randn(64, 32)
    remat.fit(model, x, quiet=True)
    assert patched_forward_of(model) is not None


def test_fit_tells_what_other_limits_cost(capsys: pytest.CaptureFixture[str]) -> None:
    remat.fit(sequential(), torch.randn(64, 32))
    told = capsys.readouterr().err
    assert all(line in told for line in ("minimum", "5% slower", "10% slower", "20% slower", "nothing is recomputed"))


def test_a_new_limit_holds_for_other_shapes_too() -> None:
    model, large, small = sequential(), torch.randn(256, 32), torch.randn(255, 32)
    wrapped = rotor.Checkpointable(model, large)
    wrapped.compute_sequence(1.0)
    with pytest.warns(UserWarning, match="measured and planned again"):
        wrapped(small)
    assert not wrapped.planned.inputs.plan_for(arguments(small)).schedule.recomputations
    wrapped.compute_sequence(round(1.05 * remat.minimum_budget(wrapped.chain)))
    with pytest.warns(UserWarning, match="measured and planned again"):
        wrapped(small)
    assert wrapped.planned.inputs.plan_for(arguments(small)).schedule.recomputations


class Pair(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def test_a_tuple_is_the_one_argument_of_a_sequential() -> None:
    a, b = torch.randn(8, 32), torch.randn(8, 32)
    model = nn.Sequential(Pair(), *sequential())
    wrapped = rotor.Checkpointable(model)
    wrapped.measure((a, b))
    wrapped.compute_sequence(1.0)
    assert wrapped((a, b)).shape == (8, 32)
    assert torch.equal(remat.fit(model, ((a, b),), 1.0, quiet=True)((a, b)), wrapped((a, b)))


# Bounds --------------------------------------------------------------------------------------------------------------


def test_the_lower_bound_where_a_stage_saves_less_than_its_output() -> None:
    zeros, ones = [0] * 4, [1.0] * 4
    chain = Chain([4] * 5, [0, 4, 4, 4], zeros, zeros, ones, ones)
    operations = remat.Schedule.parse("F_all1 F_all2 F_ck3 F_all4 B4 F_all3 B3 B2 B1").operations
    candidates = [operations, *(remat.solve(chain, 20, solver).operations for solver in ("floating", "persistent"))]
    valid = [seconds for peak, seconds in (peak_and_makespan(chain, found) for found in candidates) if peak <= 20]
    assert min(valid) < min(peak_and_makespan(chain, found)[1] for found in candidates[1:]) + 1e-9
    assert remat.lower_bound(chain, 20) <= min(valid)


# What measuring leaves behind ----------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Keeps what it computed, graph and all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.tanh(self.linear(x))
        return x + self.last


@pytest.mark.parametrize("found", [False, True])
def test_measuring_leaves_attributes_as_they_were(found: bool) -> None:
    blocks = [Remembering() for _ in range(4)]
    x = torch.randn(16, 32)
    model: nn.Module = nn.Sequential(*blocks)
    if found:
        model = Blocks(4, 32)
        model.blocks = nn.ModuleList(blocks)
    remat.profile(model, x)
    remat.run(model, x, remat.solve(remat.profile(model, x), 1.0), repeats=1)
    assert all(block.last is None for block in blocks)
    copy.deepcopy(model)


# Wrong arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sequential, lambda: Blocks(3, 32)], ids=["sequential", "found"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda output: output.sum(1)}, "a tensor of shape .*must return one number"),
        ({"loss": lambda output: 1.0}, "the loss returned a float"),
        ({"loss": lambda output: output.sum().detach()}, "without a graph"),
        ({"loss": 3}, "the loss is a int"),
        ({"loss": nn.functional.cross_entropy}, r"loss=lambda output: cross_entropy\(output, targets\)"),
        ({"memory": 10**30}, "above the largest"),
        ({"memory": 1}, r"An int counts bytes; write '5GiB', or a share of what plain PyTorch needs, 0\.5"),
        ({"memory": 5}, "An int counts bytes"),
        ({"memory": [0.5]}, "it is a list"),
        ({"slots": "5"}, "slots='5': must be an int"),
        ({"sample": torch.randn(64, 31)}, "fails on this sample"),
        ({"sample": "words"}, "the sample is a str without a tensor"),
        ({"sample": torch.utils.data.DataLoader([0])}, r"pass one batch of it .* next\(iter\(loader\)\)"),
    ],
)
def test_fit_says_what_is_wrong_and_changes_nothing(make: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    given = {"sample": torch.randn(64, 32), "memory": 1.0, **options}
    with pytest.raises(remat.RematError, match=message):
        remat.fit(model, quiet=True, **given)
    assert patched_forward_of(model) is None and all(parameter.grad is None for parameter in model.parameters())
    remat.fit(model, torch.randn(64, 32), 1.0, quiet=True)


@pytest.mark.parametrize("wrong", [nn.Linear, None, 3, lambda x: x])
@pytest.mark.parametrize("function", ["fit", "profile", "find_chain", "compare"])
def test_what_is_no_model_is_refused(function: str, wrong: Any) -> None:
    with pytest.raises(remat.RematError, match=r"is a class; pass an instance|pass a torch.nn.Module"):
        getattr(remat, function)(wrong, torch.randn(2, 2))


def test_other_wrong_arguments() -> None:
    model, x = sequential(), torch.randn(64, 32)
    with torch.inference_mode():
        inference = torch.randn(64, 32)
    with pytest.raises(remat.InvalidSample, match="inference mode"):
        remat.profile(model, inference)
    with pytest.raises(remat.RematError, match=r"in_flight=1\.5"):
        rotor.Checkpointable(model, in_flight=1.5)
    with pytest.raises(remat.RematError, match="repeats=0: must be at least 1"):
        remat.profile(model, x, repeats=0)
    with pytest.raises(remat.RematError, match="wrapped in a Checkpointable already"):
        remat.fit(rotor.Checkpointable(model), x)


class Pairs(nn.Module):
    """Every other block is too small for a stage of its own, so stages have two calls, and code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (128, 16) * 5)

    def between(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with self.between() if number % 2 else contextlib.nullcontext():
                x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Drawing(Pairs):
    def between(self) -> contextlib.AbstractContextManager[None]:
        torch.rand(())  # as code that drops layers does
        return contextlib.nullcontext()


class Precise(Pairs):
    def between(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("kind", [Drawing, Precise])
@pytest.mark.parametrize("autocast", [True, False])
def test_code_between_the_calls_of_one_stage(kind: type[Pairs], autocast: bool) -> None:
    torch.manual_seed(0)
    model, sample = kind(), torch.randn(6, 10, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chain = remat.profile(model, sample, small=0.5)
    pairs = [name for name in chain.names if re.fullmatch(r"blocks\.(\d)\.\.blocks\.(?!\1)\d", name)]
    assert len(pairs) > 1
    for share in (0.0, 0.3):
        least = remat.minimum_budget(chain)
        schedule = remat.solve(chain, round(least + share * (chain.store_all_bytes - least)))
        plain, trained = copy.deepcopy(model), remat.apply(copy.deepcopy(model), schedule)
        for step in range(3):
            expected = train_step(plain, sample, autocast=autocast, seed=step)
            assert_same(expected, train_step(trained, sample, autocast=autocast, seed=step), f"{schedule}, step {step}")


def test_what_is_shown_without_print_is_short_and_eval_mode_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), torch.randn(64, 32)
    remat.fit(model.eval(), sample, 1.0)
    assert "It is in eval mode" in capsys.readouterr().err
    remat.remove(model)
    remat.fit(model.train(), sample, 1.0)
    assert "eval mode" not in capsys.readouterr().err
    remat.remove(model)
    chain = remat.profile(model, sample, small=0.0)
    schedule = remat.solve(chain, 1.0)
    assert repr(schedule).startswith("<Schedule by persistent for 6 stages and the loss, budget ")
    report = remat.simulate(chain, schedule)
    assert repr(report) == str(report) and "\n" not in repr(report)
    found = remat.find_chain(model, sample)
    assert repr(found) == str(found)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Scaled(nn.Module):
    """A small layer, which is a stage together with the block before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dropout = 1.0, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        scale = self.scale if context is None else context.scale
        if context is not None and context.draws:
            scale += random.random()
        return torch.tanh(self.dropout(x) * scale)


class ScaledPairs(nn.Module):
    """What it changes between the two calls of a stage, another one in each step."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.step = change, 0
        self.blocks = nn.ModuleList(Wide() for _ in range(6))
        self.scales = nn.ModuleList(Scaled() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = SimpleNamespace(scale=1.0, draws=self.change == "draws")
        for number, (block, scale) in enumerate(zip(self.blocks, self.scales, strict=True)):
            x = block(x)
            value = 1.0 - 0.1 * number * (self.step % 2)
            if self.change == "attribute":
                scale.scale = value
            if self.change == "flag":
                scale.train(bool((self.step + number) % 2))
            if self.change == "draws":
                random.random()
            context.scale = value
            x = scale(x) if self.change in ("attribute", "flag") else scale(x, context)
            scale.train()
        return x


@pytest.mark.parametrize("change", ["attribute", "flag", "context", "draws"])
def test_what_code_between_the_calls_of_one_stage_changes(change: str) -> None:
    torch.manual_seed(0)
    plain, x = ScaledPairs(change), torch.randn(128, 64)
    model = copy.deepcopy(plain)
    assert "blocks.0..scales.0" in remat.profile(model, x, options=False).names
    remat.fit(model, x, 0.6, options=False, quiet=True)
    for step in range(4):
        found = []
        for each in (plain, model):
            each.step = step
            random.seed(step)
            found.append(train_step(each, x, seed=step))
        assert_same(found[0], found[1], f"step {step}")
