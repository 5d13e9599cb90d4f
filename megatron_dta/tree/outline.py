"""The outline of a forest: its segments and what planning needs of them, far smaller than its tokens.

Shapes: N nodes in preorder, S sequences. A node is a segment, cut again after every token that ends a sequence, so that
each sequence is a path of whole nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dta.tree.forest import Forest, Runs, sorted_sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """Nodes in preorder, so a subtree is a range of nodes and of tokens."""

    length: np.ndarray
    """int64 [N]: tokens of each node, at least 1."""
    depth: np.ndarray
    """int64 [N]: depth of its first token."""
    parent: np.ndarray
    """int64 [N]: the node above, -1 for a root."""
    sources: np.ndarray
    """int64 [N]: its tokens with a loss-bearing edge, which reach the LM head."""
    last: np.ndarray
    """int64 [S]: the node that each sequence ends with, in the caller's order."""

    @property
    def num_nodes(self) -> int:
        return len(self.length)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @cached_property
    def end(self) -> np.ndarray:
        """One past the last node of each node's subtree, int64 [N]."""
        return subtree_ends(self.parent)

    @cached_property
    def start(self) -> np.ndarray:
        """First tree token of every node, and one past the last of all: int64 [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.length)])

    @cached_property
    def size(self) -> np.ndarray:
        """Tokens of each node's subtree, int64 [N]."""
        return self.start[self.end] - self.start[:-1]

    @cached_property
    def pairs(self) -> np.ndarray:
        """Visible (query, key) pairs of each node's tokens, int64 [N]."""
        return visible_pairs(self.depth, self.length)

    @cached_property
    def children(self) -> tuple[np.ndarray, np.ndarray]:
        """(first [N + 1], child [N - roots]): the children of v are child[first[v] : first[v + 1]], increasing."""
        inner = np.flatnonzero(self.parent >= 0)
        counts = np.bincount(self.parent[inner], minlength=self.num_nodes)
        order = np.argsort(self.parent[inner], kind="stable")
        return np.concatenate([[0], np.cumsum(counts)]), inner[order]

    def part_of(self, sequences: np.ndarray) -> "Outline":
        """Return the outline of some sequences alone, int [n]: the nodes on their paths.

        `sources` stays that of the whole: a token whose edge is trained by other sequences only is counted still.
        """
        nodes = self.nodes_of(sequences)
        inner = self.parent[nodes]
        parent = np.where(inner < 0, -1, np.searchsorted(nodes, inner))
        last = np.searchsorted(nodes, self.last[sequences])
        values = {name: getattr(self, name)[nodes] for name in ("length", "depth", "sources")}
        return Outline(parent=parent, last=last, **values)

    def nodes_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return the nodes on the paths of some sequences, increasing."""
        if self.is_deep():
            return np.flatnonzero(self.held(sequences))
        frontier = np.unique(self.last[sequences])
        levels = [frontier]
        while len(frontier):
            above = self.parent[frontier]
            frontier = np.unique(above[above >= 0])
            levels.append(frontier)
        return np.unique(np.concatenate(levels))

    @cached_property
    def num_levels(self) -> int:
        """Nodes on the longest path."""
        change = np.append(np.ones(self.num_nodes, np.int64), 0)
        np.add.at(change, self.end, -1)
        return int(np.cumsum(change)[:-1].max(initial=0))

    def is_deep(self) -> bool:
        """Tell whether counting over all nodes is faster than walking up paths."""
        return self.num_levels * _PER_LEVEL > self.num_nodes

    def held(self, sequences: np.ndarray) -> np.ndarray:
        """Count the given sequences that end in each node's subtree, int64 [N]."""
        so_far = np.concatenate([[0], np.cumsum(np.bincount(self.last[sequences], minlength=self.num_nodes))])
        return so_far[self.end] - so_far[:-1]


_PER_LEVEL = 5000
"""Walking up one level of paths takes as long as counting over so many nodes."""


