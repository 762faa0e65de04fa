"""A cell that ends in `fit` shows a sentence; the modules are folded away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import remat

formatters = pytest.importorskip("IPython.core.formatters")
interactive = pytest.importorskip("IPython.core.interactiveshell")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A shell of a notebook, which shows HTML."""
    shell = interactive.InteractiveShell.instance()
    shell.display_formatter.active_types = [*shell.display_formatter.active_types, "text/html"]
    yield shell
    interactive.InteractiveShell.clear_instance()


def _html(shell: object, value: object) -> str | None:
    data, _ = shell.display_formatter.format(value)  # type: ignore[attr-defined]
    return data.get("text/html")


def test_a_model_is_shown_by_how_it_trains(shell: object) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    fitted = remat.fit(model, torch.randn(256, 64), 0.9, quiet=True)
    shown = _html(shell, fitted)
    assert shown is not None and "<p>remat.fit: Sequential now trains in" in shown
    assert shown.index("<details>") > shown.index("</p>") and "GELU" in shown
    assert _html(shell, nn.Linear(2, 2)) is None
    remat.remove(model)
    assert _html(shell, model) is None


def test_how_somebody_else_shows_modules_is_left_alone(shell: object) -> None:
    shell.display_formatter.formatters["text/html"].for_type(nn.Module, lambda module: "theirs")  # type: ignore[attr-defined]
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    assert _html(shell, remat.fit(model, torch.randn(256, 64), 1.0, quiet=True)) == "theirs"
