"""Spreading against brute force: loads, bounds, contiguous cuts, moves, bins, and the baselines it is compared with."""

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_dta.tree.fill import bins, longest_first
from megatron_dta.tree.loads import loads, lower_bound, path_work, subtree_work
from megatron_dta.tree.moves import moves_from, polish
from megatron_dta.tree.outline import Outline, build_outline
from megatron_dta.tree.spread import _contiguous, spread
from tests.forests import SHAPES, broom, caterpillar, random_batch, star
from tools.bench.baselines import contiguous, largest_load

PRECISION = 1.001
"""Bisections stop within half a per mille."""


def outline_of(seed: int, **limits) -> tuple[Outline, np.ndarray, np.random.Generator]:
    """Draw an outline and the work of its nodes: their tokens, or anything, with some that take none."""
    rng = np.random.default_rng(seed)
    outline = build_outline(random_batch(rng, **limits).tokens)
    if seed % 3 == 0:
        return outline, outline.length.astype(float), rng
    work = rng.exponential(1.0, outline.num_nodes) * outline.length
    return outline, work * (rng.random(outline.num_nodes) < 0.9), rng


def paths(outline: Outline) -> list[set[int]]:
    """Return the nodes of every sequence's path, one parent pointer at a time."""
    found = []
    for node in outline.last.tolist():
        path = set()
        while node >= 0:
            path.add(node)
            node = int(outline.parent[node])
        found.append(path)
    return found


