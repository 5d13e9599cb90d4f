"""The record that every other module calls a sequence: one rollout, its ids never changed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Sample:
    """One sequence with its training data; per-token arrays have length L, entry t is about predicting token t.

    Shapes: tokens int32 [L], loss_mask bool [L] (entry 0 is always False: nothing predicts it), old_logprobs and
    ref_logprobs float64 [L] or None, identity int64 [L] or None, advantage a float, float64 [L] or None.
    """

    sample_id: str
    group_id: str
    trajectory_id: str
    """Samples cut from one trajectory (forms `turn`, `comb`) share it; group statistics count a trajectory once."""
    tokens: np.ndarray
    loss_mask: np.ndarray
    reward: float | None = None
    advantage: float | np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    identity: np.ndarray | None = None
    version: int | None = None


def columns(samples: Sequence[Sample]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray | None]]:
    """Return ids, loss masks and identity tags of all samples: what trees are built of."""
    return [s.tokens for s in samples], [s.loss_mask for s in samples], [s.identity for s in samples]
