"""What an objective sees: one entry per term, that is per (sequence, trained token), whatever tree it came from.

Shapes: M terms of the part of the step at hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NORMALIZERS = ("token_mean", "sequence_mean")


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """Terms of some sequences; only `logprobs` and `entropies` carry gradients."""

    logprobs: torch.Tensor
    """[M], of the sampled tokens at the sampling temperature."""
    entropies: torch.Tensor
    """[M], of the distributions they were drawn from."""
    weights: torch.Tensor
    """[M]: one over the denominators of the whole step; a loss is the weighted sum over its terms."""
    advantages: torch.Tensor
    """[M]; 0 where the batch has none."""
    old_logprobs: torch.Tensor
    """[M]: of the policy that sampled; the detached `logprobs` where a rollout is on-policy."""
    ref_logprobs: torch.Tensor | None
    """[M], of the reference policy."""
    sequences: torch.Tensor
    """int [M]: number of the sequence in the caller's order."""

    def weighted_sum(self, per_term: torch.Tensor) -> torch.Tensor:
        return (self.weights * per_term).sum()


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """A scalar that adds up over the parts of a step, with what users watch."""

    value: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over terms, reported as means over the step's trained tokens; detached."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Reported as the largest value of the step; detached, never of an empty part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """A loss function with what it needs from the batch."""

    name: str
    function: Callable[[Terms], Loss]
    normalizer: str = "token_mean"
    needs_advantages: bool = False
    needs_ref_logprobs: bool = False

    def __post_init__(self):
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"normalizer is {self.normalizer!r}; expected one of {', '.join(NORMALIZERS)}")

    def __call__(self, terms: Terms) -> Loss:
        return self.function(terms)


def term_weights(sequences: torch.Tensor, num_terms: int, num_trained: int, normalizer: str) -> torch.Tensor:
    """Return one over the denominators of a whole step, fp64 [M].

    sequences: int [M], the owner of every term at hand, with all of its terms; num_terms and num_trained: terms, and
    sequences with a term, of the whole step, which may be spread over ranks. token_mean: every trained token of the
    step counts the same. sequence_mean: the mean over sequences of the mean over each one's trained tokens; a sequence
    that trains no token has no mean and is not counted.
    """
    if normalizer == "token_mean":
        return torch.full(sequences.shape, 1.0 / max(num_terms, 1), dtype=torch.float64)
    if normalizer == "sequence_mean":
        return 1.0 / (torch.bincount(sequences).double()[sequences] * max(num_trained, 1))
    raise ValueError(f"normalizer is {normalizer!r}; expected one of {', '.join(NORMALIZERS)}")
