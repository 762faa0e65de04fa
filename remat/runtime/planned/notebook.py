"""How a notebook shows a model that `fit` has planned: by a sentence, with the modules folded away."""

from __future__ import annotations

import sys
from html import escape

from torch import nn

from remat.runtime.planned.patched_forward import patched_forward_of


def shown_in_a_sentence() -> None:
    """Tells the notebook that runs, if one does; nothing about the model changes for that.

    Where somebody else has said how modules are shown, it stays so.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        if nn.Module not in formatter.type_printers:
            formatter.for_type(nn.Module, html_of)


def html_of(model: nn.Module) -> str | None:
    """The sentence of a model that trains by a plan; None for any other, which is shown as ever."""
    patch = patched_forward_of(model)
    if patch is None or not patch.summary:
        return None
    modules = f"<details><summary>{type(model).__name__}</summary><pre>{escape(repr(model))}</pre></details>"
    return f"<p>{escape(patch.summary)}</p>{modules}"
