"""A recurrent network with an ordinary Python loop over time (Hochreiter and Schmidhuber, 1997)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """Reads a sequence of any length cell by cell, predicts from its last state: (T, N, inputs) to (N, classes)."""

    def __init__(self, inputs: int = 64, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(inputs + width, 4 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = cell = sequence.new_zeros(sequence.shape[1], self.width)
        for values in sequence:
            take, forget, give, new = self.gates(torch.cat([values, hidden], dim=1)).chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(take) * torch.tanh(new)
            hidden = torch.sigmoid(give) * torch.tanh(cell)
        return self.head(hidden)
