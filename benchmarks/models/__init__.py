"""Networks of the papers: those as `nn.Sequential` are for the planners, the classes for DTR, as they are."""

from benchmarks.models.densenet import DenseNet, densenet121, densenet161, densenet169, densenet201
from benchmarks.models.inception import inception_v3
from benchmarks.models.recurrent import LSTM
from benchmarks.models.transformer import Transformer
from benchmarks.models.unet import UNet
from benchmarks.models.unrolled_gan import UnrolledGAN
from benchmarks.models.vgg import vgg11, vgg13, vgg16, vgg19
from remat.models import (
    Tree,
    TreeLSTM,
    complete_tree,
    gpt,
    parse_tree,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    resnet1001,
)

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
