"""Pack an outline into chunks: which tokens run together, in which order, and what that is predicted to take.

A *heavy* token has more tokens in its subtree than a chunk holds, so some descendant is in another chunk whatever one
does: it has to be pushed. Below the heavy tokens hang *items*: subtrees that fit a chunk and are kept whole, so that
heavy tokens are the only pushed ones. Items are packed like parcels, heavy tokens fill the gaps that are left.

Shapes: N nodes of the outline, P pieces in preorder, K chunks.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappush, heapreplace

import numpy as np

from megatron_dta.tree.outline import Outline

WINDOWS = (1, 4, 16, 64, None)
"""Bins open at once: few keep relatives together (few states alive), None packs best."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Pieces of nodes with their chunks; chunks are numbered in the order they run."""

    outline: Outline
    node: np.ndarray
    """int64 [P]: pieces in preorder."""
    length: np.ndarray
    """int64 [P]."""
    chunk: np.ndarray
    """int64 [P]: never above the chunk of the piece's parent."""

    @property
    def num_chunks(self) -> int:
        return int(self.chunk.max(initial=-1)) + 1

    @cached_property
    def depth(self) -> np.ndarray:
        """Depth of each piece's first token, int64 [P]."""
        start = np.cumsum(self.length) - self.length
        return self.outline.depth[self.node] + start - self.outline.start[self.node]

    # What follows lets `Layout` take pieces for tokens.
    @property
    def num_tokens(self) -> int:
        return len(self.node)

    @cached_property
    def parent(self) -> np.ndarray:
        """int64 [P]: the piece above, -1 for a root."""
        last = np.searchsorted(self.node, self.outline.parent[self.node], side="right") - 1
        goes_on = np.concatenate([[False], self.node[1:] == self.node[:-1]]) if len(self.node) else np.zeros(0, bool)
        above = np.where(self.outline.parent[self.node] < 0, -1, last)
        return np.where(goes_on, np.arange(len(self.node)) - 1, above)

    @cached_property
    def subtree_end(self) -> np.ndarray:
        """int64 [P]: one past the last piece below."""
        return np.searchsorted(self.node, self.outline.end[self.node])

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (length, chunk) of maximal runs of tokens in preorder: the assignment, run-length encoded."""
        if not len(self.chunk):
            return self.length, self.chunk
        starts = np.flatnonzero(np.concatenate([[True], self.chunk[1:] != self.chunk[:-1]]))
        return np.add.reduceat(self.length, starts), self.chunk[starts]


def least_pushed(outline: Outline, capacity: int) -> int:
    """Count the heavy tokens: no assignment to chunks of `capacity` tokens pushes fewer."""
    return int(np.clip(outline.size - capacity, 0, outline.length).sum())


def pack(outline: Outline, capacity: int, window: int | None) -> Packing:
    """Pack into chunks of at most `capacity` tokens, pushing the heavy tokens alone; at most `window` bins are open."""

    def bins(sizes: np.ndarray) -> list[list[int]]:
        return _best_fit_decreasing(sizes, capacity) if window is None else _best_fit(sizes, capacity, window)

    return _pack(outline, capacity, capacity, capacity, bins)


def pack_in_order(outline: Outline, capacity: int) -> Packing:
    """Cut preorder every `capacity` tokens: pushes more than it must, but no chunk but one has a gap."""
    cut = np.arange(0, outline.num_tokens, capacity)
    start = np.union1d(outline.start[:-1], cut)
    return Packing(
        outline=outline,
        node=np.searchsorted(outline.start, start, side="right") - 1,
        length=np.diff(start, append=outline.num_tokens),
        chunk=len(cut) - 1 - start // capacity,  # later tokens are never above earlier ones
    )


def pack_evenly(outline: Outline, capacity: int, num_chunks: int, largest: int) -> Packing:
    """Pack into about `num_chunks` chunks of alike size, at most `capacity` tokens each.

    Subtrees of more than `largest` tokens are opened: small items balance better, and push more.
    """
    level = min(capacity, -(-outline.num_tokens // num_chunks))
    num_heavy = int(np.clip(outline.size - largest, 0, outline.length).sum())
    num_bins, for_heavy = max(1, num_chunks - num_heavy // level), num_heavy % level
    return _pack(outline, capacity, largest, level, lambda sizes: _least_loaded(sizes, capacity, num_bins, for_heavy))


def _pack(
    outline: Outline, capacity: int, largest: int, level: int, bins_of: Callable[[np.ndarray], list[list[int]]]
) -> Packing:
    """Pack items of at most `largest` tokens as `bins_of` says; other tokens fill chunks up to `level`."""
    heavy = np.clip(outline.size - largest, 0, outline.length)
    is_full = heavy == outline.length
    at_top = outline.parent < 0
    at_top[~at_top] = is_full[outline.parent[~at_top]]
    item = np.flatnonzero(at_top & ~is_full)
    owner = np.where(heavy[item] > 0, item, outline.parent[item])
    sizes = (outline.size - heavy)[item]
    filler = _HeavyFiller(outline, heavy, owner, level, capacity)
    item_chunk = np.zeros(len(item), np.int64)
    for members in bins_of(sizes):
        item_chunk[members] = filler.close(members, int(sizes[members].sum()))
    filler.finish()
    light = np.flatnonzero(~is_full)
    holder = np.searchsorted(item, light, side="right") - 1
    pieces = np.array(filler.pieces, np.int64).reshape(-1, 4)
    node, offset, length, chunk = (
        np.concatenate([light, pieces[:, 0]]),
        np.concatenate([heavy[light], pieces[:, 1]]),
        np.concatenate([(outline.length - heavy)[light], pieces[:, 2]]),
        np.concatenate([item_chunk[holder], pieces[:, 3]]),
    )
    order = np.lexsort((offset, node))
    return Packing(outline=outline, node=node[order], length=length[order], chunk=chunk[order])


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack the largest first into the fullest bin that takes it; bins come in the order of their last items."""
    order = np.argsort(-sizes, kind="stable").tolist()
    bins = _Bins(capacity)
    for i, size in zip(order, sizes[order].tolist()):
        bins.add(i, size)
    return sorted(bins.members, key=max)


