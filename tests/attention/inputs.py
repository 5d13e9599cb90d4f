"""Inputs for attention backends, and what two of them have to agree on."""

from dataclasses import dataclass

import torch

from megatron_dta.attention.api import Backend, get_backend
from megatron_dta.attention.mask import TreeMask

NUM_KV_HEADS, HEAD_SIZE, SCALE = 2, 6, 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Inputs:
    """q, dout [T, N, H] and k, v [C, K, H] of one call, with its mask."""

    mask: TreeMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(self.mask, *(x.to(dtype) for x in (self.q, self.k, self.v, self.dout)))


def draw(mask: TreeMask, groups: int = 2, seed: int = 0) -> Inputs:
    """Draw fp64 inputs that bf16 holds exactly, so that errors come from the arithmetic alone."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, HEAD_SIZE, generator=generator).bfloat16().double()

    num_heads = NUM_KV_HEADS * groups
    q, dout = normal(mask.num_queries, num_heads), normal(mask.num_queries, num_heads)
    return Inputs(mask, q, normal(mask.num_keys, NUM_KV_HEADS), normal(mask.num_keys, NUM_KV_HEADS), dout)


def run(backend: str | Backend, x: Inputs) -> dict[str, torch.Tensor]:
    """Run forward and backward."""
    attention = get_backend(backend) if isinstance(backend, str) else backend
    out, lse = attention.forward(x.q, x.k, x.v, x.mask, SCALE)
    grads = attention.backward(x.dout, x.q, x.k, x.v, out, lse, x.mask, SCALE)
    return dict(zip(NAMES, (out, lse, *grads)))


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    for name in NAMES:
        torch.testing.assert_close({name: got[name]}, {name: expected[name]}, **close)
