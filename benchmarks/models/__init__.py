"""Networks of the papers: those as `nn.Sequential` are for the planners, the classes for DTR, as they are."""

from benchmarks.models.densenet import DenseNet, densenet121, densenet161, densenet169, densenet201
from benchmarks.models.inception import inception_v3
from benchmarks.models.recurrent import LSTM
from benchmarks.models.transformer import Transformer
from benchmarks.models.unet import UNet
from benchmarks.models.unrolled_gan import UnrolledGAN
from benchmarks.models.vgg import vgg11, vgg13, vgg16, vgg19
from remat import models as _packaged
from remat.models import *  # noqa: F403  # those that the package has

__all__ = [  # noqa: PLE0604  # of names
    *_packaged.__all__,
    "LSTM",
    "DenseNet",
    "Transformer",
    "UNet",
    "UnrolledGAN",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "inception_v3",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
