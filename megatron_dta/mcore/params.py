"""What travels with one forward of the model, through every layer: the call's part of the plan."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dta.attention.api import Backend
from megatron_dta.attention.mask import TreeMask

if TYPE_CHECKING:
    from megatron_dta.mcore.routing import Routing


class Mode(StrEnum):
    """Why the model runs; a field of the call, never inferred from whether gradients are enabled."""

    PUSH = "push"
    """Store the states of the call's tokens; no gradient."""
    TRAIN = "train"
    """Forward with gradient; its backward exchanges gradients with the cache."""
    SWEEP = "sweep"
    """Log-probs only; no gradient."""


class StateCache(Protocol):
    """States of pushed tokens and the gradients their descendants left, per layer; rows as `rows` made them."""

    def rows(self, rows: np.ndarray) -> Any:
        """Prepare an index array of the plan for the methods below."""

    def with_context(
        self, layer: int, rows: Any, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached keys and values of `rows` [C], followed by k and v [R, K, H]: [C + R, K, H] each."""

    def store(self, layer: int, rows: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the first n of k and v [R, K, H] to `rows` [n]; writing the same again changes nothing."""

    def add_grads(self, layer: int, rows: Any, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add dk and dv [C, K, H] to the accumulators of `rows`."""

    def join_grads(
        self, layer: int, rows: Any, own: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dk and dv [R, K, H], widened, plus what the accumulators of `rows` hold at the rows `own`."""


@dataclass(kw_only=True, eq=False)
class CallParams(PackedSeqParams):
    """What any call of the model carries; R rows."""

    routing: "Routing | None" = None
    """Routes and statistics of a mixture of experts; None for a dense model."""
    routed_tokens: torch.Tensor | None = None
    """int64: number of the token, in the routing's count, of each row that this process routes; -1 for padding."""
    qkv_format: str = field(default="sbhd", init=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """How the rows of a call lie on context-parallel ranks; n rows of R on each."""

    by_rank: torch.Tensor
    """int64 [R]: rows, rank by rank."""
    place: torch.Tensor
    """int64 [R]: where every row is in that order."""


@dataclass(kw_only=True, eq=False)
class TreeParams(CallParams):
    """The plan of one call on the device; n rows on this process, R rows over all context ranks, C context rows."""

    mode: Mode
    depth: torch.Tensor
    """int [n]: rotary positions."""
    mask: TreeMask
    """Of the queries that this process attends with: all R, or its n where keys and values are gathered."""
    backend: Backend
    cache: StateCache
    context_state: Any
    """Of C state rows to read."""
    dealt: Dealt | None = None
    """None without context parallelism."""
    store_state: Any = None
    """PUSH: of the state rows to write for the call's first rows."""
    context_grad: Any = None
    """TRAIN: of C accumulators to add to."""
    own_rows: torch.Tensor | None = None
    """TRAIN: int, rows of R whose accumulators join this call's gradients ..."""
    own_grad: Any = None
    """... and the accumulators that hold them."""
