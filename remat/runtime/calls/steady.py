"""Stages of PyTorch's own layers that depend on nothing but input, parameters, autocast and flags of backends.

They draw no random numbers, have no buffers, and their forwards change no attribute and no parameter, so that none of
these has to be saved before they run and restored when they run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from remat.runtime.patching import runs_as_its_class

_NAMES = """
    Identity Sequential ModuleList ModuleDict Linear Bilinear Flatten Unflatten LayerNorm GroupNorm RMSNorm
    LocalResponseNorm ReLU ReLU6 LeakyReLU PReLU ELU CELU SELU GELU SiLU Mish GLU Tanh Sigmoid LogSigmoid Softplus
    Softsign Softshrink Hardshrink Hardsigmoid Hardswish Hardtanh Tanhshrink Threshold Softmax LogSoftmax Softmin
    PixelShuffle PixelUnshuffle Upsample ChannelShuffle CosineSimilarity PairwiseDistance RNNCell GRUCell LSTMCell
"""
_OF_DIMENSIONS = "Conv ConvTranspose MaxPool AvgPool AdaptiveMaxPool AdaptiveAvgPool LPPool ConstantPad ZeroPad"
_LAYERS = [
    getattr(nn, name)
    for name in (*_NAMES.split(), *(f"{kind}{n}d" for kind in _OF_DIMENSIONS.split() for n in (1, 2, 3)))
]
_STEADY = {kind: kind.forward for kind in _LAYERS if kind.forward.__globals__["__name__"].startswith("torch.nn.")}
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN = (torch.Tensor, nn.Parameter)


def is_steady(parts: Sequence[nn.Module], inputs: Sequence[torch.Tensor] = ()) -> bool:
    """Whether all these modules are such layers, as PyTorch has them, on plain parameters and inputs."""
    if not all([type(each) in _PLAIN for each in inputs]):
        return False
    for part in parts:
        kind = type(part)
        if _STEADY.get(kind) is not kind.forward or part._buffers or not runs_as_its_class(part):
            return False
        if any([type(each) is not nn.Parameter for each in part._parameters.values() if each is not None]):
            return False
    return True


def saves_its_input(module: nn.Module) -> bool:
    """Whether it is a layer for whose backward PyTorch keeps its input."""
    weight = module._parameters.get("weight") if type(module) in _PRODUCTS else None
    if weight is None or not weight.requires_grad:
        return False
    return isinstance(module, nn.Linear) or (module.padding_mode == "zeros" and not isinstance(module.padding, str))
