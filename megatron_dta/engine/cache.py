"""States of pushed tokens and the gradients their descendants leave: two arenas whose rows the plan gives out.

Shapes: L layers, K key/value heads, H head size, C rows of a call's context, R rows of a call, G ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


class ArenaCache:
    """Implements mcore's `StateCache` for one process. Accumulators are fp32, fp64 for fp64 models."""

    def __init__(
        self,
        *,
        num_layers: int,
        state_rows: int,
        grad_rows: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ):
        """Allocate both arenas; `poison` fills unused and freed rows with NaN, so that a wrong read shows."""
        self.wide = torch.promote_types(dtype, torch.float32)
        self.poison, self.device = poison, device
        shape = (2, num_layers, state_rows, num_kv_heads, head_size)
        self.states = torch.empty(shape, dtype=dtype, device=device)
        self.accumulators = torch.empty((*shape[:2], grad_rows, *shape[3:]), dtype=self.wide, device=device)
        if poison:
            self.states.fill_(torch.nan)
            self.accumulators.fill_(torch.nan)

    def rows(self, rows: np.ndarray) -> torch.Tensor:
        """See `StateCache`: int64 on the device."""
        return torch.from_numpy(np.asarray(rows, np.int64)).to(self.device)

    def with_context(self, layer, rows, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StateCache`."""
        num_context = len(rows)
        if num_context == 0:
            return k, v
        joined = []
        for states, own in zip(self.states[:, layer], (k, v)):
            both = own.new_empty(num_context + len(own), *own.shape[1:])
            torch.index_select(states, 0, rows, out=both[:num_context])
            both[num_context:] = own
            joined.append(both)
        return joined[0], joined[1]

    def store(self, layer, rows, k, v) -> None:
        """See `StateCache`."""
        for states, own in zip(self.states[:, layer], (k, v)):
            states.index_copy_(0, rows, own[: len(rows)])

    def begin_grads(self, rows: np.ndarray) -> None:
        """Zero the accumulators of `rows` in every layer, before the first gradient arrives."""
        self.accumulators.index_fill_(2, self.rows(rows), 0.0)

    def add_grads(self, layer, rows, dk, dv) -> None:
        """See `StateCache`; rows are distinct, so the sum does not depend on the order of threads."""
        for accumulators, grad in zip(self.accumulators[:, layer], (dk, dv)):
            accumulators.index_add_(0, rows, grad.to(self.wide))

    def join_grads(self, layer, rows, own, dk, dv) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StateCache`."""
        if not len(own):
            return dk, dv
        left = self.accumulators[:, layer].index_select(1, rows)
        return dk.to(self.wide).index_add(0, own, left[0]), dv.to(self.wide).index_add(0, own, left[1])

    def free(self, state_rows: np.ndarray, grad_rows: np.ndarray) -> None:
        """Mark rows as unused."""
        if self.poison:
            self.states.index_fill_(2, self.rows(state_rows), torch.nan)
            self.accumulators.index_fill_(2, self.rows(grad_rows), torch.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedRows:
    """Rows of both arenas are dealt over the ranks of a group by their number; m is the most that one rank has."""

    count: int
    local: torch.Tensor
    """int64: this rank's rows, by their place in its own arenas ..."""
    place: torch.Tensor
    """... and where each of them is in the list."""
    gathered: torch.Tensor
    """int64 [C]: where every row of the list is among those gathered from all ranks, m each."""
    dealt: torch.Tensor
    """int64 [G m]: the reverse; `count` where a rank has fewer than m."""


class SharedArenaCache(ArenaCache):
    """Implements `StateCache` where every rank of a context-parallel group holds a share of the rows.

    Calls see whole rows: keys and values are gathered for a call, gradients are summed over ranks where they are held.
    """

    def __init__(self, *, group: dist.ProcessGroup, state_rows: int, grad_rows: int, **sizes):
        """Allocate this rank's share of both arenas."""
        self.group = group
        shares = [-(-rows // group.size()) for rows in (state_rows, grad_rows)]
        super().__init__(state_rows=shares[0], grad_rows=shares[1], **sizes)

    def rows(self, rows: np.ndarray) -> SharedRows:  # type: ignore[override]
        """See `StateCache`: row r is on rank r % G."""
        rows, ranks = np.asarray(rows, np.int64), self.group.size()
        owner, places = rows % ranks, np.arange(len(rows))
        order = np.argsort(owner, kind="stable")
        held = np.bincount(owner, minlength=ranks)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(held) - held, held)
        most = int(held.max(initial=0))
        gathered = np.empty(len(rows), np.int64)
        gathered[order] = owner[order] * most + within
        dealt = np.full(ranks * most, len(rows), np.int64)
        dealt[gathered] = places
        mine = np.flatnonzero(owner == self.group.rank())
        local, place, gathered_, dealt_ = (
            torch.from_numpy(x).to(self.device) for x in (rows[mine] // ranks, mine, gathered, dealt)
        )
        return SharedRows(count=len(rows), local=local, place=place, gathered=gathered_, dealt=dealt_)

    def with_context(self, layer, rows, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StateCache`; k and v are of all R rows."""
        if rows.count == 0:
            return k, v
        most = len(rows.dealt) // self.group.size()
        own = k.new_zeros(most, 2, *k.shape[1:])
        own[: len(rows.local)] = self.states[:, layer].index_select(1, rows.local).transpose(0, 1)
        found = own.new_empty(len(rows.dealt), *own.shape[1:])
        dist.all_gather_into_tensor(found, own, group=self.group)
        found = found.index_select(0, rows.gathered)
        return torch.cat((found[:, 0], k)), torch.cat((found[:, 1], v))

    def store(self, layer, rows, k, v) -> None:
        """See `StateCache`; every rank stores what it holds of all R rows."""
        for states, own in zip(self.states[:, layer], (k, v)):
            states.index_copy_(0, rows.local, own.index_select(0, rows.place))

    def begin_grads(self, rows: np.ndarray) -> None:
        """See `ArenaCache`."""
        self.accumulators.index_fill_(2, self.rows(rows).local, 0.0)

    def add_grads(self, layer, rows, dk, dv) -> None:
        """See `StateCache`; dk and dv are what this rank's queries add."""
        both = torch.stack((dk, dv), dim=1).to(self.wide)
        both = torch.cat((both, both.new_zeros(1, *both.shape[1:]))).index_select(0, rows.dealt)
        found = both.new_empty(len(both) // self.group.size(), *both.shape[1:])
        dist.reduce_scatter_tensor(found, both, group=self.group)
        for accumulators, grad in zip(self.accumulators[:, layer], found[: len(rows.local)].unbind(1)):
            accumulators.index_add_(0, rows.local, grad)

    def join_grads(self, layer, rows, own, dk, dv) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StateCache`; each rank adds what it holds to its own part of the sum over ranks that follows."""
        left = self.accumulators[:, layer].index_select(1, rows.local)
        mine = own.index_select(0, rows.place)
        return dk.to(self.wide).index_add(0, mine, left[0]), dv.to(self.wide).index_add(0, mine, left[1])

    def free(self, state_rows: np.ndarray, grad_rows: np.ndarray) -> None:
        """See `ArenaCache`."""
        if self.poison:
            self.states.index_fill_(2, self.rows(state_rows).local, torch.nan)
            self.accumulators.index_fill_(2, self.rows(grad_rows).local, torch.nan)
