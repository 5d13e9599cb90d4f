"""Rules of both rollout formats: what a field may hold, and how a fault is told."""

import difflib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

ID_LIMIT = 2**31
"""Token ids are int32; a known vocabulary size takes its place."""

LOGPROB_ROUNDING = 1e-4
"""A log-probability near zero may come out of float32 or bfloat16 arithmetic slightly positive."""

LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs")

PADDING_WORDS = ("attention", "pad", "position_ids", "input_mask")


def show(value: object) -> str:
    """Return a value as it looks in a message: one line of at most 60 characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: object) -> bool:
    """Tell whether a JSON value is a finite number that a float64 holds; true and false are not."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def refuse_unknown(where: str, what: str, given: Iterable[str], valid: tuple[str, ...]) -> None:
    """Raise UsageError for the first name of `given` that is not in `valid`, naming the nearest valid one."""
    for name in given:
        if name in valid:
            continue
        nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
        advice = f"did you mean {nearest[0]}? " if nearest else ""
        unpadded = "samples are unpadded: drop padding tokens and this key; " if _is_padding(name) else ""
        raise UsageError(f"{where}: unknown {what} {show(name)}; {unpadded}{advice}valid: {', '.join(valid)}")


def first_fault(field: str, values: np.ndarray, id_limit: int) -> tuple[int, str] | None:
    """Find the first entry that `field` cannot hold: its flat index and what was expected, or None."""
    if field == "tokens":
        bad, expected = (values < 0) | (values >= id_limit), f"an id from 0 to {id_limit - 1}"
    elif field == "loss_mask":
        bad, expected = (values != 0) & (values != 1), "0 or 1"
    elif field in LOGPROB_FIELDS:
        bad, expected = ~np.isfinite(values) | (values > LOGPROB_ROUNDING), "a finite log-probability, at most 0"
    else:
        bad, expected = ~np.isfinite(values), "a finite number"
    return (int(bad.argmax()), expected) if bad.any() else None


def writable(sample: Sample, name: str) -> Any:
    """Return a field as a file holds it: a sweep scores trained tokens only, the NaN of others is written as 0."""
    value = getattr(sample, name)
    if name not in LOGPROB_FIELDS or value is None:
        return value
    return np.where(np.isnan(value) & ~sample.loss_mask, 0.0, value)


def _is_padding(name: str) -> bool:
    return any(word in name.lower() for word in PADDING_WORDS)
