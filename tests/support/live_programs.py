"""Small random programs on tensors, run by plain PyTorch and under DTR with evictions forced at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.runtime.dtr import _kernels as k
from remat.runtime.live.store import FLOAT_BYTES, NUMBERS

SIDE = 4


def _sorted(x: Tensor) -> list[Tensor]:
    return list(torch.sort(x, dim=-1))


def _set_row(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1] = y[0] * 2
    z[z > 1] = 0.5
    return z


def _add_to_view(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[1:3].add_(y[:2])
    z.t()[0].mul_(0.5)
    return z


def _out(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(SIDE, SIDE)
    torch.add(x.detach(), y.detach(), out=z)
    return torch.mul(z, 2, out=torch.empty(0)) + x


def _foreach(x: Tensor, y: Tensor) -> list[Tensor]:
    made = torch._foreach_mul([x, y], 0.5)
    first, second = made[0].detach().clone(), made[1].detach().clone()
    torch._foreach_add_([first, second], [x.detach(), y.detach()], alpha=2)
    return [*made, first, second]


def _complex(x: Tensor, y: Tensor) -> Tensor:
    z = torch.view_as_complex(torch.stack([x, y], -1))
    return (z.conj() * z).imag + (z * z.conj()).real + z.conj().imag


def _branch(x: Tensor, y: Tensor) -> Tensor:
    return x + y if bool((x.detach() * y.detach()).sum() > 0) else x - 2 * y


def _until(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        if x.detach().abs().max().item() < 1:
            break
        x = x * 0.5 + y * 0.1
    return x


def _numpy(x: Tensor, y: Tensor) -> Tensor:
    return y * float(x.detach().numpy().sum()) + x.detach()[0].tolist()[0]


def _statistics(x: Tensor, y: Tensor) -> Tensor:
    mean, variance = torch.zeros(SIDE), torch.ones(SIDE)
    z = functional.batch_norm(x, mean, variance, training=True)
    return z + functional.batch_norm(y, mean, variance, training=False) + mean


def _in_place_chain(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty(SIDE, SIDE).copy_(x.detach())
    w = z.view(-1)
    for i in range(3):
        w[i : i + 8] += y.detach().reshape(-1)[:8]
    return functional.relu_(x + z)


def _kept_by_no_one(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = x.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((z * z * y.detach()).sum(), z)
    return y + gradient


def _checkpoint(x: Tensor, y: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda a, b: functional.dropout(torch.tanh(a * b), 0.5), x, y, use_reentrant=False)


def _autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ y).float() * 0.3


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": lambda x, y: torch.matmul(x, y) * 0.3,
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid in place": lambda x, y: (x + y).sigmoid_(),
    "transpose": lambda x, y: x.t(),
    "reshape": lambda x, y: x.reshape(-1)[1:].reshape(3, 5)[:, :4].sum(0) + y,
    "expand": lambda x, y: x[:1].expand(SIDE, SIDE) * y,
    "layer norm": lambda x, y: functional.layer_norm(x, (SIDE,)),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "sort": lambda x, y: _sorted(x)[0] + y,
    "max": lambda x, y: x.max(dim=0).values + y,
    "chunk": lambda x, y: torch.cat([part * i for i, part in enumerate(x.chunk(2))]) + y,
    "index": lambda x, y: x[torch.tensor([3, 1, 0, 0])] + y,
    "nonzero": lambda x, y: y + x[x.detach() > 0].sum(),
    "dropout": lambda x, y: functional.dropout(x, 0.3),
    "noise": lambda x, y: x + torch.rand_like(y) * torch.randn(SIDE, SIDE),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], x[None], dropout_p=0.2)[0],
    "autocast": _autocast,
    "rows": _set_row,
    "view in place": _add_to_view,
    "out": _out,
    "foreach": _foreach,
    "complex": _complex,
    "branch": _branch,
    "until": _until,
    "numpy": _numpy,
    "statistics": _statistics,
    "in place": _in_place_chain,
    "inner gradient": _kept_by_no_one,
    "checkpoint": _checkpoint,
}


Step = tuple[str, int, int]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=8
)


def run_program(steps: list[Step], *, after_step: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Runs the steps on a few tensors, trains on what they made, and returns all that can be looked at."""
    torch.manual_seed(3)
    parameters = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2)]
    buffer = torch.zeros(SIDE, SIDE)
    pool: list[Tensor] = [*parameters, torch.randn(SIDE, SIDE)]
    for name, i, j in steps:
        made = OPERATIONS[name](pool[i % len(pool)], pool[j % len(pool)])
        pool.extend(made if isinstance(made, list) else [made])
        pool = pool[-6:]
        buffer.mul_(0.9).add_(pool[-1].detach())
        pool[-1] = pool[-1] + buffer
        after_step()
    loss = sum((tensor * tensor).mean() for tensor in pool)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    after_step()
    penalty = loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)
    penalty.backward()
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-1, 1)
                parameter -= 0.1 * parameter.grad
    after_step()
    return [*pool, *parameters, *(p.grad for p in parameters if p.grad is not None), buffer, penalty, torch.rand(2)]


class EvictAfterEachOperator(TorchDispatchMode):
    """Entered inside a DTR block: after operators, all that can be evicted is, or what the chooser says.

    Args:
        dtr: whose block it is.
        choose: is called after each operator; whether to evict then.
    """

    def __init__(self, dtr: remat.DTR, choose: Callable[[], bool]) -> None:
        super().__init__()
        self.dtr, self.choose = dtr, choose

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.choose():
            evict_all(self.dtr)
        return result


def evict_all(dtr: remat.DTR) -> None:
    """Asks for so much memory that all must go which can."""
    block = dtr._last
    store, ledger = block._store, block.ledger
    store.settle()
    locked = sum(s.size for s in (r() for r in store.by_tensor.values()) if s and s.operator is None and not s.released)
    locked += max(store.numbers.most - NUMBERS, 0) * FLOAT_BYTES
    (tensor,) = ledger.add("pressure", 1, [], [ledger.budget - locked])
    store.consult("pressure")
    ledger.note(k.RELEASE, tensor)
    ledger.memory -= ledger.budget - locked


@contextmanager
def evicting(choose: Callable[[], bool], **options: Any) -> Iterator[remat.DTR]:
    """A DTR block with a large budget, but with evictions after operators."""
    options = {"thrash_limit": 1e6, "costs": "model", **options}
    dtr = remat.DTR("1GiB", **options)
    with dtr, EvictAfterEachOperator(dtr, choose):
        yield dtr