def _best_fit(sizes: np.ndarray, capacity: int, window: int) -> list[list[int]]:
    """Pack in preorder into the fullest open bin that takes an item; beyond `window` open ones the fullest closes."""
    bins, closed = _Bins(capacity), []
    for i, size in enumerate(sizes.tolist()):
        bins.add(i, size)
        if len(bins.free) > window:
            closed.append(bins.close_fullest(before=i))
    while bins.free:
        closed.append(bins.close_fullest())
    return closed


def _least_loaded(sizes: np.ndarray, capacity: int, num_bins: int, reserved: int) -> list[list[int]]:
    """Put the largest first into the emptiest bin, a new one where it does not fit; bins come by their last items.

    The last bin has `reserved` tokens of room for what can only run after all others.
    """
    order = np.argsort(-sizes, kind="stable").tolist()
    emptiest: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(1, num_bins)]
    last: list[int] = []
    heappush(emptiest, (reserved, 0, last))
    for i, size in zip(order, sizes[order].tolist()):
        load, number, members = emptiest[0]
        if load + size <= capacity:
            members.append(i)
            heapreplace(emptiest, (load + size, number, members))
        else:
            heappush(emptiest, (size, len(emptiest), [i]))
    others = [members for _, number, members in emptiest if members and number > 0]
    return sorted(others, key=max) + ([last] if last else [])


class _Bins:
    """Bins by free space; the fullest first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.free: list[tuple[int, int]] = []
        self.members: list[list[int]] = []

    def add(self, item: int, size: int) -> None:
        at = bisect_left(self.free, (size, -1))
        if at < len(self.free):
            free, number = self.free.pop(at)
        else:
            free, number = self.capacity, len(self.members)
            self.members.append([])
        self.members[number].append(item)
        insort(self.free, (free - size, number))

    def close_fullest(self, before: int | None = None) -> list[int]:
        """Close the fullest bin; one that was just opened by item `before` stays where there is another."""
        at = 0
        if before is not None and len(self.free) > 1 and self.members[self.free[0][1]][-1] == before:
            at = int(self.free[0][0] > 0)  # a bin that the item filled to the brim is done
        return self.members[self.free.pop(at)[1]]


class _HeavyFiller:
    """Give heavy tokens to chunks, the deepest first, once everything below them has a chunk."""

    def __init__(self, outline: Outline, heavy: np.ndarray, owner: np.ndarray, level: int, capacity: int):
        """level: how full chunks become; the last one takes all that is left if it has at most `capacity` tokens."""
        self.level, self.capacity = level, capacity
        self.items_left, self.heavy_left = len(owner), int(heavy.sum())
        self.heavy, self.parent = heavy.tolist(), outline.parent.tolist()
        self.owner = owner.tolist()
        below = np.bincount(owner[owner >= 0], minlength=outline.num_nodes)
        nodes = np.flatnonzero((heavy > 0) & (outline.parent >= 0))
        np.add.at(below, outline.parent[nodes], 1)
        self.waiting_for = below.tolist()
        self.ready: list[int] = []
        self.num_ready = 0
        self.num_chunks = 0
        self.pieces: list[tuple[int, int, int, int]] = []
        """(node, offset, length, chunk)"""

    def close(self, members: list[int], size: int) -> int:
        """Number a chunk of items with `size` tokens, and fill it up."""
        chunk = self._new_chunk()
        self.items_left -= len(members)
        for i in members:
            self._done(self.owner[i])
        is_last = self.items_left == 0 and size + self.heavy_left <= self.capacity
        self._fill(chunk, max((self.capacity if is_last else self.level) - size, 0))
        while self.num_ready >= self.level:
            self._fill(self._new_chunk(), self._room())
        return chunk

    def finish(self) -> None:
        """Put what is left into chunks of its own."""
        while self.heavy_left:
            self._fill(self._new_chunk(), self._room())

    def _room(self) -> int:
        is_last = self.items_left == 0 and self.heavy_left <= self.capacity
        return self.capacity if is_last else self.level

    def _new_chunk(self) -> int:
        self.num_chunks += 1
        return self.num_chunks - 1

    def _done(self, owner: int) -> None:
        if owner >= 0:
            self.waiting_for[owner] -= 1
            if self.waiting_for[owner] == 0:
                self.ready.append(owner)
                self.num_ready += self.heavy[owner]

    def _fill(self, chunk: int, gap: int) -> None:
        while gap and self.ready:
            node = self.ready[-1]
            length = min(gap, self.heavy[node])
            self.heavy[node] -= length  # from its end: descendants run first
            self.num_ready -= length
            self.heavy_left -= length
            gap -= length
            self.pieces.append((node, self.heavy[node], length, chunk))
            if self.heavy[node] == 0:
                self.ready.pop()
                self._done(self.parent[node])
