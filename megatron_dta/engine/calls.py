"""From the arrays of a plan to what this process's model parts take: its rows of a call, its mask, its edges.

Shapes: R rows of a call over all context-parallel ranks, n = R / ranks of this process, C context rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_dta.attention.api import Backend
from megatron_dta.attention.mask import tree_mask
from megatron_dta.axes import Axes
from megatron_dta.mcore.parallel import Groups
from megatron_dta.mcore.params import Dealt, Mode, StateCache, TreeParams
from megatron_dta.tree.deal import ShardEdges, deal, shard_chunk_edges, shard_mask, visible_counts
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.plan import Call, Chunk, Push


@dataclass(frozen=True, kw_only=True, eq=False)
class RankCall:
    """One process's share of a call."""

    tokens: torch.Tensor
    """int64 [n]: token ids."""
    params: TreeParams
    rows: np.ndarray
    """int64 [n]: this process's rows of the call, increasing."""


def as_index(rows: np.ndarray | None, device: torch.device) -> torch.Tensor:
    """Put an index array of the plan on a device, int64."""
    return torch.from_numpy(np.asarray(rows, np.int64)).to(device)


class Calls:
    """Makes this process's share of every call of a plan; all its processes deal rows alike."""

    def __init__(self, forest: Forest, axes: Axes, groups: Groups, backend: Backend, device: torch.device):
        self.forest, self.axes, self.groups = forest, axes, groups
        self.backend, self.device = backend, device

    def rows(self, call: Call) -> np.ndarray:
        """Return the call's rows of every context-parallel rank, int64 [ranks, n], increasing on each."""
        if self.axes.context == 1:
            return np.arange(call.size)[None]
        if self.axes.cp_comm == "allgather":
            weights = visible_counts(call.visible_from, call.visible_to, call.size)
        else:  # each rank attends with all queries of its heads; what differs is the rows that reach the head
            weights = np.zeros(call.size, np.int64)
            weights[call.source_rows if isinstance(call, Chunk) else []] = 1
        return deal(weights, self.axes.context)

    def edges(self, chunk: Chunk, rows: np.ndarray) -> ShardEdges:
        """Return the chunk's edges whose source is among these rows."""
        return shard_chunk_edges(chunk, rows)

    def make(self, call: Call, mode: Mode, cache: StateCache) -> RankCall:
        """Return this process's share of a call of one model part, whose cache is given."""
        by_rank = self.rows(call)
        rows = by_rank[self.groups.cp.rank()]
        tokens, depth = (
            self._padded(values[call.tokens], call.size, rows) for values in (self.forest.tokens, self.forest.depth)
        )
        visible_from, visible_to, num_queries = call.visible_from, call.visible_to, call.size
        if self.axes.context > 1 and self.axes.cp_comm == "allgather":
            visible_from, visible_to = shard_mask(visible_from, visible_to, rows)
            num_queries = len(rows)
        params = TreeParams(
            mode=mode,
            depth=depth,
            mask=tree_mask(visible_from, visible_to, num_queries, self.device),
            backend=self.backend,
            cache=cache,
            context_state=cache.rows(call.context_state),
            dealt=self._dealt(by_rank),
            routed_tokens=self._routed(call, rows),
        )
        if isinstance(call, Push):
            params.store_state = cache.rows(call.store_state)
        if isinstance(call, Chunk) and mode is Mode.TRAIN:
            params.context_grad, params.own_grad = cache.rows(call.context_grad), cache.rows(call.own_grad)
            params.own_rows = as_index(call.own_rows, self.device)
        return RankCall(tokens=tokens, params=params, rows=rows)

    def num_hidden(self, call: Call) -> int:
        """Return the rows of the hidden states that this process's layers hand on."""
        return call.size // self.axes.context // (self.axes.tensor if self.axes.sequence else 1)

    def _padded(self, values: np.ndarray, size: int, rows: np.ndarray) -> torch.Tensor:
        padded = np.zeros(size, np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded[rows]).to(self.device)

    def _dealt(self, by_rank: np.ndarray) -> Dealt | None:
        if self.axes.context == 1:
            return None
        order = by_rank.reshape(-1)
        return Dealt(by_rank=as_index(order, self.device), place=as_index(np.argsort(order), self.device))

    def _routed(self, call: Call, rows: np.ndarray) -> torch.Tensor:
        """Return the tree tokens of the rows that this process routes to experts; -1 for padding."""
        tokens = np.full(call.size, -1)
        tokens[: len(call.tokens)] = call.tokens
        own = tokens[rows]
        if self.axes.sequence:
            own = own.reshape(self.axes.tensor, -1)[self.groups.tp.rank()]
        return as_index(own, self.device)
