"""Choose among packings, and improve the chosen one where it has few parts: there every gap in a chunk shows.

The tree tokens are cut into *units*, ranges that stay together: parts of nodes, or subtrees that the packing keeps
whole. Simulated annealing moves units between chunks. What a chunk takes depends only on which units it holds: its
context is their ancestors outside it, and those of them with a descendant outside it are pushed. Sets of units are bit
masks: unit i in preorder is bit i.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.layout import Layout
from megatron_dta.tree.outline import Outline, visible_pairs
from megatron_dta.tree.packing import WINDOWS, Packing, Prediction, pack, predict

MOST_UNITS = 64
STEPS_PER_UNIT = 100
HOT, COLD = 0.05, 0.0005
"""First and last temperature, of a chunk's mean time."""
TOLERANCE = 2e-3
"""Less time than this share is not worth more memory, nor a search."""

Candidate = tuple[Packing, Prediction]


def best_packing(
    outline: Outline, cost: CostModel, capacity: int, multiple: int, state_limit: int | None = None
) -> Candidate:
    """Return the packing of an outline that is predicted to be fastest, and its prediction.

    Of packings that take the same within TOLERANCE it is the one with the fewest cached rows. At most `state_limit`
    states are alive at once; where no packing keeps to that, it is the one with the fewest.
    """
    packings = {p.chunk.tobytes() + p.length.tobytes(): p for p in (pack(outline, capacity, w) for w in WINDOWS)}
    chosen = _choose([(p, predict(p, cost, capacity, multiple)) for p in packings.values()], state_limit)
    better = improve(chosen[0], cost, capacity, multiple, state_limit)
    if better is chosen[0]:
        return chosen
    return _choose([chosen, (better, predict(better, cost, capacity, multiple))], state_limit)


def _choose(candidates: Sequence[Candidate], state_limit: int | None) -> Candidate:
    fitting = [c for c in candidates if state_limit is None or c[1].state_rows <= state_limit]
    if not fitting:
        return min(candidates, key=lambda c: c[1].state_rows)
    fastest = min(prediction.seconds for _, prediction in fitting)
    alike = [c for c in fitting if c[1].seconds <= fastest * (1 + TOLERANCE)]
    # An accumulator row holds four bytes where a state row holds two.
    return min(alike, key=lambda c: (c[1].state_rows + 2 * c[1].grad_rows, c[1].seconds))


def lower_bound(outline: Outline, cost: CostModel, capacity: int, multiple: int) -> float:
    """Return seconds that no plan which computes every token once is predicted to beat."""
    tokens = outline.num_tokens
    heavy = np.clip(outline.size - capacity, 0, outline.length)
    # A token is read by all chunks that hold tokens below it but its own, and they are as many as its subtree fills.
    filled = _filled_chunks(outline.size, capacity) - _filled_chunks(outline.size - heavy, capacity)
    chunks, rows = math.ceil(tokens / capacity), math.ceil(tokens / multiple) * multiple
    pairs = int(outline.pairs.sum()) + rows - tokens
    one = cost.chunk
    device = one.row * rows + one.pair * pairs + one.context * int((filled - heavy).sum())
    device += one.fixed * chunks + one.source * int(outline.sources.sum())
    forced = int(heavy.sum())
    work = cost.push.row * forced + cost.push.pair * int(visible_pairs(outline.depth, heavy).sum())
    return max(one.launch * chunks, device) + _push_seconds(cost, capacity, multiple, forced, work)


