"""A model that is patched in place stays what it is, and a forward that takes another path is noticed."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import rotor
from remat.errors import InfeasibleBudget, OverBudgetWarning, RematError, UnsupportedModel
from remat.runtime.meter import MemoryMeter
from remat.runtime.planned.patched_forward import patched_forward_of
from remat.runtime.pytree import loss_in, tensors
from remat.simulation import store_all_peak
from support.steps import assert_same
from support.training import made, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


def test_checkpointable_plans_at_the_first_forward_and_patches_the_model() -> None:
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
    assert patched_forward_of(model) is None
    remat.fit(model, sample, round(1.2 * caught.value.minimum), quiet=True)
    drive = patched_forward_of(model)
    with pytest.raises(InfeasibleBudget):
        remat.fit(model, sample, 1000, quiet=True)
    assert drive is not None and patched_forward_of(model) is drive  # the plan that it had
    assert remat.fit(model, sample, 0.9, quiet=True) is model
    assert patched_forward_of(model) not in (None, drive)
    with pytest.raises(RematError, match=r"remat.remove\(model\) first"):
        rotor.Checkpointable(model, sample, 0.9)


def test_copies_pickles_and_signatures_are_the_models_own(tmp_path: Any) -> None:
    model, sample = made("gpt2")
    signature = inspect.signature(model.forward)
    remat.fit(model, sample, 0.5, quiet=True)
    assert inspect.signature(model.forward) == signature
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert patched_forward_of(other) is None
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
    chain = remat.profile(model, sample)
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
    chain = remat.profile(model, sample)
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
    remat.fit(model, sample, "150KiB", quiet=True)
    with pytest.warns(UserWarning, match="autocast"):
        found = train(wrapped(model), sample)
    assert_same(expected, found)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_an_nn_sequential_whose_forward_others_wrap_runs_what_is_around_it(before: bool) -> None:
    """`before` remat has it, or after: its stages in a row are not all that its forward does."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)))

    def wrapped(model: nn.Module) -> nn.Module:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    sample = torch.randn(64, 32)
    expected = train(wrapped(made()), sample)
    assert not all(map(torch.equal, expected, train(made(), sample)))
    if before:
        assert_same(expected, train(remat.fit(wrapped(made()), sample, 0.6, quiet=True), sample))
        assert_same(expected, train(rotor.Checkpointable(wrapped(made()), sample, 0.6), sample))
        return
    fitted = wrapped(remat.fit(made(), sample, 0.6, quiet=True))
    with pytest.warns(UserWarning, match="autocast"):
        found = train(fitted, sample)
    assert_same(expected, found)


class CalledInAnotherWay(nn.Sequential):
    def __call__(self, input: torch.Tensor) -> Any:
        return super().__call__(2 * input)


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


@pytest.mark.parametrize("kind", [CalledInAnotherWay, Backwards])
@pytest.mark.parametrize("outermost", [True, False])
def test_a_kind_of_nn_sequential_that_does_more_than_run_its_children(kind: type, outermost: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        parts = [[nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)] for _ in range(6)]
        if outermost:
            return kind(*(nn.Sequential(*each) for each in parts))
        return nn.Sequential(*(kind(*each) for each in parts))

    sample = torch.randn(64, 32)
    expected = train(made(), sample)
    assert_same(expected, train(remat.fit(made(), sample, 0.7, quiet=True), sample))
    model, calls = made(), []
    model.register_forward_hook(lambda module, given, output: calls.append(len(given)))
    for in_place in None, False:
        module = rotor.Checkpointable(copy.deepcopy(model), sample, 0.7, in_place=in_place)
        before = len(calls)
        assert_same(expected, train(module, sample))
        assert len(calls) - before == 3
        with torch.no_grad():
            assert torch.equal(module(sample), module.wrapped(sample))


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "gradients of samples": lambda model, x: torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x[:, None]),
    "of parameters": lambda model, x: torch.func.grad(
        lambda values: torch.func.functional_call(model, values, (x,)).sum()
    )({name: value.detach() for name, value in model.named_parameters()}),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["blocks", "a row"])
def test_inside_of_torch_func_the_model_runs_as_plain_pytorch(name: str, transform: str) -> None:
    def new() -> nn.Module:
        torch.manual_seed(0)
        if name == "a row":
            return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))
        model = made(name)[0]
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # `vmap` would have to be told how to draw
        return model

    sample = torch.randn(8, 16) if name == "a row" else made(name)[1]
    expected = tensors(TRANSFORMS[transform](new(), sample))
    for model in remat.fit(new(), sample, 0.6, quiet=True), rotor.Checkpointable(new(), sample, 0.6):
        plain = train(new(), sample)
        with pytest.warns(OverBudgetWarning, match=r"torch\.func"):
            found = tensors(TRANSFORMS[transform](model, sample))
        assert_same(expected, found)
        assert_same(plain, train(model, sample))


