"""Networks of the papers: those as `nn.Sequential` are for `remat`'s planners, the classes for DTR, as they are."""

from remat.models.densenet import DenseNet
from remat.models.gpt import gpt
from remat.models.recurrent import LSTM
from remat.models.resnet import (
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    resnet1001,
)
from remat.models.transformer import Transformer
from remat.models.treelstm import Tree, TreeLSTM, complete_tree, parse_tree
from remat.models.unet import UNet
from remat.models.unrolled_gan import UnrolledGAN

__all__ = [
    "LSTM",
    "DenseNet",
    "Transformer",
    "Tree",
    "TreeLSTM",
    "UNet",
    "UnrolledGAN",
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
