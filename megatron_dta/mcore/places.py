"""Where a process's tensors lie in those of the whole model: numbers only.

A *whole* tensor is what a single process holds, without the rows that pad the vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Piece(NamedTuple):
    """Rows, or columns, that follow each other both in a whole tensor and in a process's part of it."""

    whole: int
    """The first of them in the whole tensor ..."""
    local: int
    """... and in the process's."""
    length: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process's tensor lies in the whole one."""

    name: str
    """Of the parameter, in the whole model."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    local: tuple[int, ...]
    """Shape of the process's, with its rows of the padded vocabulary."""
    dim: int
    """The pieces are along it."""
    pieces: tuple[Piece, ...]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the process's part of a whole tensor; rows that pad the vocabulary are 0."""
        local = whole.new_zeros(self.local)
        for start, place, length in self.pieces:
            local.narrow(self.dim, place, length).copy_(whole.narrow(self.dim, start, length))
        return local

    def paste(self, local: torch.Tensor, into: torch.Tensor) -> None:
        """Write the process's part to its place in a whole tensor."""
        for start, place, length in self.pieces:
            into.narrow(self.dim, start, length).copy_(local.narrow(self.dim, place, length))

    @property
    def numel(self) -> int:
        """Count the numbers of the whole tensor that the process holds."""
        return math.prod(self.local) // self.local[self.dim] * sum(piece.length for piece in self.pieces)

    def to_json(self) -> list[Any]:
        """Return what `from_json` takes."""
        return [self.name, self.whole, self.local, self.dim, self.pieces]

    @staticmethod
    def from_json(fields: list[Any]) -> "Place":
        """Return the place that `to_json` wrote."""
        name, whole, local, dim, pieces = fields
        return Place(
            name=name, whole=tuple(whole), local=tuple(local), dim=dim, pieces=tuple(Piece(*p) for p in pieces)
        )  # fmt: skip


def vocabulary_pieces(start: int, num_rows: int, vocab_size: int) -> tuple[Piece, ...]:
    """Return the real rows among `num_rows` of the padded vocabulary from `start` on: one piece or none."""
    num_real = min(num_rows, vocab_size - start)
    return (Piece(start, 0, num_real),) if num_real > 0 else ()


def split_pieces(length: int, rank: int, size: int, number: int) -> tuple[Piece, ...]:
    """Return the pieces of one of `size` ranks: its `length` rows are of `number` matrices, each dealt to all ranks."""
    rows = length // number
    return tuple(Piece((i * size + rank) * rows, i * rows, rows) for i in range(number))
