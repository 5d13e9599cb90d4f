"""What plans are compared with: simpler ways to cut a forest into chunks and to spread sequences over ranks."""

import numpy as np

from megatron_dta.tree.forest import Forest
from megatron_dta.tree.loads import loads, path_work
from megatron_dta.tree.outline import Outline


def naive_cuts(forest: Forest, capacity: int) -> np.ndarray:
    """Assign tokens to chunks by cutting preorder every `capacity` tokens, int [T]."""
    return np.arange(forest.num_tokens) // capacity


def segment_cuts(forest: Forest, capacity: int) -> np.ndarray:
    """Give every segment a chunk of its own, or several where it is longer: depth-first, one path at a time."""
    segment = np.cumsum(np.isin(np.arange(forest.num_tokens), forest.segment_start)) - 1
    within = np.arange(forest.num_tokens) - forest.segment_start[segment]
    return segment * (forest.num_tokens + 1) + within // capacity


def aligned_cuts(forest: Forest, capacity: int) -> np.ndarray:
    """Assign every tree token to a chunk of at most `capacity` tokens, int32 [T]: contiguous ranges of preorder.

    No cut crosses a subtree that fits a chunk, so only tokens whose own subtree exceeds the capacity can have
    descendants in another chunk: the least possible for that capacity.
    """
    num_tokens = forest.num_tokens
    token = np.arange(num_tokens)
    heavy = forest.subtree_end - token > capacity
    below_heavy = forest.parent < 0
    below_heavy[~below_heavy] = heavy[forest.parent[~below_heavy]]
    unit_start = np.append(token[heavy | below_heavy], num_tokens)
    cuts = [0]
    while unit_start[cuts[-1]] < num_tokens:
        limit = unit_start[cuts[-1]] + capacity
        cuts.append(int(np.searchsorted(unit_start, limit, side="right")) - 1)
    sizes = np.diff(unit_start[cuts])
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def contiguous(outline: Outline, work: np.ndarray, num_ranks: int) -> np.ndarray:
    """Cut the sequences in preorder into ranges with the smallest largest work, by bisection, int [S]."""
    order = np.argsort(outline.last, kind="stable")
    last = outline.last[order]
    path, so_far = path_work(outline, work)[last], np.cumsum(work)[last]

    def cuts(limit: float) -> list[int] | None:
        found = [0]
        while found[-1] < len(last):
            if len(found) > num_ranks or path[found[-1]] > limit * (1 + 1e-12):
                return None
            room = (limit - path[found[-1]]) * (1 + 1e-12) + so_far[found[-1]]
            found.append(int(np.searchsorted(so_far, room, side="right")))
        return found if len(found) <= num_ranks + 1 else None

    low, high = 0.0, float(work.sum())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle) else (middle, high)
    found = cuts(high * (1 + 1e-9)) or [0, len(last)]
    rank_of = np.zeros(len(last), np.int64)
    rank_of[order] = np.repeat(np.arange(len(found) - 1), np.diff(found))
    return rank_of


def largest_load(outline: Outline, work: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> float:
    """Return the work of the fullest rank."""
    return float(loads(outline, work, rank_of, num_ranks).max())
