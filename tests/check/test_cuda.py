"""What `python -m remat.check` checks, on models that are small: where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from remat.check.checks import CHECKS, Skipped

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_on_cuda(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        CHECKS[name](torch.device("cuda"), True)
    except Skipped as reason:
        pytest.skip(str(reason))
    finally:
        torch.use_deterministic_algorithms(False)
