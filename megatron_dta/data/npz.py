"""Rollouts as one .npz: per-token arrays of all samples end to end, cut by `offsets`.

T: tokens of the file, S: its samples.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.data.atomic import replaced
from megatron_dta.data.fields import ID_LIMIT, LOGPROB_FIELDS, first_fault, refuse_unknown, show, writable
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

REQUIRED = ("ids", "loss_mask", "offsets", "task", "trial", "task_names")
OPTIONAL = ("reward", "advantage", *LOGPROB_FIELDS, "identity", "version", "sample_id", "trajectory_id")

INT, BOOL, FLOAT, TEXT = "iu", "biu", "fiu", "U"
KINDS = {"loss_mask": BOOL, "task_names": TEXT, "sample_id": TEXT, "trajectory_id": TEXT} | dict.fromkeys(
    ("reward", "advantage", *LOGPROB_FIELDS), FLOAT
)
"""dtype kinds of an array; integers where it is not named."""
DTYPES = {INT: np.int64, BOOL: bool, FLOAT: np.float64, TEXT: str}

UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile raise for truncated, damaged, encrypted or pickled members."""


def read_npz(path: str | Path, *, id_limit: int = ID_LIMIT) -> list[Sample]:
    """Read ids, loss_mask [T], offsets [S + 1], task, trial [S] and task_names; per-token arrays of samples are views.

    Optional: reward, version [S], advantage [S] or [T] ([S] where S = T), old_logprobs, ref_logprobs, identity [T],
    and the strings sample_id and trajectory_id [S] where "<task name>/<trial>" does not name a sample.
    Never unpickles. Raises UsageError, naming the array and the sample, for anything that is not as documented.
    """
    arrays = _load(path)
    offsets = _offsets(path, arrays)
    names = _names(path, arrays, len(offsets) - 1)
    table = _Table(path, arrays, offsets, names["sample_id"], id_limit)
    per_sample: list[str] = [field for field in ("reward", "version") if field in arrays]
    per_token: list[str] = ["ids", "loss_mask", *(field for field in (*LOGPROB_FIELDS, "identity") if field in arrays)]
    if "advantage" in arrays:
        (per_token if table.is_per_token("advantage") else per_sample).append("advantage")
    columns: dict[str, Any] = dict(names)
    columns |= {field: table.numbers(field).tolist() for field in per_sample}
    bounds = offsets.tolist()
    for field in per_token:
        flat = table.tokens(field)
        columns["tokens" if field == "ids" else field] = [flat[a:b] for a, b in pairwise(bounds)]
    return [Sample(**dict(zip(columns, row))) for row in zip(*columns.values())]


