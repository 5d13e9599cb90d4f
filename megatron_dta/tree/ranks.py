"""Pack one rank's sequences into chunks: sharing every prefix, or copying prefixes where that is faster.

Shapes: N nodes of the batch's outline, n sequences of the rank.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.tree.budget import capacity_of, padded
from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.fill import bins
from megatron_dta.tree.improve import best_packing
from megatron_dta.tree.loads import loads
from megatron_dta.tree.outline import Outline
from megatron_dta.tree.packing import Packing, pack, pack_evenly
from megatron_dta.tree.prediction import Prediction, predict


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPacking:
    """The chunks of one rank."""

    sequences: np.ndarray
    """int64 [n]: numbers in the batch, increasing."""
    parts: np.ndarray
    """int64 [n]: sequences of different parts share nothing."""
    run_length: np.ndarray
    run_chunk: np.ndarray
    """int64: chunks of the rank's tree tokens in preorder, run-length encoded."""
    capacity: int
    prediction: Prediction
    packing: Packing | None
    """What was predicted; None where prefixes are copied."""
    work: float
    """Device time of its tree tokens alone."""

    @property
    def num_chunks(self) -> int:
        return len(self.prediction.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.run_length.sum())


@dataclass(frozen=True, kw_only=True)
class Packer:
    """What packing a rank needs to know."""

    outline: Outline
    work: np.ndarray
    """float64 [N]: device time of every node's tokens."""
    cost: CostModel
    budget: int | str
    multiple: int
    state_limit: int | None
    in_flight: int = 1

    def pack(self, sequences: np.ndarray, *, search: bool = True) -> RankPacking:
        """Pack some sequences, int [n], as fast as is found; without `search`, as a first estimate."""
        outline = self.outline.part_of(sequences)
        capacity = capacity_of(max(outline.num_tokens, 1), self.budget, self.multiple)  # a no-op has a row as well
        if outline.num_tokens <= capacity:
            packing = pack(outline, capacity, None)
            prediction = self._predict(packing, capacity)
        else:
            packing, prediction = best_packing(
                outline,
                self.cost,
                capacity,
                self.multiple,
                self.state_limit,
                in_flight=self.in_flight,
                search=search,
            )
        shared = self._shared(packing, sequences, capacity, prediction)
        holds_too_many = self.state_limit is not None and prediction.state_rows > self.state_limit
        if self._least_copying(outline, capacity) >= prediction.push_seconds.sum() and not holds_too_many:
            return shared
        copied = self._copied(outline, sequences, capacity)
        if copied is None:
            return shared
        return copied if holds_too_many or copied.prediction.seconds < prediction.seconds else shared

    def balanced(self, packed: RankPacking, num_chunks: int) -> RankPacking:
        """Pack a rank again into `num_chunks` chunks of about equal size; as it is, where that is not possible."""
        if packed.num_chunks == 0:
            return packed
        outline = self.outline.part_of(packed.sequences)
        level = -(-outline.num_tokens // num_chunks)
        found = []
        for largest in (level, level // 2, level // 4, level // 8):
            packing = pack_evenly(outline, packed.capacity, num_chunks, max(largest, 1))
            if packing.num_chunks <= num_chunks:
                found.append((packing, self._predict(packing, packed.capacity)))
        if not found:
            return packed
        # The other ranks wait for the largest chunk as often as there are chunks.
        packing, prediction = min(found, key=lambda f: num_chunks * f[1].chunk_seconds.max() + f[1].push_seconds.sum())
        return self._shared(packing, packed.sequences, packed.capacity, prediction)

    def with_pushes_before(self, packed: RankPacking, chunk: np.ndarray) -> RankPacking:
        """Return the rank with its pushes made before the given chunks, int [Q], where that is not later."""
        if packed.packing is None:
            return packed
        capacity = packed.prediction.push_capacity
        return replace(packed, prediction=self._predict(packed.packing, capacity, push_before=chunk))

    def _predict(self, packing: Packing, capacity: int, **given) -> Prediction:
        return predict(packing, self.cost, capacity, self.multiple, in_flight=self.in_flight, **given)

    def _shared(self, packing: Packing, sequences: np.ndarray, capacity: int, prediction: Prediction) -> RankPacking:
        length, chunk = packing.runs()
        return RankPacking(
            sequences=sequences,
            parts=np.zeros(len(sequences), np.int64),
            run_length=length,
            run_chunk=chunk,
            capacity=capacity,
            prediction=prediction,
            packing=packing,
            work=self._work(sequences),
        )

    def _work(self, sequences: np.ndarray) -> float:
        return float(self.work[self.outline.nodes_of(sequences)].sum())

    def _least_copying(self, outline: Outline, capacity: int) -> float:
        """Return device time that copying costs at least: a tree in k chunks has its first node k times."""
        root = np.flatnonzero(outline.parent < 0)
        copies = -(-outline.size[root] // capacity) - 1
        return float((copies * node_work(outline, self.cost)[root]).sum())

    def _copied(self, outline: Outline, sequences: np.ndarray, capacity: int) -> RankPacking | None:
        """Give every chunk copies of the prefixes it needs, so that nothing is pushed; None where a path is too long.

        A small push costs a whole call of the model; copying a short prefix costs its tokens a few times over.
        """
        parts = bins(outline, capacity)
        if parts is None:
            return None
        num_parts = int(parts.max()) + 1
        tokens, pairs, sources = (
            loads(outline, values.astype(np.float64), parts, num_parts)
            for values in (outline.length, outline.pairs, outline.sources)
        )
        rows = padded(tokens, self.multiple)
        none = np.zeros(0)
        prediction = Prediction(
            rows=rows.astype(np.int64),
            chunk_seconds=self.cost.chunk.seconds(rows, pairs + rows - tokens, 0.0, sources),
            push_rows=none.astype(np.int64),
            push_seconds=none,
            push_before=none.astype(np.int64),
            pushed_tokens=0,
            state_rows=0,
            grad_rows=0,
            push_capacity=capacity,
        )
        return RankPacking(
            sequences=sequences,
            parts=parts,
            run_length=tokens.astype(np.int64),
            run_chunk=np.arange(num_parts),
            capacity=capacity,
            prediction=prediction,
            packing=None,
            work=self._work(sequences),
        )


def node_work(outline: Outline, cost: CostModel) -> np.ndarray:
    """Return the device time of every node's own tokens, forward and backward, float64 [N]."""
    c = cost.chunk
    return c.row * outline.length + c.pair * outline.pairs + c.source * outline.sources
