"""Executions that aligned cuts do not produce: pushes that are forests, chunks in flight, modes and memory."""

import numpy as np
import pytest
import torch

from megatron_dta.engine import executor as executor_module
from megatron_dta.engine.cache import ArenaCache
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.schedule import schedule
from megatron_dta.tree.statistics import memory_statistics, plan_statistics
from megatron_dta.verify import random_objective, with_random_advantages
from tests.batches import SHAPES, batch, grad_error, step, tiny
from tests.forests import make_plan, program

TWO_TREES = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8, 9], [7, 8, 10, 10]]


def forest_of(samples):
    return build_forest([s.tokens for s in samples], [s.loss_mask for s in samples])


class Planned(TreeEngine):
    """A tree engine that executes a given plan."""

    def __init__(self, model, plan):
        super().__init__(model, poison_cache=True)
        self.given = program(plan)

    def plan(self, samples):
        return self.given


def assert_plan_is_exact(plan, samples):
    _, expected = step(FlatEngine(tiny()), samples, random_objective())
    _, got = step(Planned(tiny(), plan), samples, random_objective())
    assert grad_error(got, expected) < 1e-9


def test_push_that_is_a_forest():
    """One chunk holds the leaves of two trees, so its push holds both prompts; a third holds what was pushed."""
    samples = with_random_advantages(batch(TWO_TREES))
    forest = forest_of(samples)
    is_prompt = np.isin(forest.tokens, [1, 2, 3, 7, 8]) & (forest.subtree_end - np.arange(forest.num_tokens) > 1)
    plan = schedule(forest, np.where(is_prompt, 0, 1), capacity=8)
    assert any((forest.parent[push.tokens] < 0).sum() == 2 for push in plan.pushes)
    assert_plan_is_exact(plan, samples)


def test_random_legal_assignments():
    """Chunks need not be contiguous: tokens assigned by depth layers, many trees per chunk."""
    rng = np.random.default_rng(0)
    samples = with_random_advantages(batch(SHAPES["several trees"] + SHAPES["comb"] + TWO_TREES))
    forest = forest_of(samples)
    for _ in range(4):
        bounds = np.sort(rng.integers(1, 12, 3))
        plan = schedule(forest, np.searchsorted(bounds, forest.depth), capacity=forest.num_tokens)
        assert_plan_is_exact(plan, samples)


@pytest.mark.parametrize("in_flight", [1, 3, 7])
def test_backwards_may_wait_first_in_first_out(in_flight):
    samples = with_random_advantages(batch(SHAPES["comb"] + SHAPES["ragged"]))
    assert_plan_is_exact(make_plan(forest_of(samples), 4, in_flight=in_flight), samples)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_last_backward_is_announced_once_right_before_it(monkeypatch, in_flight):
    """Reductions of gradients start in it: one too early would miss what later chunks add."""
    samples = batch(SHAPES["comb"] + SHAPES["ragged"])
    engine = Planned(tiny(), make_plan(forest_of(samples), 4, in_flight=in_flight))
    happened = []
    run_backward = executor_module.backward

    def noting(outputs, grads):
        happened.append("backward")
        run_backward(outputs, grads)

    monkeypatch.setattr(executor_module, "backward", noting)
    engine.train_batch(samples, random_objective(), on_last_backward=happened.append)
    tiny().zero_grad(set_to_none=True)
    (plan,) = engine.given.plans
    assert len(plan.chunks) > 3
    assert happened == ["backward"] * (len(plan.chunks) - 1) + [0, "backward"]
    engine.forward_batch(samples)
    assert len(happened) == len(plan.chunks) + 1, "a sweep has no backward"


class CountingCache(ArenaCache):
    """Counts the rows that hold something a later operation needs."""

    peak_states = peak_grads = 0

    def __init__(self, **options):
        super().__init__(**options)
        self.live_states, self.live_grads = set(), set()
        type(self).last = self

    def store(self, layer, rows, k, v):
        super().store(layer, rows, k, v)
        self.live_states |= set(rows.tolist())
        self.peak_states = max(self.peak_states, len(self.live_states))

    def begin_grads(self, rows):
        super().begin_grads(rows)
        assert not self.live_grads & set(rows.tolist())
        self.live_grads |= set(rows.tolist())
        self.peak_grads = max(self.peak_grads, len(self.live_grads))

    def free(self, state_rows, grad_rows):
        super().free(state_rows, grad_rows)
        assert self.live_states >= set(state_rows.tolist())
        assert self.live_grads >= set(grad_rows.tolist())
        self.live_states -= set(state_rows.tolist())
        self.live_grads -= set(grad_rows.tolist())


@pytest.mark.parametrize("budget", [2, 5, 16])
def test_live_states_are_the_predicted_peak(monkeypatch, budget):
    """D06: what is alive, counted at run time, and its bytes are what the plan says; nothing is left at the end."""
    monkeypatch.setattr(executor_module, "ArenaCache", CountingCache)
    samples = batch(SHAPES["comb"] + SHAPES["ragged"])
    engine = TreeEngine(tiny(), budget=budget)
    (plan,) = engine.plan(samples).plans
    step(engine, samples, random_objective())
    cache = CountingCache.last
    assert (cache.peak_states, cache.peak_grads) == (plan.state_rows, plan.grad_rows)
    assert not cache.live_states
    assert not cache.live_grads
    memory = memory_statistics(plan_statistics(plan), tiny().model_config, "fp64")
    assert (cache.states.nbytes, cache.accumulators.nbytes) == (memory.states, memory.accumulators)


def test_live_states_do_not_exceed_the_path():
    """D06: in a comb whose turns are run one by one, only the open path is alive."""
    samples = batch(SHAPES["comb"])
    (plan,) = TreeEngine(tiny(), budget=2).plan(samples).plans
    assert plan.state_rows <= max(len(s.tokens) for s in samples)


def test_a_sweep_has_no_accumulators_and_no_graph(monkeypatch):
    monkeypatch.setattr(executor_module, "ArenaCache", CountingCache)
    engine = TreeEngine(tiny(), budget=5)
    engine.forward_batch(batch(SHAPES["comb"]))
    assert CountingCache.last.accumulators.numel() == 0
    assert all(p.grad is None for p in tiny().parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", ["whole", 5])
def test_sweep_and_training_agree_bitwise(dtype, budget):
    """B07: the sweep runs the pushes and chunk shapes of training, so an on-policy ratio is exactly 1."""
    from dataclasses import replace

    from megatron_dta.rl import objectives

    samples = batch(SHAPES["ragged"] + SHAPES["comb"], old_logprobs=None)
    engine = TreeEngine(tiny(dtype=dtype), budget=budget)
    swept = [replace(s, old_logprobs=new) for s, new in zip(samples, engine.forward_batch(samples))]
    result, _ = step(engine, swept, objectives.grpo())
    assert result.metrics["ratio"] == 1.0
    assert result.metrics["ratio_max"] == 1.0
    assert result.metrics["clip_fraction"] == 0.0
    assert result.metrics["policy_kl"] == 0.0


def test_same_plan_is_bitwise_repeatable():
    """B23: the same plan twice gives the same bits; another plan differs by rounding only."""
    samples = with_random_advantages(batch(SHAPES["ragged"] + SHAPES["comb"]))
    runs = [step(TreeEngine(tiny(dtype="fp32"), budget=b), samples, random_objective())[1] for b in (6, 6, "whole")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert grad_error(runs[2], runs[0]) < 1e-4
