"""A network over trees, another one for each input (Tai, Socher and Manning, 2015, Child-Sum Tree-LSTM)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Tree:
    """A node: a word, as a number, and what hangs on it."""

    word: int
    children: tuple[Tree, ...] = ()

    def __len__(self) -> int:
        return 1 + sum(len(child) for child in self.children)

    def words(self) -> Iterator[int]:
        """Of all nodes, each before those below it."""
        yield self.word
        for child in self.children:
            yield from child.words()


def complete_tree(depth: int, word: int = 0) -> Tree:
    """A complete binary tree of 2^depth - 1 nodes, as in the DTR paper's Table 1."""
    return Tree(
        word, () if depth <= 1 else (complete_tree(depth - 1, 2 * word + 1), complete_tree(depth - 1, 2 * word + 2))
    )


def parse_tree(source: str, words: int = 128) -> Tree:
    """The syntax tree of Python source; a node's word is the kind of its syntax.

    Raises:
        SyntaxError: the source is no Python.
    """
    kinds = sorted(name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST))
    number = {name: position % words for position, name in enumerate(kinds)}

    def tree_of(node: ast.AST) -> Tree:
        return Tree(number[type(node).__name__], tuple(tree_of(child) for child in ast.iter_child_nodes(node)))

    return tree_of(ast.parse(source))


class _Cell(nn.Module):
    """From a node's word and what its children have returned: its hidden and its inner state, (rows, width) each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 3 * width)
        self.forget = nn.Linear(2 * width, width)

    def forward(self, value: Tensor, states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        below = sum((hidden for hidden, _ in states), torch.zeros_like(value))
        take, give, new = self.gates(torch.cat([value, below], dim=1)).chunk(3, dim=1)
        cell = torch.sigmoid(take) * torch.tanh(new)
        for hidden, inner in states:
            cell = cell + torch.sigmoid(self.forget(torch.cat([value, hidden], dim=1))) * inner
        return torch.sigmoid(give) * torch.tanh(cell), cell


class TreeLSTM(nn.Module):
    """Reads a tree from its leaves up and predicts from the root: a `Tree` to (rows, classes).

    Args:
        words: how many different words there are; those of trees are taken modulo that.
        width: of the state of a node.
        rows: each node's state is a (rows, width) matrix; the paper's Table 1 has 1024 x 1024.
    """

    def __init__(self, words: int = 128, width: int = 64, rows: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, rows * width)
        self.cell = _Cell(width)
        self.head = nn.Linear(width, classes)
        self.rows, self.width = rows, width

    def forward(self, tree: Tree) -> Tensor:
        words = torch.tensor(list(tree.words()), device=self.words.weight.device) % self.words.num_embeddings
        # One look-up for all nodes: its gradient has the size of the whole embedding.
        values = iter(self.words(words).view(-1, self.rows, self.width).unbind())
        return self.head(self._state(tree, values)[0])

    def _state(self, tree: Tree, values: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        value = next(values)
        return self.cell(value, [self._state(child, values) for child in tree.children])
