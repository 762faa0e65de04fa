"""Stages of PyTorch's own layers run again without saved state; those that something makes draw or change do not."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.runtime.calls.steady import is_steady
from support.steps import assert_same, train_step

WIDTH, ROWS = 16, 12


class Noisy(nn.Linear):
    """A layer of PyTorch's with noise on top."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(WIDTH)


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + 0.1 * torch.rand_like(weight))


def noisy(func: Any, result: Any) -> Any:
    return result + torch.rand(()) if func in (nn.functional.linear, torch.ops.aten.addmm.default) else result


class NoisyWeight(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return noisy(func, super().__torch_function__(func, types, args, kwargs or {}))


class NoisyInput(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return noisy(func, super().__torch_function__(func, types, args, kwargs or {}))


class NoisyFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return noisy(func, func(*args, **(kwargs or {})))


class NoisyOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return noisy(func, func(*args, **(kwargs or {})))


@contextmanager
def global_hook() -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output + torch.rand(()))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def other_forward_of_the_class() -> Iterator[None]:
    own = nn.Linear.forward
    nn.Linear.forward = lambda self, x: own(self, x) + torch.rand(())  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = own  # type: ignore[method-assign]


def hook_behind(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda module, args, output: output + torch.rand(WIDTH))


def hook_before(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, args: (args[0] + torch.rand(WIDTH),))


def hook_that_counts(layer: nn.Linear) -> None:
    def count(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        module.count = getattr(module, "count", 0) + 1
        return output * module.count

    layer.register_forward_hook(count)


def own_forward(layer: nn.Linear) -> None:
    layer.forward = types.MethodType(lambda self, x: type(self).forward(self, x) + torch.rand(WIDTH), layer)


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Noise())


def spectral(layer: nn.Linear) -> None:
    parametrizations.spectral_norm(layer)


def old_spectral(layer: nn.Linear) -> None:
    nn.utils.spectral_norm(layer)


def other_class(layer: nn.Linear) -> None:
    layer.__class__ = Noisy


def other_parameter(layer: nn.Linear) -> None:
    layer.weight = NoisyWeight(layer.weight.detach())


CHANGES: list[Callable[[nn.Linear], None]] = [
    hook_behind,
    hook_before,
    hook_that_counts,
    own_forward,
    parametrized,
    spectral,
    old_spectral,
    other_class,
    other_parameter,
]
ADDING = (parametrized, spectral)  # modules to what a stage consists of
SURROUNDINGS: list[Callable[[], AbstractContextManager[Any]]] = [NoisyFunctions, NoisyOperators, global_hook]
FORWARD = "F_ck1 F_none2 F_none3 F_none4 F_all5 B5 "
RECOMPUTING = FORWARD + "F_ck1 F_none2 F_none3 F_all4 B4 F_ck1 F_none2 F_all3 B3 F_ck1 F_all2 B2 F_all1 B1"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def sample() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def recomputing(model: nn.Module) -> nn.Module:
    """Trained with the model's input kept alone: what one stage makes again, the next one reads."""
    return remat.apply(model, remat.Schedule.parse(RECOMPUTING))


def test_plain_layers_are_steady() -> None:
    assert is_steady(list(layers().modules()))
    assert not is_steady([nn.Dropout()]) and not is_steady([nn.BatchNorm1d(WIDTH)]) and not is_steady([nn.RReLU()])


@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_layers(change: Callable[[nn.Linear], None], later: bool) -> None:
    plain, own = layers(), layers()
    model = recomputing(own) if later else own
    torch.manual_seed(3)
    for layer in plain:
        change(layer)
    torch.manual_seed(3)
    for layer in own:
        change(layer)
    if not later:
        model = recomputing(own)
    elif change in ADDING:
        with pytest.raises(remat.PlanMismatch, match="apply it again"):
            model(sample())
        model = recomputing(own)
    for step in range(3):
        assert_same(train_step(plain, sample()), train_step(model, sample()), f"step {step}")


@pytest.mark.parametrize("ends", ["with the step", "with the forward"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS, ids=lambda each: each.__name__)
def test_surroundings_that_draw(surroundings: Callable[[], AbstractContextManager[Any]], ends: str) -> None:
    plain, model = layers(), recomputing(layers())
    for _ in range(2):
        expected, found = (step_in(surroundings, ends, each) for each in (plain, model))
        assert_same(expected, found)


def test_another_forward_of_the_class() -> None:
    step = "with the step"  # a forward of a class that is changed back before the backward cannot be known
    expected, found = (step_in(other_forward_of_the_class, step, each) for each in (layers(), recomputing(layers())))
    assert_same(expected, found)


def step_in(surroundings: Callable[[], AbstractContextManager[Any]], ends: str, module: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    with surroundings():
        loss = module(sample()).square().mean()
        if ends == "with the step":
            loss.backward()
    if ends == "with the forward":
        loss.backward()
    return [loss.detach(), *(each.grad for each in module.parameters() if each.grad is not None), torch.get_rng_state()]


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_come_and_go_between_forward_and_backward(hook: str) -> None:
    def step(module: nn.Module, own: nn.Sequential) -> list[Tensor]:
        torch.manual_seed(7)
        first = getattr(own[1], hook)(changes)
        loss = module(sample()).square().mean()
        first.remove()
        second = getattr(own[2], hook)(changes)
        loss.backward()
        seen.append(len(own[1]._forward_hooks) + len(own[1]._forward_pre_hooks))
        second.remove()
        seen.append(len(own[2]._forward_hooks) + len(own[2]._forward_pre_hooks))
        return [loss.detach(), *(each.grad for each in own.parameters() if each.grad is not None)]

    def changes(module: nn.Module, args: tuple[Tensor], output: Any = None) -> Any:
        return (args[0] + torch.rand(WIDTH),) if output is None else output + torch.rand(WIDTH)

    seen: list[int] = []
    plain, own = layers(), layers()
    model = recomputing(own)
    for _ in range(2):
        assert_same(step(plain, plain), step(model, own))
    assert not any(seen)


def test_a_hook_that_removes_itself() -> None:
    def noise_once(module: Any, args: Any, output: Tensor) -> Tensor:
        module.handle.remove()
        return output + torch.rand(WIDTH)

    plain, own = layers(), layers()
    model = recomputing(own)
    for _ in range(2):
        for layer in (plain[1], own[1]):
            layer.handle = layer.register_forward_hook(noise_once)
        assert_same(train_step(plain, sample()), train_step(model, sample()))
        assert not own[1]._forward_hooks


def test_inputs_that_draw() -> None:
    plain, model = layers(), recomputing(layers())
    for _ in range(2):
        expected, found = (train_step(each, sample().as_subclass(NoisyInput)) for each in (plain, model))
        assert_same(expected, found)
