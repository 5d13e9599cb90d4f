import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from megatron_dta.model_config import ModelConfig, read_model_config
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.statistics import (
    activation_bytes,
    linear_flops,
    memory_statistics,
    num_expert_parameters,
    num_parameters,
    over_ranks,
    plan_statistics,
    work_statistics,
)
from tests.forests import forest_of, make_plan, random_forest

# Two query heads of size 2 on one key head: q 4, kv 2. Matrices of a layer: 4 (2 x 4 + 2 x 2 + 3 x 6) = 120.
TINY = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=4,
    ffn_size=6,
    num_heads=2,
    num_kv_heads=1,
    head_size=2,
    vocab_size=10,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=False,
    qk_norm=True,
    qkv_bias=False,
    init_std=0.02,
    max_positions=64,
)

# Three experts of 3 x 4 x 5 = 60 in place of the MLP, two of them for each token, and a router of 12.
MIXTURE = replace(TINY, family="qwen3_moe", num_experts=3, experts_per_token=2, expert_ffn_size=5)

# The example of this file: a root 1, its child 2, and below that the leaf 3 and the chain 4, 5.
#   sequences: 3 + 4 tokens, areas 6 + 10; tree: 5 tokens at depths 0, 1, 2, 2, 3, area 1 + 2 + 3 + 3 + 4.
#   trained: 3 in the first, 4 and 5 in the second: 3 terms, predicted from 2 rows (2, 4).
SEQUENCES = [[1, 2, 3], [1, 2, 4, 5]]
MASKS = [[0, 0, 1], [0, 0, 1, 1]]


def example(budget=WHOLE, *, multiple=1, masks=MASKS):
    forest = build_forest([np.array(s) for s in SEQUENCES], [np.array(m, bool) for m in masks])
    return make_plan(forest, budget, multiple=multiple)


def test_counts_of_the_example():
    counts = plan_statistics(example())
    assert (counts.sequences, counts.trees, counts.segments, counts.longest_path) == (2, 1, 3, 4)
    assert (counts.sequence_tokens, counts.tree_tokens, counts.token_ratio) == (7, 5, 7 / 5)
    assert (counts.sequence_area, counts.tree_area, counts.area_ratio) == (16, 13, 16 / 13)
    assert (counts.trained_tokens, counts.head_rows) == (3, 2)
    assert (counts.budget, counts.chunks, counts.rows, counts.fill) == (5, 1, 5, 1.0)
    assert (counts.pushes, counts.pushed_tokens, counts.pushed_share) == (0, 0, 0.0)
    assert (counts.state_rows, counts.grad_rows) == (0, 0)


def test_counts_of_the_example_in_chunks_of_two():
    """Chunks 1 2, then 3, then 4 5: both tokens of the first are pushed, their subtrees being larger than two."""
    counts = plan_statistics(example(2))
    assert (counts.budget, counts.chunks, counts.rows, counts.fill) == (2, 3, 5, 5 / 6)
    assert (counts.pushes, counts.pushed_tokens, counts.pushed_share) == (1, 2, 2 / 5)
    assert (counts.state_rows, counts.grad_rows) == (2, 2)
    assert (counts.trained_tokens, counts.head_rows) == (3, 2)


def test_a11_token_ratio_is_logical_over_executed():
    p, a, b, c, d = ([10 * n + i for i in range(n)] for n in (7, 5, 3, 4, 2))
    counts = plan_statistics(make_plan(forest_of(p + a + b, p + a + c, p + d), WHOLE))
    assert counts.token_ratio == (15 + 16 + 9) / (7 + 5 + 3 + 4 + 2)


@pytest.mark.parametrize(
    ("tokens", "budget", "multiple", "rows"),
    [
        (200, WHOLE, 128, [256]),
        (200, 128, 128, [128, 128]),
        (200, 255, 128, [128, 128]),
        (128, WHOLE, 128, [128]),
        (1, WHOLE, 128, [128]),
        (200, WHOLE, 384, [384]),
        (200, WHOLE, 1, [200]),
    ],
)
def test_a39_rows_are_padded_to_full_multiples(tokens, budget, multiple, rows):
    plan = make_plan(forest_of(list(range(tokens))), budget, multiple=multiple)
    assert sorted(chunk.size for chunk in plan.chunks) == rows
    counts = plan_statistics(plan)
    assert counts.rows == sum(rows)
    assert counts.tree_tokens == tokens
    assert counts.fill == tokens / (len(rows) * plan.capacity)


