"""`RematCallback` in the trainers of transformers and TRL: losses as without it, within the limit, left as found."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import remat
from remat.errors import RematError
from remat.runtime.planned.patched_forward import patched_forward_of
from support.trainers import Tokens, llama, measured, texts, tokenizer

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
callbacks = pytest.importorskip("remat.integrations.transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SETTINGS = {"per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none", "use_cpu": True}
SETTINGS |= {"disable_tqdm": True, "save_strategy": "no", "bf16": False, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def _no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    peaks: list[int]
    logs: list[dict[str, float]]
    model: nn.Module


def outcome(trainer: Any, *, measures: bool = True, **how: Any) -> Outcome:
    if measures:
        with measured(trainer) as peaks:
            trainer.train(**how)
    else:
        peaks = []
        trainer.train(**how)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Outcome([each["loss"] for each in logs], [each["grad_norm"] for each in logs], peaks, logs, trainer.model)


def trainer_of(folder: Path, *added: Any, model: nn.Module | None = None, steps: int = 3, **settings: Any) -> Any:
    data = settings.pop("data", None) or Tokens(48)
    args = transformers.TrainingArguments(str(folder), max_steps=steps, **{**SETTINGS, **settings})
    how: dict[str, Any] = {"train_dataset": data, "eval_dataset": Tokens(64), "callbacks": list(added)}
    return transformers.Trainer(model or llama(), args, **how)


def assert_within(found: Outcome, plain: Outcome) -> None:
    """Equal to the last bit, within the limit, and something was recomputed for that."""
    assert found.losses == plain.losses and found.norms == plain.norms
    assert len(set(plain.losses)) > 1 or len(set(plain.norms)) > 1
    limits = {entry["remat/limit"] for entry in found.logs}
    assert len(limits) == 1, "a share is one of the first call"
    assert all(entry["remat/peak"] <= entry["remat/limit"] for entry in found.logs)
    assert max(found.peaks, default=0) <= limits.pop()
    assert all(entry["remat/recomputations"] > 0 for entry in found.logs)
    assert patched_forward_of(found.model) is None


# transformers.Trainer ------------------------------------------------------------------------------------------------


PLAIN: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
}


@pytest.mark.parametrize("name", PLAIN)
def test_trainer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PLAIN[name]
    own = name == "checkpointing"
    plain = trainer_of(tmp_path, **({} if own else settings))
    driven = trainer_of(tmp_path, callbacks.RematCallback(memory=0.6), **settings)
    switches = [name for name in ("gradient_checkpointing", "activation_checkpointing") if hasattr(driven.args, name)]
    before = {name: getattr(driven.args, name) for name in switches}
    state = set(driven.model.state_dict())
    expected, found = outcome(plain), outcome(driven)
    assert_within(found, expected)
    said = capsys.readouterr().err
    assert said.count("now trains in") == 1
    assert said.count("own checkpointing is off") == own
    assert {name: getattr(driven.args, name) for name in switches} == before
    assert set(driven.model.state_dict()) == state
    assert any(getattr(module, "gradient_checkpointing", False) for module in driven.model.modules()) == own
    assert [entry for entry in driven.state.log_history if "eval_loss" in entry] == [
        {**entry, **_times(other)}
        for entry, other in zip(
            (entry for entry in plain.state.log_history if "eval_loss" in entry),
            (entry for entry in driven.state.log_history if "eval_loss" in entry),
            strict=True,
        )
    ]


def _times(entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if "runtime" in name or "per_second" in name}


def test_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    whole = outcome(trainer_of(tmp_path / "plain", steps=4))
    saving = {"save_strategy": "steps", "save_steps": 2, "data": Tokens(48)}
    outcome(trainer_of(tmp_path / "first", callbacks.RematCallback(0.6), steps=4, **saving), measures=False)
    again = trainer_of(tmp_path / "first", callbacks.RematCallback(0.6), steps=4, **saving)
    found = outcome(again, resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert found.losses[-2:] == whole.losses[-2:]


def test_lengths_that_vary_are_measured_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Tokens(24, varies=True)
    assert len({len(data[index]["input_ids"]) for index in range(48)}) > 8
    ran: list[Any] = []
    profile = remat.training.planned.profile
    monkeypatch.setattr(
        remat.training.planned, "profile", lambda *args, **kwargs: [ran.append(1), profile(*args, **kwargs)][1]
    )
    order = {"train_sampling_strategy": "sequential"}
    expected = outcome(trainer_of(tmp_path, steps=12, data=data, **order), measures=False)
    with pytest.warns(UserWarning, match="a batch is longer than all before") as caught:
        found = outcome(
            trainer_of(tmp_path, callbacks.RematCallback("12MiB"), steps=12, data=data, **order), measures=False
        )
    assert len([each for each in caught if "remat: " in str(each.message)]) == 1
    assert found.losses == expected.losses
    assert 1 < len(ran) <= 5
    ran.clear()
    named = outcome(trainer_of(tmp_path, callbacks.RematCallback("12MiB", longest=48), steps=12, data=data, **order))
    assert named.losses == expected.losses and len(ran) == 1
    assert max(named.peaks) <= 12 * 2**20


@pytest.mark.filterwarnings("ignore:remat. a batch is longer")
def test_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    data = Tokens(24, varies=True)
    order = {"train_sampling_strategy": "sequential", "steps": 6, "data": data}
    limit = 1_900_000
    trainer = trainer_of(tmp_path, callbacks.RematCallback(limit), **order)
    state = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(
        remat.InfeasibleBudget, match=r"this batch \(int64\[4, \d+\].*Sequences of \d+ tokens fit"
    ) as error:
        trainer.train()
    done = trainer.state.global_step
    assert 0 < done < 6
    assert error.value.minimum > limit
    del error
    gc.collect()
    assert patched_forward_of(trainer.model) is None  # also where training has failed
    assert any(not torch.equal(state[name], value) for name, value in trainer.model.state_dict().items())

    expected = outcome(trainer_of(tmp_path, **order), measures=False)
    with pytest.warns(remat.OverBudgetWarning, match="schedule of least memory") as caught:
        found = outcome(
            trainer_of(tmp_path, callbacks.RematCallback(limit, when_short="least"), **order), measures=False
        )
    assert len([each for each in caught if each.category is remat.OverBudgetWarning]) == 1
    assert found.losses == expected.losses


def test_a_limit_that_is_too_small_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callbacks.RematCallback("10KiB"), gradient_checkpointing=True)
    with pytest.raises(remat.InfeasibleBudget, match="the minimum is about"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert patched_forward_of(trainer.model) is None and "forward" not in vars(trainer.model)
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor"])
def test_a_limit_for_the_whole_device_counts_the_optimizer_of_the_trainer(optim: str, tmp_path: Path) -> None:
    expected = outcome(trainer_of(tmp_path, optim=optim))
    size = sum(parameter.nbytes for parameter in llama().parameters())
    callback = callbacks.RematCallback("4GiB", of="device")  # for what other tests hold, too
    found = outcome(trainer_of(tmp_path, callback, optim=optim))
    assert found.losses == expected.losses
    moments = 0 if optim == "adafactor" else 2
    for log in found.logs:
        assert (2 + moments) * size + max(found.peaks) <= 1.02 * log["remat/peak"]
        assert log["remat/peak"] <= log["remat/limit"] == 4 << 30


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_a_head_in_parts(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = outcome(trainer_of(tmp_path, **settings))
    found = outcome(trainer_of(tmp_path, callbacks.RematCallback(0.7, chunk_head=True), **settings))
    near = 2e-2 if settings.get("bf16") else 1e-4
    assert found.losses == pytest.approx(expected.losses, rel=near)
    assert found.norms == pytest.approx(expected.norms, rel=near)
    assert max(found.peaks) <= found.logs[0]["remat/limit"]
    assert "forward" not in vars(found.model.lm_head)


def test_a_training_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ArithmeticError("of somebody else")

    trainer = trainer_of(tmp_path, callbacks.RematCallback(0.6), Fails(), gradient_checkpointing=True)
    try:
        trainer.train()
    except ArithmeticError:
        assert patched_forward_of(trainer.model) is not None
    gc.collect()
    assert patched_forward_of(trainer.model) is None
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())


def test_an_error_that_is_held_ends_its_own_training_alone(tmp_path: Path) -> None:
    """What a training leaves when its error goes is not what the next one with the same callback has begun."""

    class Fails(transformers.TrainerCallback):
        held: BaseException | None = None
        fails = True

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.held = None  # the last reference to the error of the training before
            gc.collect()
            if self.fails:
                raise ArithmeticError("of somebody else")

    fails = Fails()
    trainer = trainer_of(tmp_path, callbacks.RematCallback(0.6), fails)
    try:
        trainer.train()
    except ArithmeticError as error:
        fails.held, fails.fails = error, False
    found = outcome(trainer, measures=False)
    assert all("remat/limit" in entry for entry in found.logs[-3:])
    assert patched_forward_of(trainer.model) is None


def test_a_model_whose_forward_is_not_called_is_warned_of(tmp_path: Path) -> None:
    class Parts(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
            return model.lm_head(hidden).logsumexp(-1).mean()

    args = transformers.TrainingArguments(str(tmp_path), max_steps=3, **SETTINGS)
    trainer = Parts(llama(), args, train_dataset=Tokens(48), callbacks=[callbacks.RematCallback(0.6)])
    with pytest.warns(remat.OverBudgetWarning, match="the forward of LlamaForCausalLM is not called") as caught:
        trainer.train()
    assert len([each for each in caught if "is not called" in str(each.message)]) == 1


def test_a_profiler_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two steps run beside one, and nothing can be measured: the model is estimated once. The others are as
    ever."""
    estimated: list[nn.Module] = []
    estimate_in = remat.profiling.profile.estimate_in
    monkeypatch.setattr(
        remat.profiling.profile,
        "estimate_in",
        lambda world, model, *args: [estimated.append(model), estimate_in(world, model, *args)][1],
    )

    class Profiles(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.profiler = torch.profiler.profile()
            self.profiler.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                self.profiler.__exit__(None, None, None)

    expected = outcome(trainer_of(tmp_path, steps=4), measures=False)
    found = outcome(trainer_of(tmp_path, callbacks.RematCallback("9MiB"), Profiles(), steps=4), measures=False)
    assert found.losses == expected.losses
    assert ["remat/limit" in entry for entry in found.logs] == [False, False, True, True]
    assert len(estimated) == 1


def test_the_largest_batch_that_runs_is_looked_for(tmp_path: Path) -> None:
    """`auto_find_batch_size` begins anew with a smaller batch where memory has run out."""
    failing = [True, True]

    class Full(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if failing:
                failing.pop()
                raise RuntimeError("CUDA out of memory.")

    trainer = trainer_of(tmp_path, callbacks.RematCallback(0.6), Full(), auto_find_batch_size=True)
    found = outcome(trainer, measures=False)
    assert len(found.losses) == 3 and not failing
    assert patched_forward_of(trainer.model) is None


def test_what_is_logged_reaches_those_that_report(tmp_path: Path) -> None:
    class Reports(transformers.TrainerCallback):
        logged: list[dict[str, float]] = []  # noqa: RUF012  # of this one test

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            self.logged.append(dict(logs))

    trainer_of(tmp_path, Reports(), callbacks.RematCallback(0.6), steps=2).train()
    assert all({"remat/limit", "remat/peak", "remat/recomputations"} <= set(each) for each in Reports.logged[:-1])


def test_a_trainer_that_compiles(tmp_path: Path) -> None:
    """The model as a whole: its training steps run uncompiled, within the limit."""
    pytest.importorskip("torch._inductor")
    expected = outcome(trainer_of(tmp_path))
    found = outcome(trainer_of(tmp_path, callbacks.RematCallback(0.6), torch_compile=True))
    assert_within(found, expected)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(remat.RematError, match="unknown argument 'longst'; choose from"):
        callbacks.RematCallback(0.6, longst=3)
    with pytest.raises(remat.InvalidBudget):
        callbacks.RematCallback("a lot")
    with pytest.raises(remat.RematError, match="when_short='never': choose 'error' or 'least'"):
        callbacks.RematCallback(0.6, when_short="never")


# TRL -----------------------------------------------------------------------------------------------------------------


def sft(folder: Path, added: list[Any], **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    data = Dataset.from_list([{"text": text} for text in texts(24, 40, 40 if settings.pop("even", True) else 60)])
    adapters = settings.pop("adapters", None)
    args = trl.SFTConfig(str(folder), max_steps=3, **{**SETTINGS, **settings})
    more = {"peft_config": adapters} if adapters else {}
    return trl.SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer(), callbacks=added, **more)


def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=4)


def preferences() -> Any:
    from datasets import Dataset

    columns = (texts(16, 12, 12, seed=1), texts(16, 20, 20, seed=2), texts(16, 20, 20, seed=3))
    return Dataset.from_list([{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(*columns, strict=True)])


def dpo(folder: Path, added: list[Any], **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    adapters = settings.pop("adapters", None)
    reference = llama() if settings.pop("reference", False) else None
    model: Any = llama()
    if adapters is None and reference is None:  # which is loaded from where the model was
        model.save_pretrained(folder / "model")
        model = str(folder / "model")
    args = trl.DPOConfig(str(folder), max_steps=3, **{**SETTINGS, **settings})
    more = {"peft_config": adapters} if adapters else {}
    return trl.DPOTrainer(
        model,
        ref_model=reference,
        args=args,
        train_dataset=preferences(),
        processing_class=tokenizer(),
        callbacks=added,
        **more,
    )


def kto(folder: Path, added: list[Any], **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    columns = zip(texts(16, 12, 12, seed=1), texts(16, 20, 20, seed=2), strict=True)
    rows = [{"prompt": a, "completion": b, "label": bool(at % 2)} for at, (a, b) in enumerate(columns)]
    args = trl.KTOConfig(str(folder), max_steps=3, **{**SETTINGS, **settings})
    data = Dataset.from_list(rows)
    how: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": added}
    return trl.KTOTrainer(llama(), ref_model=llama(), args=args, **how)


def grpo(folder: Path, added: list[Any], **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split())) % 5) for text in completions]

    args = trl.GRPOConfig(
        str(folder), max_steps=3, num_generations=4, max_completion_length=12, **{**SETTINGS, **settings}
    )
    data = Dataset.from_list([{"prompt": text} for text in texts(16, 12, 12, seed=1)])
    return trl.GRPOTrainer(
        llama(), reward_funcs=words, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=added
    )


def reward(folder: Path, added: list[Any], **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    data = preferences().remove_columns("prompt")
    args = trl.RewardConfig(str(folder), max_steps=3, **{**SETTINGS, **settings})
    model = llama("LlamaForSequenceClassification", num_labels=1)
    return trl.RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=added)


OF_TRL: Mapping[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "SFT": (sft, dict),
    "SFT, nll": (sft, lambda: {"loss_type": "nll"}),
    "SFT, packed": (sft, lambda: {"packing": True, "max_length": 64}),
    "SFT, without padding": (sft, lambda: {"padding_free": True, "max_length": None}),
    "SFT, lengths that vary": (sft, lambda: {"even": False}),
    "SFT, LoRA": (sft, lambda: {"adapters": lora()}),
    "DPO": (dpo, dict),
    "DPO, reference": (dpo, lambda: {"reference": True}),
    "DPO, LoRA": (dpo, lambda: {"adapters": lora()}),
    "KTO": (kto, dict),
    "GRPO": (grpo, dict),
    "reward": (reward, dict),
}


@pytest.mark.parametrize("name", OF_TRL)
def test_trl(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    make, settings = OF_TRL[name]
    expected = outcome(make(tmp_path, [], **settings()))
    callback = callbacks.RematCallback(0.9, longest=64)  # a fused head takes the same for any number of tokens
    found = outcome(make(tmp_path, [callback], **settings()))
    assert_within(found, expected)


def test_steps_are_watched(tmp_path: Path) -> None:
    callback = callbacks.RematCallback(0.6, watch=True)
    trainer_of(tmp_path, callback, eval_strategy="steps", eval_steps=2, steps=4).train()
    assert callback.watched is not None
    kinds = [each.kind for each in callback.watched.steps]
    assert kinds == ["training"] * 2 + ["evaluation"] + ["training"] * 2 + ["evaluation"]
    assert all(each.planned_bytes <= each.limit_bytes for each in callback.watched.steps)
    assert "4 steps, at most" in str(callback.watched)


def test_several_devices_in_one_process_are_refused() -> None:
    with pytest.raises(RematError, match="torchrun"):
        callbacks.RematCallback("1GiB").on_train_begin(SimpleNamespace(n_gpu=2), None, None, model=nn.Linear(2, 2))
