"""Models that are no `nn.Sequential`: chains are found in them, and driven while their own forward runs."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from helpers import assert_same
from library_models import EVERY, LENGTH, LIBRARY, Blocks, Residual, blocks, convolutions, gpt2, records, shared, t5
from torch import nn

import remat
from remat import rotor
from remat.errors import InfeasibleBudget, LeftChain, PlanMismatch, RematError, ReplayError, UnsupportedModel
from remat.runtime.driving import CallRun, drive_of
from remat.runtime.values import arguments, loss_in, tensors
from remat.solvers.base import store_all_peak

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> None:
    from transformers import logging

    logging.set_verbosity_error()


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model, sample = EVERY[name]()
    return model.train(), sample


@functools.cache
def chain_of(name: str) -> remat.Chain:
    """Measured once for all tests that plan for the same model."""
    model, sample = made(name)
    return remat.profile(model, sample, repeats=1)


def train(model: nn.Module, sample: Any, steps: int = 3) -> list[torch.Tensor]:
    """Some steps of Adam: losses, gradients, parameters, buffers and the state of the random numbers."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    left = []
    for _ in range(steps):
        optimizer.zero_grad()
        call = arguments(sample)
        output = model(*call.args, **call.kwargs)
        loss = loss_in(output)
        if loss is None:
            loss = sum(tensor.square().mean() for tensor in tensors(output))
        del output
        loss.backward()
        left.append(loss.detach())
        left += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    left += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*left, torch.get_rng_state()]


