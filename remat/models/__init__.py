"""Networks of the papers as `nn.Sequential`, ready for `remat`."""

from remat.models.gpt import gpt
from remat.models.resnet import (
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    resnet1001,
)

__all__ = [
    "gpt",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet1001",
]
