"""A38: very deep and very wide forests are planned, run and saved as statistics; no recursion anywhere."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.tree.statistics import plan_statistics
from tests.batches import VOCAB, tiny, trained

CHECKED = [0, 1, 17, 2499, 4999]


def star(num_children=10_000):
    digits = [[k // VOCAB**d % VOCAB for d in range(4)] for k in range(num_children)]
    return [trained([1, 2, 3, *d], [0, 0, 0, 0, 1, 1, 1], str(k)) for k, d in enumerate(digits)]


def caterpillar(depth=5_000):
    """Return sequences that leave a common path one token later each: a branch point at every depth."""
    path = np.random.default_rng(0).integers(0, VOCAB, depth + 1)
    return [
        trained([*path[: k + 1], (path[k + 1] + 1) % VOCAB], [0] * (k + 1) + [1], str(k)) for k in range(depth)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "budget"), [(star(), "whole"), (caterpillar(), 1024)], ids=["star", "caterpillar"])
def test_run(samples, budget):
    engine = TreeEngine(tiny(), budget=budget)
    logprobs = engine.forward_batch(samples)
    some = [samples[k] for k in CHECKED]
    for k, expected in zip(CHECKED, FlatEngine(tiny()).forward_batch(some)):
        np.testing.assert_allclose(logprobs[k], expected, atol=1e-9)
    (plan,) = engine.plan(samples).plans
    counts = plan_statistics(plan)
    assert json.loads(json.dumps(asdict(counts))) == asdict(counts)
