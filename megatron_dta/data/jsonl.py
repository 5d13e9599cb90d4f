"""Rollouts as JSON lines: one sample a line; entry t of a per-token list belongs to the prediction of token t."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.data.atomic import replaced
from megatron_dta.data.fields import ID_LIMIT, LOGPROB_FIELDS, first_fault, is_number, refuse_unknown, show, writable
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

REQUIRED = ("group_id", "sample_id", "tokens", "loss_mask")
OPTIONAL = ("reward", "advantage", *LOGPROB_FIELDS, "identity", "version", "trajectory_id")

INT, FLOAT, BOOL, NULL = frozenset([int]), frozenset([int, float]), frozenset([int, bool]), frozenset([type(None)])
NAMES = {
    INT: "an integer",
    FLOAT: "a number",
    BOOL: "0 or 1 (or true, false)",
    FLOAT | NULL: "a number (or null where untrained)",
}


def read_jsonl(path: str | Path, *, mask: str = "full", id_limit: int = ID_LIMIT) -> list[Sample]:
    """Read one sample a line, tokens [L]; with mask="response" per-token lists may cover only the last R tokens.

    Raises UsageError, naming the line, the sample and the field, for anything that is not as documented.
    """
    samples: list[Sample] = []
    lines: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            line = _Line(f"{path}, line {number}", _parse(text, f"{path}, line {number}"), mask == "response", id_limit)
            sample = line.sample()
            first = lines.setdefault(sample.sample_id, number)
            if first != number:
                raise line.fault("sample_id", show(sample.sample_id), f"a new one: line {first} has it already")
            samples.append(sample)
    if not samples:
        raise UsageError(f"{path}: got an empty file, expected one sample a line")
    return samples


def write_jsonl(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write one sample a line, atomically; `read_jsonl` gives equal samples back. Raises ValueError for NaN or inf."""
    with replaced(path) as file:
        for sample in samples:
            file.write(json.dumps(_record(sample), allow_nan=False).encode() + b"\n")


def _record(sample: Sample) -> dict[str, Any]:
    record = {name: writable(sample, name) for name in (*REQUIRED, *OPTIONAL)}
    record["loss_mask"] = sample.loss_mask.astype(int)
    if sample.trajectory_id == sample.sample_id:
        del record["trajectory_id"]
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()}
    return {name: value for name, value in plain.items() if value is not None}


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        fault = f"{error.msg}, column {error.colno} of {len(text)}"
        raise UsageError(f"{where}: not valid JSON ({fault}), expected one whole object a line") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not readable ({error}), expected one JSON object in UTF-8") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: got {show(record)}, expected an object with {', '.join(REQUIRED)}")
    return record


