"""The form in which a trajectory is trained: whole, one sample per turn, or per turn with its history edited."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dta.data.samples import Sample

FORMS = ("whole", "turn", "comb")

PER_TOKEN = ("tokens", "loss_mask", "advantage", "old_logprobs", "ref_logprobs", "identity")

QWEN3_EMPTY_THINK = (151667, 271, 151668, 271)
"""`<think>\\n\\n</think>\\n\\n`: what Qwen3's chat template writes before the last assistant turn only."""


def apply_form(samples: Iterable[Sample], form: str, think: Sequence[int] = QWEN3_EMPTY_THINK) -> list[Sample]:
    """Cut trajectories into the samples of `form`; a trajectory without a trained token gives none unless whole.

    `turn`: the tokens up to the end of each assistant turn, loss on that turn only. `comb`: the same with `think`,
    untrained, right before the turn: the template's re-rendered history. Raises ValueError for an unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; valid: {', '.join(FORMS)}")
    if form == "whole":
        return list(samples)
    inserted = np.asarray(think if form == "comb" else (), np.int32)
    return [
        _cut(sample, turn, start, end, inserted)
        for sample in samples
        for turn, (start, end) in enumerate(turn_spans(sample.loss_mask))
    ]


def turn_spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, end) of every assistant turn: the maximal runs of True in a bool [L] mask."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2]))


def first_groups(samples: Sequence[Sample], num_groups: int) -> list[Sample]:
    """Keep the samples of the first `num_groups` groups, by first appearance."""
    kept = set(list(dict.fromkeys(sample.group_id for sample in samples))[:num_groups])
    return [sample for sample in samples if sample.group_id in kept]


def truncated(sample: Sample, num_tokens: int) -> Sample:
    """Return the first `num_tokens` tokens of a sample, as views."""
    if len(sample.tokens) <= num_tokens:
        return sample
    return _map_tokens(sample, lambda _, values: values[:num_tokens])


def _cut(sample: Sample, turn: int, start: int, end: int, inserted: np.ndarray) -> Sample:
    """Return turn [start, end) with the tokens before it, `inserted` in between; views where nothing is inserted."""
    num_inserted = len(inserted)

    def cut(name: str, values: np.ndarray) -> np.ndarray:
        if not num_inserted:
            return values[:end]
        fill = inserted if name == "tokens" else np.zeros(num_inserted, values.dtype)
        return np.concatenate([values[:start], fill, values[start:end]])

    piece = _map_tokens(sample, cut)
    loss_mask = np.zeros(end + num_inserted, bool)
    loss_mask[start + num_inserted :] = True
    return replace(piece, sample_id=f"{sample.sample_id}#turn{turn}", loss_mask=loss_mask)


def _map_tokens(sample: Sample, change: Callable[[str, np.ndarray], np.ndarray]) -> Sample:
    """Apply `change(field, array)` to every per-token array of a sample."""
    changed: dict[str, Any] = {}
    for name in PER_TOKEN:
        values = getattr(sample, name)
        if isinstance(values, np.ndarray):
            changed[name] = change(name, values)
    return replace(sample, **changed)