class Around(nn.Module):
    """A module of one's own around a model of a library."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.parametrize("recorder", ["torch.export", "torch.jit.trace"])
@pytest.mark.parametrize("way", ["fit", "Checkpointable", "apply"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_what_is_recorded_to_run_elsewhere_is_the_model_as_it_is(way: str, recorder: str, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(8))).train(training)
    sample = torch.randn(64, 8)
    expected = model(sample)
    if way == "fit":
        with_plan: nn.Module = remat.fit(model, sample, 0.7, quiet=True)
    elif way == "Checkpointable":
        with_plan = rotor.Checkpointable(model, sample, 0.7, verbosity=0)
    else:
        with_plan = remat.apply(model, remat.solve(remat.profile(model, sample), 0.7))
    with_plan.train(training)
    if recorder == "torch.export":
        recorded = torch.export.export(with_plan, (sample,)).module()
    else:
        recorded = torch.jit.trace(with_plan, (sample,))
    assert torch.equal(recorded(sample), expected)
    with_plan.train()(sample).sum().backward()  # the plan is still there
    assert model[0][0].weight.grad is not None


def test_caches_are_off_in_training_steps_wherever_the_model_is() -> None:
    inner, sample = made("gpt2")
    expected = train(inner, sample)
    for memory in (0.6, 1.0):  # also where everything is stored
        model = Around(made("gpt2")[0]).train()
        remat.fit(model, sample, memory, quiet=True, other_path="error")
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
    with pytest.raises(UnsupportedModel, match="has its own gradient checkpointing turned on"):
        model(**sample)


def test_checkpointing_that_timm_turned_on_is_noticed() -> None:
    """timm keeps a flag of its own name, which `set_grad_checkpointing` sets."""
    model, sample = made("blocks")
    model.grad_checkpointing = False
    remat.fit(model, sample, 0.9, quiet=True)
    model.grad_checkpointing = True
    with pytest.raises(UnsupportedModel, match=r"set_grad_checkpointing\(False\)"):
        model(sample)
    model.grad_checkpointing = False
    model(sample).sum().backward()


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    model, sample = made("blocks")
    compiled = torch.compile(model, backend="eager")
    for whole in (compiled, made("blocks")[0]):
        if whole is not compiled:
            whole.compile(backend="eager")
        with pytest.raises(UnsupportedModel, match="compile its blocks"):
            remat.fit(whole, sample, 0.9, quiet=True)
    remat.fit(model, sample, 0.8, quiet=True)
    expected = train(made("blocks")[0], sample)
    assert_same(expected, train(torch.compile(model, backend="aot_eager"), sample))  # runs as if it were not compiled


def test_two_forwards_before_their_backwards() -> None:
    """Which holds more than the plan counts, and that is said, once."""

    def both(model: nn.Module, sample: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first, second = model(sample), model(2 * sample)
        second.square().mean().backward()
        first.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, sample = made("blocks")
    model, _ = made("blocks")
    remat.fit(model, sample, 0.7, quiet=True, other_path="error")
    expected = both(plain, sample)
    with pytest.warns(remat.OverBudgetWarning, match="2 forwards wait for their backward at once"):
        found = both(model, sample)
    assert_same(expected, found)
    both(model, sample)


class Wide(nn.Module):
    """Works on as many copies of its input as its owner says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, copies: int) -> torch.Tensor:
        wide = self.drop(self.up(x.repeat(copies, 1)).tanh())
        return x + self.down(wide).unflatten(0, (copies, -1)).mean(0)


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.copies = nn.ModuleList(Wide() for _ in range(6)), 1

    def forward(self, x: torch.Tensor, copies: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.copies if copies is None else int(copies))
        return x


def _drops_out(model: Widened) -> None:
    for block in model.blocks:
        block.drop.p = 0.2


CHANGES: dict[str, Callable[[Widened], Any]] = {
    "attribute": lambda model: setattr(model, "copies", 3),
    "dropout": _drops_out,
    "tensor of one number": lambda _: {"copies": torch.tensor(3)},
}


