"""What an operator is given, compared in place, is what is compared when it is written down first."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from remat.runtime.calls.tape import look_of, looks_like
from remat.runtime.operators import traits_of

ADD = torch.ops.aten.add.Tensor
CAT = torch.ops.aten.cat.default
SUM = torch.ops.aten.sum.dim_IntList
BASE = torch.zeros(6, 6)
OTHER = torch.zeros(6, 6)
TENSORS = (
    *(BASE, OTHER, BASE.double(), BASE[:5], BASE.t(), BASE[1:], BASE[:, :5], BASE.int(), torch.zeros(6, 6, 1)),
    *(torch.nn.Parameter(torch.zeros(6, 6)), torch.zeros(6, 6).to_sparse()),
)
CALLS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    *((ADD, (first, second), {}) for first, second in product(TENSORS[:6], TENSORS)),
    *((ADD, (BASE, OTHER), {"alpha": alpha}) for alpha in (1, 2, 1.0)),
    *((ADD, given, {}) for given in ((BASE, 1), (BASE, 2), (BASE, 1.5), (BASE,), (BASE, OTHER, 1), (BASE, None), ())),
    *((CAT, ([*given], dim), {}) for given in (TENSORS[:2], TENSORS[:1], TENSORS[1::-1], ()) for dim in (0, 1)),
    *((SUM, (BASE, dims), {}) for dims in ([0], [1], [0, 1], None)),
    *((SUM, (BASE, [0]), {"dtype": dtype}) for dtype in (torch.float32, torch.float64)),
    (SUM, (BASE, [0], True), {}),
)


def number(tensor: torch.Tensor) -> int:
    """Of its memory: that of `BASE` is the run's own."""
    known = {BASE.untyped_storage()._cdata: 0, OTHER.untyped_storage()._cdata: 1}
    return known.get(tensor.untyped_storage()._cdata, -1) if tensor.layout == torch.strided else -1


@pytest.mark.parametrize("function", [ADD, CAT, SUM])
def test_arguments_look_like_others_where_their_looks_are_equal(function: Any) -> None:
    traits, equal = traits_of(function), 0
    calls = [(args, kwargs) for which, args, kwargs in CALLS if which is function]
    for first, second in product(calls, calls):
        look = look_of(traits, *first, number)
        is_equal = look == look_of(traits, *second, number)
        assert looks_like(look, traits, *second, number) == is_equal, (first, second)
        equal += is_equal
    assert len(calls) <= equal < len(calls) ** 2
