"""Plans for many ranks, over random batches and settings: whole, legal, as predicted, and the same again."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.errors import UsageError
from megatron_dta.tree import improve
from megatron_dta.tree.budget import WHOLE, row_multiple
from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.plan import Plan
from megatron_dta.tree.planner import BatchPlan, Settings, Task, build_plan, plan_batch
from tests.forests import SHAPES, Batch, broom, random_batch
from tests.replay import check, kinds_of
from tools.bench.synthetic import skewed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def short_search():
    """What is checked here does not depend on how fast the plans are that are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "STEPS", 100)
        yield


def cost_of(*, launch: float, fixed: float, context: float) -> CostModel:
    """Return a cost where a row takes about a second."""
    chunk = CallCost(launch=launch, fixed=fixed, row=0.7, pair=0.05, context=context, source=0.1)
    return CostModel(machine="test", chunk=chunk, push=replace(chunk.scaled(1 / 3, 1 / 3), source=0.0))


COSTS = {
    "balanced": cost_of(launch=2, fixed=0.1, context=0.01),
    "launches": cost_of(launch=9, fixed=0.2, context=0.01),
    "no floor": cost_of(launch=0, fixed=0.5, context=0.01),
    "contexts": cost_of(launch=1, fixed=0.2, context=0.4),
    "pushes": replace(cost_of(launch=2, fixed=0.1, context=0.4), push=cost_of(launch=9, fixed=9, context=0.4).chunk),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and what its plan has to fit."""

    batch: Batch
    settings: Settings

    def plan(self) -> BatchPlan:
        batch = self.batch
        return plan_batch(build_outline(batch.tokens, batch.loss_masks, batch.identities), self.settings)

    def build(self, task: Task, in_flight: int | None = None) -> Plan:
        """Build a rank's plan; `in_flight` replaces that of the settings."""
        multiple, given = self.settings.multiple, in_flight or self.settings.in_flight
        return build_plan(task, *self.part(task.sequences), multiple=multiple, in_flight=given)

    def part(self, sequences: np.ndarray) -> tuple[list, list, list | None]:
        batch = self.batch
        columns = (batch.tokens, batch.loss_masks, batch.identities)
        tokens, masks, identities = (c and [c[i] for i in sequences] for c in columns)
        return tokens or [], masks or [], identities


def batch_of(*sequences) -> Batch:
    tokens = [np.array(sequence, np.int32) for sequence in sequences]
    return Batch(tokens=tokens, loss_masks=[np.arange(len(t)) > 0 for t in tokens], identities=None)


@st.composite
def batches(draw) -> Batch:
    """Draw a named shape, several copies of one with other ids, or a random batch."""
    name = draw(st.sampled_from(["random"] * 6 + ["nothing", *SHAPES]))
    if name == "random":
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        return random_batch(rng, most=draw(st.integers(1, 14)), longest=draw(st.integers(1, 18)))
    shape = SHAPES.get(name, [])
    return batch_of(*(np.array(s) + 1000 * copy for copy in range(draw(st.integers(1, 3))) for s in shape))


@st.composite
def cases(draw, *, together: int = 3) -> Case:
    multiple = draw(st.sampled_from([1, 2, 3, 8]))
    group = draw(st.integers(1, together))
    given = Settings(
        cost=COSTS[draw(st.sampled_from(sorted(COSTS)))],
        budget=draw(st.one_of(st.just(WHOLE), st.integers(multiple, 20))),
        multiple=multiple,
        ranks=group * draw(st.integers(1, 9 // group)),
        together=group,
        in_flight=draw(st.integers(1, 3)),
    )
    return Case(batch=draw(batches()), settings=given)


def check_case(case: Case) -> None:
    """Check everything that holds of any plan of any batch."""
    plan = case.plan()
    ranks = [case.build(task) for task in plan.tasks]
    check_shares(case, plan)
    for task, rank in zip(plan.tasks, ranks):
        check(rank, case.settings.multiple, task.slots)
        assert case.settings.budget == WHOLE or rank.capacity <= case.settings.budget
        assert rank.capacity % case.settings.multiple == 0
    check_predictions(case, plan, ranks)
    for start in range(0, len(ranks), case.settings.together):
        kinds = [kinds_of(rank) for rank in ranks[start : start + case.settings.together]]
        assert all(k == kinds[0] for k in kinds), "ranks of a group wait for each other for ever"
    check_totals(case, plan, ranks)


def check_shares(case: Case, plan: BatchPlan) -> None:
    """Every sequence is trained by one rank; a rank without any has one call of padding, or what its group runs."""
    num, ranks = len(case.batch.tokens), case.settings.ranks
    assert len(plan.tasks) == len(plan.predictions) == len(plan.seconds) == ranks
    assert sorted(i for task in plan.tasks for i in task.sequences.tolist()) == list(range(num))
    assert all((np.diff(task.sequences) > 0).all() for task in plan.tasks)
    empty = [task for task in plan.tasks if not len(task.sequences)]
    assert not empty or num < ranks
    if case.settings.together == 1:
        assert all(task.slots.pushes == (0,) for task in empty)
        assert all(task.slots is None for task in plan.tasks if len(task.sequences))


def check_predictions(case: Case, plan: BatchPlan, ranks: list[Plan]) -> None:
    """A04, C09: what runs is what was predicted, to the token; calls of padding are nobody's work."""
    for predicted, tokens, task, rank in zip(plan.predictions, plan.rank_tokens, plan.tasks, ranks):
        chunks = [chunk for chunk in rank.chunks if len(chunk.tokens)]
        pushes = [push for push in rank.pushes if len(push.tokens)]
        assert predicted.rows.tolist() == [chunk.size for chunk in chunks]
        assert predicted.push_rows.tolist() == [push.size for push in pushes]
        assert predicted.pushed_tokens == rank.num_pushed
        assert tokens == rank.forest.num_tokens == sum(len(chunk.tokens) for chunk in chunks)
        assert (predicted.state_rows, predicted.grad_rows) == (rank.state_rows, rank.grad_rows)
        if case.settings.budget == WHOLE:
            assert len(chunks) == (len(task.sequences) > 0)
            assert not pushes


def check_totals(case: Case, plan: BatchPlan, ranks: list[Plan]) -> None:
    forest = case.batch.forest()
    assert plan.tree_tokens == forest.num_tokens <= plan.rank_tokens.sum() <= forest.lengths.sum()
    assert sum(len(chunk.terms) for rank in ranks for chunk in rank.chunks) == len(forest.term_target)
    slowest = plan.seconds.max()
    assert plan.seconds.tolist() == [prediction.seconds for prediction in plan.predictions]
    assert plan.bound_seconds <= slowest * (1 + 1e-9)
    assert slowest <= plan.step_seconds * (1 + 1e-9)
    if case.settings.together == 1:
        assert plan.step_seconds == slowest


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(cases())
def test_any_batch_on_any_ranks(case):
    check_case(case)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(cases(together=1), st.integers(0, 12))
def test_a_limit_of_states_is_kept_or_refused(case, limit):
    limited = replace(case, settings=replace(case.settings, state_limit=limit, in_flight=1))
    most = max(prediction.state_rows for prediction in case.plan().predictions)
    try:
        plan, refusal = limited.plan(), ""
    except UsageError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"state_limit is {limit}; the fewest cached states found for a rank of ")
        assert most > limit, "the plan without a limit keeps to it"
        return
    check_case(limited)
    assert max(limited.build(task).state_rows for task in plan.tasks) <= limit


def digest(case: Case) -> str:
    """Return a hash of every array of all plans."""
    plan = case.plan()
    found = hashlib.sha256(repr((plan.step_seconds, plan.bound_seconds, plan.tree_tokens)).encode())
    for part in (plan.seconds, plan.rank_tokens, *plan.predictions, *plan.tasks, *map(case.build, plan.tasks)):
        for leaf in _leaves(part):
            found.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return found.hexdigest()


def _leaves(value) -> Iterator:
    if hasattr(value, "__dataclass_fields__"):
        value = tuple(getattr(value, name) for name in value.__dataclass_fields__)
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def digests() -> list[str]:
    """Plan some random batches for several ranks, with the full search."""
    found = []
    for seed in range(4):
        batch = random_batch(np.random.default_rng(seed), most=12, longest=14)
        for name, together in (("balanced", 1), ("pushes", 2)):
            given = Settings(cost=COSTS[name], budget=5 + seed, ranks=4, together=together)
            found.append(digest(Case(batch=batch, settings=given)))
    return found


def test_the_same_batch_is_planned_alike_everywhere():
    """Ranks plan in processes of their own: neither hashing nor what ran before may matter."""
    code = "from tests.tree.test_planner import digests; print(*digests())"
    found = []
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == 8


@settings(derandomize=True, deadline=None, database=None, max_examples=25)
@given(cases())
def test_planning_twice_gives_the_same(case):
    assert digest(case) == digest(case)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(case, random):
    order = list(range(len(case.batch.tokens)))
    random.shuffle(order)
    tokens, masks, identities = case.part(np.array(order, int))
    shuffled = Batch(tokens=tokens, loss_masks=masks, identities=identities)
    plan, other = case.plan(), replace(case, batch=shuffled).plan()
    for one, two in zip(plan.tasks, other.tasks):
        contents = [(case.batch.tokens[i].tobytes(), _tag(case.batch, i)) for i in one.sequences]
        assert sorted(contents) == sorted((tokens[i].tobytes(), _tag(shuffled, i)) for i in two.sequences)
    np.testing.assert_allclose(plan.seconds, other.seconds, rtol=1e-9)
    assert plan.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)


def _tag(batch: Batch, sequence: int) -> bytes:
    tag = batch.identities and batch.identities[sequence]
    return np.zeros(len(batch.tokens[sequence]), int).tobytes() if tag is None else tag.tobytes()


@pytest.mark.parametrize("first", [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 5, 6], [7, 2, 3, 4]])
def test_sequences_of_another_batch_are_refused(first):
    sequences = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]]
    case = Case(batch=batch_of(*sequences), settings=Settings(cost=COSTS["balanced"], budget=4))
    (task,) = case.plan().tasks
    other = replace(case, batch=batch_of(first, *sequences[1:]))
    with pytest.raises(
        ValueError, match=r"have \d distinct tokens; the task was planned for 3 with 6, .*: not the same batch"
    ):
        other.build(task)
    with pytest.raises(ValueError, match=r"parts has shape \(3,\)"):
        case.build(replace(task, sequences=task.sequences[:-1]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a04_bins_with_their_own_prefixes_run_what_was_planned(ranks):
    """A04: prefixes are copied into bins because pushing costs more; the loss counts every term once."""
    batch = batch_of(*(tokens + 100 * group for group in range(4) for tokens in broom(3, 6, 5)))
    case = Case(batch=batch, settings=Settings(cost=COSTS["pushes"], budget=20, multiple=4, ranks=ranks))
    plan = case.plan()
    assert any(len(set(task.parts.tolist())) > 1 for task in plan.tasks), "this test is to copy prefixes"
    check_case(case)
    assert plan.rank_tokens.sum() > plan.tree_tokens


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(batches(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from([1, 2, 5]))
def test_c09_the_planned_padding_is_the_executed_one(batch, tensor, context, sequence_parallel, block):
    multiple = row_multiple(block=block, tensor=tensor, context=context, sequence_parallel=sequence_parallel)
    case = Case(batch=batch, settings=Settings(cost=COSTS["balanced"], budget=2 * multiple, multiple=multiple, ranks=2))
    plan = case.plan()
    for task, predicted in zip(plan.tasks, plan.predictions):
        calls = case.build(task)
        sizes = [call.size for call in (*calls.chunks, *calls.pushes)]
        assert all(size % multiple == 0 < size <= 2 * multiple for size in sizes)
        if len(task.sequences):
            assert predicted.rows.sum() == calls.num_rows
            assert sum(sizes) == predicted.rows.sum() + predicted.push_rows.sum()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_c18_skewed_groups_are_balanced(seed, ranks):
    batch = skewed(120, seed)
    given = Settings(cost=COSTS["no floor"], budget=8192, multiple=128, ranks=ranks)
    plan = plan_batch(build_outline(batch.tokens, batch.loss_masks), given)
    assert plan.seconds.max() / plan.seconds.mean() < 1.2
    assert plan.rank_tokens.sum() < 1.2 * plan.tree_tokens


@pytest.mark.parametrize("groups_per_rank", [1, 3])
@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("budget", [WHOLE, 10])
def test_c18_equal_groups_stay_whole(ranks, groups_per_rank, budget):
    """With as many equal groups for every rank none is split, whatever their order in the batch."""
    num_groups = ranks * groups_per_rank
    batch = batch_of(*(tokens + 100 * group for tokens in broom(6, 4, 3) for group in range(num_groups)))
    plan = Case(batch=batch, settings=Settings(cost=COSTS["balanced"], budget=budget, ranks=ranks)).plan()
    held = [set((task.sequences % num_groups).tolist()) for task in plan.tasks]
    assert [len(groups) for groups in held] == [groups_per_rank] * ranks, "a group is on two ranks"
    assert plan.seconds.max() == pytest.approx(plan.seconds.min())
    assert plan.rank_tokens.sum() == plan.tree_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ranks": 6, "together": 4},
            "6 data-parallel ranks do not divide into groups of 4 .*; choose a multiple of 4",
        ),
        ({"ranks": 0}, "ranks is 0; expected at least 1"),
        ({"together": 0}, "together is 0; expected at least 1"),
        ({"in_flight": 0}, "in_flight is 0; expected at least 1"),
        ({"multiple": 0}, "padding multiple is 0; expected at least 1"),
        ({"budget": 100, "multiple": 128}, "budget is 100; expected 'whole' or at least 128 tokens"),
        ({"budget": "all"}, "budget is 'all'; expected 'whole' or at least 1 tokens"),
    ],
)
def test_f11_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        Case(batch=batch_of([1, 2]), settings=Settings(cost=COSTS["balanced"], **changes)).plan()


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("prompt", [0, 4])
def test_f13_seven_rollouts_on_two_ranks(prompt, together):
    """A batch that the ranks do not divide loses nothing and repeats nothing."""
    batch = batch_of(*([*range(prompt), *range(10 * i + 10, 10 * i + 15)] for i in range(7)))
    given = Settings(cost=COSTS["balanced"], budget=10, ranks=2, together=together)
    case = Case(batch=batch, settings=given)
    check_case(case)
    assert sorted(len(task.sequences) for task in case.plan().tasks) == [3, 4]


