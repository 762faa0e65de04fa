"""What `profile` finds, that it leaves no trace, and that it never holds the whole model's activations."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import remat
from benchmarks import models
from remat.errors import MeasurementError, UnsupportedModel
from remat.measuring.preserving import aliased_parameters
from remat.measuring.stage_costs import SavedStorages
from remat.profiling import whole_steps
from remat.runtime.meter import MemoryMeter
from remat.simulation import simulate, store_all_peak
from support.steps import assert_same, train_step

CPU = torch.device("cpu")


def test_the_meter_sees_temporaries_and_what_stays() -> None:
    meter = MemoryMeter(CPU)
    with meter.session():
        with meter.region():
            kept = torch.empty(1000, dtype=torch.uint8)
            temporary = torch.empty(5000, dtype=torch.uint8)
            del temporary
        with meter.region():
            more = torch.empty(300, dtype=torch.uint8)
            del kept, more
    first, second = meter.regions
    assert (first.start_bytes, first.peak_bytes, first.end_bytes) == (0, 6000, 1000)
    assert (second.start_bytes, second.peak_bytes, second.end_bytes) == (1000, 1300, 0)


def test_what_was_allocated_between_sessions_is_not_counted_when_it_is_freed() -> None:
    """PyTorch's profiler remembers the addresses of an earlier session, and takes what is there later for the same."""
    meter = MemoryMeter(CPU)
    with meter.session(), meter.region():
        held = [torch.empty(3000, dtype=torch.uint8) for _ in range(50)]
    del held
    other = [torch.empty(3000, dtype=torch.uint8) for _ in range(50)]  # takes the same addresses, unseen
    with meter.session(), meter.region():
        kept = torch.empty(10000, dtype=torch.uint8)
        del other
    assert meter.regions[0].end_bytes == kept.nbytes
    assert meter.regions[0].peak_bytes == kept.nbytes


def test_the_meter_refuses_to_lie() -> None:
    meter = MemoryMeter(CPU)
    with torch.profiler.profile(profile_memory=True), pytest.raises(MeasurementError, match="profiler is running"):
        with meter.session():
            pass
    with meter.session(), meter.region():
        with pytest.raises(MeasurementError, match="not inside another region"), meter.region():
            pass
        torch.empty(10)
    with pytest.raises(MeasurementError, match="recorded no allocation"), meter.session(), meter.region():
        pass
    with pytest.raises(MeasurementError, match="must be inside a session"), meter.region():
        pass


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 200), nn.Linear(200, 100), nn.Linear(100, 300))


def test_sizes_of_linear_layers_by_hand() -> None:
    batch = 1000
    chain = remat.profile(wide(), torch.randn(batch, 30), small=0.0, output_held=False)
    sizes = [batch * width * 4 for width in (30, 200, 100, 300)]
    assert chain.act_bytes == (*sizes, 0)
    assert chain.grad_bytes == (0, *sizes[1:], 0)
    assert chain.saved_bytes == (*sizes[1:], 0)
    working = torch.get_rng_state().numel()  # while it is asked for, in a run that may have to be repeated
    assert chain.fwd_overhead_bytes == chain.save_overhead_bytes == (working, working, working, 0)
    weights = [30 * 200 * 4, 200 * 100 * 4, 100 * 300 * 4]
    for index in (1, 2):
        # By the backward the output is gone (no backward needs it) and the weight's gradient is there.
        extra = chain.bwd_overhead_bytes[index]
        assert 0 <= extra - (weights[index] - sizes[index + 1]) <= 4 * 300 + 64
    assert chain.names == ("0", "1", "2", "loss") and chain.layout is not None
    assert chain.layout.modules == (1, 1, 1) and chain.layout.inputs == ("float32[1000, 30] cpu",)


class AddOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def test_memory_that_is_used_anew_is_not_taken_for_what_was_saved() -> None:
    """What is only noted, not kept, is freed at once, and the next tensor of its size gets its address."""
    x = torch.randn(100_000, requires_grad=True)
    for _ in range(100):  # in most of them some address is given out anew
        saved = SavedStorages()
        with saved_tensors_hooks(saved.note, lambda _: x):
            result = x.exp()  # saves its result
            assert saved.among(result)
            del result
            others = [torch.empty(100_000) for _ in range(3)]
        assert not any(map(saved.among, others))


def test_what_cannot_stand_alone_is_fused() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), AddOne(),
        nn.Conv1d(2, 2, 1), nn.Identity(), nn.Linear(4, 4),
    )  # fmt: skip
    chain = remat.profile(model, torch.randn(3, 3, 4), small=0.0)
    assert chain.layout is not None and chain.layout.modules == (3, 3, 2, 1)
    assert chain.names == ("0..2", "3..5", "6..7", "8", "loss")


