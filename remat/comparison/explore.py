"""`explore`: a Jupyter widget with a budget slider, which shows a plan, its memory and all planners' overheads."""

from __future__ import annotations

from typing import Any

from torch import nn

from remat.chain import Chain
from remat.errors import RematError
from remat.plotting.overview import plot_chain
from remat.profiling.profile import profile
from remat.runtime.checks import Loss
from remat.solvers import minimum_budget

_STEPS = 24  # of the slider, between the least budget and storing everything
# Planners that answer at once, also for long chains.
PLANNERS = ("fit", "persistent", "revolve", "chen", "sequential")


def explore(model: nn.Module | Chain, sample: Any = None, loss: Loss | None = None, *, output_held: bool = True) -> Any:
    """A Jupyter widget: choose a budget and a planner, see the plan and its memory over time.

    The model is measured once, and nothing of it is run afterwards: the pictures are predictions, at budgets that work.

    Args:
        model: any module; or a chain that was measured before, without a sample.
        sample: as for `remat.profile`.
        loss: as for `remat.profile`.
        output_held: as for `remat.profile`.

    Raises:
        RematError: ipywidgets is not installed.
        UnsupportedModel, MeasurementError: as `remat.profile`.
    """
    try:
        from ipywidgets import Dropdown, SelectionSlider, interactive
    except ImportError as error:
        raise RematError("explore needs ipywidgets: pip install ipywidgets") from error
    chain = model if isinstance(model, Chain) else profile(model, sample, loss=loss, output_held=output_held)
    shares = SelectionSlider(options=shares_of(chain), value=1.0, description="budget", continuous_update=False)
    planners = Dropdown(options=PLANNERS, description="planner")

    def show(share: float, planner: str) -> Any:
        from IPython.display import display

        display(plot_chain(chain, share, solver=planner, strategies=PLANNERS))

    return interactive(show, share=shares, planner=planners)


def shares_of(chain: Chain) -> list[float]:
    """Budgets to choose from, as shares of what storing everything takes, from the least that works on."""
    least = minimum_budget(chain) / chain.store_all_bytes
    # Rounded up, so that the least one still works.
    return sorted({min(round(least + (1 - least) * step / _STEPS + 5e-4, 3), 1.0) for step in range(_STEPS + 1)})
