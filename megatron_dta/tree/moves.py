"""Move subtrees from the fullest rank to emptier ones.

Shapes: N nodes, S sequences, R ranks.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.loads import loads, path_work, subtree_work
from megatron_dta.tree.outline import Outline

_MOVES = 40
_TARGETS = 4
"""Ranks that a move is tried to: the emptiest."""


def polish(outline: Outline, work: np.ndarray, rank_of: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Move subtrees from the fullest rank to one of the emptiest, each time the move that leaves the two lowest.

    A rank's load is its work times its factor. Never worse; a rank keeps at least one sequence.
    """
    rank_of = rank_of.copy()
    load = loads(outline, work, rank_of, len(factors)) * factors
    for _ in range(_MOVES):
        full = int(load.argmax())
        options = moves_from(outline, work, rank_of, load, factors, full)
        best = min(options, key=lambda move: move.worst, default=None)
        if best is None or best.worst >= load[full] * (1 - 1e-9):
            break
        rank_of[best.sequences(outline, rank_of, full)] = best.target
        load[[full, best.target]] = best.after_full, best.after_target
    return rank_of


@dataclass(frozen=True, kw_only=True)
class Move:
    """A subtree that leaves the fullest rank, with the loads of both ranks after it."""

    node: int
    target: int
    after_full: float
    after_target: float

    @property
    def worst(self) -> float:
        return max(self.after_full, self.after_target)

    def sequences(self, outline: Outline, rank_of: np.ndarray, full: int) -> np.ndarray:
        """Return the sequences that move."""
        inside = (outline.last >= self.node) & (outline.last < outline.end[self.node])
        return np.flatnonzero(inside & (rank_of == full))


def moves_from(outline, work, rank_of, load, factors, full: int, least: float = 0.0) -> list[Move]:
    """Return for each of the emptiest ranks the move from `full` that leaves the two lowest.

    Only moves that take at least `least` work from the rank are looked at.
    """
    held = outline.held(np.flatnonzero(rank_of == full))
    inner = outline.parent >= 0
    above = np.where(inner, held[outline.parent], np.iinfo(held.dtype).max)
    # The top of a path that only these sequences use; the rank keeps others.
    node = np.flatnonzero((held > 0) & (above > held) & (held < held[~inner].sum()))
    saved = subtree_work(outline, work * (held > 0))[node]
    node, saved = node[saved >= least], saved[saved >= least]
    found = []
    for target in np.argsort(load, kind="stable")[: _TARGETS + 1].tolist():
        if target == full or not len(node):
            continue
        missing = work * (outline.held(np.flatnonzero(rank_of == target)) == 0)
        path = path_work(outline, missing) - missing
        added = (subtree_work(outline, missing * (held > 0)) + path)[node]
        after_full, after_target = load[full] - saved * factors[full], load[target] + added * factors[target]
        at = int(np.maximum(after_full, after_target).argmin())
        found.append(
            Move(
                node=int(node[at]),
                target=target,
                after_full=float(after_full[at]),
                after_target=float(after_target[at]),
            )
        )
    return found
