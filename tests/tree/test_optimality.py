"""The planner against the exact optimum on small forests, in several regimes of cost."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.improve import MOST_UNITS, Units, best_packing, improve, lower_bound
from megatron_dta.tree.layout import Layout, group_by
from megatron_dta.tree.outline import Outline, build_outline, outline_of
from megatron_dta.tree.packing import WINDOWS, Packing, pack
from megatron_dta.tree.plan import Call
from megatron_dta.tree.prediction import predict
from megatron_dta.tree.ranks import Packer, node_work
from megatron_dta.tree.schedule import schedule
from tests.forests import Batch, broom, random_assignment, random_forest, star, visible_pairs
from tests.tree.exact_packing import Best, best_shared, best_unshared
from tools.bench.baselines import aligned_cuts

UNIT = 4
FORESTS = 80
"""Per regime, each regime its own."""
REGIMES = {
    "h200": {"launch": 0.2, "fixed": 0.01, "context": 0.01},
    "launches": {"launch": 0.8, "fixed": 0.02, "context": 0.01},
    "no floor": {"launch": 0.0, "fixed": 0.05, "context": 0.01},
    "contexts": {"launch": 0.1, "fixed": 0.02, "context": 0.4},
}


def cost_of(regime: str, capacity: int) -> CostModel:
    """Return a cost where a full chunk takes about a second. A row at depth `capacity` takes 0.7 + 0.5 of its share."""
    launch, fixed, context = (REGIMES[regime][name] for name in ("launch", "fixed", "context"))
    chunk = CallCost(
        launch=launch,
        fixed=fixed,
        row=0.7 / capacity,
        pair=0.5 / capacity**2,
        context=context / capacity,
        source=0.1 / capacity,
    )
    return CostModel(machine=regime, chunk=chunk, push=replace(chunk.scaled(1 / 3, 1 / 3), source=0.0))


@cache
def small_batch(seed: int, *, least: int = 10, most: int = 16, nodes: int = 8) -> tuple[Batch, int]:
    """Draw sequences of `least` to `most` units and at least `nodes` nodes, and a capacity that forces 3 chunks."""
    rng = np.random.default_rng(seed)
    while True:
        batch, capacity = _batch(rng, most), int(rng.integers(3 if most > 9 else 2, 7))
        outline = outline_of(batch.forest())
        units = outline.num_tokens // UNIT
        if outline.num_nodes >= nodes and least <= units <= most and units > 2 * capacity:
            return batch, capacity * UNIT


def _batch(rng: np.random.Generator, most: int) -> Batch:
    """Draw the paths to all leaves of one or several trees, then duplicates and prefixes of them."""
    shapes = {
        "comb": lambda i: i - 1 if i % 2 else i - 2,
        "star": lambda i: 0,
        "binary": lambda i: (i - 1) // 2,
        "bush": lambda i: rng.integers(i),
        "trees": lambda i: rng.integers(i) if rng.random() < 0.7 else -1,
    }
    above = shapes[rng.choice(list(shapes))]
    parents = [-1, *(int(above(i)) for i in range(1, rng.integers(most // 3, most)))]
    longest = rng.integers(1, 4)
    paths: list[np.ndarray] = []
    for i, parent in enumerate(parents):
        ids = np.full(UNIT * rng.integers(1, longest + 1), i, np.int32)
        paths.append(ids if parent < 0 else np.concatenate([paths[parent], ids]))
    tokens = [path for i, path in enumerate(paths) if i not in parents]
    for _ in range(rng.integers(0, 3)):
        path = tokens[rng.integers(len(tokens))]
        tokens.append(path[: UNIT * rng.integers(1, len(path) // UNIT + 1)])
    prompt = rng.integers(0, 2 * UNIT)
    masks = [(np.arange(len(t)) >= prompt) & (rng.random(len(t)) < 0.8) for t in tokens]
    return Batch(tokens=tokens, loss_masks=masks, identities=None)


def batch_of(regime: str, number: int) -> tuple[Batch, int]:
    return small_batch(1000 * list(REGIMES).index(regime) + number)


def instance(regime: str, number: int) -> tuple[Outline, CostModel, int]:
    batch, capacity = batch_of(regime, number)
    return build_outline(batch.tokens, batch.loss_masks), cost_of(regime, capacity), capacity


@cache
def optimum(regime: str, number: int) -> Best:
    return best_shared(*instance(regime, number), UNIT)


def gaps(regime: str, seconds: Callable[[Outline, CostModel, int], float]) -> np.ndarray:
    """Return by how much `seconds` exceeds the optimum, as shares of it, [FORESTS]."""
    best = np.array([optimum(regime, number).seconds for number in range(FORESTS)])
    return np.array([seconds(*instance(regime, number)) for number in range(FORESTS)]) / best - 1


@pytest.mark.parametrize("regime", REGIMES)
def test_the_planner_is_near_the_optimum(regime):
    gap = gaps(regime, lambda *given: best_packing(*given, 1)[1].seconds)
    assert gap.min() > -1e-9, "the optimum is none"
    assert gap.mean() < 0.01
    assert gap.max() < 0.06


@pytest.mark.parametrize("regime", REGIMES)
def test_the_lower_bound_is_close_below_the_optimum(regime):
    gap = gaps(regime, lambda *given: lower_bound(*given, 1))
    assert gap.max() < 1e-9
    assert gap.mean() > -0.02


def test_aligned_cuts_alone_are_not_near_the_optimum():
    """Negative control: where launches rule, it matters how full chunks are."""

    def seconds(outline: Outline, cost: CostModel, capacity: int) -> float:
        forest = next(forests).forest()
        return predict(packing_of(forest, aligned_cuts(forest, capacity)), cost, capacity, 1).seconds

    forests = (batch_of("launches", number)[0] for number in range(FORESTS))
    assert gaps("launches", seconds).mean() > 0.03


@pytest.mark.parametrize("regime", REGIMES)
def test_a_rank_shares_or_copies_prefixes_nearly_as_well_as_can_be(regime):
    numbers = range(FORESTS // 2)
    best = [min(optimum(regime, n).seconds, best_unshared(*instance(regime, n))) for n in numbers]
    gap = np.array([packed_seconds(*instance(regime, n)) for n in numbers]) / best - 1
    assert gap.min() > -1e-9
    assert gap.mean() < 0.03
    assert gap.max() < 0.1


def packed_seconds(outline: Outline, cost: CostModel, capacity: int) -> float:
    work = node_work(outline, cost)
    packer = Packer(outline=outline, work=work, cost=cost, budget=capacity, multiple=1, state_limit=None)
    return packer.pack(np.arange(len(outline.last))).prediction.seconds


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("regime", ["h200", "contexts"])
def test_the_optimum_equals_brute_force(regime, seed):
    batch, capacity = small_batch(seed, least=5, most=6 if seed else 7, nodes=3)
    outline, cost = build_outline(batch.tokens, batch.loss_masks), cost_of(regime, capacity)
    best = best_shared(outline, cost, capacity, UNIT)
    whole = predict(best.packing, cost, capacity, 1)
    units = Packing(outline=outline, node=best.packing.node, length=best.packing.length, chunk=best.packing.chunk * 0)
    found = [predict(p, cost, capacity, 1).seconds for p in legal_packings(units, capacity)]
    assert best.seconds <= min(found) + 1e-9
    assert min(found) <= whole.seconds + 1e-9
    if len(whole.push_rows) < 2:
        assert whole.seconds == pytest.approx(best.seconds)
    copied = [
        sum(predict(pack(outline.part_of(bin_), 10**9, None), cost, 10**9, 1).seconds for bin_ in bins)
        for bins in partitions_of_sequences(outline)
        if all(outline.part_of(bin_).num_tokens <= capacity for bin_ in bins)
    ]
    assert best_unshared(outline, cost, capacity) == pytest.approx(min(copied, default=np.inf))


def legal_packings(units: Packing, capacity: int) -> Iterator[Packing]:
    for labels in partitions(units.num_tokens):
        chunk_of = np.array(labels)
        if np.bincount(chunk_of, units.length).max() <= capacity:
            with suppress(ValueError):
                yield replace(units, chunk=np.argsort(Layout(units, chunk_of).post_order())[chunk_of])


def partitions_of_sequences(outline: Outline) -> Iterator[list[np.ndarray]]:
    for labels in partitions(len(outline.last)):
        yield group_by(np.array(labels), max(labels) + 1)


def partitions(num: int) -> Iterator[list[int]]:
    """Yield every partition of `num` things, as the number of each one's part; parts by their first thing."""
    stack: list[list[int]] = [[]]
    while stack:
        labels = stack.pop()
        if len(labels) == num:
            yield labels
        else:
            stack += [[*labels, label] for label in range(max(labels, default=-1) + 2)]