def test_work_of_the_example():
    """Forward FLOPs: 480 a token, 32 a visible pair, 80 a head row; backward is twice the forward."""
    plan = example(2)
    work = work_statistics([plan], plan_statistics(plan), TINY)
    assert work.sequence_flops == 3 * (480 * 7 + 32 * 16 + 80 * 3)
    assert work.tree_flops == 3 * (480 * 5 + 32 * 13 + 80 * 2)
    assert work.flop_ratio == pytest.approx((480 * 7 + 32 * 16 + 80 * 3) / (480 * 5 + 32 * 13 + 80 * 2))
    assert work.push_flops == 480 * 2 + 32 * (1 + 2)


def test_work_does_not_depend_on_budget_and_padding_but_for_pushes():
    for seed in range(20):
        forest = random_forest(seed)
        plans = [make_plan(forest, budget, multiple=multiple) for budget, multiple in ((1, 1), (3, 2), (WHOLE, 8))]
        works = [work_statistics([plan], plan_statistics(plan), TINY) for plan in plans]
        assert len({(work.sequence_flops, work.tree_flops) for work in works}) == 1
        assert works[0].push_flops >= works[1].push_flops >= works[2].push_flops == 0


@pytest.mark.parametrize("budget", [2, WHOLE])
def test_distinct_sequences_save_nothing(budget):
    plan = make_plan(forest_of([1, 2, 3], [2, 2, 3, 4], [3]), budget)
    counts = plan_statistics(plan)
    work = work_statistics([plan], counts, TINY)
    assert (counts.token_ratio, counts.area_ratio, work.flop_ratio) == (1.0, 1.0, 1.0)
    assert work.sequence_flops == work.tree_flops


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 2 * 40 + 2 * (120 + 2 * 4 + 2 * 2) + 4),
        ({"tied": True}, 40 + 2 * (120 + 2 * 4 + 2 * 2) + 4),
        ({"qk_norm": False}, 2 * 40 + 2 * (120 + 2 * 4) + 4),
        ({"qkv_bias": True}, 2 * 40 + 2 * (120 + 2 * 4 + 2 * 2 + 4 + 2 * 2) + 4),
    ],
)
def test_parameters_are_counted(changes, parameters):
    assert num_parameters(replace(TINY, **changes)) == parameters


@pytest.mark.parametrize(
    "name",
    [
        "Llama-2-7b-hf",
        "Llama-3.1-8B",
        "Llama-3.1-70B",
        "Qwen2.5-1.5B",
        "Qwen2.5-72B",
        "Qwen3-0.6B",
        "Qwen3-8B",
        "Qwen3-32B",
        "Qwen3-30B-A3B",
        "Qwen3-235B-A22B",
    ],
)
def test_parameters_equal_those_of_published_models(data_dir, name):
    config = read_model_config(data_dir / "hf_configs" / f"{name}.json")
    assert num_parameters(config) == json.loads((data_dir / "hf_shapes" / f"{name}.json").read_text())["params"]


@pytest.mark.parametrize(
    ("dtype", "narrow", "wide", "masters"), [("bf16", 2, 4, 4), ("fp32", 4, 4, 0), ("fp64", 8, 8, 0)]
)
def test_memory_of_the_example(dtype, narrow, wide, masters):
    """Parameters 348; a cached token is 2 x 2 layers x 1 head x 2; two are alive at the peak, chunks have two rows."""
    memory = memory_statistics(plan_statistics(example(2)), TINY, dtype)
    assert memory.weights == 348 * narrow
    assert memory.gradients == 348 * wide
    assert memory.optimizer == 348 * (2 * wide + masters)
    assert memory.states == 2 * 8 * narrow
    assert memory.accumulators == 2 * 8 * wide
    assert memory.activations == 2 * activation_bytes(TINY, narrow)
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.states, memory.accumulators, memory.activations)
    assert memory.total == sum(parts)


def test_a_token_works_on_its_experts_alone_and_memory_holds_all():
    assert linear_flops(MIXTURE) == 2 * 2 * (48 + 12 + 2 * 60)
    assert num_expert_parameters(MIXTURE) == 2 * 3 * 60
    assert num_expert_parameters(TINY) == 0
    assert num_parameters(MIXTURE) == 2 * 40 + 2 * (48 + 12 + 3 * 60 + 2 * 4 + 2 * 2) + 4
    assert num_parameters(replace(MIXTURE, ffn_size=7)) == num_parameters(MIXTURE), "no layer has that MLP"
    assert activation_bytes(MIXTURE, 2) == 2 * (2 * (6 * 4 + 3 * (4 + 2 * 2) + 4 + 4 + 2 * (4 + 5 * 5)) + 3 * 3 * 4)