def visible_pairs(depth: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the pairs of runs of tokens that start at `depth`: a token sees itself and what is above it."""
    return length * depth + length * (length + 1) // 2


def subtree_ends(parent: np.ndarray) -> np.ndarray:
    """Return one past the last node of every subtree, int64 [N], from preorder parents."""
    ends = list(range(1, len(parent) + 1))
    above = parent.tolist()
    for node in range(len(ends) - 1, -1, -1):
        if above[node] >= 0 and ends[above[node]] < ends[node]:
            ends[above[node]] = ends[node]
    return np.array(ends, np.int64)


def outline_of(forest: Forest) -> Outline:
    """Return the outline of a forest."""
    token = np.arange(forest.num_tokens)
    is_start = np.zeros(forest.num_tokens + 1, bool)
    is_start[forest.segment_start] = True
    after = forest.sequence_end + 1  # a child of the last token comes right after it
    inside = after[after < forest.num_tokens]
    is_start[inside] |= forest.parent[inside] == inside - 1
    start = np.flatnonzero(is_start[:-1])
    node_of = np.cumsum(is_start[:-1]) - 1
    above = forest.parent[start]
    is_source = np.zeros(len(token), bool)
    is_source[forest.parent[forest.trained]] = True
    return Outline(
        length=np.diff(np.append(start, forest.num_tokens)),
        depth=forest.depth[start].astype(np.int64),
        parent=np.where(above < 0, -1, node_of[above]).astype(np.int64),
        sources=_sums(is_source, start),
        last=node_of[forest.sequence_end].astype(np.int64),
    )


def build_outline(
    tokens: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray] | None = None,
    identities: Sequence[np.ndarray | None] | None = None,
) -> Outline:
    """Return the outline of the forest that `build_forest` makes of these sequences, without the forest."""
    runs = Runs(len(tokens))
    path = np.zeros(max((len(t) for t in tokens), default=0), np.int64)
    is_source = np.zeros(sum(len(t) for t in tokens), bool)
    open_: list[tuple[int, int]] = []  # (depth, first tree token) of the runs on the current path
    starts: list[int] = []
    for i, shared in sorted_sequences(tokens, loss_masks, identities, None):
        while open_ and open_[-1][0] >= shared:
            open_.pop()
        if open_:
            base, first = open_[-1]
            starts.append(first + shared - base)  # where this sequence leaves the run, or goes on after its end
        length = len(tokens[i])
        runs.add(i, shared, length, int(path[shared - 1]) if shared else -1)
        if length > shared:
            open_.append((shared, runs.start[-1]))
            starts.append(runs.start[-1])
            path[shared:length] = np.arange(runs.start[-1], runs.num_tokens)
        runs.sequence_end[i] = path[length - 1]
        if loss_masks is not None:
            is_source[path[: length - 1][np.asarray(loss_masks[i][1:], bool)]] = True
    return _outline_of_runs(runs, np.array(starts, np.int64), is_source[: runs.num_tokens])


def _outline_of_runs(runs: Runs, starts: np.ndarray, is_source: np.ndarray) -> Outline:
    adds = np.diff([*runs.start, runs.num_tokens]) > 0
    run_start, shared, above = (np.array(v, np.int64)[adds] for v in (runs.start, runs.shared, runs.parent))
    start = np.unique(np.concatenate([starts[starts < runs.num_tokens], run_start]))
    run = np.searchsorted(run_start, start, side="right") - 1
    into = start - run_start[run]
    parent_token = np.where(into == 0, above[run], start - 1)
    return Outline(
        length=np.diff(np.append(start, runs.num_tokens)),
        depth=shared[run] + into,
        parent=np.where(parent_token < 0, -1, np.searchsorted(start, parent_token, side="right") - 1),
        sources=_sums(is_source, start),
        last=np.searchsorted(start, runs.sequence_end, side="right") - 1,
    )


def _sums(flags: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Count the flags of every node, int64 [N]."""
    so_far = np.cumsum(flags, dtype=np.int32)
    before = np.where(start > 0, so_far[start - 1], 0) if len(start) else start
    return np.diff(before, append=so_far[-1] if len(so_far) else 0).astype(np.int64)
