"""Networks of the papers: those as `nn.Sequential` are for `remat`'s planners, the classes for DTR, as they are."""

from remat.models.densenet import DenseNet, densenet121, densenet161, densenet169, densenet201
from remat.models.gpt import gpt
from remat.models.inception import inception_v3
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
from remat.models.vgg import vgg11, vgg13, vgg16, vgg19

__all__ = [
    "LSTM",
    "DenseNet",
    "Transformer",
    "Tree",
    "TreeLSTM",
    "UNet",
    "UnrolledGAN",
    "complete_tree",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "gpt",
    "inception_v3",
    "parse_tree",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet1001",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
