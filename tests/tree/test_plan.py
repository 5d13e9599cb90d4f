import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.tree.budget import WHOLE, capacity_of
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.layout import Layout
from megatron_dta.tree.plan import Call, Chunk, Kind, Operation, Plan, Push
from megatron_dta.tree.schedule import schedule
from tests.forests import SHAPES, ancestor_sets, forest_of, make_plan, random_assignment, random_forest, shaped

RANDOM = [random_forest(seed) for seed in range(40)]
BUDGETS = (1, 2, 5, 17, WHOLE)


class Replay:
    """Play a plan's operations with token numbers for states and sets of tokens for gradients, checking each step."""

    def __init__(self, plan: Plan, multiple: int = 1):
        self.plan, self.multiple = plan, multiple
        self.ancestors = ancestor_sets(plan.forest)
        self.outside = descendants_in_other_chunks(plan, self.ancestors)
        self.states: dict[int, int] = {}
        self.gradients: dict[int, tuple[int, set[int]]] = {}
        self.in_flight: deque[int] = deque()
        self.forwarded: list[int] = []
        self.finished: set[int] = set()
        self.stored: set[int] = set()
        self.most_states = self.most_gradients = 0

    def run(self) -> None:
        actions = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.PUSH: self.push, Kind.FREE: self.free}
        for operation in self.plan.operations:
            actions[operation.kind](operation)
        assert (self.states, self.gradients, list(self.in_flight)) == ({}, {}, []), "something is left at the end"
        assert sorted(self.forwarded) == list(range(len(self.plan.chunks)))
        assert self.finished == set(range(self.plan.forest.num_tokens))
        assert (self.most_states, self.most_gradients) == (self.plan.state_rows, self.plan.grad_rows)

    def push(self, operation: Operation) -> None:
        push = self.plan.pushes[operation.index]
        self.check_call(push)
        tokens, rows = push.tokens.tolist(), push.store_state.tolist()
        assert not self.stored & set(tokens), "pushed twice"
        assert not self.states.keys() & set(rows), "a live state is overwritten"
        assert all(0 <= row < self.plan.state_rows for row in rows)
        assert len(set(rows)) == len(tokens)
        self.stored |= set(tokens)
        self.states |= zip(rows, tokens)
        self.most_states = max(self.most_states, len(self.states))

    def forward(self, operation: Operation) -> None:
        self.check_call(self.plan.chunks[operation.index])
        self.forwarded.append(operation.index)
        self.in_flight.append(operation.index)
        assert len(self.in_flight) <= self.plan.in_flight

    def backward(self, operation: Operation) -> None:
        assert operation.index == self.in_flight.popleft(), "backwards run in the order of the forwards"
        chunk = self.plan.chunks[operation.index]
        self.check_context(chunk)
        self.begin_gradients(chunk)
        self.consume_own(chunk)
        for row, token in zip(chunk.context_grad.tolist(), chunk.context.tolist()):
            assert self.gradients[row][0] == token, "a gradient goes to another token's accumulator"
            self.gradients[row][1].update(t for t in chunk.tokens.tolist() if token in self.ancestors[t])
        self.finished |= set(chunk.tokens.tolist())

    def begin_gradients(self, chunk: Chunk) -> None:
        fresh, rows = set(chunk.fresh_grad.tolist()), chunk.context_grad.tolist()
        assert len(fresh) == len(chunk.fresh_grad)
        assert len(set(rows)) == len(chunk.context)
        assert all(0 <= row < self.plan.grad_rows for row in rows)
        assert fresh == set(rows) - self.gradients.keys(), "rows are zeroed exactly at their first use"
        self.gradients |= {r: (t, set()) for r, t in zip(rows, chunk.context.tolist()) if r in fresh}
        self.most_gradients = max(self.most_gradients, len(self.gradients))

    def consume_own(self, chunk: Chunk) -> None:
        """Every gradient that descendants elsewhere owe has arrived, so their chunks ran earlier: post-order."""
        own = chunk.tokens[chunk.own_rows].tolist()
        assert own == [t for t in chunk.tokens.tolist() if self.outside[t]]
        for token, row in zip(own, chunk.own_grad.tolist()):
            assert self.gradients[row] == (token, self.outside[token])
            assert self.outside[token] <= self.finished

    def free(self, operation: Operation) -> None:
        for row in operation.free_state.tolist():
            assert self.outside[self.states.pop(row)] <= self.finished, "somebody still reads a freed state"
        for row in operation.free_grad.tolist():
            assert self.gradients.pop(row)[0] in self.finished, "a freed gradient was not consumed"
        kept = [*self.states.values(), *(t for t, _ in self.gradients.values() if t in self.finished)]
        assert not any(self.outside[token] <= self.finished for token in kept), "a row is kept too long"

    def check_call(self, call: Call) -> None:
        tokens = set(call.tokens.tolist())
        assert call.tokens.tolist() == sorted(tokens)
        assert len(call.tokens) > 0
        assert call.size == -(-len(tokens) // self.multiple) * self.multiple, "A04: the size is the padded token count"
        assert call.size <= self.plan.capacity
        assert len(call.visible_from) == len(call.visible_to) == len(call.context) + call.size
        assert call.context.tolist() == sorted(set().union(*(self.ancestors[t] for t in tokens)) - tokens)
        self.check_context(call)

    def check_context(self, call: Call) -> None:
        assert [self.states.get(row) for row in call.context_state.tolist()] == call.context.tolist()


def descendants_in_other_chunks(plan: Plan, ancestors: list[set[int]]) -> list[set[int]]:
    chunk_of = np.full(plan.forest.num_tokens, -1)
    for i, chunk in enumerate(plan.chunks):
        assert (chunk_of[chunk.tokens] == -1).all(), "a token is in two chunks"
        chunk_of[chunk.tokens] = i
    assert (chunk_of >= 0).all(), "a token is in no chunk"
    outside: list[set[int]] = [set() for _ in ancestors]
    for token, above in enumerate(ancestors):
        for a in above:
            if chunk_of[a] != chunk_of[token]:
                outside[a].add(token)
    return outside


def check_terms(plan: Plan) -> None:
    """Every edge and every term is in the one chunk that holds the edge's source."""
    forest = plan.forest
    for chunk in plan.chunks:
        sources = chunk.tokens[chunk.source_rows]
        assert len(set(sources.tolist())) == len(sources)
        assert np.array_equal(sources[chunk.edge_source], forest.parent[forest.edges[chunk.edges]])
        assert np.array_equal(chunk.edges[chunk.term_edge], forest.term_edge[chunk.terms])
        assert set(chunk.edge_source.tolist()) == set(range(len(sources))), "a head row without an edge"
        assert (np.diff(chunk.edge_source) >= 0).all(), "the head takes edges in the order of their rows"
    assert sorted(e for c in plan.chunks for e in c.edges.tolist()) == list(range(len(forest.edges)))
    assert sorted(t for c in plan.chunks for t in c.terms.tolist()) == list(range(len(forest.term_target)))


def check(plan: Plan, multiple: int = 1) -> None:
    Replay(plan, multiple).run()
    check_terms(plan)


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
    counts = {name: plan[name] for name in ("sequences", "tree_tokens", "chunks", "pushed_tokens", "rows")}
    assert counts == {"sequences": 2454, "tree_tokens": 717729, "chunks": 59, "pushed_tokens": 3960, "rows": 717729}