@dataclass(frozen=True, slots=True)
class _Line:
    """One parsed line; its methods return checked fields or raise UsageError."""

    where: str
    record: dict[str, Any]
    response_only: bool
    id_limit: int

    def sample(self) -> Sample:
        refuse_unknown(self._place(), "key", self.record, (*REQUIRED, *OPTIONAL))
        for name in REQUIRED:
            if self.record.get(name) is None:
                raise UsageError(f"{self._place()}: missing field {name}; required: {', '.join(REQUIRED)}")
        tokens = self._list("tokens", INT, np.int64)
        if not len(tokens):
            raise self.fault("tokens", "an empty list", "at least one id")
        self._check("tokens", tokens)
        loss_mask = self._loss_mask(len(tokens))
        num_response = len(self.record["loss_mask"])
        sample_id = self._name("sample_id")
        return Sample(
            sample_id=sample_id,
            group_id=self._name("group_id"),
            trajectory_id=self._name("trajectory_id") if self._has("trajectory_id") else sample_id,
            tokens=tokens.astype(np.int32),
            loss_mask=loss_mask,
            reward=self._number("reward") if self._has("reward") else None,
            advantage=self._advantage(len(tokens), num_response),
            old_logprobs=self._logprobs("old_logprobs", loss_mask, num_response),
            ref_logprobs=self._logprobs("ref_logprobs", loss_mask, num_response),
            identity=self._identity(len(tokens)),
            version=self._integer("version") if self._has("version") else None,
        )

    def fault(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(f"{self._place()}: {field}: got {got}, expected {expected}")

    def _place(self) -> str:
        sample_id = self.record.get("sample_id")
        return self.where if sample_id is None else f"{self.where}, sample {show(sample_id)}"

    def _has(self, field: str) -> bool:
        return self.record.get(field) is not None

    def _name(self, field: str) -> str:
        value = self.record[field]
        if type(value) not in (str, int) or value == "":
            raise self.fault(field, show(value), "a string or an integer")
        return str(value)

    def _number(self, field: str) -> float:
        value = self.record[field]
        if not is_number(value):
            raise self.fault(field, show(value), "a finite number")
        return float(value)

    def _integer(self, field: str) -> int:
        value = self.record[field]
        if type(value) is not int:
            raise self.fault(field, show(value), "an integer")
        return value

    def _loss_mask(self, num_tokens: int) -> np.ndarray:
        values = self._list("loss_mask", BOOL, np.int64)
        self._check("loss_mask", values)
        return self._aligned("loss_mask", values, num_tokens, len(values)).astype(bool)

    def _advantage(self, num_tokens: int, num_response: int) -> float | np.ndarray | None:
        if not isinstance(self.record.get("advantage"), list):
            return self._number("advantage") if self._has("advantage") else None
        values = self._list("advantage", FLOAT, np.float64)
        aligned = self._aligned("advantage", values, num_tokens, num_response)
        aligned[0] = 0
        self._check("advantage", aligned, num_tokens - len(values))
        return aligned

    def _logprobs(self, field: str, loss_mask: np.ndarray, num_response: int) -> np.ndarray | None:
        if not self._has(field):
            return None
        values = self._list(field, FLOAT | NULL, np.float64)
        aligned = self._aligned(field, values, len(loss_mask), num_response)
        aligned[0] = 0
        shift = len(loss_mask) - len(values)
        if None in self.record[field]:
            missing = np.zeros(len(loss_mask), bool)
            missing[shift:] = [value is None for value in self.record[field]]
            missing[0] = False
            if (missing & loss_mask).any():
                at = int((missing & loss_mask).argmax()) - shift
                raise self.fault(f"{field}[{at}]", "null", "a log-probability: loss_mask trains this token")
            aligned[missing] = 0
        self._check(field, aligned, shift)
        return aligned

    def _identity(self, num_tokens: int) -> np.ndarray | None:
        if not self._has("identity"):
            return None
        values = self._list("identity", INT, np.int64)
        if len(values) != num_tokens:
            raise self.fault("identity", f"{len(values)} entries", f"{num_tokens}, one for each token")
        return values

    def _list(self, field: str, kinds: frozenset[type], dtype: type) -> np.ndarray:
        """Return a list as an array; types are checked first, as numpy would turn true into 1 and "1" into text."""
        values = self.record[field]
        if not isinstance(values, list):
            raise self.fault(field, show(values), "a list")
        wrong = set(map(type, values)) - kinds
        if wrong:
            at = next(i for i, value in enumerate(values) if type(value) in wrong)
            raise self.fault(f"{field}[{at}]", show(values[at]), NAMES[kinds])
        try:
            return np.array(values, dtype)
        except OverflowError as error:
            largest = max(values, key=lambda value: abs(value or 0))
            raise self.fault(field, show(largest), f"values that fit {np.dtype(dtype).name}") from error

    def _aligned(self, field: str, values: np.ndarray, num_tokens: int, num_response: int) -> np.ndarray:
        """Check a per-token length; values of the response only are right-aligned, zeros in front."""
        num_values = len(values)
        if num_values == num_tokens or (self.response_only and num_values == num_response < num_tokens):
            return np.concatenate([np.zeros(num_tokens - num_values, values.dtype), values])
        expected = f"expected {num_tokens}"
        if num_values < num_tokens and not self.response_only:
            expected += '; if the file holds response-only masks say data.mask = "response"'
        elif self.response_only:
            expected += f" (all tokens) or {num_response} (the response)" if num_response < num_tokens else " at most"
        raise UsageError(f"{self._place()}: {field} has a wrong length: got {num_values}, {expected}")

    def _check(self, field: str, values: np.ndarray, shift: int = 0) -> None:
        """Raise for the first entry that the field cannot hold; `shift` zeros in front are not in the file."""
        fault = first_fault(field, values, self.id_limit)
        if fault:
            raise self.fault(f"{field}[{fault[0] - shift}]", show(values[fault[0]]), fault[1])
