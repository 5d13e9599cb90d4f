"""Who is in which chunk, who reads whom, and which chunk must run before which."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np


class Tree(Protocol):
    """What a layout needs of a forest: tokens, or runs of tokens that stay together, in preorder."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def parent(self) -> np.ndarray: ...

    @property
    def subtree_end(self) -> np.ndarray: ...


class Layout:
    """An assignment of tree tokens to chunks, with what follows from it: pushed tokens, contexts, a legal order."""

    def __init__(self, forest: Tree, chunk_of: np.ndarray):
        """Number the chunks 0, 1, ... in the order of their labels. chunk_of: int [T]; raises ValueError else."""
        if chunk_of.shape != (forest.num_tokens,):
            raise ValueError(f"chunk_of has shape {chunk_of.shape}; the forest has {forest.num_tokens} tokens")
        self.forest = forest
        _, first, inverse = np.unique(chunk_of, return_index=True, return_inverse=True)
        self.chunk_of = inverse.astype(np.int32)
        self.num_chunks = len(first)
        self._by_first_token = np.argsort(first).tolist()
        self.tokens = group_by(self.chunk_of, self.num_chunks)
        parent = forest.parent
        entry = np.flatnonzero(parent >= 0)
        self.entries = entry[self.chunk_of[entry] != self.chunk_of[parent[entry]]]
        """Tokens whose parent is in another chunk, increasing."""
        self.pushed = np.flatnonzero(self._below(np.arange(forest.num_tokens), self.entries))
        """Tokens with a descendant in another chunk, increasing."""

    def contexts(self) -> list[np.ndarray]:
        """Return for every chunk the pushed tokens outside it with a descendant in it, int32, increasing."""
        own_entries = group_by(self.chunk_of[self.entries], self.num_chunks)
        return [self.ancestors(self.entries[own]) for own in own_entries]

    def ancestors(self, entries: np.ndarray) -> np.ndarray:
        """Return the pushed proper ancestors of `entries` (increasing tokens), int32, increasing.

        For all entries of a chunk they lie outside it, or chunks would hold each other's ancestors.
        """
        if len(entries) == 0:
            return np.zeros(0, np.int32)
        near = self.pushed[: np.searchsorted(self.pushed, entries[-1])]
        return near[self._below(near, entries)].astype(np.int32)

    def _below(self, tokens: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Tell for each of `tokens` whether one of the increasing `marks` is its proper descendant, bool."""
        ends = self.forest.subtree_end[tokens]
        return np.searchsorted(marks, ends, side="left") > np.searchsorted(marks, tokens, side="right")

    def order(self) -> list[int]:
        """Return the chunks as they run, each after all that hold descendants of its tokens: as numbered, if legal.

        Raises ValueError where two chunks hold each other's ancestors.
        """
        above = self.forest.parent[self.entries]
        if (self.chunk_of[self.entries] < self.chunk_of[above]).all():
            return list(range(self.num_chunks))
        return self.post_order()

    def post_order(self) -> list[int]:
        """Order the chunks so that each comes after all chunks that hold descendants of its tokens.

        Depth-first over "is read by", so that few contexts are alive at once; no recursion. Raises ValueError where
        two chunks hold each other's ancestors: they would wait for one another for ever.
        """
        readers = self._readers()
        has_context = np.zeros(self.num_chunks, bool)
        has_context[self.chunk_of[self.entries]] = True
        order: list[int] = []
        state = np.zeros(self.num_chunks, np.int8)  # 0 unseen, 1 open, 2 done
        for root in [c for c in self._by_first_token if not has_context[c]] + self._by_first_token:
            stack: list[tuple[int, Iterator[int]]] = [] if state[root] else [(root, iter(readers[root]))]
            state[root] = max(state[root], 1)
            while stack:
                chunk, rest = stack[-1]
                reader = next(rest, None)
                if reader is None:
                    state[chunk] = 2
                    order.append(chunk)
                    stack.pop()
                elif state[reader] == 1:
                    raise ValueError(f"chunks {chunk} and {reader} each hold ancestors of the other's tokens")
                elif state[reader] == 0:
                    state[reader] = 1
                    stack.append((reader, iter(readers[reader])))
        return order

    def _readers(self) -> list[list[int]]:
        """Return for every chunk the chunks with a child of one of its tokens, by their first such token."""
        owner = self.chunk_of[self.forest.parent[self.entries]].astype(np.int64)
        pairs, first = np.unique(owner * self.num_chunks + self.chunk_of[self.entries], return_index=True)
        pairs = pairs[np.argsort(first)]
        groups = group_by(pairs // max(self.num_chunks, 1), self.num_chunks)
        return [(pairs[group] % self.num_chunks).tolist() for group in groups]


def group_by(labels: np.ndarray, num_labels: int) -> list[np.ndarray]:
    """Return for each label 0 .. num_labels - 1 the increasing indices that carry it."""
    if num_labels == 0:
        return []
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.searchsorted(labels[order], np.arange(1, num_labels)))