def test_stages_too_small_to_matter_are_fused() -> None:
    model = nn.Sequential(
        nn.Tanh(), nn.Linear(900, 900), nn.Linear(900, 1), nn.Tanh(), nn.Linear(1, 900), nn.Linear(900, 900)
    )
    sample = torch.randn(1000, 900)
    for _ in range(3):  # told from what they have to do, not from how long they took
        chain = remat.profile(model, sample, small=0.3)
        assert chain.layout is not None and chain.layout.modules == (5, 1)
    fine = remat.profile(model, sample, small=0.0)
    assert fine.layout is not None
    # Linear and Tanh belong together in any case: nobody saves what passes between them.
    assert fine.layout.modules == (1, 1, 2, 1, 1)


class Concatenated(nn.Module):
    """A residual block whose layers see a copy of its input, which therefore no backward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(torch.cat([x[:, :32], x[:, 32:]], dim=1))


class Convolved(nn.Module):
    """A residual block of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["as it is", "bfloat16", "float16"])
@pytest.mark.parametrize(("make", "shape"), [(Concatenated, (256, 64)), (Convolved, (4, 8, 16, 16))])
def test_blocks_stay_stages_where_no_backward_keeps_their_input(
    make: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    """Else a network of such blocks, or of any under autocast, would be one stage, of which nothing can be freed."""
    model, sample = nn.Sequential(*(make() for _ in range(6))), torch.randn(shape)
    state = copy.deepcopy(model.state_dict())

    def left_by(module: nn.Module) -> list[torch.Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        module(sample).float().square().mean().backward()
        return [*(parameter.grad.clone() for parameter in model.parameters()), *map(torch.clone, model.buffers())]

    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        chain = remat.profile(model, sample)
        assert chain.layout is not None and chain.layout.modules == (1,) * 6
        least, most = remat.minimum_budget(chain), chain.store_all_bytes
        assert least < 0.7 * most
        plain = left_by(model)
        for limit in (least, (least + most) // 2):
            schedule = remat.solve(chain, limit)
            assert remat.run(model, sample, schedule, repeats=1).peak_bytes <= limit
            assert_same(left_by(remat.apply(model, schedule)), plain)


@pytest.mark.parametrize("make", [models.densenet121, models.resnet34], ids=["DenseNet-121", "ResNet-34"])
def test_networks_of_the_papers_have_a_stage_for_each_block(make: Callable[..., nn.Sequential]) -> None:
    model = make()
    blocks = sum(name.startswith(("layer", "block")) for name, _ in model.named_children())
    chain = remat.profile(model, torch.randn(1, 3, 64, 64), estimate=True, device="h100", options=False)
    assert chain.length >= blocks


class Inside(nn.Module):
    """Works on a tensor of another layout, or of a batch at once, or by an operator of one's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "vmap":
            return torch.vmap(torch.sin)(y)
        if self.kind == "jagged":
            nested = torch.nested.nested_tensor([each.detach() for each in y], layout=torch.jagged)
            return y + nested.values().reshape(y.shape)
        if self.kind == "mkldnn":
            return y + y.detach().to_mkldnn().to_dense()
        layouts = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}
        return y + layouts[self.kind](y.detach()).to_dense()


@pytest.mark.filterwarnings("ignore:.*depends on the data")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "jagged", "mkldnn", "vmap"])
def test_modules_are_probed_whatever_they_work_on(kind: str) -> None:
    model = nn.Sequential(*(Inside(kind) for _ in range(3)))
    chain = remat.profile(model, torch.randn(8, 16))
    assert chain.layout is not None and chain.layout.modules == (1, 1, 1)


def test_marks() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4)
    )
    chain = remat.profile(model, torch.randn(6, 4), small=0.0)
    assert chain.layout is not None and chain.layout.modules == (1, 2, 1, 1)  # nobody saves the input of a dropout
    assert chain.draws_random == (False, True, False, False, False)
    assert chain.changes_buffers == (False, False, True, False, False)
    assert [size == 0 for size in chain.grad_bytes] == [True, True, False, False, False, True]
    assert chain.bwd_seconds[0] == 0 and chain.bwd_seconds[1] > 0
    assert chain.reserve_bytes > 0
    chain = remat.profile(model.eval(), torch.randn(6, 4), small=0.0)
    assert not any(chain.draws_random) and not any(chain.changes_buffers)


def test_the_loss_is_the_last_stage() -> None:
    model, sample, target = wide(), torch.randn(50, 30), torch.randint(0, 300, (50,))
    chain = remat.profile(model, sample, loss=lambda out: nn.functional.cross_entropy(out, target), small=0.0)
    assert chain.act_bytes[-1] == 4 and chain.saved_bytes[-1] >= 50 * 300 * 4
    assert chain.fwd_seconds[-1] > 0 and chain.bwd_seconds[-1] > 0
    free = remat.profile(model, sample, small=0.0)
    assert (free.act_bytes[-1], free.saved_bytes[-1], free.fwd_seconds[-1], free.bwd_seconds[-1]) == (0, 0, 0, 0)


def test_the_model_is_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LSTM(8, 8), First(), nn.Linear(8, 2))
    model[1].eval()
    sample = torch.randn(6, 8)
    model(sample).sum().backward()
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(calls.append)
        parameter.register_post_accumulate_grad_hook(calls.append)
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    parameters, buffers = list(model.parameters()), list(model.buffers())
    flags = [part.training for part in model.modules()]
    state, copied = torch.get_rng_state(), sample.clone()

    chain = remat.profile(model, sample)
    remat.run(model, sample, remat.solve(chain, remat.minimum_budget(chain)), baseline=True)

    assert_same(list(before.values()), list(model.state_dict().values()))
    assert all(a is b for a, b in zip(gradients, (p.grad for p in model.parameters()), strict=True))
    assert_same(values, gradients)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert flags == [part.training for part in model.modules()]
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(sample, copied)
    assert calls == []
    assert [id(weight) for weight in model[3]._flat_weights] == [id(p) for p in model[3].parameters()]


class First(nn.Module):
    def forward(self, pair: tuple) -> torch.Tensor:
        return pair[0]


def test_an_error_in_a_stage_leaves_the_model_as_found() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), Broken())
    sample = torch.randn(3, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="broken"):
        remat.profile(model, sample)
    assert_same(list(before.values()), list(model.state_dict().values()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state) and not torch.autograd._profiler_enabled()


def test_tied_parameters_stay_tied_under_aliases() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    with aliased_parameters([first, second]):
        assert first.weight is second.weight
        assert first.weight.data_ptr() == second.weight.data_ptr()
    assert first.weight is second.weight


def test_a_first_module_in_place_on_the_models_input() -> None:
    sample = torch.randn(3, 4)
    copied = sample.clone()
    with pytest.raises(UnsupportedModel, match=r"module '0' works in place on the model's input.*inplace=False"):
        remat.profile(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), sample)
    flat = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match="works in place on the model's input"):
        remat.profile(flat, sample)
    assert torch.equal(sample, copied)


def test_profiling_never_holds_the_whole_models_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty layers: a step that stores everything peaks several times higher than the whole of `profile`, which runs
    none where memory is short."""
    monkeypatch.setattr(whole_steps, "free_bytes", lambda device: 30 * 2**20)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30)))
    sample = torch.randn(1000, 64)
    # The profiler cannot be nested, so memory is watched from outside of it: as live tensors, at two modules.
    seen: SimpleQueue[int] = SimpleQueue()  # which is not put back, as a list would be

    def live() -> int:
        tensors = (f for f in gc.get_objects() if type(f) is torch.Tensor and f.device.type == "cpu")
        storages = {
            storage._cdata: storage for storage in (t.untyped_storage() for t in tensors if t.layout == torch.strided)
        }
        return sum(storage.nbytes() for storage in storages.values() if has_memory(storage))

    def has_memory(storage: torch.UntypedStorage) -> bool:
        try:
            storage.data_ptr()
        except RuntimeError:  # of what a replay in part skips
            return False
        return True

    chain = remat.profile(model, sample)
    gc.collect()
    before = live()
    for position in (15, 29):
        model[position].register_forward_hook(lambda module, args, output: seen.put(live() - before))
    remat.profile(model, sample)
    assert 0 < max(seen.get() for _ in range(seen.qsize())) < store_all_peak(chain) / 3


