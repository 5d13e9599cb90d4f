"""How many rows a chunk may have, and to which multiple calls are padded: one formula for planning and execution."""

from math import lcm
from numbers import Integral
from typing import Any

from megatron_dta.errors import UsageError

WHOLE = "whole"
FP8_ROWS = {"none": 1, "fp8": 16, "mxfp8": 32}
"""Rows a rank's matrices need in low-precision formats."""


def row_multiple(
    *, block: int = 1, tensor: int = 1, sequence_parallel: bool = False, context: int = 1, fp8: str = "none"
) -> int:
    """Return the multiple of rows that every call is padded to.

    block: what kernels or the user ask for (attention tiles have 128 rows); context parallelism deals equally many
    rows to each of `context` ranks, sequence parallelism deals those over the `tensor` ranks, and fp8 formats need
    full groups of 16 (mxfp8: 32) rows on each of them. Raises UsageError for values that are not positive and unknown
    formats.
    """
    for name, value in (("padding multiple", block), ("tensor", tensor), ("context", context)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise UsageError(f"{name} is {value!r}; expected a positive whole number")
    if fp8 not in FP8_ROWS:
        raise UsageError(f"fp8 is {fp8!r}; expected one of {', '.join(FP8_ROWS)}")
    shards = (tensor if sequence_parallel else 1) * context
    return lcm(block, shards * FP8_ROWS[fp8])


def padded(tokens: Any, multiple: int) -> Any:
    """Round numbers of tokens, one or an array, up to full multiples of the padding."""
    return -(-tokens // multiple) * multiple


def capacity_of(num_tokens: int, budget: int | str, multiple: int = 1) -> int:
    """Return the most tokens one chunk may hold: the budget (`whole`: all tokens) in full multiples of the padding.

    Raises UsageError if not one padded row fits the budget.
    """
    if multiple < 1:
        raise UsageError(f"padding multiple is {multiple}; expected a positive whole number")
    if budget == WHOLE:
        return padded(num_tokens, multiple)
    if isinstance(budget, bool | str) or not isinstance(budget, Integral) or int(budget) < multiple:
        raise UsageError(
            f"budget is {budget!r}; expected '{WHOLE}' or at least {multiple} tokens, the padding multiple of a chunk"
        )
    return int(budget) // multiple * multiple
