"""The head over a vocabulary that several ranks share: what one process computes, to the bit alike on all ranks."""

import pytest
import torch

from megatron_dta.mcore import head
from tests.control.spawn import ROOT, run_torch
from tests.parallel.ranks_head import CHECKS

SCRIPT = str(ROOT / "tests/parallel/ranks_head.py")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shared_vocabulary_equals_whole(num_ranks):
    """B02: targets on every rank; log-probs, and the gradients of each rank's words."""
    lines = run_torch(num_ranks, SCRIPT).splitlines()
    assert [line for line in lines if line.endswith(" ok")] == [f"{check.__name__} ok" for check in CHECKS]


def test_combining_a_single_rank_changes_no_bit():
    """What a group of one would do: sharding adds no rounding where there is nothing to combine."""
    torch.manual_seed(0)
    lse, entropy, source = 20 * torch.randn(9), torch.rand(9), torch.tensor([0, 3, 3, 8])
    logprob = -torch.rand(4)
    combined = head._combined((lse[None], entropy[None], logprob[None]), source, torch.zeros(4, dtype=torch.long))
    for got, given in zip(combined, (lse, entropy, logprob)):
        assert torch.equal(got, given)


def test_combining_shares_is_the_entropy_of_the_whole():
    """Nothing large cancels: large log-sum-exps cost no digits of the entropy."""
    torch.manual_seed(0)
    logits = 1e6 + torch.randn(7, 30, dtype=torch.float64)
    parts = logits.split([4, 25, 1], 1)
    lses = torch.stack([p.logsumexp(1) for p in parts])
    entropies = torch.stack([-(p.softmax(1) * p.log_softmax(1)).sum(1) for p in parts])
    none = torch.zeros(0, dtype=torch.long)
    _, entropy, _ = head._combined((lses, entropies, lses[:, :0]), none, none)
    wanted = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    bound = 8 * 1e6 * torch.finfo(torch.float64).eps  # the roundings of the log-sum-exps themselves
    torch.testing.assert_close(entropy, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize(("num_rows", "vocab"), [(0, 5), (3, 5), (3, 1)])
def test_rows_without_edges(num_rows, vocab):
    """No edge, or no row: results are empty, gradients of entropies alone, and zero for the weight."""
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    logprob, entropy = head.edge_logprobs(hidden, weight, none, none, temperature=1.0, vocab_size=vocab)
    assert logprob.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    log_p = (hidden @ weight[:vocab].T).log_softmax(-1)
    wanted = torch.autograd.grad(-(log_p.exp() * log_p).sum(), (hidden, weight))
    for got, expected in zip((hidden.grad, weight.grad), wanted):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert num_rows > 0 or (weight.grad == 0).all()
