"""Keys and values that language models keep for generating: of no use in training, and grown by every run of a block.

A block that is recomputed would add its keys a second time. So does transformers' own checkpointing turn them off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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
