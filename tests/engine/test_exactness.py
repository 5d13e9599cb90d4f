"""The tree engine equals every sequence alone: log-probs, loss, metrics and every parameter's gradient, in fp64."""

import numpy as np
import pytest

from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.mcore import head
from megatron_dta.rl import objectives
from megatron_dta.verify import random_objective, with_random_advantages
from tests.batches import SHAPES, VOCAB, batch, grad_error, step, tiny

EXACT = 1e-9
BUDGETS = [("whole", 1), ("whole", 8), (16, 4), (5, 1), (1, 1)]
FULL_GRPO = objectives.grpo(clip_low=0.1, clip_high=0.3, kl_coef=0.2, normalizer="sequence_mean")


def assert_equal(model, samples, objective, budget, multiple, temperature=1.0):
    flat_engine = FlatEngine(model, temperature=temperature)
    flat, flat_grads = step(flat_engine, samples, objective)
    engine = TreeEngine(model, budget=budget, multiple=multiple, temperature=temperature, poison_cache=True)
    tree, grads = step(engine, samples, objective)
    assert tree.num_terms == flat.num_terms
    assert tree.metrics == pytest.approx(flat.metrics, abs=EXACT)
    assert grad_error(grads, flat_grads) < EXACT
    for got, expected in zip(engine.forward_batch(samples), flat_engine.forward_batch(samples)):
        np.testing.assert_allclose(got, expected, atol=EXACT)


@pytest.mark.parametrize(("budget", "multiple"), BUDGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape, budget, multiple):
    samples = with_random_advantages(batch(SHAPES[shape]))
    assert_equal(tiny(), samples, random_objective(), budget, multiple)


@pytest.mark.parametrize("shape", ["star", "siblings", "comb", "caterpillar", "ragged"])
@pytest.mark.parametrize("budget", ["whole", 7])
def test_head_in_many_row_blocks(monkeypatch, shape, budget):
    """Edges of one source stand side by side, also where a branch lies between their targets."""
    monkeypatch.setitem(head.MAX_LOGITS, "cpu", 2 * VOCAB)
    samples = with_random_advantages(batch(SHAPES[shape], p_trained=1.0))
    assert_equal(tiny(), samples, random_objective(), budget, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("objective", [objectives.sft(), FULL_GRPO], ids=["sft", "grpo"])
def test_families_and_objectives(family, tied, objective):
    samples = batch(SHAPES["ragged"] + SHAPES["comb"])
    assert_equal(tiny(family, tied=tied), samples, objective, 11, 1, temperature=0.7)


@pytest.mark.parametrize("recompute", ["core_attention", "full"])
@pytest.mark.parametrize("budget", ["whole", 5])
def test_recompute_changes_no_gradient(recompute, budget):
    """D03, D11: a mask must survive recomputation, and a chunk's first forward runs without gradient."""
    samples = batch(SHAPES["ragged"])
    assert_equal(tiny(recompute=recompute), samples, FULL_GRPO, budget, 1)
    _, plain = step(TreeEngine(tiny(), budget=budget), samples, FULL_GRPO)
    _, recomputed = step(TreeEngine(tiny(recompute=recompute), budget=budget), samples, FULL_GRPO)
    assert grad_error(recomputed, plain) < 1e-12


@pytest.mark.parametrize("trial", range(6))
def test_random_forests(trial):
    rng = np.random.default_rng(trial)
    sequences: list[list[int]] = []
    for _ in range(rng.integers(4, 14)):
        old = sequences[rng.integers(len(sequences))][: rng.integers(0, 25)] if sequences and rng.random() < 0.8 else []
        sequences.append([*old, *rng.integers(0, VOCAB, rng.integers(0 if old else 1, 12)).tolist()])
    budget = [7, 16, 64][trial % 3]
    assert_equal(tiny(), with_random_advantages(batch(sequences, seed=trial)), random_objective(), budget, 1)


def test_gradient_does_not_depend_on_the_cut():
    """A22: no division by the number of chunks, whatever that is."""
    samples = batch(SHAPES["comb"])
    _, whole = step(TreeEngine(tiny()), samples, FULL_GRPO)
    for budget in (16, 6, 3, 2):
        _, cut = step(TreeEngine(tiny(), budget=budget), samples, FULL_GRPO)
        assert grad_error(cut, whole) < EXACT


def test_prompt_only_chunk_passes_on_its_descendants_gradients():
    """A chunk without a loss-bearing edge still runs its backward."""
    prompt = list(range(1, 11))
    samples = batch([[*prompt, 11, 12, 3], [*prompt, 2, 2, 5]])
    for sample in samples:
        sample.loss_mask[:] = np.arange(13) > 10
    engine = TreeEngine(tiny(), budget=4, poison_cache=True)
    (plan,) = engine.plan(samples).plans
    assert any(len(chunk.edges) == 0 for chunk in plan.chunks)
    assert_equal(tiny(), samples, FULL_GRPO, 4, 1)


def test_chunk_of_several_trees():
    samples = batch(SHAPES["several trees"])
    (plan,) = TreeEngine(tiny(), budget=9).plan(samples).plans
    roots = [int((plan.forest.parent[chunk.tokens] < 0).sum()) for chunk in plan.chunks]
    assert max(roots) > 1
    assert len(plan.chunks) > 1
    assert_equal(tiny(), samples, FULL_GRPO, 9, 1)
