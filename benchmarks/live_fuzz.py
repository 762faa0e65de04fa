"""Random programs under DTR at three budgets: equal bits, and within the budget by the allocator's own count.

    python -m benchmarks.live_fuzz --programs 600

Each program is run plainly, twice without a limit (which is how scratch memory is learned), and then at shares of what
that took. Outcomes: "pass"; "said", it went over or did not fit and the report, a warning or an error says so, and the
budget that an error names works; "bits", "silent" (above the budget, and nothing says so), "raw" (an error that is none
of remat's).
"""

from __future__ import annotations

import argparse
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.keeping import RESULTS, write
from remat.runtime.meter import MemoryMeter

ROWS, WIDTH = 48, 64
SHARES = (0.9, 0.7, 0.5)
SLACK = 2048  # bytes: numbers that Python hands to operators are tensors too


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = x.detach() * 0 + 2
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor + 0 * x


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm, self.conv = nn.BatchNorm1d(WIDTH), nn.Conv2d(1, 3, 3, padding=1)
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRUCell(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(50, WIDTH)


Operation = Callable[[Modules, Tensor, Tensor], Tensor]


def _slices(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[::2].mul_(0.5)
    z[1:5, 3:9] += y[1:5, 3:9].detach()
    z.t()[2].fill_(0.25)
    return z


def _puts(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    index = torch.arange(ROWS - 1, -1, -1)
    z = torch.index_put(x, (index[:7],), y[:7].detach(), accumulate=True)
    z = z.scatter_add(0, index[:, None].expand(-1, WIDTH), y)
    return torch.where(z > 1, torch.ones(()), z).scatter(1, torch.zeros(ROWS, 1, dtype=torch.long), 0.5)


def _hooked(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    z = x * y
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient * 0.5)
    return z.tanh()


def _inner(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((m.linear(z).tanh() * y.detach()).sum(), z, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), z)
    return y + second.detach()


def _branch(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    count = 0
    while float(x.detach().abs().mean().item()) > 0.4 and count < 3:
        x, count = x * 0.6 + y * 0.1, count + 1
    return x if bool((x.detach().sum() > 0).item()) else x - y


def _complex(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    z = torch.fft.rfft(x, dim=-1)
    return (
        torch.fft.irfft(z * z.conj(), n=WIDTH, dim=-1) * 0.01
        + torch.view_as_complex(torch.stack([x, y], -1)).conj().imag
    )


def _empty(m: Modules, x: Tensor, y: Tensor) -> Tensor:
    none = x[:0] @ m.linear.weight
    return torch.cat([x, none, y[:0]]) + none.sum()


OPERATIONS: dict[str, Operation] = {
    "arithmetic": lambda m, x, y: (x * 0.5 + y).div(1.5) - x.mean(),
    "linear": lambda m, x, y: functional.gelu(m.linear(x)) + y,
    "layer norm": lambda m, x, y: m.norm(x + y),
    "batch norm": lambda m, x, y: m.batch_norm(x),
    "conv": lambda m, x, y: m.conv(x[None, None]).mean(1)[0] + y,
    "channels last": lambda m, x, y: m.conv(x[None, None].to(memory_format=torch.channels_last)).amax(1)[0] * 0.3,
    "lstm": lambda m, x, y: m.lstm(x[None])[0][0],
    "gru": lambda m, x, y: m.gru(x, y),
    "attention": lambda m, x, y: m.attention(x[None], y[None], y[None], need_weights=False)[0][0],
    "dropout": lambda m, x, y: functional.dropout(x, 0.3) + torch.rand_like(y) * 0.1,
    "slices": _slices,
    "puts": _puts,
    "split": lambda m, x, y: torch.cat([part * k for k, part in enumerate(x.split(13))]) + torch.stack([x, y]).sum(0),
    "sort": lambda m, x, y: x.sort(dim=-1).values + y.topk(WIDTH, dim=-1).values,
    "einsum": lambda m, x, y: torch.einsum("ij,kj->ik", x, y) @ y * 0.01,
    "masks": lambda m, x, y: x.masked_fill(y.detach() > 0.5, 0.1) + x[x.detach() > 0].mean(),
    "lookup": lambda m, x, y: m.embedding(x.detach()[:, 0].abs().mul(7).long() % 50) * 0.1 + x,
    "half": lambda m, x, y: (x.bfloat16() @ y.bfloat16().t()).float()[:, :1] * 0.1 + x.double().sin().float(),
    "complex": _complex,
    "custom": lambda m, x, y: _Doubling.apply(x).tanh(),
    "checkpoint": lambda m, x, y: checkpoint(
        lambda a, b: functional.dropout(torch.tanh(m.linear(a) * b), 0.2), x, y, use_reentrant=False
    ),
    "hook": _hooked,
    "inner gradients": _inner,
    "branch": _branch,
    "no gradients": lambda m, x, y: y + torch.no_grad()(lambda: (x.exp().clamp(max=3) @ m.linear.weight) * 0.1)(),
    "empty": _empty,
    "views": lambda m, x, y: x.reshape(WIDTH, ROWS).t()[:, :WIDTH].contiguous().view(ROWS, WIDTH) + y.flip(0),
    "softmax": lambda m, x, y: torch.log_softmax(x, -1) * 0.1 + y.cumsum(0) * 0.01,
    "numpy": lambda m, x, y: x * float(y.detach().numpy().mean()),
}


def program_of(seed: int) -> list[tuple[str, int, int]]:
    chance = random.Random(seed)
    return [
        (chance.choice(sorted(OPERATIONS)), chance.randrange(8), chance.randrange(8))
        for _ in range(chance.randint(4, 12))
    ]


def run(modules: Modules, steps: list[tuple[str, int, int]], sample: Tensor) -> list[Tensor]:
    """A forward by these steps and a backward; returns all that they leave behind."""
    torch.manual_seed(3)
    pool = [sample, sample * 0.5 + 0.1]
    for name, i, j in steps:
        made = OPERATIONS[name](modules, pool[i % len(pool)], pool[j % len(pool)])
        pool = [*pool, made][-5:]
    loss = sum(tensor.square().mean() for tensor in pool)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [loss.detach(), torch.rand(2)]


def left_by(modules: Modules, made: list[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad.clone() for parameter in modules.parameters() if parameter.grad is not None]
    return [*made, *gradients, *(buffer.clone() for buffer in modules.buffers())]


def fresh(state: dict[str, Tensor]) -> Modules:
    modules = Modules()
    modules.load_state_dict(state)
    for parameter in modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return modules


def judge(seed: int) -> tuple[list[str], str]:
    """An outcome for each budget, and what was seen of bad ones."""
    steps, state = program_of(seed), Modules().state_dict()
    torch.manual_seed(seed)
    sample = torch.randn(ROWS, WIDTH).requires_grad_()
    sample.grad = torch.zeros_like(sample)

    def attempt(how: Any) -> tuple[list[Tensor], remat.DTR | None]:
        modules = fresh(state)
        sample.grad.zero_()
        if how is None:
            return left_by(modules, run(modules, steps, sample)), None
        with how as dtr:
            made = run(modules, steps, sample)
        return left_by(modules, made), dtr

    expected, _ = attempt(None)
    for _ in range(4):
        _, dtr = attempt(remat.DTR("1GiB", "h_dtr_eq", granularity="operator"))
    assert dtr is not None
    whole = dtr.report().peak_bytes
    outcomes, seen = [], ""
    for share in SHARES:
        outcome, text = _within(int(share * whole), attempt, expected)
        outcomes.append(outcome)
        seen += f"{share}: {text}; " if text else ""
    return outcomes, seen


def _within(  # noqa: PLR0911  # one for each outcome
    budget: int, attempt: Callable[[Any], Any], expected: list[Tensor]
) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt(
                remat.DTR(budget, "h_dtr_eq", granularity="operator")
            )  # operators that meet other forms when something is evicted
            modules_peak: list[int] = []

            class Metered(remat.DTR):
                def __enter__(self) -> remat.DTR:
                    self.meter = MemoryMeter(torch.device("cpu"), may_be_idle=True)
                    self.inside = self.meter.session()
                    self.inside.__enter__()
                    self.region = self.meter.region()
                    self.region.__enter__()
                    return super().__enter__()

                def __exit__(self, *error: Any) -> None:
                    super().__exit__(*error)
                    self.region.__exit__(*error)
                    self.inside.__exit__(*error)
                    (region,) = self.meter.regions
                    modules_peak.append(region.peak_bytes - region.start_bytes)

            found, dtr = attempt(Metered(budget, "h_dtr_eq"))
        except remat.OutOfBudget as error:
            if error.minimum is None:
                return "said", ""
            try:
                found, dtr = attempt(remat.DTR(error.minimum, "h_dtr_eq", thrash_limit=None, granularity="operator"))
            except remat.OutOfBudget as again:
                return "said", f"the least budget {error.minimum} that an error names gives {again.minimum}"
            return ("said", "") if _same(found, expected) else ("bits", "at the least budget")
        except remat.Thrashing:
            return "said", ""
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return "raw", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    if not _same(found, expected):
        return "bits", f"budget {budget}"
    said = dtr.report().outcome != "pass" or any(issubclass(one.category, remat.OverBudgetWarning) for one in caught)
    if modules_peak[0] > budget + SLACK and not said:
        return "silent", f"{modules_peak[0]} within {budget}, reported {dtr.report().peak_bytes}"
    return ("said", "") if said else ("pass", "")


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    bad: list[dict[str, object]] = []
    for seed in range(options.first, options.first + options.programs):
        outcomes, seen = judge(seed)
        counts.update(outcomes)
        if seen:
            bad.append({"program": seed, "outcomes": outcomes, "seen": seen})
            print(seed, outcomes, seen, flush=True)
        if (seed + 1) % 50 == 0:
            print(seed + 1, dict(counts), flush=True)
    if not options.dry:
        rows: list[dict[str, object]] = [{"programs": options.programs, "budgets": len(SHARES), **counts}, *bad]
        write("live_fuzz", rows, "random programs under DTR at shares of what they take without a limit")
    print(dict(counts), RESULTS / "live_fuzz.json")


if __name__ == "__main__":
    main()
