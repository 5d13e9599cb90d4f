"""Fill ranks, or bins, one after the other with whole subtrees, the largest that fits first.

A subtree that does not fit is opened only to use up the room that is left: the path above what is taken then has to be
computed there too.

Shapes: N nodes, S sequences.
"""

import itertools
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.tree.loads import lower_bound, path_work, subtree_work
from megatron_dta.tree.outline import Outline

_PRECISION = 5e-4
"""Bisection of the largest load stops here, relative."""
_BUNDLES, _FEWEST, _COARSE, _MOST = 2**14, 32, 64, 512
"""Small siblings are moved together: so many bundles over all ranks, at least and at most so many for a rank."""
_PIECES = 4
"""Longest first: a rank's share is at least so many subtrees."""


def filled(outline, work, num_ranks, factors, limit: float) -> list[np.ndarray]:
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


def longest_first(outline: Outline, work: np.ndarray, num_ranks: int) -> np.ndarray:
    """Pack subtrees, the longest first, each on the rank that has least after it, int [S].

    Subtrees of more than a rank's share / `_PIECES` are opened. A rank pays a path above its subtrees once.
    """
    share = float(work.sum()) / num_ranks / _PIECES
    total = subtree_work(outline, work)
    is_open = total > share
    top = outline.parent < 0
    top[~top] = is_open[outline.parent[~top]]
    items = np.flatnonzero(top & ~is_open)
    # Sequences that end at an opened node go with it: the node's own path is the item.
    ends = np.unique(outline.last[is_open[outline.last]])
    path = path_work(outline, work)
    items, size = np.concatenate([items, ends]), np.concatenate([total[items], np.zeros(len(ends))])
    above = np.concatenate([outline.parent[items[: len(items) - len(ends)]], ends])
    load, held = np.zeros(num_ranks), np.zeros((num_ranks, outline.num_nodes), bool)
    rank_of_node = np.zeros(outline.num_nodes, np.int64)
    for at in np.argsort(-(size + path[above] * (above >= 0)), kind="stable").tolist():
        chain = []
        node = int(above[at])
        while node >= 0:
            chain.append(node)
            node = int(outline.parent[node])
        after = load + size[at] + (work[chain] * ~held[:, chain]).sum(axis=1)
        rank = int(after.argmin())
        load[rank] = after[rank]
        held[rank, chain] = True
        is_end = at >= len(items) - len(ends)
        rank_of_node[items[at] : items[at] + 1 if is_end else outline.end[items[at]]] = rank
    return rank_of_node[outline.last]


def bins(outline: Outline, capacity: int) -> np.ndarray | None:
    """Put sequences into few bins, int64 [S]; the paths of a bin have at most `capacity` tokens in their union.

    None where one path is longer.
    """
    length = outline.length.astype(np.float64)
    if len(outline.last) == 0 or path_work(outline, length).max() > capacity:
        return None
    units = _units(outline, length, capacity / _MOST)
    # Every bin takes a sequence, or none ever does: a long prefix whose branches do not all fit is not opened.
    taken = _Filling(units, itertools.repeat(float(capacity), len(outline.last)), 1 / _MOST).run()
    return None if taken is None else _labels(outline, taken)


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
    total, end = subtree_work(outline, work).tolist(), outline.end.tolist()
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
        path, gained, least, is_empty = [0], [0.0], room * self.grain, True
        while True:
            kids = self._kids(path[-1])
            before = room
            while kids and (at := bisect_right(kids, (room, len(self.left)))):
                size, unit = kids.pop(at - 1)
                room -= size
                self.taken.append((self.units.first[unit], self.units.end[unit], rank))
            gained[-1] += before - room
            is_empty &= gained[-1] == 0
            opened = self._to_open(kids, room, least, is_empty=is_empty)
            if opened is None:
                break
            if opened not in self.entered:
                self.entered.add(opened)
                self.taken.append((self.units.first[opened], self.units.first[opened] + 1, rank))
            room -= self.units.own[opened]
            path.append(opened)
            gained.append(0.0)
        self._settle(path, gained)

    def _to_open(self, kids: list[tuple[float, int]], room: float, least: float, *, is_empty: bool) -> int | None:
        """Choose the child with the cheapest path to copy, if it leaves more room than it costs.

        A rank that holds nothing yet has to pay for some path.
        """
        best = None
        for size, unit in kids:
            own = self.units.own[unit]
            fits = unit in self.units.children and room - own > (0.0 if is_empty else max(own / 2, least))
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
