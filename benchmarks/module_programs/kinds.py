"""Tensors of other kinds: complex, jagged, sparse, of other types."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn

from benchmarks.module_programs.fragments import Own, fragment, linear


@fragment("kinds")
def _complex(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    z = torch.fft.rfft(own.linear(x), dim=-1)
    product = torch.view_as_complex(torch.stack([x, x.flip(0)], -1)).conj()
    return torch.fft.irfft(z * z.conj(), n=own.width, dim=-1) * 0.01 + product.imag + (product * product.conj()).real


@fragment("kinds")
def _conj_lazily(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    z = torch.complex(own.linear(x), x).conj()
    return torch.view_as_real(z.resolve_conj()).sum(-1) + (z @ z.mH).imag.mean() + z.imag.neg()


@fragment("kinds")
def _jagged(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    count = len(x) // 3
    parts = [x[:count], x[count:]]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return torch.cat(list(own.linear(nested).sin().unbind())) + x


@fragment("kinds")
def _sparse(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    rows = torch.arange(len(x))
    values = x.detach()[:, 0].sigmoid()
    matrix = torch.sparse_coo_tensor(torch.stack([rows, rows.flip(0)]), values, (len(x), len(x)))
    return own.linear(x) + torch.sparse.mm(matrix, x)


@fragment("kinds")
def _sparse_rows(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    matrix = (x.detach() @ x.detach().t()).relu().to_sparse_csr()
    return own.linear(matrix @ x * 0.01)


def _of_double(own: Own, chance: Random) -> None:
    own.double = nn.Linear(own.width, own.width, dtype=torch.double)


@fragment("kinds", _of_double)
def _double(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return own.double(x.double()).tanh().float() + x


@fragment("kinds")
def _autocast(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.gelu(own.linear(x)) @ own.linear.weight
    return y.float() + x


@fragment("kinds")
def _half(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    return (x.bfloat16() @ own.linear.weight.bfloat16()).float().relu() + x.half().float()


@fragment("kinds")
def _expanded(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """Views of other strides and sizes than their storage has."""
    wide = x[:, None].expand(-1, 3, -1)
    return own.linear(wide).mean(1) + x.as_strided((len(x), own.width), (0, 1)) + x.unfold(0, 2, 1).sum() * 0.001


def _parameter(own: Own, chance: Random) -> None:
    linear(own, chance)
    own.scale = nn.Parameter(torch.ones(own.width))
    own.spare = nn.Parameter(torch.ones(3))  # that nobody uses


@fragment("kinds", _parameter)
def _shared(own: Own, x: Tensor, mask: Tensor) -> Tensor:
    """A weight that is used twice, once transposed, and a scale that broadcasts."""
    return nn.functional.linear(own.linear(x).tanh(), own.linear.weight.t()) * own.scale
