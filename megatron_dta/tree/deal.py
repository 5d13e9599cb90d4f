"""Context parallelism in numbers: which rows of a call each rank computes, and what of mask and edges is a rank's.

Every rank sees all keys of the call and computes the queries of its own rows, dealt in tiles of consecutive rows so
that all ranks have equally many rows and nearly equal visible area. As long as a rank's rows are increasing, its mask
is again two numbers per key, over its own rows.

Shapes: R rows and K keys (context, then the R rows) of a call, n = R / ranks rows of a rank.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dta.errors import UsageError
from megatron_dta.tree.plan import Chunk

TILE = 128
"""Most rows dealt at once: attention kernels work on blocks of as many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardEdges:
    """The edges and terms of a chunk whose source row is one rank's, as `Chunk` has them. Shapes: E edges, M terms."""

    source_rows: np.ndarray
    """int32: the rank's own rows with a loss-bearing edge, increasing."""
    edges: np.ndarray
    """int32 [E]: indices into `Forest.edges`, ordered by source."""
    edge_source: np.ndarray
    """int32 [E]: index into `source_rows` of every edge, increasing."""
    terms: np.ndarray
    """int64 [M]: indices into the forest's terms."""
    term_edge: np.ndarray
    """int64 [M]: index into `edges` of every term."""


def visible_counts(visible_from: np.ndarray, visible_to: np.ndarray, num_rows: int) -> np.ndarray:
    """Return how many keys each query row sees, int64 [R], from the mask's vectors [K]: O(K + R)."""
    first = np.clip(visible_from, 0, num_rows)
    stop = np.maximum(np.clip(visible_to, 0, num_rows), first)
    opened, closed = (np.bincount(ends, minlength=num_rows + 1) for ends in (first, stop))
    return np.cumsum(opened - closed)[:num_rows]


def deal(weights: np.ndarray, ranks: int, tile: int = TILE) -> np.ndarray:
    """Deal rows of these weights [R] to ranks, int64 [ranks, n]; each rank's rows are increasing.

    Tiles have the most rows up to `tile` that divide n. They go out heaviest first, in rounds of one to each rank,
    and in each round the heavier to whom has less so far: no two ranks' sums ever differ by more than one tile's
    weight. Raises UsageError where ranks cannot have equally many rows.
    """
    if ranks < 1 or len(weights) % ranks:
        raise UsageError(
            f"{len(weights)} rows cannot be dealt to {ranks} context ranks; expected equally many for each: pad calls "
            f"to a multiple of row_multiple(context=...)"
        )
    num_rows = len(weights) // ranks
    size = next(size for size in range(tile, 0, -1) if num_rows % size == 0)
    tiles = weights.reshape(-1, size).sum(1)
    hands, loads = np.empty((num_rows // size, ranks), np.int64), np.zeros(ranks, tiles.dtype)
    for hand, heaviest in zip(hands, np.argsort(-tiles, kind="stable").reshape(-1, ranks)):
        takers = np.argsort(loads, kind="stable")
        hand[takers] = heaviest
        loads[takers] += tiles[heaviest]
    hands.sort(axis=0)
    return (hands.T[:, :, None] * size + np.arange(size)).reshape(ranks, num_rows)


def shard_mask(visible_from: np.ndarray, visible_to: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask's two vectors over a rank's increasing `rows` alone, int32 [K] each.

    A key that none of them sees has an empty interval.
    """
    first, stop = (np.searchsorted(rows, ends).astype(np.int32) for ends in (visible_from, visible_to))
    return first, stop


def shard_chunk_edges(chunk: Chunk, rows: np.ndarray) -> ShardEdges:
    """Return the edges with a source among a rank's increasing `rows`, in the chunk's order, and their terms."""
    own_source = np.isin(chunk.source_rows, rows, assume_unique=True)
    own_edge = own_source[chunk.edge_source]
    own_term = own_edge[chunk.term_edge]
    return ShardEdges(
        source_rows=np.searchsorted(rows, chunk.source_rows[own_source]).astype(np.int32),
        edges=chunk.edges[own_edge],
        edge_source=_renumber(own_source)[chunk.edge_source[own_edge]].astype(np.int32),
        terms=chunk.terms[own_term],
        term_edge=_renumber(own_edge)[chunk.term_edge[own_term]],
    )


def _renumber(kept: np.ndarray) -> np.ndarray:
    """Return the new index of every kept entry, int64."""
    return np.cumsum(kept) - 1
