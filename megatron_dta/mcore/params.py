"""What travels with one forward of the model, through every layer: the call's part of the plan."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dta.attention.api import Backend
from megatron_dta.attention.mask import TreeMask


class Mode(StrEnum):
    """Why the model runs; a field of the call, never inferred from whether gradients are enabled."""

    PUSH = "push"
    """Store the states of the call's tokens; no gradient."""
    TRAIN = "train"
    """Forward with gradient; its backward exchanges gradients with the cache."""
    SWEEP = "sweep"
    """Log-probs only; no gradient."""


class StateCache(Protocol):
    """States of pushed tokens and the gradients their descendants left, per layer; rows as the plan gives them."""

    def with_context(
        self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached keys and values of `rows` [C], followed by k and v [R, K, H]: [C + R, K, H] each."""

    def store(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [n, K, H] to `rows`; writing the same again changes nothing."""

    def add_grads(self, layer: int, rows: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add dk and dv [C, K, H] to the accumulators of `rows`."""

    def grads(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was added to the accumulators of `rows`."""


@dataclass(kw_only=True, eq=False)
class TreeParams(PackedSeqParams):
    """The plan of one call on the device; R rows, C context rows."""

    mode: Mode
    depth: torch.Tensor
    """int [R]: rotary positions."""
    mask: TreeMask
    backend: Backend
    cache: StateCache
    context_state: torch.Tensor
    """int [C]: state rows to read."""
    store_state: torch.Tensor | None = None
    """PUSH: int [n], state rows to write for the first n rows."""
    context_grad: torch.Tensor | None = None
    """TRAIN: int [C], accumulators to add to."""
    own_rows: torch.Tensor | None = None
    """TRAIN: int, rows whose accumulators join this call's gradients ..."""
    own_grad: torch.Tensor | None = None
    """... and the accumulators that hold them."""
    qkv_format: str = field(default="sbhd", init=False)
