"""Pack one rank's sequences into chunks: sharing every prefix, or copying prefixes where that is faster.

Shapes: N nodes of the batch's outline, n sequences of the rank.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.budget import capacity_of
from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.fill import bins
from megatron_dta.tree.improve import best_packing
from megatron_dta.tree.loads import loads
from megatron_dta.tree.outline import Outline
from megatron_dta.tree.packing import Prediction, pack, pack_evenly, predict


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

    def pack(self, sequences: np.ndarray, *, search: bool = True) -> RankPacking:
        """Pack some sequences, int [n], as fast as is found; without `search`, as a first estimate."""
        outline = self.outline.part_of(sequences)
        capacity = capacity_of(max(outline.num_tokens, 1), self.budget, self.multiple)  # a no-op has a row as well
        if outline.num_tokens <= capacity:
            packing = pack(outline, capacity, None)
            prediction = predict(packing, self.cost, capacity, self.multiple)
        else:
            packing, prediction = best_packing(
                outline, self.cost, capacity, self.multiple, self.state_limit, search=search
            )
        length, chunk = packing.runs()
        shared = self._packed(
            outline, sequences, np.zeros(len(sequences), np.int64), length, chunk, capacity, prediction
        )
        if self._least_copying(outline, capacity) >= prediction.push_seconds.sum():
            return shared
        copied = self._copied(outline, sequences, capacity)
        return copied if copied is not None and copied.prediction.seconds < prediction.seconds else shared

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
                found.append((packing, predict(packing, self.cost, packed.capacity, self.multiple)))
        if not found:
            return packed
        # The other ranks wait for the largest chunk as often as there are chunks.
        packing, prediction = min(found, key=lambda f: num_chunks * f[1].chunk_seconds.max() + f[1].push_seconds.sum())
        one_part = np.zeros_like(packed.parts)
        return self._packed(outline, packed.sequences, one_part, *packing.runs(), packed.capacity, prediction)

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
        rows = -(-tokens // self.multiple) * self.multiple
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
        return self._packed(
            outline, sequences, parts, tokens.astype(np.int64), np.arange(num_parts), capacity, prediction
        )

    def _packed(self, outline, sequences, parts, run_length, run_chunk, capacity, prediction) -> RankPacking:
        return RankPacking(
            sequences=sequences,
            parts=parts,
            run_length=run_length,
            run_chunk=run_chunk,
            capacity=capacity,
            prediction=prediction,
            work=float(self.work[self.outline.nodes_of(sequences)].sum()),
        )


def node_work(outline: Outline, cost: CostModel) -> np.ndarray:
    """Return the device time of every node's own tokens, forward and backward, float64 [N]."""
    c = cost.chunk
    return c.row * outline.length + c.pair * outline.pairs + c.source * outline.sources