def write_npz(path: str | Path, samples: Sequence[Sample]) -> None:
    """Write samples, atomically; `read_npz` gives equal samples back.

    Raises UsageError when a field is given for some samples only: a column has no hole, JSON lines may.
    """
    if not samples:
        raise UsageError(f"{path}: got no samples, expected at least one")
    lengths = [len(sample.tokens) for sample in samples]
    arrays = {
        "ids": np.concatenate([sample.tokens for sample in samples]),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]).astype(np.uint8),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        **_name_columns(path, samples),
    }
    for field in ("reward", "version", "advantage", *LOGPROB_FIELDS, "identity"):
        values = [writable(sample, field) for sample in samples]
        if any(value is not None for value in values):
            arrays[field] = _column(path, field, values)
    with replaced(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _column(path: str | Path, field: str, values: list) -> np.ndarray:
    """Return [T] when every sample has an array, [S] when every sample has a number."""
    num_arrays = sum(isinstance(value, np.ndarray) for value in values)
    if any(value is None for value in values) or 0 < num_arrays < len(values):
        fault = f"{field} is not of one kind in all samples (missing, a number, one a token)"
        raise UsageError(f"{path}: {fault}, expected one column: write .jsonl instead")
    return np.concatenate(values) if num_arrays else np.array(values, DTYPES[KINDS.get(field, INT)])


def _name_columns(path: str | Path, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return task, trial, task_names, and sample_id and trajectory_id where the first three do not say them."""
    numbers: dict[str, int] = {}
    task = [numbers.setdefault(sample.group_id, len(numbers)) for sample in samples]
    sample_ids = [sample.sample_id for sample in samples]
    trial = [_trial(sample) for sample in samples]
    columns = {"task": np.array(task, np.int64), "task_names": np.array(list(numbers))}
    if None in trial:
        trial = list(range(len(samples)))
        columns["sample_id"] = np.array(sample_ids)
    columns["trial"] = np.array(trial, np.int64)
    if any(sample.trajectory_id != sample.sample_id for sample in samples):
        columns["trajectory_id"] = np.array([sample.trajectory_id for sample in samples])
    if any(name.endswith("\0") for sample in samples for name in (sample.group_id, sample.sample_id)):
        raise UsageError(f"{path}: an id ends in a NUL character, which numpy strings drop, expected text")
    return columns


def _trial(sample: Sample) -> int | None:
    """Return the number n of a sample id "<group>/<n>", or None."""
    number = sample.sample_id.removeprefix(f"{sample.group_id}/")
    is_number = number.isdecimal() and len(number) < 19 and f"{sample.group_id}/{int(number)}" == sample.sample_id
    return int(number) if is_number else None


def _load(path: str | Path) -> dict[str, np.ndarray]:
    """Read every array of the archive; each has one dimension and a plain type."""
    if not zipfile.is_zipfile(path):
        raise UsageError(f"{path}: not an .npz archive (truncated?), expected what numpy.savez writes")
    arrays: dict[str, np.ndarray] = {}
    name = "the archive"
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = archive[name]
    except UNREADABLE as error:
        fault = " ".join(str(error).split())
        raise UsageError(f"{path}: {name}: {fault}; expected plain arrays: objects are never unpickled") from error
    refuse_unknown(str(path), "array", arrays, (*REQUIRED, *OPTIONAL))
    for name in REQUIRED:
        if name not in arrays:
            raise UsageError(f"{path}: missing array {name}; required: {', '.join(REQUIRED)}")
    for name, array in arrays.items():
        _check_type(path, name, array)
    return arrays


def _check_type(path: str | Path, name: str, array: np.ndarray) -> None:
    kinds = KINDS.get(name, INT)
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise UsageError(f"{path}: {name}: got shape {np.shape(array)}, expected one dimension")
    if array.dtype.kind not in kinds:
        expected = {INT: "integers", BOOL: "0 and 1", FLOAT: "numbers", TEXT: "strings"}[kinds]
        raise UsageError(f"{path}: {name}: got dtype {array.dtype}, expected {expected}")


def _offsets(path: str | Path, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return offsets [S + 1] as int64: from 0 to T, each sample at least one token."""
    offsets, num_tokens = arrays["offsets"].astype(np.int64), len(arrays["ids"])
    if len(offsets) < 2:
        raise UsageError(f"{path}: got no samples (offsets has {len(offsets)} entries), expected at least one")
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        ends = f"{offsets[0]} to {offsets[-1]}"
        raise UsageError(f"{path}: offsets do not cover ids: got {ends}, expected 0 to {num_tokens}")
    short = np.diff(offsets) < 1
    if short.any():
        at = int(short.argmax())
        fault = f"offsets[{at + 1}] is {offsets[at + 1]} after {offsets[at]}"
        raise UsageError(f"{path}: sample number {at}: {fault}, expected a larger one: no sample is empty")
    return offsets


def _names(path: str | Path, arrays: dict[str, np.ndarray], num_samples: int) -> dict[str, list[str]]:
    """Return group, sample and trajectory ids [S]; sample ids are unique."""
    for name in ("task", "trial", "sample_id", "trajectory_id"):
        if name in arrays and len(arrays[name]) != num_samples:
            got = f"got {len(arrays[name])}, expected {num_samples}, one for each sample"
            raise UsageError(f"{path}: {name} has a wrong length: {got}")
    task, task_names = arrays["task"], arrays["task_names"].tolist()
    outside = (task < 0) | (task >= len(task_names))
    if outside.any():
        at = int(outside.argmax())
        raise UsageError(f"{path}: task[{at}]: got {task[at]}, expected 0 to {len(task_names) - 1} (task_names)")
    groups = [task_names[number] for number in task.tolist()]
    ids = [f"{group}/{number}" for group, number in zip(groups, arrays["trial"].tolist())]
    if "sample_id" in arrays:
        ids = arrays["sample_id"].tolist()
    first: dict[str, int] = {}
    for at, name in enumerate(ids):
        if first.setdefault(name, at) != at:
            raise UsageError(
                f"{path}: sample number {at}: got id {show(name)} of number {first[name]}, expected a new one"
            )
    trajectories = arrays["trajectory_id"].tolist() if "trajectory_id" in arrays else ids
    return {"group_id": groups, "sample_id": ids, "trajectory_id": trajectories}


@dataclass(frozen=True, slots=True)
class _Table:
    """The arrays of one file; its methods return checked columns or raise UsageError."""

    path: str | Path
    arrays: dict[str, np.ndarray]
    offsets: np.ndarray
    sample_ids: list[str]
    id_limit: int

    def is_per_token(self, field: str) -> bool:
        return len(self.arrays[field]) == len(self.arrays["ids"]) != len(self.sample_ids)

    def numbers(self, field: str) -> np.ndarray:
        """Return a column with one number a sample [S]."""
        values = self.arrays[field].astype(DTYPES[KINDS.get(field, INT)])
        if len(values) != len(self.sample_ids):
            also = f" or {len(self.arrays['ids'])}, one for each token" if field == "advantage" else ""
            got = f"got {len(values)}, expected {len(self.sample_ids)}, one for each sample{also}"
            raise UsageError(f"{self.path}: {field} has a wrong length: {got}")
        self._check(field, values, np.arange(len(values) + 1))
        return values

    def tokens(self, field: str) -> np.ndarray:
        """Return a column with one value a token [T]; entry 0 of a sample predicts nothing."""
        values, num_tokens = self.arrays[field], len(self.arrays["ids"])
        if len(values) != num_tokens:
            got = f"got {len(values)}, expected {num_tokens}, one for each token of ids"
            raise UsageError(f"{self.path}: {field} has a wrong length: {got}")
        if values.dtype.kind == "f" or KINDS.get(field) == FLOAT:
            values = values.astype(np.float64)
            values[self.offsets[:-1]] = 0
        self._check(field, values, self.offsets)
        return values.astype(np.int32 if field == "ids" else DTYPES[KINDS.get(field, INT)], copy=False)

    def _check(self, field: str, values: np.ndarray, bounds: np.ndarray) -> None:
        """Raise for the first value that the field cannot hold; sample i has the values bounds[i] to bounds[i + 1]."""
        fault = None
        if field not in ("identity", "version"):
            fault = first_fault("tokens" if field == "ids" else field, values, self.id_limit)
        if fault:
            at, expected = fault
            number = int(np.searchsorted(bounds, at, side="right")) - 1
            place = f"{self.path}: sample {show(self.sample_ids[number])}: {field}[{at - bounds[number]}]"
            raise UsageError(f"{place}: got {show(values[at])}, expected {expected}")
