"""Read rollout files: one entry point for both formats, every form, and the limits of a quick run."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dta.data.fields import ID_LIMIT, show
from megatron_dta.data.forms import FORMS, QWEN3_EMPTY_THINK, apply_form, first_groups, truncated
from megatron_dta.data.jsonl import read_jsonl, write_jsonl
from megatron_dta.data.npz import read_npz, write_npz
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

__all__ = ["read_rollouts", "write_jsonl", "write_npz"]

MASKS = ("full", "response")


def read_rollouts(
    path: str | Path,
    *,
    form: str = "whole",
    limit: int | None = None,
    truncate: int | None = None,
    mask: str = "full",
    vocab_size: int | None = None,
    think: Sequence[int] = QWEN3_EMPTY_THINK,
    on_warning: Callable[[str], object] = warnings.warn,
) -> list[Sample]:
    """Read a .jsonl or .npz file as the samples of a form; ids stay as they are in the file.

    `limit` keeps the first groups, `truncate` the first tokens of each sample after the form is applied, `think` is
    what form "comb" inserts; mask="response" takes JSON lines whose per-token lists cover only the response.
    Raises UsageError, in one line, for options or contents that are not as documented.
    """
    path = Path(path)
    _check_options(path, form, mask, limit=limit, truncate=truncate, vocab_size=vocab_size)
    id_limit = ID_LIMIT if vocab_size is None else vocab_size
    if form == "comb" and not all(type(token) is int and 0 <= token < id_limit for token in think):
        raise UsageError(f"{path}: think is {show(tuple(think))}; expected ids from 0 to {id_limit - 1}")
    try:
        samples = _read(path, mask, id_limit)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected a readable .jsonl or .npz file") from error
    _exclude_first_tokens(path, samples, on_warning)
    if limit is not None:
        samples = first_groups(samples, limit)
    if form != "whole":
        _report_untrained(path, samples, form, on_warning)
    samples = apply_form(samples, form, think)
    return samples if truncate is None else [truncated(sample, truncate) for sample in samples]


def _read(path: Path, mask: str, id_limit: int) -> list[Sample]:
    if path.suffix == ".jsonl":
        return read_jsonl(path, mask=mask, id_limit=id_limit)
    if path.suffix != ".npz":
        raise UsageError(f"{path}: got the ending {show(path.suffix)}, expected .jsonl or .npz")
    if mask == "response":
        raise UsageError(f'{path}: data.mask = "response" is for .jsonl: arrays of an .npz cover all tokens; drop it')
    return read_npz(path, id_limit=id_limit)


def _check_options(path: Path, form: str, mask: str, **counts: int | None) -> None:
    for name, value, valid in (("form", form, FORMS), ("mask", mask, MASKS)):
        if value not in valid:
            raise UsageError(f"{path}: {name} is {show(value)}; valid: {', '.join(valid)}")
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise UsageError(f"{path}: {name} is {show(count)}; expected a positive integer")


def _exclude_first_tokens(path: Path, samples: list[Sample], on_warning: Callable[[str], object]) -> None:
    """Clear loss_mask[0] in place: no token predicts the first one."""
    first = [sample for sample in samples if sample.loss_mask[0]]
    for sample in first:
        sample.loss_mask[0] = False
    if first:
        what = f"loss_mask[0] is 1 in {len(first)} of {len(samples)} samples (first: {show(first[0].sample_id)})"
        on_warning(f"{path}: {what}: nothing predicts a first token, so it is not trained")


def _report_untrained(path: Path, samples: list[Sample], form: str, on_warning: Callable[[str], object]) -> None:
    untrained = [sample.sample_id for sample in samples if not sample.loss_mask.any()]
    if untrained:
        what = f"{len(untrained)} of {len(samples)} trajectories (first: {show(untrained[0])})"
        on_warning(f"{path}: {what} have no trained token and give no sample in form {form}")