@pytest.mark.parametrize(("name", "active"), [("Qwen3-30B-A3B", 3.3e9), ("Qwen3-235B-A22B", 22e9)])
def test_active_parameters_are_those_that_the_name_says(name, active, data_dir):
    config = read_model_config(data_dir / "hf_configs" / f"{name}.json")
    embeddings = 2 * config.vocab_size * config.hidden_size
    assert linear_flops(config) / 2 + embeddings == pytest.approx(active, rel=0.02)


def test_memory_of_experts_is_spread_over_their_own_ranks():
    """360 weights of experts, 228 others, which two ranks halve."""
    counts = plan_statistics(example(2))
    shares = {"tensor": 2, "context": 2}
    assert memory_statistics(counts, MIXTURE, "bf16", **shares, expert=4, expert_tensor=1).weights == (90 + 114) * 2
    assert memory_statistics(counts, MIXTURE, "bf16", **shares, expert=2).weights == (90 + 114) * 2
    assert memory_statistics(counts, MIXTURE, "bf16", **shares).weights == (180 + 114) * 2
    assert memory_statistics(counts, MIXTURE, "bf16", pipeline=2, expert=2).weights == (90 + 114) * 2


def test_activations_of_a_token_grow_with_every_width():
    base = activation_bytes(TINY, 2)
    assert base == 2 * 2 * (6 * 4 + 3 * (4 + 2 * 2) + 4 + 4 + 5 * 6)
    assert activation_bytes(TINY, 4) == 2 * base
    assert activation_bytes(replace(TINY, num_layers=4), 2) == 2 * base
    assert all(activation_bytes(replace(TINY, **{w: 8}), 2) > base for w in ("hidden_size", "ffn_size", "num_kv_heads"))


def test_memory_does_not_grow_with_the_number_of_sequences():
    """A root with many leaves: one state is alive whatever their number, and a chunk has at most the budget."""

    def memory(num_leaves):
        plan = make_plan(forest_of(*([0, i] for i in range(1, num_leaves + 1))), 8)
        return memory_statistics(plan_statistics(plan), TINY, "bf16")

    assert memory(20) == memory(500)


@pytest.mark.parametrize("budget", [2, WHOLE])
def test_a33_a_batch_without_a_trained_token(budget):
    plan = example(budget, masks=[[0] * 3, [0] * 4])
    counts = plan_statistics(plan)
    assert (counts.trained_tokens, counts.head_rows, counts.tree_tokens) == (0, 0, 5)
    assert all(len(chunk.edges) == len(chunk.terms) == 0 for chunk in plan.chunks)
    assert work_statistics([plan], counts, TINY).flop_ratio == (480 * 7 + 32 * 16) / (480 * 5 + 32 * 13)


def test_an_empty_forest_has_finite_statistics():
    plan = make_plan(build_forest([], []), WHOLE)
    counts = plan_statistics(plan)
    parts = counts, work_statistics([plan], counts, TINY), memory_statistics(counts, TINY, "bf16")
    assert parts[0].tree_tokens == parts[1].tree_flops == 0
    assert all(np.isfinite(value) for part in parts for value in asdict(part).values())


@pytest.mark.parametrize("budget", [2, 4, WHOLE])
def test_counts_over_ranks_are_sums_and_peaks(budget):
    """One rank's counts are its own; two copies of it have twice the sums, the same peaks and the same ratios."""
    counts = plan_statistics(example(budget))
    assert over_ranks([counts]) == counts
    twice, once = asdict(over_ranks([counts, counts])), asdict(counts)
    peaks = {"longest_path", "budget", "rows_in_flight", "state_rows", "grad_rows"}
    ratios = {"token_ratio", "area_ratio", "pushed_share", "fill"}
    for name, value in once.items():
        assert twice[name] == (value if name in peaks | ratios else 2 * value), name


def test_memory_on_several_devices():
    """Weights are spread over tensor and pipeline ranks, rows over context ranks as well."""
    counts = plan_statistics(example(2))
    one, many = (memory_statistics(counts, TINY, "bf16", **shares) for shares in ({}, {"tensor": 2, "context": 2}))
    assert (many.weights, many.gradients, many.optimizer) == (one.weights // 2, one.gradients // 2, one.optimizer // 2)
    assert (many.states, many.accumulators, many.activations) == (
        one.states // 4, one.accumulators // 4, one.activations // 4,
    )  # fmt: skip
