"""`make demo`: a GPT trains within half of its memory. One sentence, and one picture of what other limits cost.

python -m examples.within_half --out demo
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import remat
from examples.demo import language
from remat.formatting import format_bytes
from remat.plotting.style import COLOURS, new_figure

HALF = 0.5
MEASURED = (0.8, 0.65, HALF, 0.35)  # of plain PyTorch's memory
PLANNED = 40  # limits between the least and plain PyTorch's


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(prog="python -m examples.within_half", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)

    model, sample, loss = language(batch=4)
    remat.fit(model, sample, HALF, loss)  # what a training script would call; from here on the model trains within half
    loss(model(sample)).backward()
    remat.remove(model)

    chain = remat.profile(model, sample, loss=loss)
    most, least = chain.store_all_bytes, remat.minimum_budget(chain)
    plans = {share: remat.solve(chain, int(share * most)) for share in MEASURED}
    peaks = {share: remat.run(model, sample, plan, loss=loss, repeats=1).peak_bytes for share, plan in plans.items()}
    limits = [least + (most - least) * step // PLANNED for step in range(PLANNED + 1)]
    answers = remat.solvers.make_solver("persistent").solve_many(chain, limits)
    planned = [remat.simulate(chain, each) for each in answers if isinstance(each, remat.Schedule)]

    figure = new_figure(6.4, 3.8)
    ax = figure.subplots()
    ax.plot([100 * each.peak_bytes / most for each in planned], [_slower(each) for each in planned], color=COLOURS[0])
    ax.plot(
        [100 * peaks[share] / most for share in MEASURED],
        [_slower(remat.simulate(chain, plans[share])) for share in MEASURED],
        "o",
        color=COLOURS[1],
    )
    ax.plot([100], [0], "k*", markersize=11)
    ax.legend(["remat, predicted", "peaks that were measured", "plain PyTorch"], frameon=False)
    ax.set(
        xlabel="peak memory, % of plain PyTorch's",
        ylabel="extra time per step (%)",
        title="GPT of 12 blocks",
        ylim=(-3, 80),
    )
    ax.grid(alpha=0.3)
    figure.savefig(given.out / "fit.png", dpi=150)

    slower = _slower(remat.simulate(chain, plans[HALF]))
    text = (
        f"remat trained a GPT in {format_bytes(peaks[HALF])} of activations (measured) where plain PyTorch needs "
        f"{format_bytes(most)}, predicted {slower:.0f} % slower; other limits are in {given.out / 'fit.png'}"
    )
    print(text)
    return text


def _slower(report: remat.Report) -> float:
    return 100 * ((report.overhead or 1.0) - 1)


if __name__ == "__main__":
    main()
