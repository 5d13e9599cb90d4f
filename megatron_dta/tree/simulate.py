"""Larger batches than there are at hand: an outline repeated with other contents, to size a cluster without one."""

import numpy as np

from megatron_dta.tree.outline import Outline

JITTER = 0.1
"""Ends of sequences are this much longer or shorter, at random."""


def repeated(outline: Outline, copies: int, seed: int = 0) -> Outline:
    """Return the outline of `copies` batches that differ in content but for the prefix all sequences share.

    What follows that prefix is repeated; the last node of every path is up to `JITTER` longer or shorter, drawn from
    `seed`. Sequences come copy by copy. Raises ValueError below one copy.
    """
    if copies < 1:
        raise ValueError(f"copies is {copies}; expected at least 1")
    shared = _shared_nodes(outline)
    rest = outline.num_nodes - shared
    shift = np.repeat(np.arange(copies) * rest, rest)
    node = np.concatenate([np.arange(shared), np.tile(np.arange(shared, outline.num_nodes), copies)])
    parent = outline.parent[node].copy()
    parent[shared:] += np.where(parent[shared:] >= shared, shift, 0)
    length, sources = outline.length[node].copy(), outline.sources[node].copy()
    is_leaf = (outline.end - np.arange(outline.num_nodes) == 1)[node]
    factor = np.random.default_rng(seed).uniform(1 - JITTER, 1 + JITTER, len(node))
    factor[: outline.num_nodes] = 1.0  # the first copy is the batch itself
    stretched = np.maximum(np.rint(length * factor), 1).astype(np.int64)
    sources = np.where(is_leaf, np.minimum(np.rint(sources * factor), stretched).astype(np.int64), sources)
    last = np.tile(outline.last, copies)
    last += np.where(last >= shared, np.repeat(np.arange(copies) * rest, len(outline.last)), 0)
    return Outline(
        length=np.where(is_leaf, stretched, length),
        depth=outline.depth[node],
        parent=parent,
        sources=sources,
        last=last,
    )


def _shared_nodes(outline: Outline) -> int:
    """Count the nodes, from the first on, that lie on the paths of all sequences and have something below."""
    ends = np.bincount(outline.last, minlength=outline.num_nodes)
    for node in range(outline.num_nodes):
        goes_on = outline.end[node] == outline.num_nodes and outline.end[node] > node + 1
        if outline.parent[node] != node - 1 or not goes_on:
            return node
        if ends[node]:
            return node + 1
    return outline.num_nodes
