"""What models of libraries turn on by themselves: caches for generating, and checkpointing of their own.

Keys and values that language models keep are of no use in training, and a block that is recomputed would add its keys a
second time, so transformers' own checkpointing turns them off. Checkpointing besides a plan would recompute twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from remat.errors import UnsupportedModel


def configs_with_caches(parts: Iterable[nn.Module]) -> list[Any]:
    """Configurations of these modules that say `use_cache`, as transformers' do, each once."""
    found = {}
    for part in parts:
        if "config" not in part.__dict__ and not hasattr(type(part), "config"):
            continue  # to ask the module itself would take its `__getattr__` longer
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", None) is True:
            found[id(config)] = config
    return list(found.values())


@contextmanager
def caches_off(configs: list[Any]) -> Iterator[None]:
    """Inside, no caches are kept, where the caller does not ask for them."""
    on = [config for config in configs if config.use_cache is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


class LibrarySwitches:
    """What libraries' modules in a model may turn on by themselves: looked for once, for all of its forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._configs, self._switches = configs_with_caches(model.modules()), switches_of(model)

    def refuse_checkpointing(self) -> None:
        """Raises UnsupportedModel where one of the model's switches for that is on."""
        refuse_checkpointing(self._switches)

    def caches_off(self) -> AbstractContextManager[None]:
        """Inside, no caches are kept, where the caller does not ask for them."""
        return caches_off(self._configs)


SWITCHES = ("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing")


def switches_of(model: nn.Module) -> list[nn.Module]:
    """The modules that have a switch for checkpointing of their own, of which transformers and timm have some."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in SWITCHES)]


def refuse_checkpointing(switches: list[nn.Module]) -> None:
    """Raises UnsupportedModel where one of the switches is on."""
    for module in switches:
        if any(getattr(module, name, False) is True for name in SWITCHES):
            raise UnsupportedModel(
                f"{type(module).__name__} has its own gradient checkpointing turned on; turn it off "
                "(gradient_checkpointing_disable(), activation_checkpointing_disable() in newer versions, or "
                "set_grad_checkpointing(False); of a trainer, gradient_checkpointing=False among its arguments), so "
                "that the plan decides what to keep"
            )
