"""Estimates: of a model that is never computed, for a device that need not be there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import remat
from remat.devices import BY_ARITHMETIC, DEVICES, Device, device_named
from remat.errors import InvalidFile, RematError, UnsupportedModel
from remat.estimation import calibration
from remat.estimation.kernels import Kernels
from remat.estimation.roofline import Roofline, kind_of
from remat.estimation.world import World
from remat.formatting import format_bytes
from remat.profiling import whole_steps
from remat.runtime.meter import MemoryMeter
from remat.simulation import store_all_peak
from remat.training import estimate as estimate_module
from remat.training.estimate import static_bytes
from support.live_models import allocate_gradients
from support.unit_blocks import left_by

_EXACT = ("act_bytes", "saved_bytes", "grad_bytes", "draws_random", "changes_buffers", "fixed", "names")
Made = tuple[nn.Module, Any]


def _language(model: str, config: str, **options: Any) -> Made:
    torch.manual_seed(0)
    found = getattr(transformers, model)(getattr(transformers, config)(vocab_size=300, **options)).train()
    tokens = torch.randint(0, 300, (2, 32))
    return found, {"input_ids": tokens, "labels": tokens}


def _images() -> Made:
    torch.manual_seed(0)
    return remat.models.resnet18(), torch.randn(2, 3, 64, 64)


def _vgg() -> Made:
    blocks = [
        nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(inplace=True))
        for width in (8, 16, 32)
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 7, padding=3), *blocks, nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 10)), (
        torch.randn(2, 3, 32, 32)
    )


def _encoder() -> Made:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(2, 16, 32)


MODELS: dict[str, Callable[[], Made]] = {
    "gpt": lambda: (
        remat.models.gpt(vocabulary=200, width=32, heads=4, depth=4, context=32),
        torch.randint(0, 200, (2, 32)),
    ),
    "resnet18": _images,
    "convolutions": _vgg,
    "encoder": _encoder,
    "gpt2": lambda: _language(
        "GPT2LMHeadModel", "GPT2Config", n_layer=4, n_embd=32, n_head=4, bos_token_id=0, eos_token_id=1
    ),
    "llama": lambda: _language(
        "LlamaForCausalLM",
        "LlamaConfig",
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "mixtral": lambda: _language(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    ),
    "t5": lambda: _language(
        "T5ForConditionalGeneration",
        "T5Config",
        num_layers=2,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        decoder_start_token_id=0,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_that_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: of each stage, and the peaks of plans, never below and within 2 %."""
    # Of plans of the same times, since both try some for what they take beyond their prediction.
    monkeypatch.setattr(whole_steps, "is_worth_it", lambda chain, device: False)
    model, sample = MODELS[name]()
    measured = remat.profile(model, sample, small=0.0, options=False)
    before = torch.get_rng_state()
    found = remat.profile(model, sample, small=0.0, estimate=True, options=False)
    assert torch.equal(torch.get_rng_state(), before)
    for field in _EXACT:
        ours, theirs = getattr(found, field), getattr(measured, field)
        if field == "saved_bytes":  # numbers that PyTorch makes tensors of
            assert all(abs(one - other) <= 64 for one, other in zip(ours, theirs, strict=True))
        else:
            assert ours == theirs, field
    assert found.layout is not None and measured.layout is not None
    assert (found.layout.calls, found.layout.modules) == (measured.layout.calls, measured.layout.modules)
    for peak in (store_all_peak, remat.minimum_budget):
        assert peak(measured) <= peak(found) <= 1.02 * peak(measured)
    own = [seconds for seconds, fixed in zip(found.fwd_seconds, found.fixed, strict=True) if not fixed]
    assert all(seconds > 0 for seconds in own[:-1])  # the last is the loss


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_a_plan_of_an_estimate_is_carried_out() -> None:
    """On the model itself: bits equal plain PyTorch's, and the peak is within the limit."""
    model, sample = MODELS["gpt"]()
    model.train()
    chain = remat.profile(model, sample, small=0.0, estimate=True, loss=_loss)
    allocate_gradients(model)
    planned = copy.deepcopy(model)
    limit = (2 * remat.minimum_budget(chain) + store_all_peak(chain)) // 3
    remat_model = remat.apply(planned, remat.solve(chain, limit))

    def step(running: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        _loss(running(sample)).backward()
        return left_by(running)

    plain = step(model)
    assert all(map(torch.equal, plain, step(remat_model)))
    meter = MemoryMeter(torch.device("cpu"))
    with meter.session(), meter.region():
        step(remat_model)
    assert meter.regions[0].peak_bytes <= limit


def test_replays_take_time_of_python() -> None:
    """On a CPU, which waits for it; a GPU has been given work ahead."""
    model, sample = MODELS["gpt"]()
    here, there = (remat.profile(model, sample, estimate=True, device=device) for device in ("cpu", "h100"))
    for chain, least in ((here, 2e-4), (there, 0.0)):
        found = [option.replay_seconds for options in chain.options for option in options]
        assert found and min(found) > least
    assert min(option.replay_seconds for options in there.options for option in options) < 2e-4


def test_nothing_is_computed() -> None:
    """Neither parameters nor activations are ever in memory; the model may be on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2**14, 2**14), nn.GELU()) for _ in range(6)))
    sample = torch.empty(2**14, 2**14, device="meta")
    meter = MemoryMeter(torch.device("cpu"), may_be_idle=True)
    with meter.session(), meter.region():
        chain = remat.profile(model, sample, device="h100", estimate=True)
    assert meter.regions[0].peak_bytes < 2**20
    assert chain.act_bytes[0] == 4 * 2**28
    assert chain.saved_bytes[0] >= 2 * 4 * 2**28
    assert chain.fwd_seconds[1] > 2 * 2**42 / 100e12  # a product of three such matrices, at what an H100 can do


def test_the_model_is_left_as_it_is() -> None:
    """Training continues; not even versions of parameters and buffers have changed."""
    model, sample = MODELS["convolutions"]()
    model.train()
    before = {name: (value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    remat.profile(model, sample, estimate=True, device="l4")
    for name, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, before[name][0]) and value._version == before[name][1]
        assert value.grad is None and type(value) is not torch._subclasses.fake_tensor.FakeTensor
    model(sample).sum().backward()


# What CUDA does otherwise --------------------------------------------------------------------------------------------


def test_sizes_on_cuda() -> None:
    """Granules of 512 bytes; dropout keeps a mask of one byte an element, where the CPU keeps numbers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
    model.train()
    sample = torch.randn(300, 7)
    here = remat.profile(model, sample, estimate=True, small=0.0, options=False)
    there = remat.profile(model, sample, estimate=True, small=0.0, options=False, device="cuda:a100")
    assert all(size % 512 == 0 for size in (*there.act_bytes, *there.saved_bytes, *there.bwd_overhead_bytes))
    whole, granules = 300 * 7 * 4, 17 * 512  # 8,400 bytes
    assert here.act_bytes[1] == whole and there.act_bytes[1] == granules
    assert here.saved_bytes[0] - whole == whole  # the noise; tanh keeps its result, which is the activation
    assert there.saved_bytes[0] - granules == 5 * 512  # the mask, 2,100 bytes
    assert there.layout is not None and there.layout.inputs == ("float32[300, 7] cuda",)


@pytest.mark.parametrize(
    ("dtype", "masked", "saved"),
    [
        (torch.bfloat16, False, {"out": 2, "softmax": 4}),
        (torch.float32, False, {"out": 4, "softmax": 4}),
        (torch.float32, True, {"out": 4, "softmax": 4, "mask": 4}),
    ],
)
def test_attention_on_cuda(dtype: torch.dtype, masked: bool, saved: dict[str, int]) -> None:
    """Flash attention for 16 bits without a mask, else the memory-efficient one; never the product of all pairs."""
    rows, heads, length, width = 2, 4, 64, 16
    mask = torch.ones(length, length, dtype=torch.bool).tril() if masked else None

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = x.view(rows, length, 3, heads, width).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    world = World(device_named("h100"))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    sample = world.stand_in(torch.empty(rows, length, 3 * heads * width, dtype=dtype, requires_grad=True))
    with world.entered():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = Attention()(sample)
        output.sum().backward()
    assert sample.grad is not None and sample.grad.shape == sample.shape
    expected = [rows * heads * length * width * saved["out"], rows * heads * length * saved["softmax"]]
    assert all(size in kept.values() for size in expected)
    assert max(kept.values()) == sample.untyped_storage().nbytes()
    assert (length * length * saved.get("mask", 0) in kept.values()) == masked


@pytest.mark.parametrize("weights", [False, True])
def test_functions_stand_for_others_in_functions_of_python(weights: bool) -> None:
    """`functional.multi_head_attention_forward` calls attention or, where its weights are asked for, dropout."""
    rows, heads, length, width = 2, 4, 64, 32
    attention = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
    kept: list[tuple[torch.dtype, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    world = World(device_named("h100"))
    attention, sample = world.stand_in_for(attention), world.stand_in(torch.empty(rows, length, width))
    with world.entered(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(sample, sample, sample, need_weights=weights)
    pairs = rows * heads * length * length
    assert [dtype for dtype, size in kept if size == pairs and dtype != torch.bool] == [torch.float32] * 2 * weights
    assert ((torch.bool, pairs) in kept) == weights


def test_convolutions_on_cuda() -> None:
    """Which go through functions of Python that choose among others."""
    chain = remat.profile(*_images(), estimate=True, device="h100", small=0.0, options=False)
    here = remat.profile(*_images(), estimate=True, small=0.0, options=False)
    assert sum(chain.saved_bytes) == pytest.approx(sum(here.saved_bytes), rel=0.01)


def test_functions_stand_for_others_in_recomputations_too() -> None:
    """A backward runs without the modes that its forward ran under."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2)) for _ in range(5))).train()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    chain = remat.profile(Wrapped(), torch.randn(64, 32), estimate=True, device="h100", small=0.0)
    assert chain.length > 2  # the check at the end of a profile has recomputed all of it


# What cannot be known ------------------------------------------------------------------------------------------------


def test_values_of_whole_numbers_are_looked_at() -> None:
    """Masks, lengths and positions, which the sample gives; not what is computed from floats."""

    class Looks(nn.Module):
        def __init__(self, *, at_floats: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.at_floats = at_floats

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            longest = int(lengths.max())
            if (lengths[:1] > 100).all() or (self.at_floats and x.sum() > 0):
                raise AssertionError("this sample is not that long")
            x = x[:, :longest]
            for layer in self.layers:
                x = layer(x)
            return x[torch.arange(len(lengths)) < lengths.nonzero().shape[0] - 1]

    sample = (torch.randn(3, 50, 8), torch.tensor([20, 30, 7]))
    chain = remat.profile(Looks(at_floats=False), sample, estimate=True)
    assert chain.act_bytes[1] == 3 * 50 * 8 * 4  # a view of the sample
    assert set(chain.act_bytes[2:5]) == {3 * 30 * 8 * 4}
    with pytest.raises(UnsupportedModel, match="depends on values that an estimate does not compute"):
        remat.profile(Looks(at_floats=True), sample, estimate=True)


class _Masked(nn.Module):
    """PyTorch's encoder looks whether a mask is the causal one, after it has made numbers of it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.encoder(x, mask=~mask)
        return y


def test_modules_that_look_at_what_they_make_of_masks() -> None:
    sample = (torch.randn(2, 10, 16), torch.ones(10, 10, dtype=torch.bool).tril())
    chain = remat.profile(_Masked(), sample, estimate=True, small=0.0)
    assert chain.act_bytes == remat.profile(_Masked(), sample, small=0.0).act_bytes


def test_weights_that_a_forward_rescales() -> None:
    """Nobody can tell whether values have changed that are not there."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model, sample = nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), *layers), torch.randint(0, 20, (4, 5))
    measured = remat.profile(model, sample, small=0.0, options=False)
    found = remat.profile(model, sample, small=0.0, estimate=True, options=False)
    assert (found.act_bytes, found.saved_bytes) == (measured.act_bytes, measured.saved_bytes)


def test_kernels_that_cannot_be_asked() -> None:
    """What is asked of a kernel with values made up may be an error, which says nothing."""
    kernels = Kernels()
    sizes = torch.empty(3, dtype=torch.int64)
    asked = kernels.ask(torch.ops.aten.linalg_cholesky.default, [torch.empty(3, 4)], {})
    assert asked is None
    assert kernels.ask(torch.ops.aten.mm.default, [torch.empty(3, 4), torch.empty(4, 5)], {}) is not None
    assert kernels.output(torch.ops.aten.repeat_interleave.Tensor, [sizes], {}).shape == (0,)
    wide = torch.empty(2**30, device="meta")
    assert kernels.ask(torch.ops.aten.add.Tensor, [wide, wide], {}) is None  # never in memory here
    assert kernels.ask(torch.ops.aten.add.Tensor, [wide[:4].clone()] * 2, {}) is not None
    state = torch.get_rng_state()
    kernels.ask(torch.ops.aten.bernoulli.p, [torch.empty(3, 4), 0.5], {})
    assert torch.equal(torch.get_rng_state(), state)


# Devices -------------------------------------------------------------------------------------------------------------


def test_devices_have_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.001)
    found = calibration.calibrate(name="mine")
    assert all(share > 0 for share in found.efficiency.values()) and found.bytes_per_second > 1e8
    path = tmp_path / "mine.json"
    found.save(path)
    assert Device.load(path) == device_named(str(path)) == found
    assert device_named("cuda:H100") is device_named("h100") is DEVICES["h100"]
    with pytest.raises(RematError, match=r"unknown device 'h101'.*h100.*remat calibrate"):
        device_named("h101")
    path.write_text('{"remat": "device", "version": 1, "name": "x"}')
    with pytest.raises(InvalidFile, match="not a device file"):
        Device.load(path)
    with pytest.raises(RematError, match=r"not complete.*random.*missing"):
        Device("x", "cuda", 1, {"float32": 1.0}, 1.0, 0.0, 1.0, dict.fromkeys(BY_ARITHMETIC, 1.0))
    with pytest.raises(RematError, match="cannot calibrate 'meta'"):
        calibration.calibrate("meta")


def test_a_device_is_for_an_estimate() -> None:
    with pytest.raises(RematError, match="Pass estimate=True"):
        remat.profile(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2), device="h100")
    with pytest.raises(RematError, match="unknown optimizer 'adamw8'"):
        remat.estimate(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2), device="h100", optimizer="adamw8")


def test_seconds_by_the_roofline() -> None:
    """Products by arithmetic, with the rate of their type; what moves data by bandwidth; views for nothing."""
    roofline, device = Roofline(DEVICES["a100"]), DEVICES["a100"]
    left, right = (torch.empty(1024, 1024, device="meta") for _ in range(2))
    mm, add, transpose = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.t.default
    single = roofline.seconds(mm, [left, right], {}, left @ right) - device.launch_seconds
    assert single == pytest.approx(2 * 1024**3 / (19.5e12 * device.efficiency["product"]))
    half = [tensor.bfloat16() for tensor in (left, right)]
    by_half = roofline.seconds(mm, half, {}, half[0] @ half[1]) - device.launch_seconds
    assert by_half == pytest.approx(2 * 1024**3 / (312e12 * device.efficiency["product"]), rel=0.5)
    moved = roofline.seconds(add, [left, right], {}, left + right) - device.launch_seconds
    assert moved == pytest.approx(3 * left.nbytes / (device.bytes_per_second * device.efficiency["pointwise"]))
    assert roofline.seconds(transpose, [left], {}, left.t()) == 0
    kinds = {
        "convolution_backward": "convolution",
        "_scaled_dot_product_flash_attention": "attention",
        "gelu_backward": "transcendental",
        "native_layer_norm_backward": "normalisation",
        "_log_softmax": "softmax",
        "embedding_dense_backward": "indexing",
        "native_dropout": "random",
        "clone": "copy",
        "relu": "pointwise",
    }
    assert {name: kind_of(getattr(torch.ops.aten, name).default) for name in kinds} == kinds
    assert kind_of(torch.ops.aten.sum.dim_IntList) == "reduction"


# Whether it fits -----------------------------------------------------------------------------------------------------


def test_what_is_there_besides_activations() -> None:
    model, sample = MODELS["gpt2"]()
    for parameter in model.transformer.wpe.parameters():
        parameter.requires_grad_(False)
    chain = remat.profile(model, sample, estimate=True, device="h100", options=False)
    every = sum(parameter.nbytes for parameter in model.parameters())  # tied ones once
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    found = static_bytes(model, chain, optimizer="adam")
    assert (found.parameters, found.gradients, found.optimizer, found.buffers) == (every, trained, 2 * trained, buffers)
    assert found.gathered == 0 and found.total == every + 3 * trained + buffers
    assert static_bytes(model, chain, optimizer="adam-mixed").optimizer == 3 * trained  # 12 bytes for 4
    assert static_bytes(model, chain, optimizer="sgd").optimizer == 0
    spread = static_bytes(model, chain, shards=4)
    assert spread.parameters == -(-every // 4) and spread.optimizer == -(-2 * trained // 4)
    block = sum(parameter.nbytes for parameter in model.transformer.h[0].parameters())
    assert 3 * block <= spread.gathered < 3 * every


class _Two(nn.Module):
    """Its inputs have other numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + y.sum()


def _shallow() -> nn.Module:
    """For what is estimated many times."""
    return remat.models.gpt(vocabulary=200, width=32, heads=4, depth=2, context=32)


def test_what_fits_and_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device so small that only some rows do; one row more does not."""
    model, sample = _shallow(), torch.zeros(4, 32, dtype=torch.int64)
    roomy = remat.estimate(model, sample, device="l4", optimizer="sgd")
    assert roomy.fits and roomy.overhead() == 1.0
    memory = int((roomy.static.total + 5 * roomy.least_bytes) / 0.95)
    small = Device(**{**DEVICES["l4"].__dict__, "name": "small", "memory_bytes": memory})
    monkeypatch.setitem(DEVICES, "small", small)
    found = remat.estimate(model, sample, device="small", optimizer="sgd")
    rows = found.largest_batch()
    assert 10 <= rows <= 40
    for more, fits in ((0, True), (1, False)):
        other = torch.zeros(rows + more, 32, dtype=torch.int64)
        assert remat.estimate(model, other, device="small", optimizer="sgd").fits == fits
    assert str(found).startswith("fits small") and "static" in str(found) and "fits small" in found._repr_html_()
    none = remat.estimate(model, sample, device="small", optimizer="adam-mixed", shards=1)
    tiny = Device(**{**small.__dict__, "name": "tiny", "memory_bytes": none.static.parameters})
    monkeypatch.setitem(DEVICES, "tiny", tiny)
    nothing = remat.estimate(model, sample, device="tiny")
    assert not nothing.fits and nothing.largest_batch() == 0 and "does not fit" in str(nothing)


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    found = logits.flatten(0, -2)
    return torch.nn.functional.cross_entropy(found, torch.zeros(len(found), dtype=torch.int64))


def test_the_old_spelling_still_works_and_says_the_new_one() -> None:
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    with pytest.warns(DeprecationWarning, match=r"estimate\(optimiser=\) is optimizer= now; .* will go in remat 0.4"):
        found = remat.estimate(model, sample, device="h100", optimiser="momentum")
    assert found.static == remat.estimate(model, sample, device="h100", optimizer="momentum").static
    with pytest.warns(DeprecationWarning, match="StaticMemory.optimiser is optimizer now"):
        assert found.static.optimiser == found.static.optimizer


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, partial(torch.optim.SGD, momentum=0.9)]
)
def test_an_optimiser_of_the_model_is_asked(optimizer: Any) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    sample = torch.empty(8, 64, device="meta")
    here = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optim = optimizer(here.parameters(), lr=0.1)
    here(torch.randn(8, 64)).sum().backward()
    optim.step()
    state = sum(each.nbytes for own in optim.state.values() for each in own.values() if isinstance(each, torch.Tensor))
    found = remat.estimate(model, sample, device="h100", optimizer=optimizer(model.parameters(), lr=0.1))
    assert found.static.optimizer == pytest.approx(state, abs=64)
    shards = remat.estimate(model, sample, device="h100", optimizer=optimizer(model.parameters(), lr=0.1), shards=4)
    assert shards.static.optimizer == -(-found.static.optimizer // 4)


def test_what_would_make_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy by itself, on a device for which the batch is too large; and what is said holds where it is taken."""
    model, tokens = _shallow(), torch.zeros(16, 32, dtype=torch.int64)
    plain = remat.estimate(model, tokens, device="l4", optimizer="adam", loss=_cross_entropy)
    memory = int((plain.static.total + plain.least_bytes) / 0.95) - 2**16
    monkeypatch.setitem(DEVICES, "small", Device(**{**DEVICES["l4"].__dict__, "name": "small", "memory_bytes": memory}))
    found = remat.estimate(model, tokens, device="small", optimizer="adam", loss=_cross_entropy)
    remedies = dict(found.remedies())
    kinds = {name.rstrip(" 0123456789") for name in remedies}
    assert not found.fits and kinds >= {"adam-8bit", "chunk_head=True", "a batch of", "sequences of"}
    assert all(f"with {name}" in str(found) for name in remedies)
    for name, size in remedies.items():
        more: dict[str, Any] = {"optimizer": "adam"}
        rows, length = 16, 32
        if name == "adam-8bit":
            more["optimizer"] = name
        elif "shards" in name:
            more["shards"] = int(name.split()[0])
        elif name == "chunk_head=True":
            more["chunk_head"] = True
        elif name == "host_limit=":
            more["host_limit"] = "1TiB"
        elif name.startswith("sequences"):
            length = int(name.split()[-1])
        else:
            rows = int(name.split()[-1])
        sample = torch.zeros(rows, length, dtype=torch.int64)
        taken = remat.estimate(model, sample, device="small", loss=_cross_entropy, **more)
        assert taken.fits and not taken.remedies(), name
        assert taken.static.total + taken.least_bytes == size
    assert f"{format_bytes(memory)} at least" in str(found).partition("\n")[0]
    assert "no recomputation, which needs" in str(taken) or "without recomputation" in str(taken)


def test_inputs_without_a_batch() -> None:
    with pytest.raises(RematError, match="no common first dimension"):
        remat.estimate(_Two(), (torch.randn(3, 8), torch.randn(2, 8)), device="l4").largest_batch()


def test_autocast_is_that_of_the_device() -> None:
    """CUDA's keeps norms, softmax and losses in float32; the CPU's does not."""
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in range(4)]
    model, sample = torch.nn.Sequential(*blocks), torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        near, far = (remat.estimate(model, sample, device=name).chain for name in ("cpu", "h100"))
    inputs, norm, product = (32 * 64 * each for each in (4, 4, 2))  # the first norm is fused with its product
    assert far.act_bytes == (inputs, product, *(norm, product) * 3, 0)
    assert near.act_bytes == (inputs, *(product,) * 7, 0)


def test_another_question_about_the_same_costs_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another optimizer, say; a batch with other whole numbers, which may be read, is another question."""
    runs = []
    own = estimate_module.estimate_in
    monkeypatch.setattr(estimate_module, "estimate_in", lambda *args: runs.append(1) or own(*args))
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.Tanh()), torch.randint(0, 50, (4, 8))
    first = remat.estimate(model, sample, device="h100")
    second = remat.estimate(model, sample, device="h100", optimizer="sgd", shards=2)
    assert len(runs) == 1 and second.chain == first.chain and second.static.total < first.static.total
    for other in ({"device": "a100"}, {"device": "h100", "options": False}):
        remat.estimate(model, sample, **other)
    remat.estimate(model, torch.zeros_like(sample), device="h100")
    model[1].weight.requires_grad_(False)
    for _ in range(2):
        remat.estimate(model, torch.zeros_like(sample), device="h100")
    assert len(runs) == 5


def test_a_sample_with_other_numbers_in_a_list_is_another_question() -> None:
    class Some(nn.Sequential):
        def forward(self, x: torch.Tensor, rows: Any) -> torch.Tensor:
            return super().forward(x[: int(rows[0])])

    model, x = Some(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(64, 16)
    for few, many in (([8], [64]), ((8,), (64,)), (np.array([8]), np.array([64]))):
        less, more = (remat.estimate(model, {"x": x, "rows": rows}, device="h100") for rows in (few, many))
        assert less.chain.store_all_bytes < more.chain.store_all_bytes


def test_an_estimate_names_itself_where_an_argument_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"estimate\(\) got an unexpected keyword argument 'memory'"):
        remat.estimate(nn.Linear(2, 2), torch.ones(2), device="h100", memory="24GiB")
