"""Tree attention behind one pair of functions; which backend computes it is always the caller's explicit choice.

Shapes: T query rows, C keys (context first, then the call's rows), N query heads, K key/value heads, H head size.
"""

from typing import Protocol

import torch

from megatron_dta.attention.mask import TreeMask
from megatron_dta.errors import UsageError

BACKENDS = ("reference", "segment", "flash4")


class Backend(Protocol):
    """softmax(scale * q k^T, over visible keys) v with grouped heads, forward and backward by hand.

    forward(q [T, N, H], k [C, K, H], v [C, K, H], mask, scale) -> (out [T, N, H], lse [N, T]);
    backward(dout, q, k, v, out, lse, mask, scale) -> (dq, dk, dv), shaped like q, k, v; dk and dv may come in a wider
    dtype, the caller rounds them after adding what it holds. lse is the log of the softmax denominator, at least fp32.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TreeMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TreeMask,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def get_backend(name: str, *, deterministic: bool = False) -> Backend:
    """Return a backend by name; raise UsageError if it is unknown or this machine cannot run it."""
    if name == "reference":
        from megatron_dta.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "segment":
        from megatron_dta.attention.segment import SegmentBackend

        return SegmentBackend()
    if name == "flash4":
        from megatron_dta.attention.flash4 import Flash4Backend

        return Flash4Backend(deterministic=deterministic)
    raise UsageError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