def budgets_of(chain: remat.Chain, count: int) -> list[int]:
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    return [least + (most - least) * step // (count - 1) for step in range(count)]


# Exact, and within the budget ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_three_steps_are_plain_pytorchs_to_the_bit_at_three_budgets(name: str) -> None:
    model, sample = made(name)
    expected = train(model, sample)
    chain = chain_of(name)
    recomputations = []
    for budget in budgets_of(chain, 4)[:3]:
        again, sample = made(name)
        schedule = remat.solve(chain, budget)
        recomputations.append(schedule.recomputations)
        assert remat.apply(again, schedule, other_path="error") is again
        assert_same(expected, train(again, sample), f"{name} at {budget}")
        remat.remove(again)
    assert recomputations[0] > 0


@pytest.mark.parametrize("name", EVERY)
def test_measured_peaks_stay_within_ten_budgets(name: str) -> None:
    model, sample = made(name)
    chain = chain_of(name)
    for budget in budgets_of(chain, 10):
        report = remat.run(model, sample, remat.solve(chain, budget), repeats=1)
        assert 0 < report.peak_bytes <= budget


@pytest.mark.parametrize("name", LIBRARY)
def test_the_prediction_is_near_what_is_measured(name: str) -> None:
    """At these sizes what the executor keeps, a generator's state a stage, is up to a tenth of all."""
    model, sample = made(name)
    schedule = remat.solve(chain_of(name), remat.minimum_budget(chain_of(name)))
    peak = remat.run(model, sample, schedule, repeats=1).peak_bytes
    assert 0.75 * schedule.budget_bytes < peak <= schedule.budget_bytes


def test_profiling_leaves_the_model_as_it_was() -> None:
    model, sample = made("resnet")
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    remat.profile(model, sample, repeats=1)
    assert_same(list(before.values()), list(model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in model.__dict__ and not any("forward" in module.__dict__ for module in model.modules())


# Finding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit", "convnext"])
def test_chains_cover_nine_tenths_of_the_activation_memory(name: str) -> None:
    model, sample = made(name)
    assert remat.find_chain(model, sample).memory_share >= 0.9


def names_of(found: remat.FoundChain) -> list[list[str]]:
    return [[stage.name for stage in chain] for chain in found.chains]


def test_blocks_come_out_as_stages() -> None:
    model, sample = made("gpt2")
    assert names_of(remat.find_chain(model, sample)) == [[f"transformer.h.{index}" for index in range(3)]]
    model, sample = made("vit")
    assert names_of(remat.find_chain(model, sample))[0][-3:] == [f"vit.layers.{index}" for index in range(3)]
    model, sample = made("blocks")
    assert names_of(remat.find_chain(model, sample)) == [[f"blocks.{index}" for index in range(4)]]
    model, sample = made("resnet")
    found = {call for stage in remat.find_chain(model, sample).stages for call in stage.calls}
    assert {f"resnet.encoder.stages.{a}.layers.{b}" for a in range(4) for b in range(2)} <= found


def test_encoder_and_decoder_are_chains_of_their_own() -> None:
    model, sample = made("t5")
    found = remat.find_chain(model, sample)
    sides = [{stage.calls[0].partition(".")[0] for stage in chain} for chain in found.chains]
    assert all(len(side) == 1 for side in sides)
    assert {"encoder"} in sides and {"decoder"} in sides


def test_what_works_in_place_belongs_to_what_it_works_on() -> None:
    model, sample = made("convolutions")
    for stage in remat.find_chain(model, sample, small=0.0).stages:
        assert not stage.name.startswith(("features.2", "features.5", "features.8", "features.11"))


def test_a_module_called_again_has_a_stage_for_each_call() -> None:
    model, sample = shared()
    (chain,) = names_of(remat.find_chain(model.train(), sample))
    assert chain == ["blocks.0", "blocks.0#2", "blocks.0#3", "blocks.0#4"]


def test_the_answer_shows_itself() -> None:
    model, sample = made("gpt2")
    found = remat.find_chain(model, sample)
    text = str(found)
    assert "transformer.h.0 ... transformer.h.2: 3 stages" in text and "outside: lm_head" in text
    assert f"{found.memory_share:.0%} of the activation memory" in text
    assert "<td>transformer.h.1</td>" in found._repr_html_()


def test_stages_can_be_named() -> None:
    model, sample = made("gpt2")
    named = remat.find_chain(model, sample, stages=["transformer.h"])
    given = remat.find_chain(model, sample, stages=[model.transformer.h])
    assert names_of(named) == names_of(given) == [[f"transformer.h.{index}" for index in range(3)]]
    chain = remat.profile(model, sample, stages=["transformer.h.0", "transformer.h.1"], repeats=1)
    assert [name for name, fixed in zip(chain.names, chain.fixed, strict=True) if not fixed] == [
        "transformer.h.0",
        "transformer.h.1",
        "loss",
    ]


def test_named_stages_that_are_no_chain_are_refused() -> None:
    model, sample = made("gpt2")
    with pytest.raises(UnsupportedModel, match=r"no module 'transformer.layers'"):
        remat.find_chain(model, sample, stages=["transformer.layers"])
    with pytest.raises(UnsupportedModel, match="lies in the stage"):
        remat.find_chain(model, sample, stages=["transformer.h.0", "transformer.h.0.mlp"])
    model, sample = t5()
    with pytest.raises(UnsupportedModel) as caught:
        remat.find_chain(model.train(), sample, stages=["encoder.block"])
    assert "'encoder.block.0' and 'encoder.block.1'" in str(caught.value)  # both calls,
    assert f"float32[{LENGTH}, {LENGTH}, 4]" in str(caught.value)  # and the position bias that the first one computes


class Skips(nn.Module):
    """What the first layer computes is used by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) * first


def test_a_tensor_that_skips_a_stage_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"the output of 'layers.0' \(float32\[4, 16\]\) is used again"):
        remat.find_chain(Skips(), torch.randn(4, 16), stages=["layers"])


def test_a_model_without_a_chain_is_offered_dtr() -> None:
    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).tanh().exp().sum()

    for refused in (
        remat.find_chain,
        lambda model, x: remat.fit(model, x, "1MiB", quiet=True),
        lambda model, x: rotor.Checkpointable(model, x, "1MiB"),
    ):
        model = Formula()
        with pytest.raises(UnsupportedModel, match=r"remat.DTR\(budget"):
            refused(model, torch.randn(4, 8))
        assert "forward" not in model.__dict__


def test_checkpointing_of_the_library_must_be_off() -> None:
    model, sample = gpt2()
    model.train().gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModel, match="gradient_checkpointing_disable"):
        remat.find_chain(model, sample)


# The model stays itself ----------------------------------------------------------------------------------------------


def test_fit_returns_the_model_itself_and_remove_gives_it_back() -> None:
    model, sample = made("gpt2")
    kind, keys = type(model), list(model.state_dict())
    expected = train(made("gpt2")[0], sample)
    fitted = remat.fit(model, sample, 0.5, quiet=True)
    assert fitted is model and type(model) is kind and list(model.state_dict()) == keys
    assert_same(expected, train(model, sample))
    assert remat.remove(model) is model and "forward" not in model.__dict__
    with pytest.raises(RematError, match="nothing to remove"):
        remat.remove(model)


def test_checkpointable_plans_at_the_first_forward_and_drives_the_model() -> None:
    model, sample = made("blocks")
    expected = train(made("blocks")[0], sample)
    module = rotor.Checkpointable(model, mem_limit=0.7)
    assert module.sequence is None
    assert_same(expected, train(model, sample))
    assert module.sequence is not None and module.sequence.recomputations > 0
    assert module.get_expected_memory() <= 0.7 * store_all_peak(module.chain)
    assert_same(train(made("blocks")[0], sample), train(rotor.Checkpointable(made("blocks")[0], sample, 0.7), sample))


def test_a_budget_too_small_names_the_least_one_and_leaves_the_model() -> None:
    model, sample = made("gpt2")
    with pytest.raises(InfeasibleBudget) as caught:
        remat.fit(model, sample, 1000, quiet=True)
    assert drive_of(model) is None
    remat.fit(model, sample, round(1.2 * caught.value.minimum), quiet=True)
    with pytest.raises(RematError, match=r"remat.remove\(model\) first"):
        remat.fit(model, sample, 0.9, quiet=True)


def test_copies_pickles_and_signatures_are_the_models_own(tmp_path: Any) -> None:
    model, sample = made("gpt2")
    signature = inspect.signature(model.forward)
    remat.fit(model, sample, 0.5, quiet=True)
    assert inspect.signature(model.forward) == signature
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert drive_of(other) is None
        assert_same(train(made("gpt2")[0], sample), train(other, sample))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert_same(list(model.state_dict().values()), list(loaded.state_dict().values()))


def test_generate_and_eval_run_untouched() -> None:
    plain, sample = made("gpt2")
    model, _ = made("gpt2")
    remat.fit(model, sample, 0.5, quiet=True)
    prompt = sample["input_ids"][:, :4]
    for each in (plain, model):
        each.eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(plain.generate(prompt, **options), model.generate(prompt, **options))
    assert torch.equal(plain(**sample).logits, model(**sample).logits)


def test_hooks_run_as_often_as_in_plain_pytorch() -> None:
    def counted(model: nn.Module) -> list[str]:
        seen: list[str] = []
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda module, args: seen.append("before"))
        block.register_forward_hook(lambda module, args, output: seen.append("after"))
        block.register_full_backward_hook(lambda module, before, after: seen.append("backward"))
        block.wide.weight.register_hook(lambda gradient: seen.append("gradient"))
        return seen

    plain, sample = made("blocks")
    seen = counted(plain)
    expected = train(plain, sample), list(seen)
    model, _ = made("blocks")
    seen = counted(model)
    chain = remat.profile(model, sample, repeats=1)
    seen.clear()
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)), other_path="error")
    assert_same(expected[0], train(model, sample))
    assert expected[1] == seen


def test_blocks_compiled_by_torch_compile() -> None:
    plain, sample = made("blocks")
    model, _ = made("blocks")
    for each in (plain, model):
        for block in each.blocks:
            block.compile(backend="aot_eager")
    expected = train(plain, sample)
    remat.fit(model, sample, 0.8, quiet=True, other_path="error")
    assert_same(expected, train(model, sample))


def test_frozen_parameters_as_adapters_leave_them() -> None:
    def frozen() -> nn.Module:
        model, _ = made("gpt2")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return model

    _, sample = made("gpt2")
    expected = train(frozen(), sample)
    model = frozen()
    chain = remat.profile(model, sample, repeats=1)
    schedule = remat.solve(chain, remat.minimum_budget(chain))
    assert schedule.recomputations > 0
    assert remat.run(model, sample, schedule, repeats=1).peak_bytes <= schedule.budget_bytes
    remat.apply(model, schedule, other_path="error")
    assert_same(expected, train(model, sample))


def test_autocast() -> None:
    def step(model: nn.Module, sample: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(model, sample, steps=1)

    plain, sample = made("llama")
    expected = step(plain, sample)
    model, _ = made("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        remat.fit(model, sample, 0.6, quiet=True, other_path="error")
    assert_same(expected, step(model, sample))


def test_a_forward_that_others_have_wrapped_in_autocast() -> None:
    """As accelerate does: one instance, which cannot be entered twice; and the first step measures again under it."""

    def wrapped(model: nn.Module) -> nn.Module:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    _, sample = made("blocks")
    expected = train(wrapped(made("blocks")[0]), sample)
    model, _ = made("blocks")
    remat.fit(model, sample, 0.9, quiet=True)
    with pytest.warns(UserWarning, match="autocast"):
        found = train(wrapped(model), sample)
    assert_same(expected, found)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


class Around(nn.Module):
    """A module of one's own around a model of a library."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def test_caches_are_off_in_training_steps_wherever_the_model_is() -> None:
    inner, sample = made("gpt2")
    expected = train(inner, sample)
    model = Around(made("gpt2")[0]).train()
    remat.fit(model, sample, 0.6, quiet=True, other_path="error")
    assert_same(expected, train(model, sample))
    assert model.inner.config.use_cache is True
    assert model(**sample).past_key_values is None
    assert model.eval()(**sample).past_key_values is not None


def test_numbers_among_the_arguments_are_no_other_input() -> None:
    model, sample = made("gpt2")
    remat.fit(model, sample, 0.6, quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**sample, num_items_in_batch=torch.tensor(46)).loss.backward()


def test_checkpointing_of_the_library_turned_on_later_is_noticed() -> None:
    model, sample = made("gpt2")
    remat.fit(model, sample, 0.6, quiet=True)
    for block in model.transformer.h:
        block.gradient_checkpointing = True
    with pytest.raises(UnsupportedModel, match="of its own turned on"):
        model(**sample)


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    model, sample = made("blocks")
    compiled = torch.compile(model, backend="eager")
    for whole in (compiled, made("blocks")[0]):
        if whole is not compiled:
            whole.compile(backend="eager")
        with pytest.raises(UnsupportedModel, match="Compile its blocks"):
            remat.fit(whole, sample, 0.9, quiet=True)
    remat.fit(model, sample, 0.8, quiet=True)
    expected = train(made("blocks")[0], sample)
    assert_same(expected, train(torch.compile(model, backend="aot_eager"), sample))  # runs as if it were not compiled


def test_two_forwards_before_their_backwards() -> None:
    def both(model: nn.Module, sample: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first, second = model(sample), model(2 * sample)
        second.square().mean().backward()
        first.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, sample = made("blocks")
    model, _ = made("blocks")
    remat.fit(model, sample, 0.7, quiet=True, other_path="error")
    assert_same(both(plain, sample), both(model, sample))


def _runs() -> int:
    gc.collect()
    return sum(type(found) is CallRun for found in gc.get_objects())


@pytest.mark.parametrize("name", ["t5", "records"])
def test_a_forward_without_a_backward_leaves_nothing_in_memory(name: str) -> None:
    """Also where what is passed to a stage beside comes out of an earlier one, whose graph the run hangs on."""
    model, sample = made(name)
    chain = remat.profile(model, sample, repeats=1)
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)), other_path="error")
    for _ in range(2):
        model(**sample)
    assert _runs() == 0
    loss = loss_in(model(**sample))
    loss.backward()
    del loss
    assert _runs() == 0
    handle = model.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**sample)
    handle.remove()
    assert _runs() == 0
    assert_same(train(made(name)[0], sample), train(copy.deepcopy(model), sample))


