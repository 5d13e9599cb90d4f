"""A batch of sequences with what its objective needs, one entry per term.

Shapes: S sequences, M terms (ordered by sequence, then position).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError
from megatron_dta.rl.advantages import group_advantages
from megatron_dta.rl.terms import Loss, Objective, Terms, term_weights


@dataclass(frozen=True, kw_only=True, eq=False)
class TermIndex:
    """Where the terms are: trained tokens that have a source."""

    sequence: np.ndarray
    """int32 [M]: number of the sequence in the caller's order."""
    position: np.ndarray
    """int32 [M]: position of the predicted token in its sequence."""
    bounds: np.ndarray
    """int64 [S + 1]: the terms of sequence i are bounds[i] .. bounds[i + 1]."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a whole step holds, over all ranks: the denominators of losses and means."""

    num_terms: int
    """Trained tokens, counted once per sequence that trains them."""
    num_trained: int
    """Sequences that train a token."""
    num_tokens: int
    """Tokens of all sequences."""


def scope_of(samples: Sequence[Sample]) -> Scope:
    """Count a step that these samples make up alone."""
    counts = [int(np.count_nonzero(sample.loss_mask[1:])) for sample in samples]
    return Scope(
        num_terms=sum(counts),
        num_trained=sum(count > 0 for count in counts),
        num_tokens=sum(len(sample.tokens) for sample in samples),
    )


def check_arrays(sample: Sample) -> None:
    """Raise UsageError unless every per-token array is as long as the tokens and finite where a token is trained."""
    length = len(sample.tokens)
    if length == 0:
        raise UsageError(f"sample {sample.sample_id}: no tokens; expected at least one")
    for name in ("advantage", "reward"):
        value = getattr(sample, name)
        is_number = value is not None and not isinstance(value, np.ndarray)
        if is_number and (np.isinf(value) or (name == "advantage" and np.isnan(value))):
            raise UsageError(f"sample {sample.sample_id}: {name} is {value}; expected a finite number")
    trained = None
    for name in ("loss_mask", "identity", "advantage", "old_logprobs", "ref_logprobs"):
        value = getattr(sample, name)
        if value is None or (name == "advantage" and not isinstance(value, np.ndarray)):
            continue
        if np.shape(value) != (length,):
            raise UsageError(f"sample {sample.sample_id}: {name} has shape {np.shape(value)}, expected ({length},)")
        if name == "loss_mask":
            trained = np.flatnonzero(value[1:]) + 1
        elif trained is not None and not np.isfinite(value[trained]).all():
            raise UsageError(f"sample {sample.sample_id}: {name} is not finite at a trained token; expected a number")


def term_index(samples: Sequence[Sample]) -> TermIndex:
    """List the trained tokens of all samples, position 0 excluded."""
    positions = [np.flatnonzero(sample.loss_mask[1:]).astype(np.int32) + 1 for sample in samples]
    counts = [len(p) for p in positions]
    return TermIndex(
        sequence=np.repeat(np.arange(len(samples), dtype=np.int32), counts),
        position=np.concatenate(positions) if positions else np.zeros(0, np.int32),
        bounds=np.cumsum([0, *counts]),
    )