class Views(nn.Module):
    """Two tensors of one memory."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, y.flatten()


def test_memory_that_two_tensors_share_counts_once() -> None:
    sample = torch.randn(4000, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Views())
    chain = remat.profile(model, sample, small=0.0)
    assert max(chain.act_bytes) == sample.nbytes
    schedule = remat.solve(chain, remat.minimum_budget(chain))
    measured = remat.run(model, sample, schedule, repeats=1).peak_bytes
    assert measured <= schedule.budget_bytes <= 1.02 * measured


class Counts(nn.Module):
    """Writes to a buffer much larger than what it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(300_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.layer(x).tanh()


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_buffers_larger_than_activations_are_in_the_limit() -> None:
    """A recomputation works on copies of the buffers that a stage changes, and a backward may keep them."""
    normalised = (part for _ in range(6) for part in (nn.Linear(32, 4000), nn.BatchNorm1d(4000), Narrow()))
    for model in (nn.Sequential(*normalised), nn.Sequential(*(Counts() for _ in range(6)))):
        sample = torch.randn(4, 32)
        chain = remat.profile(model, sample, small=0.0, loss=mean_square)
        least, most = remat.minimum_budget(chain, "recompute_all"), store_all_peak(chain)
        for budget in (least, (least + most) // 2, most):
            schedule = remat.solve(chain, budget, "recompute_all" if budget == least else "persistent")
            report = remat.run(model, sample, schedule, repeats=1, loss=mean_square)
            assert report.peak_bytes <= budget
            if budget == least:
                assert report.recomputations > 0
                assert report.peak_bytes >= 0.75 * least  # a copy more is counted where one is saved


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (32, -1)).tanh().mean(2)


@pytest.mark.parametrize("in_a_row", [True, False])
def test_torchscript_is_refused_by_plans_and_trains_under_dtr(in_a_row: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
        scripted = [torch.jit.trace(each, torch.randn(8, 16)) for each in blocks]
        return nn.Sequential(*scripted) if in_a_row else nn.ModuleDict({"one": scripted[0], "two": blocks[1]})

    model, sample = made(), torch.randn(8, 16)
    with pytest.raises(UnsupportedModel, match=r"(0|one) is TorchScript.*remat\.DTR"):
        remat.fit(model, sample, 0.5, quiet=True)
    with pytest.raises(UnsupportedModel, match="is TorchScript"):
        remat.find_chain(model, sample)
    if in_a_row:
        expected = train_step(made(), sample)
        with remat.DTR(budget="100KiB"):
            found = train_step(model, sample)
        assert_same(expected, found)


def test_a_single_stage() -> None:
    model, sample = nn.Sequential(nn.Linear(5, 5)), torch.randn(2, 5)
    chain = remat.profile(model, sample)
    assert chain.length == 2
    schedule = remat.solve(chain, remat.minimum_budget(chain))
    assert str(schedule) == "F_all1 F_all2 B2 B1"
    assert remat.run(model, sample, schedule).peak_bytes <= simulate(chain, schedule).peak_bytes


def test_progress_is_told() -> None:
    told = []
    remat.profile(wide(), torch.randn(5, 30), progress=lambda what, done, total: told.append((what, done, total)))
    assert {what for what, _, _ in told} == {
        "probing stages",
        "checking gradients",
        "measuring memory",
        "measuring time",
        "finding parts to keep",
        "timing whole steps",
    }
    assert all(0 <= done <= total for _, done, total in told)
    measuring = [(done, total) for what, done, total in told if what != "probing stages"]
    assert measuring == sorted(measuring) and len({total for _, total in measuring}) == 1  # one count for all passes


def test_what_is_garbage_is_not_freed_by_chance_while_memory_is_measured() -> None:
    """What was measured at the time would seem smaller than it is."""

    class Littering(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if gc.isenabled() and self.calls % 2:
                cycle: list[object] = [torch.empty(2**20)]
                cycle.append(cycle)
            elif gc.isenabled():
                gc.collect()
            return super().forward(x)

    sample = torch.randn(4, 8)
    expected = remat.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), sample, small=0.0)
    found = remat.profile(nn.Sequential(Littering(8, 8), nn.Linear(8, 8)), sample, small=0.0)
    assert gc.isenabled()
    for name in ("saved_bytes", "fwd_overhead_bytes", "save_overhead_bytes", "bwd_overhead_bytes", "reserve_bytes"):
        assert getattr(found, name) == getattr(expected, name), name


def _by_an_executor(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _by_a_pool(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPool(1) as pool:
        return pool.apply(work)


def _by_a_thread(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class _InAThread(nn.Module):
    """Computes half of what it does in a thread of its own."""

    def __init__(self, by: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.by = nn.Linear(8, 8), nn.Linear(8, 8), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by(lambda: self.one(x)) + self.other(x)


class _InTurns(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("by", [_by_an_executor, _by_a_pool, _by_a_thread])
@pytest.mark.parametrize("container", [nn.Sequential, _InTurns])
def test_memory_of_threads_is_said_not_to_be_counted(container: Callable[..., nn.Module], by: Any) -> None:
    with pytest.warns(remat.OverBudgetWarning, match="computes in threads of its own"):
        remat.profile(container(*(_InAThread(by) for _ in range(3))), torch.randn(4, 8))


def test_threads_that_compute_nothing_are_not_mentioned() -> None:
    class Logs(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = Thread(target=time.sleep, args=(0,))
            thread.start()
            thread.join()
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.OverBudgetWarning)
        remat.profile(nn.Sequential(Logs(8, 8), Logs(8, 8)), torch.randn(4, 8))
