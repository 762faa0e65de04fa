"""Models of real size on this machine's accelerator: remat beside PyTorch's own checkpointing, by the clock.

A step is what a training loop does: forward under autocast, loss, backward; parameters and their gradients lie there
before. Each row is one way: its peak above what was allocated before the step, its time over that of plain PyTorch (in
turn with it), how far its limit was kept, and whether its gradients have plain PyTorch's bits, if those repeat.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

import remat
from benchmarks.any_model import RIVALS, _images, _language
from benchmarks.keeping import Kept
from benchmarks.pairing import in_turn, quartiles
from remat.errors import RematError
from remat.runtime.accelerator import allocated_bytes, give_back, name_of
from remat.runtime.library import blocks_of
from remat.runtime.patching import COMPILED, blocks_as_written, is_compiled
from remat.runtime.planned.patched_forward import unpatched

_SHARES = (0.7, 0.5, 0.3)
_ROUNDS = 7


class Program(NamedTuple):
    """A model, its keyword arguments, and the type it computes in under autocast."""

    model: nn.Module
    inputs: dict[str, Any]
    dtype: torch.dtype | None = torch.bfloat16


def _gpt2() -> Program:
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "bos_token_id": 0, "eos_token_id": 1}
    return Program(*_language("GPT2", 16, 1024, 50257, use_cache=False, **sizes))


def _llama() -> Program:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    model, inputs = _language("Llama", 4, 2048, 32000, intermediate_size=5632, use_cache=False, **sizes)
    return Program(model.to(torch.bfloat16), inputs, None)


def _vit() -> Program:
    sizes = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return Program(*_images("ViT", 64, 224, image_size=224, patch_size=16, **sizes))


def _resnet() -> Program:
    model, inputs = _images("ResNet", 128, 224)
    inputs["pixel_values"] = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Program(model, inputs)


MODELS: dict[str, Callable[[], Program]] = {
    "GPT-2, 124 million": _gpt2,
    "Llama, 1 billion": _llama,
    "ViT-L/16": _vit,
    "ResNet-50": _resnet,
}


class _Training:
    """A program on the device, which every step leaves as it was."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.model, self.device = program.model.to(device), device
        self.inputs = {name: value.to(device) for name, value in program.inputs.items()}
        self.dtype = program.dtype
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def cast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def run(self) -> None:
        with self.cast():
            loss = self.model(**self.inputs).loss
        loss.backward()

    def now(self) -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()