def _filled_chunks(size: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sum of ceil(n / capacity) over n from 1 to size."""
    full, rest = np.divmod(size, capacity)
    return capacity * full * (full + 1) // 2 + rest * (full + 1)


def _push_seconds(cost: CostModel, capacity: int, multiple: int, tokens: int, work: float) -> float:
    """Return what pushes with these totals take: exactly in one call, at least in several.

    work: device seconds of their rows and pairs. In several calls, later ones read context as well, and the longer of
    host and device time is taken by call.
    """
    calls, padding = math.ceil(tokens / capacity), -tokens % multiple
    device = cost.push.fixed * calls + work + (cost.push.row + cost.push.pair) * padding
    return max(cost.push.launch * calls, device)


def improve(
    packing: Packing, cost: CostModel, capacity: int, multiple: int, state_limit: int | None = None
) -> Packing:
    """Return a packing that is predicted to be faster, or the same one where none is found. Deterministic.

    It keeps to `state_limit`. Packings of more than MOST_UNITS parts stay as they are.
    """
    outline = packing.outline
    seconds = predict(packing, cost, capacity, multiple).seconds
    start = _unit_starts(packing, capacity)
    if len(start) > MOST_UNITS or seconds <= lower_bound(outline, cost, capacity, multiple) * (1 + TOLERANCE):
        return packing
    units = Units(outline, start, cost, capacity, multiple)
    for chunks in reversed(_anneal(units, units.masks(packing))):
        found = units.packing(chunks)
        prediction = predict(found, cost, capacity, multiple)
        if prediction.seconds < seconds and (state_limit is None or prediction.state_rows <= state_limit):
            return found
    return packing


def _unit_starts(packing: Packing, capacity: int) -> np.ndarray:
    """Return the first tree tokens of units, increasing: pieces or whole subtrees; of pieces, also what fills gaps."""
    outline, piece = packing.outline, np.cumsum(packing.length) - packing.length
    starts = np.union1d(outline.start[:-1], piece)
    if len(starts) > MOST_UNITS:
        change = np.concatenate([[0], np.cumsum(packing.chunk[1:] != packing.chunk[:-1])])
        is_whole = change[packing.subtree_end - 1] == change
        return piece[(packing.parent < 0) | ~is_whole[packing.parent]]
    ends = np.arange(outline.num_tokens, 0, -capacity)  # chunks that are ranges of preorder leave one gap in all
    gaps = np.unique(capacity - np.bincount(packing.chunk, packing.length).astype(np.int64))
    fitting = [np.concatenate([outline.start[:-1] + gap, outline.start[1:] - gap]) for gap in gaps.tolist()]
    for cuts in (ends, outline.num_tokens - ends, *fitting):
        more = np.union1d(starts, cuts[(cuts >= 0) & (cuts < outline.num_tokens)])
        starts = more if len(more) <= MOST_UNITS else starts
    return starts


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
    """Ranges of tree tokens, and what chunks of them take."""

    def __init__(self, outline: Outline, start: np.ndarray, cost: CostModel, capacity: int, multiple: int):
        """start: int64 [U], increasing; a unit is part of a node, or a whole subtree."""
        self.outline, self.start = outline, start
        self.cost, self.capacity, self.multiple = cost, capacity, multiple
        self.everything = (1 << len(start)) - 1
        bounds = np.append(start, outline.num_tokens)
        self.tokens = np.diff(bounds).tolist()
        self.pairs, self.sources = (np.diff(c).tolist() for c in _counts_before(outline, bounds))
        self.above: list[int] = []
        self.below = [0] * len(start)
        for unit, parent in enumerate(self._parents().tolist()):
            self.above.append(0 if parent < 0 else self.above[parent] | 1 << parent)
            for ancestor in _bits(self.above[unit]):
                self.below[ancestor] |= 1 << unit
        self._known: dict[int, _Chunk] = {}

    def _parents(self) -> np.ndarray:
        node = np.searchsorted(self.outline.start, self.start, side="right") - 1
        above = self.outline.parent[node]
        last = np.where(above < 0, -1, self.outline.start[above + 1] - 1)
        token = np.where(self.start > self.outline.start[node], self.start - 1, last)
        return np.searchsorted(self.start, token, side="right") - 1

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
        device += one.context * context + one.source * sources
        return _Chunk(
            tokens=tokens,
            seconds=max(one.launch, device) if tokens else 0.0,
            pushed=pushed,
            work=push.row * pushed + push.pair * pushed_pairs,
            needs=below & ~mask,
        )

    def seconds(self, chunks: Sequence[int]) -> float:
        """Return what these chunks take as `predict` does; less where pushes take several calls."""
        known = [self.chunk(mask) for mask in chunks]
        pushed, work = sum(c.pushed for c in known), sum(c.work for c in known)
        return sum(c.seconds for c in known) + _push_seconds(self.cost, self.capacity, self.multiple, pushed, work)

    def order(self, chunks: Sequence[int]) -> list[int] | None:
        """Return the chunks in an order in which they may run, None where there is none."""
        rest, waiting, order = self.everything, chunks, []
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

    def masks(self, packing: Packing) -> list[int]:
        """Return the units of every chunk of a packing that cuts none of them."""
        piece = np.cumsum(packing.length) - packing.length
        masks = [0] * packing.num_chunks
        for unit, chunk in enumerate(packing.chunk[np.searchsorted(piece, self.start, side="right") - 1].tolist()):
            masks[chunk] |= 1 << unit
        return masks

    def packing(self, chunks: Sequence[int]) -> Packing:
        """Return the packing of these chunks, in depth-first order."""
        start = np.union1d(self.outline.start[:-1], self.start)
        label = [next(k for k, mask in enumerate(chunks) if mask >> unit & 1) for unit in range(len(self.start))]
        chunk = np.array(label)[np.searchsorted(self.start, start, side="right") - 1]
        node = np.searchsorted(self.outline.start, start, side="right") - 1
        begins = np.concatenate([[True], (node[1:] != node[:-1]) | (chunk[1:] != chunk[:-1])])
        node, chunk, length = node[begins], chunk[begins], np.diff(np.append(start[begins], self.outline.num_tokens))
        found = Packing(outline=self.outline, node=node, length=length, chunk=chunk)
        return Packing(
            outline=self.outline, node=node, length=length, chunk=np.argsort(Layout(found, chunk).post_order())[chunk]
        )


def _counts_before(outline: Outline, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (pairs, sources) of all tree tokens before each of `tokens`; a node's sources are spread evenly."""
    node = np.minimum(np.searchsorted(outline.start, tokens, side="right"), outline.num_nodes) - 1
    into = tokens - outline.start[node]
    pairs = (np.cumsum(outline.pairs) - outline.pairs)[node] + visible_pairs(outline.depth[node], into)
    sources = (np.cumsum(outline.sources) - outline.sources)[node] + outline.sources[node] * into / outline.length[node]
    return pairs, sources


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _anneal(units: Units, chunks: list[int]) -> list[list[int]]:
    """Return ever faster legal chunks: move random parts of chunks, slower ones less and less willingly."""
    rng = random.Random(0)
    steps = STEPS_PER_UNIT * len(units.start)
    seconds = fastest = units.seconds(chunks)
    scale = seconds / len(chunks)
    found = []
    for step in range(steps):
        moved = _move(units, chunks, rng)
        if moved is None:
            continue
        then = units.seconds(moved)
        temperature = scale * HOT * (COLD / HOT) ** (step / steps)
        if then > seconds and rng.random() >= math.exp((seconds - then) / temperature):
            continue
        order = units.order(moved)
        if order is None:
            continue
        chunks, seconds = order, then
        if seconds < fastest:
            fastest = seconds
            found.append(chunks)
    return found


def _move(units: Units, chunks: list[int], rng: random.Random) -> list[int] | None:
    """Move a part of a chunk to another or a new one, in exchange for a part of that where it is too full."""
    unit = rng.randrange(len(units.start))
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
