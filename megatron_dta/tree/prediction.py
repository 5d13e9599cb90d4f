"""What a packing's calls hold and take, before any plan is made: what packings are chosen by.

Shapes: P pieces in preorder, K chunks, Q pushes.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.budget import padded
from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.layout import Layout
from megatron_dta.tree.outline import visible_pairs
from megatron_dta.tree.packing import Packing


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """What a packing's calls hold and take, before any plan is made. Shapes: K chunks, Q pushes."""

    rows: np.ndarray
    """int64 [K], padding included."""
    chunk_seconds: np.ndarray
    """float64 [K]."""
    push_rows: np.ndarray
    """int64 [Q]."""
    push_seconds: np.ndarray
    """float64 [Q]."""
    push_before: np.ndarray
    """int64 [Q]: the chunk that each push is made before."""
    pushed_tokens: int
    state_rows: int
    """Most cached states alive at once."""
    grad_rows: int
    push_capacity: int
    """Most tokens of a push: a small one holds few states before they are needed."""

    @property
    def seconds(self) -> float:
        return float(self.chunk_seconds.sum() + self.push_seconds.sum())


def predict(
    packing: Packing,
    cost: CostModel,
    capacity: int,
    multiple: int,
    *,
    in_flight: int = 1,
    push_before: np.ndarray | None = None,
) -> Prediction:
    """Predict the calls that `schedule` makes of a packing, with pushes of at most `capacity` tokens.

    push_before: the chunk before which each push is made, where that is earlier than a chunk needs one. Raises
    ValueError where the packing's chunks are not numbered in a legal order.
    """
    outline, length, chunk = packing.outline, packing.length, packing.chunk
    layout = Layout(packing, chunk)
    num_chunks = packing.num_chunks
    if layout.order() != list(range(num_chunks)):
        raise ValueError("chunks are not numbered in an order in which they may run")
    contexts = layout.contexts()
    pairs = visible_pairs(packing.depth, length)
    tokens = np.bincount(chunk, length, num_chunks)
    rows = padded(tokens, multiple)
    sources = np.bincount(chunk, outline.sources[packing.node] * length / outline.length[packing.node], num_chunks)
    context = np.array([length[c].sum() for c in contexts], np.float64)
    chunk_pairs = np.bincount(chunk, pairs, num_chunks) + rows - tokens
    pushes = _push_calls(packing, layout, contexts, capacity)
    push_padded = padded(pushes.rows, multiple)
    readers = np.full(len(length), -1)
    for number, pieces in enumerate(contexts):
        readers[pieces] = number
    piece = pushes.piece
    # A context is freed after the backward of its last reader, which waits for the chunks in flight.
    freed_after = np.minimum(readers[piece] + in_flight - 1, num_chunks - 1)
    before = pushes.before if push_before is None else push_before
    return Prediction(
        rows=rows.astype(np.int64),
        chunk_seconds=cost.chunk.seconds(rows, chunk_pairs, context, sources),
        push_rows=push_padded.astype(np.int64),
        push_seconds=cost.push.seconds(push_padded, pushes.pairs + push_padded - pushes.rows, pushes.context, 0),
        push_before=before,
        pushed_tokens=int(pushes.length.sum()),
        state_rows=_most_alive(before[pushes.call], freed_after, pushes.length, num_chunks),
        grad_rows=_most_alive(pushes.needed_by, chunk[piece], pushes.length, num_chunks),
        push_capacity=capacity,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pushes:
    """Fragments of pushed pieces in the order they are needed, cut into calls. Shapes: F fragments, Q calls."""

    piece: np.ndarray
    length: np.ndarray
    call: np.ndarray
    needed_by: np.ndarray
    """int64 [F] each; the chunk that needs the fragment first."""
    rows: np.ndarray
    pairs: np.ndarray
    context: np.ndarray
    before: np.ndarray
    """[Q] each; the chunk that needs anything of the call first."""


def _push_calls(packing: Packing, layout: Layout, contexts: list[np.ndarray], capacity: int) -> _Pushes:
    """Line the pushed pieces up as chunks need them, and cut the line every `capacity` tokens."""
    needed_by = np.full(len(packing.length), -1)
    line = [np.zeros(0, np.int64)]
    for number, pieces in enumerate(contexts):
        fresh = pieces[needed_by[pieces] < 0]
        needed_by[fresh] = number
        line.append(fresh)
    order = np.concatenate(line)
    ends = np.cumsum(packing.length[order])
    fragment_end = np.unique(np.concatenate([ends, np.arange(capacity, ends[-1], capacity)])) if len(ends) else ends
    length = np.diff(fragment_end, prepend=0)
    at = np.searchsorted(ends, fragment_end)
    piece, offset = order[at], fragment_end - length - (ends[at] - packing.length[order[at]])
    call = (fragment_end - 1) // capacity
    num_calls = int(call.max(initial=-1)) + 1
    starts = np.searchsorted(call, np.arange(num_calls + 1))
    context = np.bincount(call, offset, num_calls)
    for number in range(num_calls):
        own = np.sort(piece[starts[number] : starts[number + 1]])
        above = layout.ancestors(own)
        context[number] += packing.length[above[~np.isin(above, own, assume_unique=True)]].sum()
    return _Pushes(
        piece=piece,
        length=length,
        call=call,
        needed_by=needed_by[piece],
        rows=np.bincount(call, length, num_calls),
        pairs=np.bincount(call, visible_pairs(packing.depth[piece] + offset, length), num_calls),
        context=context,
        before=needed_by[piece][starts[:-1]],
    )


def _most_alive(first: np.ndarray, last: np.ndarray, size: np.ndarray, num_chunks: int) -> int:
    """Return the largest total size alive at one chunk, from first to last inclusive."""
    change = np.zeros(num_chunks + 1)
    np.add.at(change, first, size)
    np.add.at(change, last + 1, -size)
    return int(np.cumsum(change).max(initial=0))
