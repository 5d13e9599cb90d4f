import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.tree.budget import WHOLE, capacity_of
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.layout import Layout
from megatron_dta.tree.plan import Push
from megatron_dta.tree.schedule import schedule
from tests.forests import SHAPES, ancestor_sets, forest_of, make_plan, random_assignment, random_forest, shaped
from tests.replay import check, descendants_in_other_chunks

RANDOM = [random_forest(seed) for seed in range(40)]
BUDGETS = (1, 2, 5, 17, WHOLE)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(("budget", "multiple"), [(b, m) for b in BUDGETS for m in (1, 4) if b == WHOLE or b >= m])
def test_aligned_plans_replay(budget, multiple, in_flight):
    """A04, C09: what runs is what was planned, to the row."""
    for forest in [*RANDOM, *(shaped(name) for name in SHAPES)]:
        plan = make_plan(forest, budget, multiple=multiple, in_flight=in_flight)
        assert plan.num_rows == sum(-(-len(chunk.tokens) // multiple) * multiple for chunk in plan.chunks)
        check(plan, multiple)


@pytest.mark.parametrize("budget", [1, 2, 5, 17])
def test_aligned_cuts_push_exactly_the_tokens_whose_subtree_exceeds_the_capacity(budget):
    for forest in RANDOM:
        pushed = [t for push in make_plan(forest, budget).pushes for t in push.tokens.tolist()]
        heavy = forest.subtree_end - np.arange(forest.num_tokens) > budget
        assert sorted(pushed) == np.flatnonzero(heavy).tolist()


def test_a_forest_that_fits_is_one_chunk_without_a_push():
    for forest in RANDOM:
        plan = make_plan(forest, WHOLE)
        assert (len(plan.chunks), plan.pushes, plan.state_rows, plan.grad_rows) == (1, (), 0, 0)


def is_forest(push: Push, ancestors: list[set[int]]) -> bool:
    """Tell whether some token of a push is not on the path to the last one."""
    *rest, last = push.tokens.tolist()
    return not set(rest) <= ancestors[last]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("num_chunks", [2, 3, 6])
def test_any_legal_assignment_replays(num_chunks, in_flight):
    rng, num_forests = np.random.default_rng(num_chunks), 0
    for forest in RANDOM:
        chunk_of, multiple = random_assignment(forest, rng, num_chunks), int(rng.integers(1, 4))
        capacity = -(-int(np.bincount(chunk_of).max()) // multiple) * multiple
        plan = schedule(forest, chunk_of, capacity=capacity, multiple=multiple, in_flight=in_flight)
        check(plan, multiple)
        ancestors = ancestor_sets(forest)
        num_forests += any(is_forest(push, ancestors) for push in plan.pushes)
        outside = descendants_in_other_chunks(plan, ancestors)
        assert Layout(forest, chunk_of).pushed.tolist() == [token for token, below in enumerate(outside) if below]
    assert num_forests > 5, "the pushes of this test are to be forests, not only chains"


@pytest.mark.parametrize(
    ("sequences", "leaves"),
    [([[1, 2, 3], [1, 2, 4], [5, 6, 7]], [2, 3, 6]), ([[1, 2, 3], [1, 4, 5]], [2, 4])],
    ids=["two roots", "two branches"],
)
def test_a_chunk_of_scattered_leaves_pushes_a_forest(sequences, leaves):
    forest = forest_of(*sequences)
    chunk_of = np.isin(np.arange(forest.num_tokens), leaves)
    plan = schedule(forest, chunk_of, capacity=forest.num_tokens)
    (push,) = plan.pushes
    assert push.tokens.tolist() == sorted(set(range(forest.num_tokens)) - set(leaves))
    assert is_forest(push, ancestor_sets(forest))
    check(plan)


def test_a_push_longer_than_the_capacity_is_split():
    plan = schedule(forest_of(list(range(7))), np.array([0, 0, 1, 1, 2, 2, 3]), capacity=4)
    assert [push.tokens.tolist() for push in plan.pushes] == [[0, 1, 2, 3], [4, 5]]
    check(plan)


@pytest.mark.parametrize(
    ("sequences", "chunk_of"),
    [
        ([[1, 2, 3]], [0, 1, 0]),
        ([[1, 2], [3, 4]], [0, 1, 1, 0]),
        ([[1, 2], [3, 4], [5, 6]], [0, 1, 1, 2, 2, 0]),
        ([[1], [2, 3], [4, 5]], [0, 1, 2, 2, 1]),
    ],
)
def test_chunks_that_wait_for_each_other_are_refused(sequences, chunk_of):
    with pytest.raises(ValueError, match=r"chunks \d and \d each hold ancestors of the other's tokens"):
        schedule(forest_of(*sequences), np.array(chunk_of), capacity=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_of": [0, 0], "capacity": 3}, r"chunk_of has shape \(2,\); the forest has 3 tokens"),
        ({"chunk_of": [0, 0, 0], "capacity": 2}, "a chunk holds 3 tokens; the capacity is 2"),
        ({"chunk_of": [0, 0, 0], "capacity": 3, "in_flight": 0}, "in_flight is 0"),
    ],
)
def test_assignments_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        schedule(forest_of([1, 2, 3]), np.array(options.pop("chunk_of")), **options)


@pytest.mark.parametrize(
    ("budget", "multiple"), [(0, 1), (-1, 1), ("all", 1), (True, 1), (2.0, 1), (None, 1), (3, 4), (127, 128)]
)
def test_budgets_below_one_padded_row_are_refused(budget, multiple):
    with pytest.raises(ValueError, match=rf"budget is {budget!r}; expected 'whole' or at least {multiple} tokens"):
        make_plan(forest_of([1, 2, 3]), budget, multiple=multiple)


def test_padding_below_one_is_refused():
    with pytest.raises(ValueError, match="padding multiple is 0"):
        capacity_of(3, 4, 0)


@pytest.mark.parametrize(
    ("budget", "multiple", "capacity"), [(5, 1, 5), (5, 4, 4), (9, 4, 8), (WHOLE, 1, 7), (WHOLE, 4, 8)]
)
def test_capacity_is_the_budget_in_full_multiples(budget, multiple, capacity):
    forest: Forest = forest_of(list(range(7)))
    assert capacity_of(forest.num_tokens, budget, multiple) == capacity


PLAN_WITHOUT_TORCH = """
import sys
from megatron_dta.cli import main
status = main(["plan", sys.argv[1], "--form", "comb", "--budget", "16384", "--json", sys.argv[2]])
assert "torch" not in sys.modules, "planning imported torch"
sys.exit(status)
"""


def test_recorded_rollouts_plan_without_torch(data_dir, tmp_path):
    report = tmp_path / "plan.json"
    rollouts = data_dir / "tau_airline_gpt4o.qwen3.npz"
    command = [sys.executable, "-c", PLAN_WITHOUT_TORCH, rollouts, report]
    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])
    plan = json.loads(report.read_text())["plan"]
    counts = {name: plan[name] for name in ("sequences", "tree_tokens", "pushed_tokens", "rows")}
    assert counts == {"sequences": 2454, "tree_tokens": 717729, "pushed_tokens": 3960, "rows": 717729}
    assert plan["chunks"] <= 49, "ceil(1.08 x tokens / budget) + 1"
