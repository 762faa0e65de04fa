"""Patches for libraries that check for fake tensors and then behave differently from training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_in_training() -> Iterator[None]:
    """Inside, transformers takes the path of real tensors: for fake ones it makes masks that training does without."""
    module = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if module is None or before is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = before  # type: ignore[attr-defined]
