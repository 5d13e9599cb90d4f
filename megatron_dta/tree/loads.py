"""What ranks have to do: work of paths and subtrees, of any assignment, and the least that any assignment leaves.

A rank computes the union of its sequences' paths, so a subtree that is cut costs the path above the cut once more.

Shapes: N nodes, S sequences, R ranks. A load is a sum of a given work per node.
"""

import math

import numpy as np

from megatron_dta.tree.layout import group_by
from megatron_dta.tree.outline import Outline

_COUNTED = 2**24
"""Up to so many (rank, node) pairs, counting is faster than walking up paths."""
_PRECISION = 5e-5
"""Bisection of the bound stops here, relative."""


def path_work(outline: Outline, work: np.ndarray) -> np.ndarray:
    """Return the work of the path from the root to each node, inclusive, float64 [N]."""
    change = np.zeros(outline.num_nodes + 1)
    change[:-1] = work
    np.add.at(change, outline.end, -work)
    return np.cumsum(change)[:-1]


def subtree_work(outline: Outline, work: np.ndarray) -> np.ndarray:
    """Return the work of each node's subtree, float64 [N]."""
    so_far = np.concatenate([[0.0], np.cumsum(work)])
    return so_far[outline.end] - so_far[:-1]


def loads(outline: Outline, work: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the work of every rank, float64 [R]: the union of its sequences' paths."""
    found = np.zeros(num_ranks)
    if num_ranks * outline.num_nodes < _COUNTED or outline.is_deep():
        for rank, own in enumerate(group_by(rank_of, num_ranks)):
            found[rank] = work[outline.held(own) > 0].sum()
        return found
    frontier = np.unique(outline.last * num_ranks + rank_of)
    seen = [frontier]
    while len(frontier):
        above = outline.parent[frontier // num_ranks]
        frontier = np.unique((above * num_ranks + frontier % num_ranks)[above >= 0])
        seen.append(frontier)
    pairs = np.unique(np.concatenate(seen))
    np.add.at(found, pairs % num_ranks, work[pairs // num_ranks])
    return found


def lower_bound(outline: Outline, work: np.ndarray, num_ranks: int) -> float:
    """Return a load that the fullest rank has in any assignment.

    For a load M, a subtree whose work needs k ranks has the path above it computed k times: a copy of node v leaves
    at most M - (path up to and including v) for what is below. The smallest M whose total, copies included, fits R
    ranks bounds every assignment.
    """
    if outline.num_nodes == 0:
        return 0.0
    path, total = path_work(outline, work), float(work.sum())
    low = max(float(path[outline.last].max()), total / num_ranks)
    subtree = subtree_work(outline, work)
    heavy = np.flatnonzero(path - work + subtree > low)  # whatever fits one rank below its path is copied nowhere
    light = np.setdiff1d(np.flatnonzero(np.isin(outline.parent, heavy)), heavy, assume_unique=True)
    below = np.zeros(len(heavy))
    np.add.at(below, np.searchsorted(heavy, outline.parent[light]), subtree[light])
    roots = np.flatnonzero(outline.parent < 0)
    rest = float(subtree[np.setdiff1d(roots, heavy, assume_unique=True)].sum())
    above = np.where(outline.parent[heavy] < 0, -1, np.searchsorted(heavy, outline.parent[heavy])).tolist()

    def needed(load: float) -> float:
        """Return the least total work, copies included, when no rank holds more than `load`."""
        need, room, sum_ = below.tolist(), (load - path[heavy]).tolist(), rest
        for v in range(len(heavy) - 1, -1, -1):
            copies = 1.0
            if need[v] > room[v]:
                copies = math.ceil(need[v] / room[v] * (1 - 1e-12)) if room[v] > 0 else math.inf
            total_v = copies * own[v] + need[v]
            if above[v] < 0:
                sum_ += total_v
            else:
                need[above[v]] += total_v
        return sum_

    own = work[heavy].tolist()
    high = max(low, total)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= num_ranks * middle else (middle, high)
    return low
