"""The LM head: log-probs of edges and entropies of their sources, without a [rows, vocabulary] tensor.

Shapes: R selected source rows, E edges, h hidden size, V real vocabulary (padding rows of the weight excluded), b rows
of a block. Logits are divided by the sampling temperature; the log-sum-exp is fp32, fp64 for fp64 models.
"""

from collections.abc import Iterator

import torch

MAX_LOGITS = 2**24
"""Logits alive at once: the row block is chosen to stay near it."""


def edge_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_source: torch.Tensor,
    edge_target: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of every edge [E] and the entropy of every row [R], in the wide dtype.

    hidden [R, h] holds source rows only; edge_source int [E] increasing indexes them, edge_target int [E] are token
    ids below `vocab_size`; weight [padded V, h]. Gradients flow to hidden and weight, from both outputs.
    """
    return _EdgeLogprobs.apply(hidden, weight, edge_source, edge_target, temperature, vocab_size)


class _EdgeLogprobs(torch.autograd.Function):
    """Row blocks in forward, the same blocks computed again in backward; saves one log-sum-exp and entropy per row."""

    @staticmethod
    def forward(ctx, hidden, weight, edge_source, edge_target, temperature: float, vocab_size: int):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse, entropy = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
        logprob = hidden.new_empty(len(edge_source), dtype=wide)
        for rows, edges in _blocks(edge_source, len(hidden), vocab_size):
            logits = _logits(hidden[rows], weight, temperature, vocab_size)
            lse[rows] = logits.logsumexp(1)
            source = edge_source[edges] - rows.start
            logprob[edges] = logits[source, edge_target[edges]] - lse[rows][source]
            entropy[rows] = lse[rows] - torch.linalg.vecdot((logits - lse[rows][:, None]).exp(), logits)
        ctx.save_for_backward(hidden, weight, edge_source, edge_target, lse, entropy)
        ctx.temperature, ctx.vocab_size = temperature, vocab_size
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, edge_source, edge_target, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        for rows, edges in _blocks(edge_source, len(hidden), ctx.vocab_size):
            log_p = _logits(hidden[rows], weight, ctx.temperature, ctx.vocab_size) - lse[rows][:, None]
            source, p = edge_source[edges] - rows.start, log_p.exp()
            per_row = torch.zeros_like(lse[rows]).index_add_(0, source, grad_logprob[edges])
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            grad = p * (-per_row[:, None] - grad_entropy[rows, None] * (log_p + entropy[rows, None]))
            grad.index_put_((source, edge_target[edges]), grad_logprob[edges], accumulate=True)
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight[: ctx.vocab_size]
            grad_weight[: ctx.vocab_size] += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _blocks(edge_source: torch.Tensor, num_rows: int, vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, their edges); edges are sorted by source."""
    size = max(1, MAX_LOGITS // vocab_size)
    starts = torch.arange(0, num_rows + size, size).clamp(max=num_rows)
    bounds = torch.searchsorted(edge_source, starts.to(edge_source)).tolist()
    for i, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        yield slice(start, stop), slice(bounds[i], bounds[i + 1])


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, vocab_size: int) -> torch.Tensor:
    """[b, h] -> [b, V]: products of the model's dtype summed and kept in the wide one, never rounded to bf16."""
    weight = weight[:vocab_size]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype != wide:
        logits = torch.mm(hidden, weight.T, out_dtype=wide)
    else:
        logits = hidden.to(wide) @ weight.to(wide).T
    return logits if temperature == 1.0 else logits / temperature
