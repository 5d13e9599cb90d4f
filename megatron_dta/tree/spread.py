"""Spread a batch over data-parallel ranks: which rank trains which sequence.

A rank computes the union of its sequences' paths, so a subtree that is cut costs the path above the cut once more. Two
ways of cutting are searched, each by bisection over the largest load: sequences in preorder cut into contiguous ranges,
which is optimal among such, and filling rank after rank with whole subtrees, the largest that fits first, descending
into one that does not fit only to use up what is left.

Shapes: N nodes, S sequences, R ranks. Loads are sums of a given work per node.
"""

import itertools
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.tree.layout import group_by
from megatron_dta.tree.outline import Outline

_PRECISION = 5e-4
"""Bisection of the largest load stops here, relative."""
_TARGETS = 4
"""Ranks that a move is tried to: the emptiest."""
_BUNDLES, _FEWEST, _COARSE, _MOST = 2**14, 32, 64, 512
"""Small siblings are moved together: so many bundles over all ranks, at least and at most so many for a rank."""


def spread(outline: Outline, work: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the rank of every sequence, int64 [S], with the smallest largest load that is found.

    work: float64 [N]; factors: float64 [R], what a rank takes for each unit of its work: its load is their product.
    No rank is empty while there are at least as many sequences as ranks. Equal input gives equal output.
    """
    num_ranks = len(factors)
    if num_ranks == 1 or len(outline.last) == 0:
        return np.zeros(len(outline.last), np.int64)
    limit, contiguous = _contiguous(outline, work, num_ranks, factors)
    candidates = [contiguous, *_filled(outline, work, num_ranks, factors, limit)]
    found = [polish(outline, work, _no_empty_rank(outline, work, num_ranks, c), factors) for c in candidates]
    return min(found, key=lambda rank_of: (loads(outline, work, rank_of, num_ranks) * factors).max())


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
    subtree = _subtree_work(outline, work)
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
    while high - low > _PRECISION / 10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= num_ranks * middle else (middle, high)
    return low


def _subtree_work(outline: Outline, work: np.ndarray) -> np.ndarray:
    so_far = np.concatenate([[0.0], np.cumsum(work)])
    return so_far[outline.end] - so_far[:-1]


def path_work(outline: Outline, work: np.ndarray) -> np.ndarray:
    """Return the work of the path from the root to each node, inclusive, float64 [N]."""
    change = np.zeros(outline.num_nodes + 1)
    change[:-1] = work
    np.add.at(change, outline.end, -work)
    return np.cumsum(change)[:-1]


def loads(outline: Outline, work: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the work of every rank, float64 [R]: the union of its sequences' paths."""
    found = np.zeros(num_ranks)
    frontier = np.unique(outline.last * num_ranks + rank_of)
    seen = [frontier]
    while len(frontier):
        above = outline.parent[frontier // num_ranks]
        frontier = np.unique((above * num_ranks + frontier % num_ranks)[above >= 0])
        seen.append(frontier)
    pairs = np.unique(np.concatenate(seen))
    np.add.at(found, pairs % num_ranks, work[pairs // num_ranks])
    return found


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
            room = load / factor - path[a]
            if room < 0:
                return None
            found.append(int(np.searchsorted(so_far, so_far[a] + room * (1 + 1e-12), side="right")))
        return found if found[-1] == len(last) else None

    low, high = 0.0, float(work.sum() * factors.max()) * (1 + 1e-9)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle) else (middle, high)
    found = cuts(high) or []
    rank_of = np.zeros(len(last), np.int64)
    rank_of[order] = np.repeat(np.arange(len(found) - 1), np.diff(found))
    return high, rank_of


def _filled(outline, work, num_ranks, factors, limit: float) -> list[np.ndarray]:
    """Fill with fine and with coarse bundles: neither is always better."""
    fine = min(max(_BUNDLES // num_ranks, _FEWEST), _MOST)
    found = [
        _filled_by(outline, work, num_ranks, factors, limit, per_rank)
        for per_rank in sorted({fine, min(fine, _COARSE)})
    ]
    return [rank_of for rank_of in found if rank_of is not None]


def _filled_by(outline, work, num_ranks, factors, limit: float, per_rank: int) -> np.ndarray | None:
    """Search the smallest load, below `limit`, at which filling rank after rank places everything."""
    units = _units(outline, work, float(work.sum()) / num_ranks / per_rank)
    low, high, best = lower_bound(outline, work, num_ranks) * float(factors.min()), limit, None
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        found = _Filling(units, (middle / factors).tolist(), 1 / per_rank).run()
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return None if best is None else _labels(outline, best)


def bins(outline: Outline, capacity: int) -> np.ndarray | None:
    """Put sequences into few bins, int64 [S]; the paths of a bin have at most `capacity` tokens in their union.

    None where one path is longer.
    """
    length = outline.length.astype(np.float64)
    if len(outline.last) == 0 or path_work(outline, length).max() > capacity:
        return None
    units = _units(outline, length, capacity / _MOST)
    taken = _Filling(units, itertools.repeat(float(capacity)), 1 / _MOST).run()
    return _labels(outline, taken or [])


def _labels(outline: Outline, taken: list[tuple[int, int, int]]) -> np.ndarray:
    label = np.zeros(outline.num_nodes, np.int64)
    for first, end, rank in reversed(taken):  # a subtree taken later had parts taken before
        label[first:end] = rank
    return label[outline.last]


@dataclass
class _Units:
    """Subtrees, or bundles of small sibling subtrees, that are taken whole or opened. Unit 0 holds all roots."""

    first: list[int] = field(default_factory=lambda: [0])
    end: list[int] = field(default_factory=lambda: [0])
    own: list[float] = field(default_factory=lambda: [0.0])
    """Work of the node itself, for a unit that can be opened."""
    total: list[float] = field(default_factory=lambda: [0.0])
    children: dict[int, list[int]] = field(default_factory=dict)

    def add(self, first: int, end: int, own: float, total: float) -> int:
        self.first.append(first)
        self.end.append(end)
        self.own.append(own)
        self.total.append(total)
        return len(self.first) - 1


def _units(outline: Outline, work: np.ndarray, bundle: float) -> _Units:
    """Open every subtree of more work than `bundle`; bundle its small children."""
    so_far = np.concatenate([[0.0], np.cumsum(work)])
    total, end = _subtree_work(outline, work).tolist(), outline.end.tolist()
    first_child, child = (values.tolist() for values in outline.children)
    own, before = work.tolist(), so_far.tolist()
    units = _Units()
    waiting = [(0, np.flatnonzero(outline.parent < 0).tolist())]
    while waiting:
        unit, nodes = waiting.pop()
        opened = []
        for start, stop in _bundles([total[node] for node in nodes], bundle):
            first, last_end = nodes[start], end[nodes[stop - 1]]
            below = child[first_child[first] : first_child[first + 1]]
            is_open = stop - start == 1 and len(below) > 0 and total[first] > bundle
            opened.append(units.add(first, last_end, own[first] if is_open else 0.0, before[last_end] - before[first]))
            if is_open:
                waiting.append((opened[-1], below))
        units.children[unit] = opened
    units.total[0] = before[-1]
    return units


def _bundles(totals: list[float], bundle: float) -> Iterator[tuple[int, int]]:
    """Group neighbours: a large one alone, small ones up to `bundle`."""
    start, size = 0, 0.0
    for at, total in enumerate(totals):
        if at > start and size + total > bundle:
            yield start, at
            start, size = at, 0.0
        size += total
    if totals:
        yield start, len(totals)


class _Filling:
    """One attempt to place everything on ranks of given room."""

    def __init__(self, units: _Units, rooms: Iterable[float], grain: float):
        """grain: the part of its room that a rank may leave empty."""
        self.units, self.rooms, self.grain = units, rooms, grain
        self.left = list(units.total)
        self.kids: dict[int, list[tuple[float, int]]] = {}
        self.taken: list[tuple[int, int, int]] = []
        """(first node, end node, rank), in the order taken."""
        self.entered: set[int] = set()

    def run(self) -> list[tuple[int, int, int]] | None:
        """Return what was taken, or None where something is left over."""
        for rank, room in enumerate(self.rooms):
            if not self._kids(0):
                break
            self._fill(rank, room)
        return None if self._kids(0) else self.taken

    def _kids(self, unit: int) -> list[tuple[float, int]]:
        if unit not in self.kids:
            self.kids[unit] = sorted((self.left[child], child) for child in self.units.children[unit])
        return self.kids[unit]

    def _fill(self, rank: int, room: float) -> None:
        path, gained, least = [0], [0.0], room * self.grain
        while True:
            kids = self._kids(path[-1])
            before = room
            while kids and (at := bisect_right(kids, (room, len(self.left)))):
                size, unit = kids.pop(at - 1)
                room -= size
                self.taken.append((self.units.first[unit], self.units.end[unit], rank))
            gained[-1] += before - room
            opened = self._to_open(kids, room, least)
            if opened is None:
                break
            if opened not in self.entered:
                self.entered.add(opened)
                self.taken.append((self.units.first[opened], self.units.first[opened] + 1, rank))
            room -= self.units.own[opened]
            path.append(opened)
            gained.append(0.0)
        self._settle(path, gained)

    def _to_open(self, kids: list[tuple[float, int]], room: float, least: float) -> int | None:
        """Choose the child with the cheapest path to copy, if it leaves more room than it costs."""
        best = None
        for size, unit in kids:
            own = self.units.own[unit]
            fits = unit in self.units.children and room - own > max(own / 2, least)
            if fits and (best is None or (own, -size) < (self.units.own[best], -self.left[best])):
                best = unit
        return best

    def _settle(self, path: list[int], gained: list[float]) -> None:
        """Write down what is left of every opened unit, from the deepest up."""
        below = 0.0
        for depth in range(len(path) - 1, 0, -1):
            unit, above = path[depth], self._kids(path[depth - 1])
            above.remove((self.left[unit], unit))
            gone = below + gained[depth]
            if self._kids(unit):
                self.left[unit] -= gone
                insort(above, (self.left[unit], unit))
            else:
                gone = self.left[unit]
            below = gone
        self.left[0] -= below + gained[0]


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


def polish(outline: Outline, work: np.ndarray, rank_of: np.ndarray, factors: np.ndarray, moves: int = 40) -> np.ndarray:
    """Move subtrees from the fullest rank to one of the emptiest, each time the move that leaves the two lowest.

    A rank's load is its work times its factor. Never worse; a rank keeps at least one sequence.
    """
    rank_of = rank_of.copy()
    load = loads(outline, work, rank_of, len(factors)) * factors
    for _ in range(moves):
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
    held = _held(outline, rank_of == full)
    inner = outline.parent >= 0
    above = np.where(inner, held[outline.parent], np.iinfo(held.dtype).max)
    # The top of a path that only these sequences use; the rank keeps others.
    node = np.flatnonzero((held > 0) & (above > held) & (held < held[~inner].sum()))
    saved = _subtree_work(outline, work * (held > 0))[node]
    node, saved = node[saved >= least], saved[saved >= least]
    found = []
    for target in np.argsort(load, kind="stable")[: _TARGETS + 1].tolist():
        if target == full or not len(node):
            continue
        missing = work * (_held(outline, rank_of == target) == 0)
        path = path_work(outline, missing) - missing
        added = (_subtree_work(outline, missing * (held > 0)) + path)[node]
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


def _held(outline: Outline, chosen: np.ndarray) -> np.ndarray:
    """Count the chosen sequences below every node, int64 [N]."""
    so_far = np.concatenate([[0], np.cumsum(np.bincount(outline.last[chosen], minlength=outline.num_nodes))])
    return so_far[outline.end] - so_far[:-1]