# Other paths ---------------------------------------------------------------------------------------------------------


class Wandering(Blocks):
    """Takes another path when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "all"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.path == "skip" and index == 2:
                continue
            if self.path == "stop" and index == 3:
                break
            x = block(x)
            if self.path == "change" and index == 1:
                x = x * 1.5
            if self.path == "in place" and index == 1:
                x.mul_(1.5)
            if self.path == "again" and index == 1:
                x = block(x)
        return self.last(x)


def wandering(path: str) -> Wandering:
    torch.manual_seed(1)
    model = Wandering().train()
    model.path = path
    return model


@pytest.mark.parametrize("path", ["skip", "stop", "change", "in place", "again"])
def test_a_forward_that_leaves_the_chain_is_noticed_and_right(path: str) -> None:
    sample = torch.randn(16, 8)
    expected = train(wandering(path), sample)
    chain = remat.profile(wandering("all"), sample, repeats=1)
    for budget in budgets_of(chain, 3)[:2]:
        schedule = remat.solve(chain, budget)
        model = wandering(path)
        remat.apply(model, schedule)
        with pytest.warns(UserWarning, match="left the chain") as caught:
            found = train(model, sample)
        assert_same(expected, found, path)
        assert sum("left the chain" in str(warning.message) for warning in caught) == 1
        strict = wandering(path)
        remat.apply(strict, schedule, other_path="error")
        with pytest.raises(LeftChain, match=r"blocks\."):
            train(strict, sample)
        strict.path = "all"
        assert_same(train(wandering("all"), sample), train(strict, sample))


def test_a_sample_that_takes_another_path_than_the_training_data() -> None:
    sample = torch.randn(16, 8)
    model = wandering("stop")
    chain = remat.profile(model, sample, repeats=1)
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)))
    model.path = "all"
    with pytest.warns(UserWarning, match=r"'blocks.3' was called"):
        found = train(model, sample)
    assert_same(train(wandering("all"), sample), found)


def test_side_inputs_that_change_are_an_error() -> None:
    class Masked(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = torch.ones(32)
            x = self.first(x)
            for block in self.blocks:
                x = block(x, self.mask)
            return self.last(x)

    class Block(Residual):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x + mask)

    model = Masked()
    model.blocks = nn.ModuleList(Block(32, 0.0) for _ in range(4))
    sample = torch.randn(16, 8)
    remat.fit(model.train(), sample, 0.5, quiet=True)
    output = model(sample)
    model.mask.mul_(2)
    with pytest.raises(ReplayError, match=r"passed to stage .blocks\."):
        output.sum().backward()


def test_shorter_inputs_train_by_the_plan_of_a_longer_one() -> None:
    model, sample = made("gpt2")
    rotor.Checkpointable(model, sample, 0.5)
    shorter = {name: tensor[:, :16] for name, tensor in sample.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, shorter)
    assert_same(train(made("gpt2")[0], shorter), found)
    model, sample = made("gpt2")
    module = rotor.Checkpointable(model, sample, 0.5)
    wider = {name: torch.cat([tensor, tensor]) for name, tensor in sample.items()}
    with pytest.warns(UserWarning, match="measured and planned for that too"):
        found = train(model, wider)
    assert_same(train(made("gpt2")[0], wider), found)
    assert module.chain.layout.inputs[0] == "int64[2, 24] cpu"


def test_a_schedule_of_another_model_or_input_is_refused() -> None:
    model, sample = made("gpt2")
    schedule = remat.solve(remat.profile(model, sample, repeats=1), 0.9)
    with pytest.raises(PlanMismatch, match=r"no module 'transformer.h.0'"):
        remat.apply(blocks()[0], schedule)
    remat.apply(model, schedule)
    with pytest.raises(PlanMismatch, match="was made for input"):
        model(input_ids=sample["input_ids"])
    model.transformer.h[1] = copy.deepcopy(model.transformer.h[0])
    with pytest.raises(PlanMismatch, match="replaced"):
        model(**sample)


def test_schedules_of_found_chains_survive_a_file(tmp_path: Any) -> None:
    model, sample = records()
    chain = remat.profile(model.train(), sample, repeats=1)
    schedule = remat.solve(chain, 0.8)
    chain.save(tmp_path / "chain.json")
    schedule.save(tmp_path / "schedule.json")
    assert remat.Chain.load(tmp_path / "chain.json") == chain
    assert remat.Schedule.load(tmp_path / "schedule.json") == schedule


def test_a_sequential_in_which_chains_are_looked_for() -> None:
    model, sample = convolutions()
    outer = nn.Sequential(model, nn.Linear(5, 2)).train()
    expected = train(copy.deepcopy(outer), sample)
    assert remat.fit(outer, sample, 0.9, quiet=True, stages=["0.features"]) is outer
    assert_same(expected, train(outer, sample))


# Comparing -----------------------------------------------------------------------------------------------------------


def test_compare_takes_a_model_as_it_is_and_its_librarys_own_way(tmp_path: Any) -> None:
    model, sample = made("gpt2")
    file = tmp_path / "comparison.json"
    strategies = ["persistent", "revolve", "gradient_checkpointing"]
    before = {part: (dict(vars(part)), list(part._forward_hooks)) for part in model.modules()}
    found = remat.compare(model, sample, [0.7, 1.0], strategies, progress=False, repeats=1, file=file)
    assert found.strategies == strategies and found.model == "GPT2LMHeadModel of 3 stages"
    own = found.at("gradient_checkpointing", None)
    assert own.measured is not None and own.gradients == "equal"
    assert own.measured.peak_bytes < found.plain.peak_bytes
    assert all(entry.gradients in ("", "equal") for entry in found.entries)
    assert found.at("persistent", 0.7).measured.peak_bytes <= 0.7 * found.store_all_bytes
    assert {part: (dict(vars(part)), list(part._forward_hooks)) for part in model.modules()} == before
    assert remat.Comparison.load(file).at("gradient_checkpointing", None) == own
    assert found.plot() is not None
    with pytest.raises(RematError, match="from 0 to 1"):
        remat.compare(model, sample, [1.0], ["torch.compile@2"], progress=False)
    with pytest.raises(RematError, match="unknown strategy"):
        remat.compare(model, sample, [1.0], ["checkpointing"], progress=False)
