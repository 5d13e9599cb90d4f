"""Choose among packings, and improve the chosen one where it has few parts: there every gap in a chunk shows.

The tree tokens are cut into *units*, ranges that stay together: parts of nodes, or subtrees that the packing keeps
whole. Simulated annealing moves units between chunks. What a chunk takes depends only on which units it holds: its
context is their ancestors outside it, and those of them with a descendant outside it are pushed. Sets of units are bit
masks: unit i in preorder is bit i.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.layout import Layout
from megatron_dta.tree.outline import Outline, visible_pairs
from megatron_dta.tree.packing import WINDOWS, Packing, pack, pack_in_order
from megatron_dta.tree.prediction import Prediction, predict

TOLERANCE = 5e-4
"""Less time than this share is not worth more memory."""
SEARCH_ABOVE = 1e-2
"""A packing that is this close to the lower bound is good enough."""
MOST_UNITS = 64
STEPS = 5000
HOT, COLD = 0.05, 0.002
"""First and last temperature, as shares of a chunk's mean time."""
MOST_TRIED = 16
SMALLER_PUSHES = (4, 16, 64)
"""Parts of the capacity that pushes take where full ones would hold too many states at once."""

Candidate = tuple[Packing, Prediction]


def best_packing(
    outline: Outline,
    cost: CostModel,
    capacity: int,
    multiple: int,
    state_limit: int | None = None,
    *,
    in_flight: int = 1,
    search: bool = True,
) -> Candidate:
    """Return the packing of an outline that is predicted to be fastest, and its prediction.

    Of packings that take the same within TOLERANCE it is the one with the fewest cached rows. At most `state_limit`
    states are alive at once; where no packing keeps to that, it is the one with the fewest. Without `search` it is not
    improved: milliseconds, for trying many.
    """
    tried = [*(pack(outline, capacity, window) for window in WINDOWS), pack_in_order(outline, capacity)]
    packings = {p.chunk.tobytes() + p.length.tobytes(): p for p in tried}

    def chosen_with(push_capacity: int) -> Candidate:
        predicted = [(p, predict(p, cost, push_capacity, multiple, in_flight=in_flight)) for p in packings.values()]
        return _choose(predicted, state_limit)

    chosen = chosen_with(capacity)
    for share in SMALLER_PUSHES:
        if state_limit is None or chosen[1].state_rows <= state_limit or share * multiple > capacity:
            break
        chosen = chosen_with(capacity // (share * multiple) * multiple)
    if chosen[1].push_capacity < capacity:
        return chosen  # the search below knows full pushes only
    if not search:
        return chosen
    better = improve(chosen[0], cost, capacity, multiple, state_limit, in_flight=in_flight)
    return _choose([chosen, (better, predict(better, cost, capacity, multiple, in_flight=in_flight))], state_limit)


def _choose(candidates: Sequence[Candidate], state_limit: int | None) -> Candidate:
    fitting = [c for c in candidates if state_limit is None or c[1].state_rows <= state_limit]
    if not fitting:
        return min(candidates, key=lambda c: c[1].state_rows)
    fastest = min(prediction.seconds for _, prediction in fitting)
    alike = [c for c in fitting if c[1].seconds <= fastest * (1 + TOLERANCE)]
    # An accumulator row is fp32, a state row bf16.
    return min(alike, key=lambda c: (c[1].state_rows + 2 * c[1].grad_rows, c[1].seconds))


def lower_bound(outline: Outline, cost: CostModel, capacity: int, multiple: int) -> float:
    """Return seconds that no plan which computes every token once is predicted to beat."""
    tokens, one, push = outline.num_tokens, cost.chunk, cost.push
    heavy = np.clip(outline.size - capacity, 0, outline.length)
    # A token is read by all chunks that hold tokens below it but its own: by as many as its subtree fills, less one.
    filled = _filled_chunks(outline.size, capacity) - _filled_chunks(outline.size - heavy, capacity)
    chunks, padding = math.ceil(tokens / capacity), -tokens % multiple
    device = one.fixed * chunks + one.row * (tokens + padding) + one.pair * (int(outline.pairs.sum()) + padding)
    device += one.context * int((filled - heavy).sum()) + one.source * int(outline.sources.sum())
    work = push.row * int(heavy.sum()) + push.pair * int(visible_pairs(outline.depth, heavy).sum())
    return max(one.launch * chunks, device) + _push_seconds(cost, capacity, multiple, int(heavy.sum()), work)


def _filled_chunks(size: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sum of ceil(n / capacity) over n from 1 to size."""
    full, rest = np.divmod(size, capacity)
    return capacity * full * (full + 1) // 2 + rest * (full + 1)


def _push_seconds(cost: CostModel, capacity: int, multiple: int, tokens: int, work: float) -> float:
    """Return what pushes with these totals take: exactly in one call, at least in several.

    work: device seconds of their rows and pairs. Of several calls, later ones read context as well, and each takes the
    longer of its own host and device time.
    """
    calls, padding, push = math.ceil(tokens / capacity), -tokens % multiple, cost.push
    return max(push.launch * calls, push.fixed * calls + work + (push.row + push.pair) * padding)


def improve(
    packing: Packing,
    cost: CostModel,
    capacity: int,
    multiple: int,
    state_limit: int | None = None,
    *,
    in_flight: int = 1,
) -> Packing:
    """Return a packing that is predicted to be faster, or the same one where none is found. Deterministic.

    What is found keeps to `state_limit`. Packings of more than MOST_UNITS parts stay as they are.
    """
    seconds = predict(packing, cost, capacity, multiple).seconds
    if seconds <= lower_bound(packing.outline, cost, capacity, multiple) * (1 + SEARCH_ABOVE):
        return packing
    start = _unit_starts(packing, capacity)
    if len(start) > MOST_UNITS:
        return packing
    units = Units(packing, start, cost, capacity, multiple)
    for chunks in reversed(_anneal(units)[-MOST_TRIED:]):
        found = units.packing(chunks)
        prediction = predict(found, cost, capacity, multiple, in_flight=in_flight)
        if prediction.seconds < seconds and (state_limit is None or prediction.state_rows <= state_limit):
            return found
    return packing


def _unit_starts(packing: Packing, capacity: int) -> np.ndarray:
    """Return the first tree token of each unit, int64, increasing; more than MOST_UNITS if that cannot be helped."""
    outline, piece = packing.outline, _starts(packing)
    starts = np.union1d(outline.start[:-1], piece)
    if len(starts) > MOST_UNITS:
        change = np.concatenate([[0], np.cumsum(packing.chunk[1:] != packing.chunk[:-1])])
        is_whole = change[packing.subtree_end - 1] == change
        return piece[(packing.parent < 0) | ~is_whole[packing.parent]]
    # Nodes are cut where full chunks would end that are ranges of preorder, and into what fills a gap.
    ends = np.arange(outline.num_tokens, 0, -capacity)
    gaps = np.unique(capacity - np.bincount(packing.chunk, packing.length).astype(np.int64))
    fitting = [np.concatenate([outline.start[:-1] + gap, outline.start[1:] - gap]) for gap in gaps.tolist()]
    for cuts in (ends, outline.num_tokens - ends, *fitting):
        more = np.union1d(starts, cuts[(cuts >= 0) & (cuts < outline.num_tokens)])
        starts = more if len(more) <= MOST_UNITS else starts
    return starts


def _starts(packing: Packing) -> np.ndarray:
    """Return the first tree token of each piece, int64 [P]."""
    return np.cumsum(packing.length) - packing.length


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What a set of units is as a chunk."""

    tokens: int
    seconds: float
    pushed: int
    """Tokens of it that have to be pushed."""
    work: float
    """Device time of their rows and pairs."""
    needs: int
    """The units that have to run before it."""


class Units:
    """Ranges of tree tokens, and what chunks of them take. Shape: U units."""

    def __init__(self, packing: Packing, start: np.ndarray, cost: CostModel, capacity: int, multiple: int):
        """Cut a packing at tree tokens `start`, int [U], increasing: a unit is part of a node, or a whole subtree."""
        self.cost, self.capacity, self.multiple = cost, capacity, multiple
        self.pieces = pieces = _cut(packing, start)
        first = np.searchsorted(_starts(pieces), start)
        self.unit_of = np.searchsorted(first, np.arange(pieces.num_tokens), side="right") - 1
        sources = packing.outline.sources[pieces.node] * pieces.length / packing.outline.length[pieces.node]
        counts = (pieces.length, visible_pairs(pieces.depth, pieces.length), sources)
        self.tokens, self.pairs, self.sources = (np.add.reduceat(c, first).tolist() for c in counts)
        self.chunks = [0] * packing.num_chunks
        """The packing's chunks, as sets of units."""
        self.above: list[int] = []
        self.below = [0] * len(first)
        parent = np.where(pieces.parent[first] < 0, -1, self.unit_of[pieces.parent[first]])
        for unit, (chunk, up) in enumerate(zip(pieces.chunk[first].tolist(), parent.tolist())):
            self.chunks[chunk] |= 1 << unit
            self.above.append(0 if up < 0 else self.above[up] | 1 << up)
            for ancestor in _bits(self.above[unit]):
                self.below[ancestor] |= 1 << unit
        self._known: dict[int, _Chunk] = {}

    def chunk(self, mask: int) -> _Chunk:
        if mask not in self._known:
            self._known[mask] = self._chunk(mask)
        return self._known[mask]

    def _chunk(self, mask: int) -> _Chunk:
        tokens = pushed = above = below = 0
        pairs = pushed_pairs = sources = 0.0
        for unit in _bits(mask):
            tokens += self.tokens[unit]
            pairs += self.pairs[unit]
            sources += self.sources[unit]
            above |= self.above[unit]
            below |= self.below[unit]
            if self.below[unit] & ~mask:
                pushed += self.tokens[unit]
                pushed_pairs += self.pairs[unit]
        context = sum(self.tokens[unit] for unit in _bits(above & ~mask))
        padding, one, push = -tokens % self.multiple, self.cost.chunk, self.cost.push
        device = one.fixed + one.row * (tokens + padding) + one.pair * (pairs + padding)
        return _Chunk(
            tokens=tokens,
            seconds=max(one.launch, device + one.context * context + one.source * sources),
            pushed=pushed,
            work=push.row * pushed + push.pair * pushed_pairs,
            needs=below & ~mask,
        )

    def seconds(self, chunks: Sequence[int]) -> float:
        """Return what `predict` does for these chunks; less where pushes take several calls."""
        known = [self.chunk(mask) for mask in chunks]
        pushed, work = sum(c.pushed for c in known), sum(c.work for c in known)
        return sum(c.seconds for c in known) + _push_seconds(self.cost, self.capacity, self.multiple, pushed, work)

    def order(self, chunks: Sequence[int]) -> list[int] | None:
        """Return the chunks in an order in which they may run, None where there is none."""
        rest, waiting, order = (1 << len(self.tokens)) - 1, chunks, []
        while waiting:
            later = []
            for mask in waiting:
                if self.chunk(mask).needs & rest:
                    later.append(mask)
                else:
                    rest ^= mask
                    order.append(mask)
            if len(later) == len(waiting):
                return None
            waiting = later
        return order

    def packing(self, chunks: Sequence[int]) -> Packing:
        """Return the packing of these chunks, numbered depth-first."""
        chunk_of = [next(k for k, mask in enumerate(chunks) if mask >> unit & 1) for unit in range(len(self.tokens))]
        chunk = np.array(chunk_of)[self.unit_of]
        return replace(self.pieces, chunk=np.argsort(Layout(self.pieces, chunk).post_order())[chunk])


def _cut(packing: Packing, start: np.ndarray) -> Packing:
    """Return the packing with its pieces cut at these tree tokens as well."""
    start = np.union1d(_starts(packing), start)
    of = np.searchsorted(_starts(packing), start, side="right") - 1
    length = np.diff(np.append(start, packing.outline.num_tokens))
    return replace(packing, node=packing.node[of], length=length, chunk=packing.chunk[of])


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _anneal(units: Units) -> list[list[int]]:
    """Return ever faster legal chunks: random parts move, where it costs time less and less willingly."""
    rng = random.Random(0)
    chunks = units.chunks
    seconds = fastest = units.seconds(chunks)
    scale = seconds / len(chunks)
    found = []
    for step in range(STEPS):
        moved = _move(units, chunks, rng)
        if moved is None:
            continue
        then = units.seconds(moved)
        temperature = scale * HOT * (COLD / HOT) ** (step / STEPS)
        if then > seconds and rng.random() >= math.exp((seconds - then) / temperature):
            continue
        order = units.order(moved)
        if order is None:
            continue
        chunks, seconds = order, then
        if seconds < fastest * (1 - 1e-9):
            fastest = seconds
            found.append(chunks)
    return found


def _move(units: Units, chunks: list[int], rng: random.Random) -> list[int] | None:
    """Move a part of a chunk to another or a new one, in exchange for a part of that where it is too full."""
    unit = rng.randrange(len(units.tokens))
    source = next(k for k, mask in enumerate(chunks) if mask >> unit & 1)
    target = rng.randrange(len(chunks) + 1)
    if target == source:
        return None
    left, taken = chunks[source], chunks[target] if target < len(chunks) else 0
    part = _part(units, left, unit, rng)
    left, taken = left ^ part, taken | part
    if units.chunk(taken).tokens > units.capacity:
        back = _part(units, chunks[target], rng.choice(list(_bits(chunks[target]))), rng)
        left, taken = left | back, taken ^ back
        if max(units.chunk(left).tokens, units.chunk(taken).tokens) > units.capacity:
            return None
    others = [mask for k, mask in enumerate(chunks) if k not in (source, target)]
    return others + [mask for mask in (left, taken) if mask]


def _part(units: Units, mask: int, unit: int, rng: random.Random) -> int:
    """Draw a unit of a chunk alone, or with what the chunk holds below or above it."""
    return 1 << unit | mask & rng.choice((0, 0, units.below[unit], units.above[unit]))
