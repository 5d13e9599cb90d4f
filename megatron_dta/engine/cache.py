"""States of pushed tokens and the gradients their descendants leave: two arenas whose rows the plan gives out.

Shapes: L layers, S state rows, A accumulator rows, K key/value heads, H head size.
"""

import torch


class ArenaCache:
    """Implements mcore's `StateCache`. Accumulators are fp32, fp64 for fp64 models."""

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
        self.poison = poison
        shape = (2, num_layers, state_rows, num_kv_heads, head_size)
        self.states = torch.empty(shape, dtype=dtype, device=device)
        self.accumulators = torch.empty((*shape[:2], grad_rows, *shape[3:]), dtype=self.wide, device=device)
        if poison:
            self.states.fill_(torch.nan)
            self.accumulators.fill_(torch.nan)

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
            states.index_copy_(0, rows, own)

    def begin_grads(self, rows: torch.Tensor) -> None:
        """Zero the accumulators of `rows` in every layer, before the first gradient arrives."""
        self.accumulators.index_fill_(2, rows, 0.0)

    def add_grads(self, layer, rows, dk, dv) -> None:
        """See `StateCache`; rows are distinct, so the sum does not depend on the order of threads."""
        for accumulators, grad in zip(self.accumulators[:, layer], (dk, dv)):
            accumulators.index_add_(0, rows, grad.to(self.wide))

    def grads(self, layer, rows) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StateCache`."""
        return self.accumulators[0, layer][rows], self.accumulators[1, layer][rows]

    def free(self, state_rows: torch.Tensor, grad_rows: torch.Tensor) -> None:
        """Mark rows as unused."""
        if self.poison:
            self.states.index_fill_(2, state_rows, torch.nan)
            self.accumulators.index_fill_(2, grad_rows, torch.nan)
