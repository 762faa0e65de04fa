"""Modules whose attributes runs leave alone are seen to be so in little time, and fare as all others do."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.runtime.calls.attributes import Attributes
from remat.runtime.calls.objects import holds_no_graph
from remat.runtime.calls.settled import Settled
from remat.runtime.generators import held_by


class Config:
    def __init__(self, label: int) -> None:
        self.label = label


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.name, self.rate, self.none = 1000, "part", 0.5, None
        self.sizes, self.pruned, self.settings = (1, (2, "x")), [1, 2], {"a": 1}
        self.config, self.kind, self.activation = Config(0), nn.GELU, torch.relu


def _modules() -> list[nn.Module]:
    root = Part()
    root.first, root.second = Part(), Part()
    return [root, root.first, root.second]


def _changed(modules: list[nn.Module], draw: random.Random, number: int) -> None:
    """Changes an attribute of one of them in some way, the same for the same draws."""
    module = draw.choice(modules)
    name = draw.choice(["width", "name", "rate", "none", "sizes", "pruned", "settings", "config", "cache", "more"])
    value: Any = draw.choice([number, None, (number, 2), [number], {number: 1}, Config, torch.Tensor, True])
    value = torch.full((2,), float(number)) if value is torch.Tensor else Config(number) if value is Config else value
    what = draw.choice(["set", "set", "delete", "append", "tensor", "clear", "child", "flag"])
    held = vars(module).get(name)
    if what == "set":
        setattr(module, name, value)
    elif what == "delete":
        vars(module).pop(name, None)
    elif what == "append" and isinstance(held, list):
        held.append(number)
    elif what == "tensor" and isinstance(held, list):
        held.append(torch.full((2,), float(number)))
    elif what == "clear" and isinstance(held, (list, dict)):
        held.clear()
    elif what == "child" and "first" in module._modules:
        module._modules["third"] = nn.Identity()
    elif what == "flag":
        module.training = not module.training


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _look(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_look, value))
    return ("config", value.label) if isinstance(value, Config) else value


def _looks(modules: list[nn.Module]) -> list[Any]:
    plain = [{name: _look(value) for name, value in vars(each).items() if name[0] != "_"} for each in modules]
    return [(each, [*module._modules]) for each, module in zip(plain, modules, strict=True)]


def _lived(seed: int, settled: dict[int, Settled | None] | None, *, changing: bool) -> tuple[list[Any], int]:
    """How modules look at each turn of some runs, each made again; and how often one was seen to be as it was."""
    draw, modules, seen, quick = random.Random(seed), _modules(), [], 0
    for number in range(12):
        attributes = Attributes(modules, changing=changing, settled=settled)
        quick += len(attributes._settled)
        for turn in ("run", "others", "again"):
            again = draw.getstate()
            changes = draw.random() < 0.3
            if turn == "run" and changes and changing:
                _changed(modules, draw, number)
            elif turn == "others":
                attributes.ended()
                if changes:
                    _changed(modules, draw, number + 100)
            elif turn == "again":
                others = attributes.others()
                with attributes.again(others):
                    seen.append(_looks(modules))
                    if changes and changing:
                        draw.setstate(again)
                        _changed(modules, draw, number + 200)
            seen.append(_looks(modules))
    return seen, quick


@pytest.mark.parametrize("changing", [True, False])
def test_runs_meet_and_leave_what_they_would_without(changing: bool) -> None:
    quick = 0
    for seed in range(300):
        found, often = _lived(seed, {}, changing=changing)
        expected, never = _lived(seed, None, changing=changing)
        assert found == expected, seed
        assert never == 0
        quick += often
    assert quick > 1000


def test_nothing_lives_longer() -> None:
    """Objects that a module refers to no more, and tensors, which are not looked at in this way."""
    (module,), settled = [Part()], dict[int, Settled | None]()
    config = weakref.ref(module.config)
    for _ in range(3):
        Attributes([module], settled=settled).ended()
    assert settled[0] is not None and Attributes([module], settled=settled)._settled
    module.config = Config(1)
    gc.collect()
    assert config() is None
    Attributes([module], settled=settled).ended()
    module.cache = torch.ones(2)
    Attributes([module], settled=settled).ended()
    assert settled[0] is None


def test_objects_are_not_asked_what_they_are_equal_to() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

    module = nn.Linear(2, 2)
    module.odd = Odd()  # type: ignore[assignment]
    how = Settled(module, holds_no_graph)
    found = how.objects(module)
    assert found is not None and found[0] is module.odd
    module.odd = Odd()  # type: ignore[assignment]
    assert how.objects(module) is None


def test_a_generator_that_came_since_it_was_looked_for_is_looked_for() -> None:
    module = Part()
    assert not held_by([module]) and not Settled(module, holds_no_graph).may_draw
    module.generator = torch.Generator()
    assert Settled(module, holds_no_graph).may_draw and held_by([module]) == [module.generator]
    assert Settled(module, holds_no_graph).may_draw


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.scale * self.down(self.act(self.up(x)))
        return found


def test_steps_after_the_first_look_so_and_notice_what_changes_then() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(6))), torch.randn(64, 32)

    def step(scale: float) -> list[torch.Tensor]:
        model.zero_grad()
        for block in model:
            block.scale = 1.0  # type: ignore[assignment]
        loss = model(x).square().mean()
        for block in model:
            block.scale = scale  # type: ignore[assignment]
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = step(1.0)
    remat.fit(model, x, 0.5, quiet=True)
    for scale in (1.0, 1.0, 1.0, 7.0, 1.0, 0.0):
        assert all(map(torch.equal, step(scale), expected))
    remat.remove(model)
