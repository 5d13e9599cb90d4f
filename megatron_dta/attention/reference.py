"""The oracle: dense, eager, any dtype, any device. It alone defines what tree attention means."""

import torch

from megatron_dta.attention.mask import TreeMask, dense_mask


class ReferenceBackend:
    """Materialises the [N, T, C] scores: for tests and small forests."""

    def forward(self, q, k, v, mask: TreeMask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`."""
        scores = _scores(q, k, mask, scale)
        lse = scores.logsumexp(-1)
        out = torch.einsum("ntc,cnh->tnh", (scores - lse[..., None]).exp().to(v.dtype), _per_query_head(v, q))
        return out, lse

    def backward(self, dout, q, k, v, out, lse, mask: TreeMask, scale: float):
        """See `Backend`."""
        keys, values = _per_query_head(k, q), _per_query_head(v, q)
        p = (_scores(q, k, mask, scale) - lse[..., None]).exp()
        dp = torch.einsum("tnh,cnh->ntc", dout, values).to(p.dtype)
        delta = (dout.to(p.dtype) * out.to(p.dtype)).sum(-1).T
        ds = (p * (dp - delta[..., None]) * scale).to(q.dtype)
        dq = torch.einsum("ntc,cnh->tnh", ds, keys)
        dk = torch.einsum("ntc,tnh->cnh", ds, q)
        dv = torch.einsum("ntc,tnh->cnh", p.to(q.dtype), dout)
        return dq, _per_key_head(dk, k), _per_key_head(dv, v)


def _scores(q, k, mask: TreeMask, scale: float) -> torch.Tensor:
    """Masked scores [N, T, C], at least fp32."""
    scores = torch.einsum("tnh,cnh->ntc", q, _per_query_head(k, q))
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    return scores.masked_fill(~dense_mask(mask), -torch.inf)


def _per_query_head(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _per_key_head(grad, x):
    return grad.view(x.shape[0], x.shape[1], -1, x.shape[2]).sum(2)
