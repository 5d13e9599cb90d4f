"""Spread a batch over data-parallel ranks: which rank trains which sequence.

Two ways of cutting are searched, each by bisection over the largest load: sequences in preorder cut into contiguous
ranges, which is optimal among such, and filling rank after rank with whole subtrees (`fill`). Moves then even out the
better of both (`moves`).

Shapes: N nodes, S sequences, R ranks. A load is a sum of a given work per node.
"""

import numpy as np

from megatron_dta.tree.fill import filled, longest_first
from megatron_dta.tree.layout import group_by
from megatron_dta.tree.loads import loads, path_work
from megatron_dta.tree.moves import polish
from megatron_dta.tree.outline import Outline

_FEW = 16
"""Up to so many ranks, longest-first packing is tried too, and everything with and without moves."""
_SHALLOW = 2**20
"""Up to so many steps up all paths together it is cheap."""
_PRECISION = 5e-4
"""Bisection of the largest load stops here, relative."""


def spread(outline: Outline, work: np.ndarray, factors: np.ndarray) -> list[np.ndarray]:
    """Return ways to spread, the rank of every sequence, int64 [S] each; the smallest largest load comes first.

    work: float64 [N]; factors: float64 [R], what a rank takes for each unit of its work: its load is their product.
    No rank is empty while there are at least as many sequences as ranks. Equal input gives equal output.
    """
    num_ranks = len(factors)
    if num_ranks == 1 or len(outline.last) == 0:
        return [np.zeros(len(outline.last), np.int64)]
    limit, contiguous = _contiguous(outline, work, num_ranks, factors)
    candidates = [contiguous, *filled(outline, work, num_ranks, factors, limit)]
    if num_ranks <= _FEW and outline.num_levels * len(outline.last) < _SHALLOW:
        candidates.append(longest_first(outline, work, num_ranks))
    plain = [_no_empty_rank(outline, work, num_ranks, candidate) for candidate in candidates]
    found = [polish(outline, work, rank_of, factors) for rank_of in plain]
    if num_ranks <= _FEW:
        found += plain  # even loads may take one chunk more
    return sorted(found, key=lambda rank_of: (loads(outline, work, rank_of, num_ranks) * factors).max())


def _contiguous(outline, work, num_ranks, factors) -> tuple[float, np.ndarray]:
    """Cut the sequences in preorder into ranges with the smallest largest load; return that load and the ranks.

    The work of a range is the path to its first sequence plus all nodes up to its last: every leaf ends a sequence.
    """
    order = np.argsort(outline.last, kind="stable")
    last = outline.last[order]
    path = path_work(outline, work)[last]
    so_far = np.cumsum(work)[last]

    def cuts(load: float) -> list[int] | None:
        found = [0]
        for factor in factors.tolist():
            a = found[-1]
            if a == len(last):
                break
            room = load / factor - path[a]  # below 0: too slow a rank for this path, left empty
            found.append(max(a, int(np.searchsorted(so_far, so_far[a] + room * (1 + 1e-12), side="right"))))
        return found if found[-1] == len(last) else None

    low, high = 0.0, float(work.sum() * factors.max()) * (1 + 1e-9)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle) else (middle, high)
    found = cuts(high) or []
    rank_of = np.zeros(len(last), np.int64)
    rank_of[order] = np.repeat(np.arange(len(found) - 1), np.diff(found))
    return high, rank_of


def _no_empty_rank(outline, work, num_ranks, rank_of) -> np.ndarray:
    """Halve the fullest ranks that have several sequences until no rank is empty."""
    rank_of = rank_of.copy()
    counts = np.bincount(rank_of, minlength=num_ranks)
    if len(rank_of) < num_ranks or counts.all():
        return rank_of
    load = loads(outline, work, rank_of, num_ranks)
    path = path_work(outline, work)
    members = dict(enumerate(group_by(rank_of, num_ranks)))
    for empty in np.flatnonzero(counts == 0).tolist():
        full = int(np.argmax(np.where(counts > 1, load, -1.0)))
        own = members[full]
        own = own[np.argsort(outline.last[own], kind="stable")]
        weight = np.cumsum(path[outline.last[own]])
        cut = int(np.clip(np.searchsorted(weight, weight[-1] / 2), 1, len(own) - 1))
        rank_of[own[cut:]] = empty
        for rank, part in ((full, own[:cut]), (empty, own[cut:])):
            members[rank], counts[rank] = part, len(part)
            load[rank] = work[outline.nodes_of(part)].sum()
    return rank_of
