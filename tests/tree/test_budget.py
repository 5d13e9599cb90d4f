"""Row multiples and capacities: what a call is padded to, and the same where it is executed."""

import itertools
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.errors import UsageError
from megatron_dta.tree.budget import FP8_ROWS, WHOLE, capacity_of, row_multiple
from tests.forests import forest_of, make_plan

SIX = [(1, 6), (2, 3), (3, 2), (6, 1)]
"""Tensor times context parallelism of 6 ranks."""


@pytest.mark.parametrize(("tensor", "context"), SIX)
def test_a39_no_split_of_six_ranks_takes_more_rows(tensor, context):
    """A39: 128-row tiles on ranks that are no power of two; the multiple is the same however they are split."""
    multiple = row_multiple(block=128, tensor=tensor, sequence_parallel=True, context=context)
    assert multiple == 384
    assert capacity_of(200, WHOLE, multiple) == 384
    plan = make_plan(forest_of(range(200)), WHOLE, multiple=multiple)
    assert [chunk.size for chunk in plan.chunks] == [plan.capacity] == [384]
    assert capacity_of(10**6, 1000, multiple) == 768


COUNTS = st.integers(1, 40)


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(COUNTS, COUNTS, st.booleans(), COUNTS, st.sampled_from(sorted(FP8_ROWS)))
def test_the_multiple_is_the_least_that_everybody_can_deal(block, tensor, sequence_parallel, context, fp8):
    """C11: whole blocks; equally many rows for every rank, context times tensor; full groups of the format on each."""
    multiple = row_multiple(block=block, tensor=tensor, sequence_parallel=sequence_parallel, context=context, fp8=fp8)
    shards = (tensor if sequence_parallel else 1) * context
    fitting = (n for n in itertools.count(block, block) if n % shards == 0 and (n // shards) % FP8_ROWS[fp8] == 0)
    assert multiple == next(fitting)
    if not sequence_parallel:
        assert multiple == row_multiple(block=block, context=context, fp8=fp8), "tensor ranks hold all rows"


@pytest.mark.parametrize(
    ("options", "multiple"),
    [
        ({}, 1),
        ({"fp8": "fp8"}, 16),
        ({"fp8": "mxfp8"}, 32),
        ({"tensor": 8}, 1),
        ({"tensor": 8, "sequence_parallel": True, "fp8": "mxfp8"}, 256),
        ({"context": 2}, 2),
        ({"context": 4, "tensor": 2, "sequence_parallel": True, "fp8": "fp8", "block": 128}, 128),
        ({"context": 3, "tensor": 2, "sequence_parallel": True}, 6),
        ({"context": 3, "tensor": 2}, 3),
        ({"block": np.int64(128), "context": np.int32(3)}, lcm(128, 3)),
    ],
)
def test_multiples(options, multiple):
    assert row_multiple(**options) == multiple


@pytest.mark.parametrize("name", ["block", "tensor", "context"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_counts_that_are_not_positive_are_refused(name, value):
    shown = "padding multiple" if name == "block" else name
    with pytest.raises(UsageError, match=f"^{shown} is {value!r}; expected a positive whole number$"):
        row_multiple(**{name: value})


def test_unknown_formats_are_refused():
    with pytest.raises(UsageError, match="fp8 is 'int8'; expected one of none, fp8, mxfp8"):
        row_multiple(fp8="int8")


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.integers(0, 3000), st.one_of(st.just(WHOLE), st.integers(1, 3000)), st.integers(1, 400))
def test_a_capacity_is_full_multiples_within_the_budget(num_tokens, budget, multiple):
    if budget != WHOLE and budget < multiple:
        with pytest.raises(UsageError, match=f"budget is {budget}; .* at least {multiple} tokens"):
            capacity_of(num_tokens, budget, multiple)
        return
    capacity = capacity_of(num_tokens, budget, multiple)
    assert capacity % multiple == 0
    assert capacity_of(num_tokens, budget, 1) - multiple < capacity if budget != WHOLE else capacity >= num_tokens
    assert capacity <= budget if budget != WHOLE else capacity < num_tokens + multiple