class _Way:
    """Steps within something; what that takes to set up is not timed."""

    def __init__(self, training: _Training, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._training, self.around = training, around

    def __call__(self) -> None:
        self._training.run()

    def seen(self) -> tuple[int, int, list[torch.Tensor]]:
        """The peak of a step, what is reserved then beyond what was allocated before it, and its gradients."""
        training = self._training
        training.model.zero_grad(set_to_none=False)
        give_back(training.device)
        before = allocated_bytes(training.device)
        torch.accelerator.reset_peak_memory_stats()
        torch.manual_seed(7)
        with self.around():
            self()
        peak = torch.accelerator.max_memory_allocated() - before
        reserved = torch.accelerator.max_memory_reserved() - before
        gradients = [parameter.grad.clone() for parameter in training.model.parameters() if parameter.grad is not None]
        training.model.zero_grad(set_to_none=False)
        return peak, reserved, gradients


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class _Rows:
    """The ways of one model, each beside plain PyTorch."""

    def __init__(self, name: str, training: _Training) -> None:
        self._name, self._training = name, training
        self.plain = _Way(training, lambda: _as_written(training.model))
        for _ in range(2):
            with self.plain.around():
                self.plain()
        self.peak, self.reserved, self._gradients = self.plain.seen()
        self._repeats = _equal(self._gradients, self.plain.seen()[2])

    def row(self, name: str, way: _Way, limit: int | None = None, warm_up: int = 2, **more: Any) -> dict[str, Any]:
        began = self._training.now()
        for _ in range(warm_up):
            with way.around():
                way()
        more["first_steps_seconds"] = round(self._training.now() - began, 2)
        peak, reserved, gradients = way.seen()
        times = in_turn([self.plain, way], _ROUNDS, self._training.now)
        found: dict[str, Any] = {"model": self._name, "way": name, "device": name_of(self._training.device)}
        found |= {"peak_bytes": peak, "peak_over_plain": round(peak / self.peak, 4), "reserved_bytes": reserved}
        found |= {"time_over_plain": quartiles(times[1], times[0]), "plain_seconds": sorted(times[0])[_ROUNDS // 2]}
        host = in_turn([self.plain, way], _ROUNDS, time.process_time)
        found |= {"host_over_plain": quartiles(host[1], host[0])}
        if limit is not None:
            found |= {"limit_bytes": limit, "peak_over_limit": round(peak / limit, 4)}
        found |= {"bits": _equal(gradients, self._gradients) if self._repeats else "plain's own differ", **more}
        print(found, flush=True)
        return found


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Inside, it is neither planned nor compiled."""
    with unpatched(model), blocks_as_written():
        yield


@contextmanager
def _fitted(training: _Training, limit: int, **options: Any) -> Iterator[float]:
    began = training.now()
    with training.cast():
        remat.fit(training.model, training.inputs, limit, quiet=True, output_held=False, **options)
    try:
        yield round(training.now() - began, 2)
    finally:
        remat.remove(training.model)


def _of(name: str, make: Callable[[], Program], device: torch.device) -> Iterator[dict[str, Any]]:
    training = _Training(make(), device)
    rows = _Rows(name, training)
    yield rows.row("plain", rows.plain, repeats_its_bits=rows._repeats)
    limits = {f"at {share:g} of plain": int(share * rows.peak) for share in _SHARES}
    for way in RIVALS if name != "ResNet-50" else []:  # whose blocks lie in four lists
        theirs = rows.row(way.name, _Way(training, lambda way=way: way.around(training.model)))  # type: ignore[misc]
        limits[f"at the peak of {way.name}"] = theirs["peak_bytes"]
        yield theirs
    yield from _tried(f"{name}, blocks compiled", lambda: _compiled(rows, training))
    for what, limit in limits.items():
        yield from _tried(f"{name}, fit {what}", lambda limit=limit, what=what: _by_fit(rows, training, limit, what))  # type: ignore[misc]
    for share in (0.7, 0.5):
        limit = int(share * rows.peak)
        what = f"at {share:g} of plain, compile=True"
        yield from _tried(
            f"{name}, fit {what}",
            lambda limit=limit, what=what: _by_fit(rows, training, limit, what, compile=True),  # type: ignore[misc]
        )
    for share in _SHARES[:2]:
        budget = int(share * rows.peak)

        def by_calls(budget: int = budget, share: float = share) -> dict[str, Any]:
            way = _Way(training, lambda: remat.DTR(budget, thrash_limit=20))
            return rows.row(f"DTR at {share:g} of plain", way, budget, warm_up=5)

        yield from _tried(f"{name}, DTR", by_calls)


def _compiled(rows: _Rows, training: _Training) -> dict[str, Any]:
    """By PyTorch alone."""
    blocks = blocks_of(training.model)
    for block in blocks:
        block.compile()
    try:
        return rows.row("blocks compiled", _Way(training), warm_up=3)
    finally:
        for block in blocks:
            del block.__dict__[COMPILED]


def _by_fit(rows: _Rows, training: _Training, limit: int, what: str, **options: Any) -> dict[str, Any]:
    with _fitted(training, limit, **options) as seconds:
        compiled = sum(map(is_compiled, training.model.modules()))
        return rows.row(f"fit {what}", _Way(training), limit, fit_seconds=seconds, compiled_blocks=compiled)


def _tried(what: str, make: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield make()
    except (RematError, RuntimeError) as error:
        row = {"model": what, "error": f"{type(error).__name__}: {error}"[:300]}
        print(row, "\n", "".join(traceback.format_exception(error)[-4:]), flush=True)
        yield row


def on_gpu() -> None:
    """Each model by itself, since a machine that is lent may be taken back."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("on_gpu: there is no accelerator here")
        return
    warnings.simplefilter("ignore")
    kept = Kept("on_gpu", (__doc__ or "").strip())
    for name, make in MODELS.items():
        kept.part(name, lambda name=name, make=make: _of(name, make, device))  # type: ignore[misc]
        give_back(device)
