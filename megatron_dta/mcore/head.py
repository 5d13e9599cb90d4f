"""The LM head: log-probs of edges and entropies of their sources, without a [rows, vocabulary] tensor.

Shapes: R selected source rows, E edges, h hidden size, V rows of this rank's weight that are real vocabulary (padding
excluded), b rows of a block, tp ranks that share the vocabulary. Logits are divided by the sampling temperature; the
log-sum-exp is fp32, fp64 for fp64 models.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

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
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of every edge [E] and the entropy of every row [R], in the wide dtype.

    hidden [R, h] holds source rows only; edge_source int [E] increasing indexes them, edge_target int [E] are token
    ids below `vocab_size`; weight [padded V, h]. Gradients flow to hidden and weight, from both outputs.

    With a `group`, weight is this rank's of equal shards of the padded vocabulary, in rank order; the rest is the same
    on all ranks, which all call this and get the same bits. The gradient of hidden is then this rank's share of a sum
    over the group, which is left to the caller: a row's other shares come from other ranks' words.
    """
    return _EdgeLogprobs.apply(hidden, weight, edge_source, edge_target, temperature, vocab_size, group)


class _EdgeLogprobs(torch.autograd.Function):
    """Row blocks in forward, the same blocks computed again in backward; saves one log-sum-exp and entropy per row."""

    @staticmethod
    def forward(ctx, hidden, weight, edge_source, edge_target, temperature: float, vocab_size: int, group):
        first, num_words = _own_words(weight, vocab_size, group)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = hidden.new_full((len(hidden),), -torch.inf, dtype=wide)  # stays, where all words are padding
        entropy, logprob = lse.new_zeros(len(hidden)), lse.new_zeros(len(edge_source))
        operand = _operand(weight, num_words)
        for rows, edges in _blocks(hidden, edge_source, num_words):
            logits = _logits(hidden[rows], operand, temperature)
            source, (word, _) = edge_source[edges] - rows.start, _owned(edge_target[edges], first, num_words)
            largest = logits.amax(1)
            logits -= largest[:, None]
            p = logits.exp()
            total = p.sum(1)
            lse[rows] = largest + total.log()
            logprob[edges] = logits[source, word] - total.log()[source]
            entropy[rows] = total.log() - torch.linalg.vecdot(p, logits) / total
        if group is not None and group.size() > 1:
            owner = edge_target // len(weight)
            lse, entropy, logprob = _combined(_over_ranks(lse, entropy, logprob, group), edge_source, owner)
        ctx.save_for_backward(hidden, weight, edge_source, edge_target, lse, entropy)
        ctx.temperature, ctx.first, ctx.num_words = temperature, first, num_words
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        """d logprob = onehot - p and d entropy = -p (log p + entropy), by the logits of a row.

        p and entropy are of the whole vocabulary, so a rank's logits need nothing more from the others.
        """
        hidden, weight, edge_source, edge_target, lse, entropy = ctx.saved_tensors
        num_words = ctx.num_words
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        if grad_logprob is None:
            grad_logprob = lse.new_zeros(len(edge_source))
        operand = _operand(weight, num_words)
        for rows, edges in _blocks(hidden, edge_source, num_words):
            log_p = _logits(hidden[rows], operand, ctx.temperature).sub_(lse[rows, None])
            source, p = edge_source[edges] - rows.start, log_p.exp()
            per_row = -torch.zeros_like(lse[rows]).index_add_(0, source, grad_logprob[edges])[:, None]
            if grad_entropy is None:
                grad = p.mul_(per_row)
            else:
                grad = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(per_row).mul_(p)
            word, owned = _owned(edge_target[edges], ctx.first, num_words)
            grad.index_put_((source, word), grad_logprob[edges].where(owned, 0.0), accumulate=True)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight[:num_words]
            grad_weight[:num_words].addmm_(grad.T.to(lse.dtype), hidden[rows].to(lse.dtype))
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _own_words(weight: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the token id of the weight's first row and how many of its rows are no padding."""
    first = 0 if group is None else group.rank() * len(weight)
    return first, min(max(vocab_size - first, 0), len(weight))


def _owned(targets: torch.Tensor, first: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's row of this rank's weight, any row where another rank has it, and whether it is here."""
    word = targets - first
    return word.clamp(0, num_words - 1), (word >= 0) & (word < num_words)


def _over_ranks(
    lse: torch.Tensor, entropy: torch.Tensor, logprob: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Gather what each rank found over its own words: [tp, R], [tp, R], [tp, E], in one collective."""
    own = torch.cat([lse, entropy, logprob])
    gathered = own.new_empty(group.size(), len(own))
    dist.all_gather(list(gathered), own, group=group)
    return gathered.split([len(lse), len(entropy), len(logprob)], 1)


def _combined(
    gathered: tuple[torch.Tensor, ...], edge_source: torch.Tensor, owner: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return log-sum-exps [R], entropies [R] and log-probs [E] over all words; `owner` [E] is each target's rank.

    A rank's words have log-probability `log_share` together, and their own distribution has its entropy: the whole
    entropy is that of the choice of a rank plus the expected one within it. Nothing large cancels.
    """
    lses, entropies, logprobs = gathered
    lse = lses.logsumexp(0)
    log_share = lses - lse
    share = log_share.exp()
    entropy = (torch.special.entr(share) + share * entropies).sum(0)
    logprob = logprobs.gather(0, owner[None])[0] + log_share[owner, edge_source]
    return lse, entropy, logprob


def _blocks(hidden: torch.Tensor, edge_source: torch.Tensor, num_words: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, their edges), none without a word; edges are sorted by source."""
    if not num_words:
        return
    num_rows, size = len(hidden), max(1, MAX_LOGITS[hidden.device.type] // num_words)
    starts = torch.arange(0, num_rows + size, size).clamp(max=num_rows)
    bounds = torch.searchsorted(edge_source, starts.to(edge_source)).tolist()
    for i, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        yield slice(start, stop), slice(bounds[i], bounds[i + 1])


def _operand(weight: torch.Tensor, num_words: int) -> torch.Tensor:
    """Return the real vocabulary's rows as `_logits` multiplies them: widened once where no kernel widens sums."""
    weight = weight[:num_words]
    return weight if weight.is_cuda else weight.to(torch.promote_types(weight.dtype, torch.float32))


def _logits(hidden: torch.Tensor, operand: torch.Tensor, temperature: float) -> torch.Tensor:
    """[b, h], [V, h] -> [b, V]: products of the model's dtype summed and kept in the wide one, never in bf16."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if operand.dtype != wide:
        logits = torch.mm(hidden, operand.T, out_dtype=wide)
    else:
        logits = hidden.to(wide) @ operand.T
    return logits if temperature == 1.0 else logits / temperature