@pytest.mark.parametrize("seed", range(40))
def test_a_prediction_is_what_the_schedule_holds(seed):
    """Which itself is replayed token by token elsewhere; here only the pairs are left to count by definition."""
    forest, packing, capacity, multiple = random_packing(seed)
    plan = schedule(forest, np.repeat(packing.chunk, packing.length), capacity=capacity, multiple=multiple, in_flight=1)
    for name, count in COUNTS.items():
        only = replace(NOTHING, **{name: 1.0})
        prediction = predict(packing, CostModel(machine="", chunk=only, push=only), capacity, multiple)
        assert prediction.chunk_seconds.tolist() == [count(forest, call) for call in plan.chunks], name
        assert prediction.push_seconds.tolist() == [count(forest, call) for call in plan.pushes], name
    assert prediction.rows.tolist() == [call.size for call in plan.chunks]
    assert prediction.push_rows.tolist() == [call.size for call in plan.pushes]
    assert prediction.pushed_tokens == plan.num_pushed
    assert (prediction.state_rows, prediction.grad_rows) == (plan.state_rows, plan.grad_rows)


COUNTS: dict[str, Callable[[Forest, Call], int]] = {
    "row": lambda forest, call: call.size,
    "pair": lambda forest, call: int(visible_pairs(forest, call).sum()),
    "context": lambda forest, call: len(call.context),
}
NOTHING = CallCost(launch=0.0, fixed=0.0, row=0.0, pair=0.0, context=0.0, source=0.0)


