"""A generative adversarial network whose generator looks ahead (Metz et al., 2017): gradients of gradients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class UnrolledGAN(nn.Module):
    """Learns to draw points like those of a sample: (N, 2) points to the generator's loss, a scalar.

    The loss is that against a discriminator which has been trained for `steps` more steps; their gradients are part of
    it, so its backward needs derivatives of second order. The discriminator itself gets no gradients from it.

    Args:
        steps: of the discriminator, unrolled.
        rate: their learning rate.
    """

    def __init__(self, steps: int = 5, width: int = 128, noise: int = 16, rate: float = 0.1) -> None:
        super().__init__()
        self.steps, self.noise, self.rate = steps, noise, rate
        self.generator = _layers(noise, width, width, 2)
        self.discriminator = _layers(2, width, width, 1)

    def forward(self, points: Tensor) -> Tensor:
        drawn = self.generator(torch.randn(len(points), self.noise, device=points.device))
        weights = {name: weight.detach().requires_grad_() for name, weight in self.discriminator.named_parameters()}
        for _ in range(self.steps):
            loss = self._judge(weights, points, 1.0) + self._judge(weights, drawn, 0.0)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: weight - self.rate * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        return self._judge(weights, drawn, 1.0)

    def _judge(self, weights: dict[str, Tensor], points: Tensor, truth: float) -> Tensor:
        opinion = functional_call(self.discriminator, weights, (points,))
        return functional.binary_cross_entropy_with_logits(opinion, torch.full_like(opinion, truth))
