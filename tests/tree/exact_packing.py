"""The best packing of a small forest, by search over everything that a shared plan may do: the oracle of the planner.

Nodes are cut into *units* of `unit` tokens, which must divide every node and the capacity. What a chunk takes depends
only on which units it holds: its context is their ancestors outside, its pushed units are those with a descendant
outside. Sets of units are bit masks, unit i in preorder is bit i, so tables over all sets answer everything. Nothing is
padded.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.outline import Outline, visible_pairs
from megatron_dta.tree.packing import Packing

WEIGHTS = (1.0, 0.0)
"""A push costs the longer of host and device time: at least any mean of the two, with these weights of the host's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """A forest cut into units, with the counts that chunks of them add up."""

    outline: Outline
    unit: int

    @cached_property
    def node(self) -> np.ndarray:
        return np.repeat(np.arange(self.outline.num_nodes), self.outline.length // self.unit)

    @property
    def num(self) -> int:
        return len(self.node)

    @cached_property
    def pairs(self) -> np.ndarray:
        tokens = np.arange(self.num) * self.unit
        return visible_pairs(self.outline.depth[self.node] + tokens - self.outline.start[self.node], self.unit)

    @cached_property
    def sources(self) -> np.ndarray:
        return (self.outline.sources * self.unit / self.outline.length)[self.node]

    @cached_property
    def above(self) -> list[int]:
        """Bit mask of each unit's proper ancestors."""
        masks: list[int] = []
        for i, node in enumerate(self.node.tolist()):
            goes_on = i and self.node[i - 1] == node
            above = i - 1 if goes_on else int(np.searchsorted(self.node, self.outline.parent[node], side="right")) - 1
            masks.append(0 if above < 0 else masks[above] | 1 << above)
        return masks

    @cached_property
    def below(self) -> list[int]:
        """Bit mask of each unit's proper descendants."""
        return [sum(1 << j for j in range(self.num) if self.above[j] >> i & 1) for i in range(self.num)]

    def packing(self, chunks: list[int]) -> Packing:
        """Return the packing of these disjoint sets of units, which run in this order."""
        chunk = [next(k for k, mask in enumerate(chunks) if mask >> i & 1) for i in range(self.num)]
        return Packing(
            outline=self.outline, node=self.node, length=np.full(self.num, self.unit), chunk=np.array(chunk, np.int64)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Best:
    """The optimum, and a packing that reaches it."""

    seconds: float
    """Exact where all pushes fit one call; otherwise what the pushes' totals take at least."""
    packing: Packing


def best_shared(outline: Outline, cost: CostModel, capacity: int, unit: int) -> Best:
    """Return the optimum over all assignments of units to chunks with a legal order.

    Best-first over the sets of units that are still to run. What a set takes at least is known from the optimum
    without the demand for a legal order, so that hardly more than the best packing's own sets are looked at.
    """
    units = Units(outline=outline, unit=unit)
    sets = _Sets(units, cost, capacity)
    everything = (1 << units.num) - 1
    number = count()
    queue = [(0.0, units.num, next(number), 0.0, 0.0, 0.0, everything, ())]
    seen: dict[int, list[tuple[float, float, float]]] = {}
    while queue:
        *_, seconds, pushed, work, rest, chunks = heapq.heappop(queue)
        if not rest:
            return Best(seconds=float(sets.least(seconds, pushed, work, rest)), packing=units.packing(list(chunks)))
        label = (seconds, pushed, work)
        if any(all(a <= b for a, b in zip(other, label)) for other in seen.setdefault(rest, [])):
            continue
        seen[rest].append(label)
        ready = np.flatnonzero((sets.mask & ~rest | sets.below & rest & ~sets.mask) == 0)
        after = (seconds + sets.seconds[ready], pushed + sets.pushed[ready], work + sets.work[ready])
        left = rest ^ sets.mask[ready]
        bound = np.round(sets.least(*after, left), 9)  # of equals, the one that is nearly done goes first
        for least, *totals, still in zip(bound.tolist(), *(a.tolist() for a in after), left.tolist()):
            heapq.heappush(queue, (least, still.bit_count(), next(number), *totals, still, (*chunks, rest ^ still)))
    raise AssertionError("a unit does not fit the capacity")


class _Sets:
    """Every set of units that may be a chunk; and for any set what running it takes at least."""

    def __init__(self, units: Units, cost: CostModel, capacity: int):
        self.push, self.capacity = cost.push, capacity
        above = _unions(units.above)
        every = np.arange(1 << units.num)
        size = _totals(np.ones(units.num, np.int64))
        outside = above & ~every
        # A path that leaves a chunk does not come back to it.
        self.mask = np.flatnonzero((size > 0) & (size * units.unit <= capacity) & (above[outside] & every == 0))
        self.below = _unions(units.below)[self.mask]
        tokens = size[self.mask] * units.unit
        context = size[outside[self.mask]] * units.unit
        pairs, sources = _totals(units.pairs)[self.mask], _totals(units.sources)[self.mask]
        self.seconds = cost.chunk.seconds(tokens, pairs, context, sources)
        is_pushed = [(self.mask >> i & 1) * ((units.below[i] & ~self.mask) > 0) for i in range(units.num)]
        self.pushed = units.unit * np.sum(is_pushed, axis=0).astype(float)
        self.work = cost.push.row * self.pushed + cost.push.pair * (units.pairs @ np.array(is_pushed))
        """Device time of the pushes, beyond what each call takes."""
        self.forced = float(np.clip(units.outline.size - capacity, 0, units.outline.length).sum())
        weighed = [self.seconds + (1 - weight) * self.work for weight in WEIGHTS]
        pushless = np.where(self.pushed > 0, np.inf, self.seconds)
        self.table = least_partition(self.mask, np.array([pushless, *weighed]), units.num)

    def least(self, seconds, pushed, work, rest):
        """Return what all takes at least, pushes included, when these totals are spent and `rest` is still to run."""
        table = self.table[:, rest]
        pushless = np.where(np.maximum(pushed, self.forced) > 0, np.inf, seconds + table[0])
        calls = np.maximum(np.ceil(np.maximum(pushed, self.forced) / self.capacity), 1)
        push = self.push
        means = [
            seconds + part + (1 - weight) * work + calls * (weight * push.launch + (1 - weight) * push.fixed)
            for weight, part in zip(WEIGHTS, table[1:])
        ]
        return np.minimum(pushless, np.max(means, axis=0))


def best_unshared(outline: Outline, cost: CostModel, capacity: int) -> float:
    """Return the optimum without pushes: sequences in bins, each a chunk with copies of the prefixes that it needs.

    Infinite where a sequence is longer than a chunk.
    """
    leaves = np.setdiff1d(np.arange(outline.num_nodes), outline.parent).tolist()  # others go with one below them
    paths = []
    for node in leaves:
        path = 0
        while node >= 0:
            path, node = path | 1 << node, int(outline.parent[node])
        paths.append(path)
    unions = _unions(paths)
    tokens, pairs, sources = (_sums(unions, counts) for counts in (outline.length, outline.pairs, outline.sources))
    fits = np.flatnonzero((tokens > 0) & (tokens <= capacity))
    seconds = cost.chunk.seconds(tokens, pairs, 0, sources)
    return float(least_partition(fits, seconds[None, fits], len(leaves))[0, -1])


def least_partition(parts: np.ndarray, values: np.ndarray, num: int) -> np.ndarray:
    """Return the least total of disjoint parts over every set of `num` things, [kinds, 2^num]; infinite if none.

    parts: sets, increasing [M]; values: [kinds, M]. The part with a set's last thing is tried first: what it leaves is
    a smaller number, whose total is known.
    """
    table = np.full((len(values), *[2] * num), np.inf)
    table[(slice(None), *[0] * num)] = 0
    for at, part in enumerate(parts.tolist()):
        last = part.bit_length()
        before: list[int | slice] = [0] * (num - last) + [slice(None)] * last
        after = before.copy()
        for i in range(last):
            if part >> i & 1:
                before[num - 1 - i], after[num - 1 - i] = 0, 1
        target = table[(slice(None), *after)]
        value = values[:, at].reshape(-1, *[1] * (target.ndim - 1))
        np.minimum(target, table[(slice(None), *before)] + value, out=target)
    return table.reshape(len(values), -1)


def _totals(values: np.ndarray) -> np.ndarray:
    """Return the sum of `values` over every set, [2^n]."""
    totals = np.zeros(1, values.dtype)
    for value in values:
        totals = np.concatenate([totals, totals + value])
    return totals


def _unions(masks: list[int]) -> np.ndarray:
    """Return the union of `masks` over every set, int64 [2^n]."""
    unions = np.zeros(1, np.int64)
    for mask in masks:
        unions = np.concatenate([unions, unions | mask])
    return unions


def _sums(masks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the sum of `values` over each of these sets."""
    return ((masks[:, None] >> np.arange(len(values)) & 1) * values).sum(axis=1)
