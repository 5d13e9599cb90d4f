"""Objectives against plain formulas written per sequence, and the denominators of a step."""

import math

import pytest
import torch

from megatron_dta.rl import objectives
from megatron_dta.rl.terms import Objective, Terms, term_weights


def terms(logprobs, **given):
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64).requires_grad_()
    ones = torch.ones_like(logprobs).detach()
    fields = {
        "entropies": ones * 0.3,
        "weights": ones / len(ones),
        "advantages": ones,
        "old_logprobs": logprobs.detach(),
        "ref_logprobs": None,
        "sequences": torch.zeros(len(ones), dtype=torch.long),
    }
    return Terms(logprobs=logprobs, **(fields | given))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_token_mean_spans_all_parts():
    """A21: 100 tokens at 2.0 and 900 at 0.5 give 0.65, not 1.25."""
    sequences = torch.tensor([0] * 100 + [1] * 900)
    losses = torch.tensor([2.0] * 100 + [0.5] * 900, dtype=torch.float64)
    weights = term_weights(sequences, 1000, 2, "token_mean")
    assert float((weights * losses).sum()) == pytest.approx(0.65)
    parts = float((weights[:100] * losses[:100]).sum()) + float((weights[100:] * losses[100:]).sum())
    assert parts == pytest.approx(0.65)


@pytest.mark.parametrize(("normalizer", "expected"), [("token_mean", 0.65), ("sequence_mean", 1.25)])
def test_weights_of_a_rank_are_those_of_the_whole_step(normalizer, expected):
    """A21, over two ranks: each has the denominators of the step; with its own alone, the sum is off."""
    parts = [(torch.zeros(100, dtype=torch.long), 2.0), (torch.full((900,), 3), 0.5)]

    def total(num_terms, num_trained):
        return sum(
            float((term_weights(own, num_terms or len(own), num_trained, normalizer) * loss).sum())
            for own, loss in parts
        )

    assert total(1000, 2) == pytest.approx(expected)
    assert total(None, 1) == pytest.approx(2.5)


def test_sequence_mean_is_the_mean_of_means():
    """A25; a sequence without a trained token (number 1) has no mean and is not counted."""
    sequences = torch.tensor([0] * 100 + [2] * 900)
    losses = torch.tensor([2.0] * 100 + [0.5] * 900, dtype=torch.float64)
    assert float((term_weights(sequences, 1000, 2, "sequence_mean") * losses).sum()) == pytest.approx(1.25)


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean"])
def test_no_terms_no_weights(normalizer):
    assert term_weights(torch.zeros(0, dtype=torch.long), 4, 2, normalizer).tolist() == []
    assert term_weights(torch.zeros(0, dtype=torch.long), 0, 0, normalizer).tolist() == []


def test_unknown_normalizer_is_refused():
    with pytest.raises(ValueError, match="normalizer is 'batch'"):
        term_weights(torch.zeros(1, dtype=torch.long), 1, 1, "batch")
    with pytest.raises(ValueError, match="normalizer is 'batch'"):
        Objective(name="x", function=objectives.sft_loss, normalizer="batch")


def test_sft_is_the_negative_log_likelihood():
    part = terms([-1.0, -2.0])
    loss = objectives.sft()(part)
    assert float(loss.value) == pytest.approx(1.5)
    assert float(loss.sums["entropy"]) == pytest.approx(0.6)


def plain_grpo(logprob, old, advantage, low, high):
    ratio = math.exp(logprob - old)
    return -min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)


@pytest.mark.parametrize("advantage", [1.3, -0.7, 0.0])
@pytest.mark.parametrize("shift", [-0.5, -0.05, 0.0, 0.05, 0.5])
def test_grpo_clips_as_ppo(shift, advantage):
    part = terms([-1.0 + shift], old_logprobs=column(-1.0), advantages=column(advantage))
    loss = objectives.grpo(clip_low=0.2, clip_high=0.3)(part)
    assert float(loss.value) == pytest.approx(plain_grpo(-1.0 + shift, -1.0, advantage, 0.2, 0.3))
    (grad,) = torch.autograd.grad(loss.value, part.logprobs)
    is_clipped = (advantage > 0 and shift == 0.5) or (advantage < 0 and shift == -0.5)
    assert float(loss.sums["clip_fraction"]) == float(is_clipped)
    assert float(grad) == pytest.approx(0.0 if is_clipped else -advantage * math.exp(shift))


def test_kl_is_the_k3_estimate():
    part = terms([-1.0], ref_logprobs=column(-1.4), advantages=column(0.0))
    loss = objectives.grpo(kl_coef=0.5)(part)
    expected = math.exp(-0.4) + 0.4 - 1
    assert float(loss.value) == pytest.approx(0.5 * expected)
    assert float(loss.sums["kl"]) == pytest.approx(expected)
    (grad,) = torch.autograd.grad(loss.value, part.logprobs)
    assert float(grad) == pytest.approx(0.5 * (1 - math.exp(-0.4)))


def test_kl_is_watched_without_a_coefficient():
    loss = objectives.grpo()(terms([-1.0], ref_logprobs=column(-2.0), advantages=column(0.0)))
    assert float(loss.sums["kl"]) > 0
    assert float(loss.value) == 0.0


def test_on_policy_ratio_is_exactly_one():
    loss = objectives.grpo()(terms([-0.1, -3.7, -11.0]))
    assert float(loss.sums["ratio"]) == 3.0
    assert float(loss.maxima["ratio_max"]) == 1.0
    assert float(loss.sums["policy_kl"]) == 0.0


def test_empty_part_has_no_maximum_and_no_nan():
    """A33: a chunk without a term."""
    loss = objectives.grpo(kl_coef=0.1)(terms([], ref_logprobs=column(), weights=column()))
    assert float(loss.value) == 0.0
    assert loss.maxima == {}
    assert all(float(value) == 0.0 for value in loss.sums.values())


def test_metrics_are_detached():
    loss = objectives.grpo(kl_coef=0.1)(terms([-1.0], ref_logprobs=column(-2.0)))
    assert not any(value.requires_grad for value in [*loss.sums.values(), *loss.maxima.values()])


@pytest.mark.parametrize(
    "options", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": float("nan")}, {"kl_coef": -1.0}]
)
def test_impossible_coefficients_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        objectives.grpo(**options)
