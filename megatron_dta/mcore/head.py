"""The LM head: log-probs of edges and entropies of their sources, without a [rows, vocabulary] tensor.

Shapes: R selected source rows, E edges, h hidden size, V real vocabulary (padding rows of the weight excluded), b rows
of a block. Logits are divided by the sampling temperature; the log-sum-exp is fp32, fp64 for fp64 models.
"""

from collections.abc import Iterator

import torch

MAX_LOGITS = {"cpu": 2**21, "cuda": 2**26}
"""Logits alive at once: the row block is chosen to stay near it; on a CPU, near its cache."""


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
        operand = _operand(weight, vocab_size)
        for rows, edges in _blocks(hidden, edge_source, vocab_size):
            logits = _logits(hidden[rows], operand, temperature)
            source = edge_source[edges] - rows.start
            largest = logits.amax(1)
            logits -= largest[:, None]
            p = logits.exp()
            total = p.sum(1)
            lse[rows] = largest + total.log()
            logprob[edges] = logits[source, edge_target[edges]] - total.log()[source]
            entropy[rows] = total.log() - torch.linalg.vecdot(p, logits) / total
        ctx.save_for_backward(hidden, weight, edge_source, edge_target, lse, entropy)
        ctx.temperature, ctx.vocab_size = temperature, vocab_size
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        """d logprob = onehot - p and d entropy = -p (log p + entropy), by the logits of a row."""
        hidden, weight, edge_source, edge_target, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        if grad_logprob is None:
            grad_logprob = lse.new_zeros(len(edge_source))
        operand = _operand(weight, ctx.vocab_size)
        for rows, edges in _blocks(hidden, edge_source, ctx.vocab_size):
            log_p = _logits(hidden[rows], operand, ctx.temperature).sub_(lse[rows, None])
            source, p = edge_source[edges] - rows.start, log_p.exp()
            per_row = -torch.zeros_like(lse[rows]).index_add_(0, source, grad_logprob[edges])[:, None]
            if grad_entropy is None:
                grad = p.mul_(per_row)
            else:
                grad = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(per_row).mul_(p)
            grad.index_put_((source, edge_target[edges]), grad_logprob[edges], accumulate=True)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight[: ctx.vocab_size]
            grad_weight[: ctx.vocab_size].addmm_(grad.T.to(lse.dtype), hidden[rows].to(lse.dtype))
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _blocks(hidden: torch.Tensor, edge_source: torch.Tensor, vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, their edges); edges are sorted by source."""
    num_rows, size = len(hidden), max(1, MAX_LOGITS[hidden.device.type] // vocab_size)
    starts = torch.arange(0, num_rows + size, size).clamp(max=num_rows)
    bounds = torch.searchsorted(edge_source, starts.to(edge_source)).tolist()
    for i, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        yield slice(start, stop), slice(bounds[i], bounds[i + 1])


def _operand(weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the real vocabulary's rows as `_logits` multiplies them: widened once where no kernel widens sums."""
    weight = weight[:vocab_size]
    return weight if weight.is_cuda else weight.to(torch.promote_types(weight.dtype, torch.float32))


def _logits(hidden: torch.Tensor, operand: torch.Tensor, temperature: float) -> torch.Tensor:
    """[b, h], [V, h] -> [b, V]: products of the model's dtype summed and kept in the wide one, never in bf16."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if operand.dtype != wide:
        logits = torch.mm(hidden, operand.T, out_dtype=wide)
    else:
        logits = hidden.to(wide) @ operand.T
    return logits if temperature == 1.0 else logits / temperature