@pytest.mark.parametrize("together", [2, 4])
def test_c03_ranks_of_a_group_run_equally_many_operations(together):
    """One sequence on a rank, several chunks on others: every rank makes the calls of its group."""
    batch = batch_of(range(9000, 9060), *(tokens + 100 * group for group in range(15) for tokens in broom(2, 3, 5)))
    case = Case(batch=batch, settings=Settings(cost=COSTS["balanced"], budget=60, ranks=4, together=together))
    plan = case.plan()
    assert min(len(task.sequences) for task in plan.tasks) == 1
    assert len({len(prediction.rows) for prediction in plan.predictions}) > 1, "this test is to have unlike ranks"
    check_case(case)


@pytest.mark.parametrize("budget", [WHOLE, 4])
@pytest.mark.parametrize("num_sequences", [0, 1, 3])
def test_c03_ranks_without_a_sequence_run_the_calls_of_their_group(num_sequences, budget):
    batch = batch_of(*(range(10 * i, 10 * i + 9) for i in range(num_sequences)))
    case = Case(batch=batch, settings=Settings(cost=COSTS["balanced"], budget=budget, multiple=2, ranks=4, together=4))
    check_case(case)
    counts = {(len(rank.pushes), len(rank.chunks)) for rank in map(case.build, case.plan().tasks)}
    several = num_sequences > 0 and budget != WHOLE
    assert counts == {(2, 3) if several else (0, 1)}


def test_prefixes_are_copied_where_no_state_may_be_cached():
    batch = batch_of([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 7])
    check_case(Case(batch=batch, settings=Settings(cost=COSTS["no floor"], budget=7, state_limit=0)))


def test_states_of_early_pushes_are_predicted():
    batch = batch_of([1, 1, 2, 1], [1, 1, 2, 2, 0, 1, 1], [2, 2, 1])
    case = Case(batch=batch, settings=Settings(cost=COSTS["balanced"], budget=2, ranks=2, together=2))
    plan = case.plan()
    states = [case.build(task).state_rows for task in plan.tasks]
    assert [prediction.state_rows for prediction in plan.predictions] == states