@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_stage_that_saves_more_than_before_says_so(change: str, options: bool) -> None:
    """Of which neither flags, shapes nor arguments tell; once."""
    torch.manual_seed(0)
    model, sample = Widened(), torch.randn(128, 32)
    given = {"copies": torch.tensor(1)} if change == "tensor of one number" else {}
    remat.fit(model, {"x": sample, **given}, 0.6, quiet=True, options=options)
    for rows in (128, 64, 100, 128):
        model(sample[:rows], **given).square().mean().backward()  # nothing to say of other batches
    given |= CHANGES[change](model) or {}
    with pytest.warns(OverBudgetWarning, match="saves .* for its backward, and .* on such inputs before"):
        model(sample, **given).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverBudgetWarning)
        model(sample, **given).square().mean().backward()


@pytest.mark.parametrize("together", [False, True])
def test_several_forwards_with_a_backward_each_or_one_for_all(together: bool) -> None:
    """A pipeline keeps its limit; where gradients of parameters wait for each other as well, that is said."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    sample = torch.randn(16, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(called: nn.Module) -> None:
        losses = [called(sample).square().mean() for _ in range(2)]
        for loss in [losses[0] + losses[1]] if together else losses:
            loss.backward()

    limit = 80_000
    module = rotor.Checkpointable(model, sample, limit, in_flight=2)
    meter = MemoryMeter(torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat.OverBudgetWarning)
        for _ in range(2):
            with meter.session(), meter.region():
                step(module)
    region = meter.regions[-1]
    assert (region.peak_bytes - region.start_bytes + sample.nbytes > limit) == together == bool(caught)
    assert len(caught) == together and all("one backward() runs through" in str(each.message) for each in caught)


def left_by(step: Callable[[], object]) -> int:
    """Bytes that are there after a step, of what it made."""
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        step()
        gc.collect()
    return meter.regions[0].end_bytes - meter.regions[0].start_bytes


@pytest.mark.parametrize("name", ["t5", "records"])
def test_a_forward_without_a_backward_leaves_nothing_in_memory(name: str) -> None:
    """Also where what is passed to a stage beside comes out of an earlier one, whose graph the run hangs on."""
    model, sample = made(name)
    chain = remat.profile(model, sample)
    remat.apply(model, remat.solve(chain, remat.minimum_budget(chain)), other_path="error")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def failing() -> None:
        with pytest.raises(ZeroDivisionError):
            model(**sample)

    assert left_by(lambda: model(**sample)) == 0
    assert left_by(lambda: loss_in(model(**sample)).backward()) == 0
    handle = model.register_forward_hook(lambda module, args, output: 1 / 0)
    assert left_by(failing) == 0
    handle.remove()
    model.zero_grad()
    assert_same(train(made(name)[0], sample), train(copy.deepcopy(model), sample))


def test_without_gradients_nothing_is_measured_and_the_models_own_forward_runs() -> None:
    model, sample = made("gpt2")
    torch.manual_seed(1)
    expected = model(**sample).logits
    module = rotor.Checkpointable(model, mem_limit="1GiB")
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(model(**sample).logits, expected)
    assert module.chain is None
    model(**sample).loss.backward()
    assert module.chain is not None


def test_a_forward_of_the_instances_own_comes_back_with_remove() -> None:
    model, sample = made("gpt2")
    own, calls = model.forward, []

    def around(**batch: Any) -> Any:
        calls.append(len(batch))
        return own(**batch)

    model.forward = around
    remat.fit(model, sample, 0.9, quiet=True)
    before = len(calls)
    model(**sample).loss.backward()
    assert len(calls) == before + 1
    assert remat.remove(model).forward is around
    model(**sample)
    assert len(calls) == before + 2


def test_an_input_that_is_too_large_for_the_limit_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    remat.fit(model, torch.randn(100, 64), "200KiB", quiet=True)
    with pytest.raises(remat.InfeasibleBudget, match=r"this batch \(float32\[1000, 64\] cpu\) needs at least 1"):
        model(torch.randn(1000, 64))
    model(torch.randn(100, 64)).sum().backward()


class Shifted(nn.Module):
    """Blocks that are passed another tensor besides their activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shift() for _ in range(6))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, shift)
        return x


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x + shift)))


@pytest.mark.parametrize("before", [False, True])
def test_another_argument_changed_before_the_backward(before: bool) -> None:
    """No node of autograd has saved it, so plain PyTorch would not see that; `before`: it was changed earlier, too."""
    model, x, shift = Shifted(), torch.randn(64, 16), torch.randn(64, 16)
    remat.fit(model, {"x": x, "shift": shift}, 0.6, options=False, quiet=True)
    if before:
        shift.mul_(2)
    loss = model(x, shift).square().mean()
    shift.add_(1)
    with pytest.raises(remat.ReplayError, match=r"of shape \(64, 16\) passed to stage 'blocks.* was modified in place"):
        loss.backward()
