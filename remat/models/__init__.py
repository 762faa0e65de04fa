"""A few networks to try remat with: as `nn.Sequential` for the planners, and a TreeLSTM for DTR.

Those that only the papers' tables need have moved to `benchmarks/models` of the repository.
"""

from typing import Any

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
from remat.models.treelstm import Tree, TreeLSTM, complete_tree, parse_tree

__all__ = [
    "Tree",
    "TreeLSTM",
    "complete_tree",
    "gpt",
    "parse_tree",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet1001",
]

_MOVED = {
    *("LSTM", "DenseNet", "Transformer", "UNet", "UnrolledGAN", "inception_v3"),
    *("densenet121", "densenet161", "densenet169", "densenet201", "vgg11", "vgg13", "vgg16", "vgg19"),
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from remat.utils.moved import moved

    return getattr(moved(f"remat.models.{name}", "benchmarks.models"), name)