def loads_by_definition(outline: Outline, work: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> list[float]:
    above = paths(outline)
    held = [set().union(*(above[i] for i in np.flatnonzero(rank_of == rank))) for rank in range(num_ranks)]
    return [sum(work[node] for node in sorted(nodes)) for nodes in held]


def assignments(outline: Outline, num_ranks: int) -> Iterator[np.ndarray]:
    for ranks in itertools.product(range(num_ranks), repeat=len(outline.last)):
        yield np.array(ranks)


@pytest.mark.parametrize("seed", range(60))
def test_a_load_is_the_union_of_paths(seed, monkeypatch):
    outline, work, rng = outline_of(seed)
    num_ranks = int(rng.integers(1, 6))
    rank_of = rng.integers(0, num_ranks, len(outline.last))
    expected = loads_by_definition(outline, work, rank_of, num_ranks)
    np.testing.assert_allclose(loads(outline, work, rank_of, num_ranks), expected, atol=1e-12)
    monkeypatch.setattr("megatron_dta.tree.loads._COUNTED", 0)  # large batches walk up the paths instead
    np.testing.assert_allclose(loads(outline, work, rank_of, num_ranks), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_work_of_paths_and_subtrees(seed):
    outline, work, _ = outline_of(seed)
    for sequence, nodes in enumerate(paths(outline)):
        assert path_work(outline, work)[outline.last[sequence]] == pytest.approx(work[sorted(nodes)].sum())
    for node in range(outline.num_nodes):
        below = [n for n in range(outline.num_nodes) if node <= n < outline.end[node]]
        assert subtree_work(outline, work)[node] == pytest.approx(work[below].sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_tiny_batches_against_all_assignments(seed, num_ranks):
    """The bound is below the optimum, what is found is not, and is close to it."""
    outline, work, _ = outline_of(seed, most=6)
    best = min(max(loads_by_definition(outline, work, a, num_ranks)) for a in assignments(outline, num_ranks))
    assert lower_bound(outline, work, num_ranks) <= best * (1 + 1e-9)
    found = loads(outline, work, spread(outline, work, np.ones(num_ranks))[0], num_ranks).max()
    assert best * (1 - 1e-9) <= found <= best * 1.34 + 1e-9


def test_tiny_batches_are_mostly_spread_as_well_as_can_be():
    gaps = []
    for seed in range(60):
        outline, work, _ = outline_of(seed, most=6)
        best = min(loads(outline, work, a, 2).max() for a in assignments(outline, 2))
        gaps.append(loads(outline, work, spread(outline, work, np.ones(2))[0], 2).max() / max(best, 1e-9) - 1)
    assert np.mean(np.array(gaps) < 1e-9) > 0.8
    assert np.mean(gaps) < 0.02


@pytest.mark.parametrize("seed", range(40))
def test_no_assignment_is_below_the_bound(seed):
    outline, work, rng = outline_of(seed, most=40, longest=20)
    for num_ranks in (1, 2, 5, 16):
        bound = lower_bound(outline, work, num_ranks) * (1 - 1e-9)
        assert bound <= loads(outline, work, rng.integers(0, num_ranks, len(outline.last)), num_ranks).max()
        for rank_of in (contiguous(outline, work, num_ranks), longest_first(outline, work, num_ranks)):
            assert bound <= largest_load(outline, work, rank_of, num_ranks)
        assert bound <= loads(outline, work, spread(outline, work, np.ones(num_ranks))[0], num_ranks).max()


def test_the_bound_counts_the_copies_of_a_cut_path():
    """Eight ranks share one tree: each computes its trunk, which a bound by total work alone would not see."""
    outline = build_outline(broom(100, 8, 10))
    work = outline.length.astype(float)
    assert lower_bound(outline, work, 8) == pytest.approx(110)
    assert lower_bound(outline, work, 4) == pytest.approx(120, rel=1e-3)
    assert lower_bound(outline, work, 1) == pytest.approx(180)


def contiguous_by_brute_force(outline: Outline, work: np.ndarray, factors: np.ndarray) -> float:
    """Return the smallest largest load over all ways to cut the sequences in preorder into ranges, in rank order."""
    order = np.argsort(outline.last, kind="stable")
    num, num_ranks = len(order), len(factors)
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(num + 1), num_ranks - 1):
        rank_of = np.zeros(num, int)
        rank_of[order] = np.repeat(np.arange(num_ranks), np.diff([0, *cuts, num]))
        best = min(best, (loads(outline, work, rank_of, num_ranks) * factors).max())
    return best


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(30))
def test_contiguous_cuts_are_the_best_of_their_kind(seed, num_ranks):
    outline, work, _ = outline_of(seed, most=7)
    factors = np.ones(num_ranks)
    best = contiguous_by_brute_force(outline, work, factors)
    load, rank_of = _contiguous(outline, work, num_ranks, factors)
    found = loads(outline, work, rank_of, num_ranks).max()
    assert best * (1 - 1e-9) <= found <= load * (1 + 1e-9)
    assert load <= best * PRECISION + 1e-9
    assert largest_load(outline, work, contiguous(outline, work, num_ranks), num_ranks) == pytest.approx(best)
    in_order = rank_of[np.argsort(outline.last, kind="stable")]
    assert (np.diff(in_order) >= 0).all()


@pytest.mark.parametrize("seed", range(30))
def test_contiguous_cuts_of_unlike_ranks(seed):
    outline, work, rng = outline_of(seed, most=7)
    factors = rng.uniform(0.9, 1.1, 3)
    best = contiguous_by_brute_force(outline, work, factors)
    load, rank_of = _contiguous(outline, work, 3, factors)
    assert best * (1 - 1e-9) <= (loads(outline, work, rank_of, 3) * factors).max() <= load * (1 + 1e-9)
    assert load <= best * PRECISION + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
@pytest.mark.parametrize("seed", range(40))
def test_polishing_never_makes_it_worse(seed, num_ranks):
    outline, work, rng = outline_of(seed, most=25, longest=15)
    factors = rng.uniform(0.5, 2.0, num_ranks)
    before = rng.integers(0, num_ranks, len(outline.last))
    given = before.copy()
    after = polish(outline, work, before, factors)
    np.testing.assert_array_equal(before, given)
    slowest = [(loads(outline, work, rank_of, num_ranks) * factors).max() for rank_of in (before, after)]
    assert slowest[1] <= slowest[0] * (1 + 1e-9)
    held = [np.bincount(rank_of, minlength=num_ranks) for rank_of in (before, after)]
    assert (held[1][held[0] > 0] > 0).all(), "a rank lost its last sequence"


@pytest.mark.parametrize("seed", range(40))
def test_a_move_leaves_the_loads_that_it_says(seed):
    outline, work, rng = outline_of(seed, most=25, longest=15)
    factors = rng.uniform(0.5, 2.0, 3)
    rank_of = rng.integers(0, 3, len(outline.last))
    load = loads(outline, work, rank_of, 3) * factors
    full = int(load.argmax())
    for least in (0.0, 0.2 * load[full] / factors[full]):
        for move in moves_from(outline, work, rank_of, load, factors, full, least):
            moved = rank_of.copy()
            moved[move.sequences(outline, rank_of, full)] = move.target
            after = loads(outline, work, moved, 3) * factors
            np.testing.assert_allclose(after[[full, move.target]], (move.after_full, move.after_target), atol=1e-9)
            assert load[full] - after[full] >= least * factors[full] - 1e-9


@pytest.mark.parametrize("num_ranks", [2, 5, 9])
@pytest.mark.parametrize("seed", range(30))
def test_no_rank_is_empty_while_there_are_sequences(seed, num_ranks):
    outline, work, rng = outline_of(seed, most=12)
    for factors in (np.ones(num_ranks), rng.uniform(0.5, 2.0, num_ranks)):
        rank_of = spread(outline, work, factors)[0]
        assert ((rank_of >= 0) & (rank_of < num_ranks)).all()
        assert len(np.unique(rank_of)) == num_ranks or len(rank_of) < num_ranks


@pytest.mark.parametrize("name", SHAPES)
def test_spreading_beats_or_equals_contiguous_cuts(name):
    outline = build_outline([np.array(t, np.int32) for t in SHAPES[name]])
    work = outline.length.astype(float)
    for num_ranks in (1, 2, 3, 5):
        found = loads(outline, work, spread(outline, work, np.ones(num_ranks))[0], num_ranks).max()
        assert found <= largest_load(outline, work, contiguous(outline, work, num_ranks), num_ranks) * PRECISION


@pytest.mark.parametrize("seed", range(60))
def test_bins_hold_no_more_than_their_capacity(seed):
    outline, _, rng = outline_of(seed, most=20, longest=15)
    length = outline.length.astype(float)
    longest = int(path_work(outline, length)[outline.last].max())
    assert bins(outline, longest - 1) is None
    for capacity in (longest, longest + int(rng.integers(1, 10)), 2 * longest, outline.num_tokens):
        label = bins(outline, capacity)
        if label is None:
            # Nothing is cut where it leaves less room than half of what it copies.
            assert capacity < 1.5 * longest
            continue
        filled = loads(outline, length, label, int(label.max()) + 1)
        assert filled.max() <= capacity
        assert filled.min() > 0
        assert len(filled) >= -(-outline.num_tokens // capacity)
    assert bins(outline, outline.num_tokens).max() == 0


def test_bins_end_where_a_long_prefix_leaves_little_room():
    outline = build_outline(broom(80, 2, 15))
    label = bins(outline, 100)
    assert label is not None
    assert sorted(label.tolist()) == [0, 1]


def test_nothing_is_spread_into_nothing():
    outline = build_outline([])
    none = np.zeros(0)
    assert bins(outline, 4) is None
    assert [found.tolist() for found in spread(outline, none, np.ones(3))] == [[]]
    assert lower_bound(outline, none, 3) == 0
    assert loads(outline, none, np.zeros(0, int), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("tokens", [caterpillar(5000), star(10_000)], ids=["caterpillar", "star"])
def test_deep_and_wide_trees_take_seconds(tokens):
    outline = build_outline(tokens)
    work = outline.length.astype(float)
    start = time.process_time()
    for num_ranks in (2, 16):
        rank_of = spread(outline, work, np.ones(num_ranks))[0]
        found = loads(outline, work, rank_of, num_ranks).max()
        assert lower_bound(outline, work, num_ranks) <= found
        assert found <= largest_load(outline, work, contiguous(outline, work, num_ranks), num_ranks) * PRECISION
    label = bins(outline, 6000)
    assert loads(outline, work, label, int(label.max()) + 1).max() <= 6000
    assert time.process_time() - start < 20


def longest_first_by_definition(outline: Outline, work: np.ndarray, num_ranks: int, pieces: int) -> np.ndarray:
    """Pack subtrees one by one, with the loads of what is placed so far counted anew each time."""
    share = work.sum() / num_ranks / pieces
    total, nobody = subtree_work(outline, work), np.full(len(outline.last), -1)
    items = []
    for node in range(outline.num_nodes):
        above = int(outline.parent[node])
        inside = np.flatnonzero((outline.last >= node) & (outline.last < outline.end[node]))
        if total[node] > share:
            inside = inside[outline.last[inside] == node]
        elif above >= 0 and total[above] <= share:
            continue
        if len(inside):
            items.append((placed(outline, work, nobody, inside, 0)[1], total[node] > share, inside))
    rank_of = nobody
    for _, _, sequences in sorted(sorted(items, key=lambda item: item[1]), key=lambda item: -round(item[0], 9)):
        after = [placed(outline, work, rank_of, sequences, rank) for rank in range(num_ranks)]
        rank_of = min(after, key=lambda placed: round(placed[1], 9))[0]
    return rank_of


def placed(outline, work, rank_of: np.ndarray, sequences: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """Put some more sequences on a rank; return the ranks and the load of that one."""
    rank_of = rank_of.copy()
    rank_of[sequences] = rank
    return rank_of, loads_by_definition(outline, work, rank_of, rank + 1)[rank]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_longest_first_keeps_its_books(seed, num_ranks):
    """The baseline packs by true loads: path by path, each counted once on a rank."""
    outline, work, _ = outline_of(seed, most=10)
    if seed % 3 == 0:
        work = work + np.arange(outline.num_nodes) * 1e-3  # no ties
    found = longest_first(outline, work, num_ranks)
    assert (found >= 0).all()
    np.testing.assert_array_equal(found, longest_first_by_definition(outline, work, num_ranks, 4))