def random_packing(seed: int) -> tuple[Forest, Packing, int, int]:
    """Draw a forest, any legal assignment, the capacity it needs, and a padding."""
    rng = np.random.default_rng(seed)
    forest = random_forest(seed)
    packing = packing_of(forest, random_assignment(forest, rng, 5))
    multiple = int(rng.integers(1, 4))
    largest = int(np.bincount(packing.chunk, packing.length).max())
    return forest, packing, -(-largest // multiple) * multiple, multiple


def packing_of(forest: Forest, chunk_of: np.ndarray) -> Packing:
    """Return a legal assignment of tokens to chunks, int [T], as a packing."""
    outline, layout = outline_of(forest), Layout(forest, chunk_of)
    node = np.repeat(np.arange(outline.num_nodes), outline.length)
    chunk = np.argsort(layout.post_order())[layout.chunk_of]
    start = np.flatnonzero(np.diff(node, prepend=-1) | np.diff(chunk, prepend=-1))
    length = np.diff(np.append(start, forest.num_tokens))
    return Packing(outline=outline, node=node[start], length=length, chunk=chunk[start])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_below_the_lower_bound(seed, regime):
    _, packing, capacity, multiple = random_packing(seed)
    cost = cost_of(regime, capacity)
    bound = lower_bound(packing.outline, cost, capacity, multiple)
    assert bound <= predict(packing, cost, capacity, multiple).seconds + 1e-9


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", range(40))
def test_units_take_what_is_predicted(seed, regime):
    _, packing, capacity, multiple = random_packing(seed)
    cost = cost_of(regime, capacity)
    prediction = predict(packing, cost, capacity, multiple)
    units = Units(packing, np.cumsum(packing.length) - packing.length, cost, capacity, multiple)
    chunks = [units.chunk(mask) for mask in units.chunks]
    np.testing.assert_allclose([chunk.seconds for chunk in chunks], prediction.chunk_seconds)
    assert sum(chunk.pushed for chunk in chunks) == prediction.pushed_tokens
    if len(prediction.push_rows) < 2:
        assert units.seconds(units.chunks) == pytest.approx(prediction.seconds)
    assert units.seconds(units.chunks) <= prediction.seconds + 1e-9
    assert units.order(units.chunks) == units.chunks
    again = units.packing(units.chunks[::-1])
    assert predict(again, cost, capacity, multiple).chunk_seconds.sum() == pytest.approx(prediction.chunk_seconds.sum())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", range(8))
def test_improving_is_legal_repeatable_and_never_worse(seed, regime):
    _, packing, capacity, multiple = random_packing(seed)
    cost = cost_of(regime, capacity)
    found, again = (improve(packing, cost, capacity, multiple) for _ in range(2))
    prediction = predict(found, cost, capacity, multiple)  # raises for an illegal order
    assert prediction.seconds <= predict(packing, cost, capacity, multiple).seconds
    assert prediction.rows.max() <= capacity
    assert np.bincount(found.node, found.length).tolist() == packing.outline.length.tolist()
    for name in ("node", "length", "chunk"):
        np.testing.assert_array_equal(getattr(found, name), getattr(again, name))


def test_subtrees_that_are_kept_whole_move_as_one():
    """Twelve trees of nine nodes in chunks of their own are 108 nodes, and twelve units."""
    tokens = [t + 100 * tree for tree in range(12) for t in broom(2, 8, 3)]
    outline, cost = build_outline(tokens), cost_of("launches", 78)
    root = np.flatnonzero(outline.parent < 0)
    alone = Packing(
        outline=outline,
        node=np.arange(outline.num_nodes),
        length=outline.length,
        chunk=np.searchsorted(root, np.arange(outline.num_nodes), side="right") - 1,
    )
    assert outline.num_nodes > MOST_UNITS
    found = predict(improve(alone, cost, 78, 1), cost, 78, 1)
    assert found.rows.tolist() == [78] * 4
    assert found.pushed_tokens == 0


def test_packings_of_many_parts_stay_as_they_are():
    outline = build_outline(star(MOST_UNITS))
    packing = pack(outline, 1, None)
    assert improve(packing, cost_of("launches", 1), 1, 1) is packing


@pytest.mark.parametrize("number", range(10))
def test_the_state_limit_is_kept_where_a_packing_keeps_it(number):
    outline, cost, capacity = instance("launches", number)
    least = min(predict(pack(outline, capacity, window), cost, capacity, 1).state_rows for window in WINDOWS)
    for limit in (0, least - 1, least, best_packing(outline, cost, capacity, 1)[1].state_rows - 1):
        packing, prediction = best_packing(outline, cost, capacity, 1, limit)
        assert prediction.state_rows <= max(limit, least)
        assert prediction.seconds == predict(packing, cost, prediction.push_capacity, 1).seconds


def test_nothing_is_packed_into_nothing():
    outline = build_outline([])
    packing, prediction = best_packing(outline, cost_of("h200", 4), 4, 1)
    assert (packing.num_chunks, prediction.seconds, lower_bound(outline, cost_of("h200", 4), 4, 1)) == (0, 0, 0)