class TermData:
    """The per-term inputs of an objective over a whole step, on the device."""

    def __init__(
        self,
        samples: Sequence[Sample],
        index: TermIndex,
        objective: Objective,
        scope: Scope,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Take a rank's samples of a step of the given scope.

        Raises UsageError where the objective needs rewards, advantages or reference log-probs that are missing.
        """
        self.num_terms, self.scope = len(index.sequence), scope
        self.logprobs = torch.zeros(self.num_terms, dtype=dtype, device=device)
        """[M]: what this process has computed so far in the pass over the step."""

        def on_device(values) -> torch.Tensor:
            return torch.as_tensor(values).to(device=device, dtype=dtype)

        sequences = torch.from_numpy(index.sequence.astype(np.int64))
        self.sequences = sequences.to(device)
        self.weights = on_device(term_weights(sequences, scope.num_terms, scope.num_trained, objective.normalizer))
        self.advantages = on_device(_advantages(samples, index, objective))
        self.old_logprobs = on_device(per_term([s.old_logprobs for s in samples], index, np.nan))
        self.ref_logprobs = _ref_logprobs(samples, index, objective, on_device)

    def terms(self, chosen: torch.Tensor | slice, logprobs: torch.Tensor, entropies: torch.Tensor) -> Terms:
        """Put the chosen terms together with their log-probs and entropies [chosen]; keep the log-probs."""
        self.logprobs[chosen] = logprobs.detach()
        old = self.old_logprobs[chosen]
        return Terms(
            logprobs=logprobs,
            entropies=entropies,
            weights=self.weights[chosen],
            advantages=self.advantages[chosen],
            old_logprobs=torch.where(old.isnan(), logprobs.detach(), old),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[chosen],
            sequences=self.sequences[chosen],
        )


def per_term(values: Sequence[float | np.ndarray | None], index: TermIndex, missing: float) -> np.ndarray:
    """Gather one field of all samples at their terms, float64 [M]; a scalar holds for all tokens of its sample."""
    out = np.full(len(index.sequence), missing)
    for value, start, stop in zip(values, index.bounds[:-1], index.bounds[1:]):
        if value is not None:
            out[start:stop] = value[index.position[start:stop]] if isinstance(value, np.ndarray) else value
    return out


def per_sequence(samples: Sequence[Sample], index: TermIndex, values: np.ndarray) -> list[np.ndarray]:
    """Give every sample its values [M], float64 [length]; NaN where it has no term: entry 0 and untrained tokens."""
    out = [np.full(len(sample.tokens), np.nan) for sample in samples]
    for row, start, stop in zip(out, index.bounds[:-1], index.bounds[1:]):
        row[index.position[start:stop]] = values[start:stop]
    return out


def sample_advantages(samples: Sequence[Sample]) -> list[float | np.ndarray]:
    """Return every sample's advantage: its own, else from its reward within its group.

    Group statistics count each trajectory once, however many samples were cut from it. Raises UsageError for a
    sample with neither, and for one trajectory with several rewards.
    """
    missing = next((s.sample_id for s in samples if s.advantage is None and s.reward is None), None)
    if missing is not None:
        raise UsageError(f"sample {missing}: neither reward nor advantage is given; this objective needs one of them")
    first: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        if sample.advantage is None:
            other = first.setdefault((sample.group_id, sample.trajectory_id), sample)
            if not np.array_equal(np.array(other.reward), np.array(sample.reward), equal_nan=True):
                raise UsageError(
                    f"samples {other.sample_id} and {sample.sample_id} of trajectory {sample.trajectory_id} have "
                    f"rewards {other.reward} and {sample.reward}; expected one reward a trajectory"
                )
    group_number = {group: n for n, group in enumerate(dict.fromkeys(group for group, _ in first))}
    computed = group_advantages(
        torch.tensor([s.reward for s in first.values()], dtype=torch.float64),
        torch.tensor([group_number[group] for group, _ in first], dtype=torch.int64),
    )
    by_trajectory = dict(zip(first, computed.tolist()))
    return [
        by_trajectory[s.group_id, s.trajectory_id] if s.advantage is None else s.advantage for s in samples
    ]  # fmt: skip


def _advantages(samples, index: TermIndex, objective: Objective) -> np.ndarray:
    if not objective.needs_advantages:
        return np.zeros(len(index.sequence))
    return per_term(sample_advantages(samples), index, 0.0)


def _ref_logprobs(samples, index: TermIndex, objective: Objective, on_device) -> torch.Tensor | None:
    if objective.needs_ref_logprobs:
        check_ref_logprobs(samples)
    if any(s.ref_logprobs is None for s in samples):
        return None
    return on_device(per_term([s.ref_logprobs for s in samples], index, np.nan))


def check_ref_logprobs(samples: Sequence[Sample]) -> None:
    """Raise UsageError for the first sample without reference log-probs."""
    without = next((s.sample_id for s in samples if s.ref_logprobs is None), None)
    if without is not None:
        raise UsageError(f"sample {without}: ref_logprobs is missing; the KL term needs it for every sample")


class Totals:
    """Sums and maxima of a step, kept on the device until they are read."""

    def __init__(self):
        self.value: torch.Tensor | float = 0.0
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, loss: Loss) -> None:
        self.value = self.value + loss.value.detach()
        for name, part in loss.sums.items():
            self.sums[name] = self.sums.get(name, 0) + part
        for name, part in loss.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], part) if name in self.maxima else part

    def numbers(self) -> dict[str, Any]:
        """Return all parts as plain numbers, which `merged_metrics` puts together."""
        return {
            "value": float(self.value),
            "sums": {name: float(part) for name, part in self.sums.items()},
            "maxima": {name: float(part) for name, part in self.maxima.items()},
        }


def merged_metrics(parts: Sequence[dict[str, Any]], num_terms: int) -> dict[str, float]:
    """Return a step's loss, means over its trained tokens, and maxima, from the numbers of every rank.

    A rank without a trained token has no sums and no maxima: it adds nothing. What only some of the others have, such
    as the KL to a reference that some samples lack, is no mean over the step and is left out.
    """
    sums = [part["sums"] for part in parts if part["sums"]]
    shared = [name for name in sums[0] if all(name in part for part in sums)] if sums else []
    means = {name: sum(part[name] for part in sums) / max(num_terms, 1) for name in shared}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, value in part["maxima"].items():
            maxima[name] = max(maxima.get(name, value), value)
    return {"loss": sum(part["value"] for part in parts), **means, **maxima}
