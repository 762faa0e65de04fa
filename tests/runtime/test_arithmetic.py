"""What operators have to compute is known from shapes alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from remat.runtime.arithmetic import operations_of

_AS_ON_CUDA = ("flash", "efficient", "cudnn")


def _on_meta(heads: int) -> torch.Tensor:
    return torch.empty(2, heads, 16, 8, device="meta")


@pytest.mark.parametrize("kind", _AS_ON_CUDA)
def test_attention_with_fewer_heads_of_keys(kind: str) -> None:
    """As if each were there for all of its queries, which is how PyTorch's formula has it."""
    query, alike, fewer = _on_meta(4), _on_meta(4), _on_meta(2)
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    for operator, given in ((forward, ()), (backward, (query,))):
        expected = flop_registry[operator.overloadpacket](*given, query, alike, alike, out_val=None)
        assert operations_of(operator, (*given, query, alike, alike), {}, None) == expected
        assert operations_of(operator, (*given, query, fewer, fewer), {}, None) == expected


def test_attention_on_the_cpu() -> None:
    x = torch.empty(2, 4, 16, 8)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert operations_of(operator.default, (x, x, x), {}, None) == 2 * 2 * (2 * 4) * 16 * 16 * 8


def test_products_by_pytorch_s_formulas() -> None:
    x = torch.empty(3, 5)
    assert operations_of(torch.ops.aten.mm.default, (x, x.t()), {}, torch.empty(3, 3)) == 2 * 3 * 5 * 3
    assert operations_of(torch.ops.aten.relu.default, (x,), {}, x) == 0
