"""Objectives: pure functions of terms, so that a shared token means for each rollout what it means alone."""

from functools import partial

import torch

from megatron_dta.rl.terms import Loss, Objective, Terms


def sft(*, normalizer: str = "token_mean") -> Objective:
    """Build supervised fine-tuning: the negative log-likelihood of every trained token."""
    return Objective(name="sft", function=sft_loss, normalizer=normalizer)


def grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, normalizer: str = "token_mean"
) -> Objective:
    """Build GRPO (Shao et al., arXiv 2402.03300) with PPO's clipping (Schulman et al., arXiv 1707.06347).

    The ratio to the sampling policy is clipped to [1 - clip_low, 1 + clip_high]; `kl_coef` weighs the k3 estimate of
    the KL divergence to the reference policy. Raises ValueError for negative coefficients or clip_low above 1.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("kl_coef", kl_coef)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; expected a number of at least 0")
    if clip_low > 1:
        raise ValueError(f"clip_low is {clip_low}; expected at most 1, a ratio is positive")
    return Objective(
        name="grpo",
        function=partial(grpo_loss, clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef),
        normalizer=normalizer,
        needs_advantages=True,
        needs_ref_logprobs=kl_coef > 0,
    )


def sft_loss(terms: Terms) -> Loss:
    """Return the weighted negative log-likelihood."""
    return Loss(value=terms.weighted_sum(-terms.logprobs), sums={"entropy": terms.entropies.detach().sum()})


def grpo_loss(terms: Terms, *, clip_low: float, clip_high: float, kl_coef: float) -> Loss:
    """Return the weighted sum of -min(ratio A, clip(ratio) A) + kl_coef KL."""
    log_ratio = terms.logprobs - terms.old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_term = -torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
    sums = {
        "entropy": terms.entropies.detach().sum(),
        "clip_fraction": (clipped * terms.advantages < ratio * terms.advantages).detach().sum(),
        "policy_kl": _k3(-log_ratio.detach()).sum(),
        "ratio": ratio.detach().sum(),
    }
    if terms.ref_logprobs is not None:
        kl = _k3(terms.ref_logprobs - terms.logprobs)
        sums["kl"] = kl.detach().sum()
        if kl_coef:
            per_term = per_term + kl_coef * kl
    maxima = {"ratio_max": ratio.detach().max()} if len(ratio) else {}
    return Loss(value=terms.weighted_sum(per_term), sums=sums, maxima=maxima)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Unbiased, non-negative estimate of KL(p || q) from p's samples, log_ratio = log q - log p (Schulman 2020)."""
    return log_ratio.exp() - 1 - log_ratio
