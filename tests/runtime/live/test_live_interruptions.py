"""A block of DTR that is interrupted, or ended by an error, leaves nothing behind."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import remat
from remat.runtime.dtr.core import compile_all
from remat.runtime.live import block, choosing
from remat.runtime.live.sites import sites
from support.live_programs import evicting

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def test_an_interruption_at_any_call_while_a_block_begins_or_ends_leaves_nothing_behind() -> None:
    """Python sees to signals where functions begin and where calls return; here at the n-th such place, for all n."""
    methods = [Tensor.tolist, Tensor.numpy, torch.tensor, torch.compile, threading.Thread._bootstrap_inner]  # type: ignore[attr-defined]
    compile_all()  # interpreted, the policy core has many more such places
    x, reached = torch.arange(64.0), 0
    for _ in range(4):  # nor is there to be anything to measure
        with remat.DTR("1KiB"):
            y = x + 1
            torch.full((200,), 1.0)
    for place in range(1, 10_000):
        seen = 0

        def interrupt(frame: Any, event: str, argument: Any, place: int = place) -> None:
            nonlocal seen, reached
            inside = frame
            while inside is not None and inside.f_code not in (block.Block.enter.__code__, block.Block.exit.__code__):
                inside = inside.f_back
            if inside is None or event not in ("call", "c_return"):
                return
            if event == "call" and frame.f_code is block.Block.exit.__code__:
                return  # nothing written in Python can protect that place
            seen += 1
            if seen == place:
                sys.setprofile(None)
                reached = place
                raise KeyboardInterrupt

        y = None
        sys.setprofile(interrupt)
        try:
            with remat.DTR("1KiB"):
                y = x + 1
                torch.full((200,), 1.0)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert _len_torch_dispatch_stack() == 0, place
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, place
        assert methods == [Tensor.tolist, Tensor.numpy, torch.tensor, torch.compile, threading.Thread._bootstrap_inner]  # type: ignore[attr-defined]
        assert y is None or torch.equal(y, x + 1), place
        if seen < place:
            break
    assert reached > 20
    with evicting(lambda: True):
        z = x + 1
    assert torch.equal(z, x + 1)


def test_a_block_that_an_error_ended_chooses_no_heuristic() -> None:
    x = torch.randn(64, 64)

    def block(fails: bool) -> remat.DTR:
        dtr = remat.DTR(6 * x.nbytes, costs="model")
        with dtr:
            y = x
            kept = [y := y @ x for _ in range(8)]
            if fails:
                raise ValueError
            torch.stack([each.sum() for each in kept[:2]])
            del kept
        return dtr

    sites.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError):
            block(fails=True)
        assert not any(site.heuristic for site in sites.values())
        assert block(fails=False).report().evictions
    assert any(site.heuristic for site in sites.values()) or not choosing.is_ready()
