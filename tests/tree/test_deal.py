from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.errors import UsageError
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.deal import ShardEdges, deal, shard_chunk_edges, shard_mask, visible_counts
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.plan import Chunk
from megatron_dta.tree.schedule import schedule
from tests.forests import (
    SHAPES,
    broom,
    caterpillar,
    make_plan,
    random_assignment,
    random_batch,
    random_forest,
    shaped,
    visible_pairs,
)

RANKS = [1, 2, 3, 4]


def dense(visible_from: np.ndarray, visible_to: np.ndarray, num_rows: int) -> np.ndarray:
    """Return who sees whom by the rule itself, bool [rows, keys]."""
    rows = np.arange(num_rows)[:, None]
    return (visible_from <= rows) & (rows < visible_to)


def rows_by_rank(chunk: Chunk, ranks: int, tile: int = 2) -> np.ndarray:
    return deal(visible_counts(chunk.visible_from, chunk.visible_to, chunk.size), ranks, tile)


@pytest.fixture(scope="module")
def chunks() -> list[Chunk]:
    """Scattered chunks with context, padded for every number of ranks, also all padding on some."""
    found = [
        chunk
        for name in SHAPES
        for budget in (12, WHOLE)
        for chunk in make_plan(shaped(name), budget, multiple=12).chunks
    ]
    for seed in range(60):
        forest = random_forest(seed, most=12, longest=20)
        chunk_of = random_assignment(forest, np.random.default_rng(seed), 1 + seed % 4)
        capacity = -(-forest.num_tokens // 12) * 12
        found += schedule(forest, chunk_of, capacity=capacity, multiple=12).chunks
    assert sum(len(chunk.context) > 0 for chunk in found) > 30
    assert sum(len(chunk.edges) == 0 for chunk in found) > 3
    return found


def test_visible_counts_are_ancestors_and_oneself():
    for seed in range(20):
        forest = random_forest(seed, most=12, longest=20)
        for chunk in make_plan(forest, 12, multiple=4).chunks:
            counts = visible_counts(chunk.visible_from, chunk.visible_to, chunk.size)
            assert counts.dtype == np.int64
            assert np.array_equal(counts, visible_pairs(forest, chunk).sum(1))


def test_visible_counts_of_any_two_vectors():
    """Empty, negative and too long intervals included."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_rows, num_keys = rng.integers(0, 30, 2)
        ends = rng.integers(-4, num_rows + 5, (2, num_keys)).astype(np.int32)
        assert np.array_equal(visible_counts(*ends, num_rows), dense(*ends, num_rows).sum(1))


TILED = st.tuples(st.integers(1, 8), st.integers(0, 40), st.integers(1, 12))


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(TILED, st.integers(0, 2**32 - 1))
def test_every_rank_gets_as_many_rows_in_whole_tiles_and_as_even_as_one_tile(shape, seed):
    """The bound is proved round by round: ranks differ by no more than before the round, or than the round's tiles."""
    ranks, share, tile = shape
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, rng.choice([2, 10, 10_000]), ranks * share)
    rows = deal(weights, ranks, tile)
    assert rows.dtype == np.int64
    assert rows.shape == (ranks, share)
    assert (np.diff(rows, axis=1) > 0).all()
    assert np.array_equal(np.sort(rows, axis=None), np.arange(len(weights)))
    if share == 0:
        return
    size = max(size for size in range(1, tile + 1) if share % size == 0)
    starts = rows[:, ::size]
    assert (starts % size == 0).all()
    assert np.array_equal(rows, (starts[:, :, None] + np.arange(size)).reshape(ranks, share))
    tiles, loads = weights.reshape(-1, size).sum(1), weights[rows].sum(1)
    assert loads.max() - loads.min() <= tiles.max() - tiles.min()
    assert loads.max() <= loads.mean() + tiles.max()
    assert np.array_equal(rows, deal(weights.copy(), ranks, tile)), "the same on every rank"


@pytest.mark.parametrize(("share", "size"), [(1, 1), (128, 128), (192, 96), (131, 1), (384, 128), (500, 125)])
def test_tiles_have_the_most_rows_that_divide_a_share(share, size):
    """Weights fall, so the first rank gets tile 0, then tile 3, the lighter of the next round."""
    first = deal(np.arange(2 * share)[::-1], 2)[0]
    assert np.array_equal(first[:size], np.arange(size))
    assert first[size : size + 1].tolist() == ([3 * size] if share > size else [])


@pytest.mark.parametrize("num_rows", [0, 1, 7, 131, 16_384])
def test_one_rank_has_all_rows(num_rows):
    assert np.array_equal(deal(np.ones(num_rows, np.int64), 1), np.arange(num_rows)[None])


@pytest.mark.parametrize(("num_rows", "ranks"), [(7, 2), (128, 3), (1, 2), (4, 0), (4, -2)])
def test_rows_that_ranks_cannot_share_evenly_are_refused(num_rows, ranks):
    with pytest.raises(UsageError, match=f"^{num_rows} rows cannot be dealt to {ranks} context ranks; .* pad calls"):
        deal(np.ones(num_rows, np.int64), ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_chain_is_dealt_evenly_where_contiguous_shards_are_not(ranks):
    """Visible area grows along a chain: the last of `ranks` equal slices has (2 ranks - 1) / ranks of the mean."""
    (chunk,) = make_plan(build_forest([np.arange(16_384)]), WHOLE).chunks
    weights = visible_counts(chunk.visible_from, chunk.visible_to, chunk.size)
    loads, slices = weights[deal(weights, ranks)].sum(1), weights.reshape(ranks, -1).sum(1)
    heaviest = weights.reshape(-1, 128).sum(1).max()
    assert loads.max() <= loads.mean() + heaviest
    assert slices.max() > slices.mean() + 3 * heaviest, "negative control"
    assert slices.max() / slices.mean() > 1.4 * loads.max() / loads.mean()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_forests_are_dealt_evenly(ranks):
    forests = [build_forest(broom(3_000, 40, 100)), build_forest(caterpillar(1_500))]
    forests += [random_batch(np.random.default_rng(seed), most=60, longest=200).forest() for seed in range(10)]
    for forest in forests:
        for chunk in make_plan(forest, 4096, multiple=128 * ranks).chunks:
            weights = visible_counts(chunk.visible_from, chunk.visible_to, chunk.size)
            loads = weights[deal(weights, ranks)].sum(1)
            assert loads.max() <= loads.mean() + weights.reshape(-1, 128).sum(1).max()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_shard_sees_what_its_rows_see(chunks, ranks):
    num_unseen = 0
    for chunk in chunks:
        whole = dense(chunk.visible_from, chunk.visible_to, chunk.size)
        for rows in rows_by_rank(chunk, ranks):
            first, stop = shard_mask(chunk.visible_from, chunk.visible_to, rows)
            assert first.dtype == stop.dtype == np.int32
            assert np.array_equal(dense(first, stop, len(rows)), whole[rows])
            num_unseen += int((first == stop).sum())
            if ranks == 1:
                assert np.array_equal(first, chunk.visible_from)
                assert np.array_equal(stop, chunk.visible_to)
    assert (num_unseen > 0) == (ranks > 1), "keys that a shard does not see are part of this test"


def test_a_shard_with_the_call_s_own_numbers_sees_other_keys(chunks):
    """Negative control: the two numbers of a shard count its own rows."""
    differs = 0
    for chunk in chunks:
        whole = dense(chunk.visible_from, chunk.visible_to, chunk.size)
        for rows in rows_by_rank(chunk, 2):
            differs += not np.array_equal(dense(chunk.visible_from, chunk.visible_to, len(rows)), whole[rows])
    assert differs > len(chunks) / 2


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_hold_every_edge_and_term_of_a_chunk_once_in_its_order(chunks, ranks):
    for chunk in chunks:
        source_of = dict(zip(chunk.edges.tolist(), chunk.source_rows[chunk.edge_source].tolist()))
        edge_of = dict(zip(chunk.terms.tolist(), chunk.edges[chunk.term_edge].tolist()))
        seen_edges, seen_terms = [], []
        for rows in rows_by_rank(chunk, ranks):
            shard, own = shard_chunk_edges(chunk, rows), set(rows.tolist())
            assert shard.edges.tolist() == [edge for edge in chunk.edges.tolist() if source_of[edge] in own]
            assert shard.terms.tolist() == [term for term in chunk.terms.tolist() if source_of[edge_of[term]] in own]
            sources = rows[shard.source_rows]
            assert sources[shard.edge_source].tolist() == [source_of[edge] for edge in shard.edges.tolist()]
            assert shard.edges[shard.term_edge].tolist() == [edge_of[term] for term in shard.terms.tolist()]
            assert np.array_equal(shard.source_rows, np.unique(shard.source_rows[shard.edge_source]))
            assert (np.diff(shard.edge_source) >= 0).all()
            seen_edges += shard.edges.tolist()
            seen_terms += shard.terms.tolist()
        assert sorted(seen_edges) == sorted(chunk.edges.tolist())
        assert sorted(seen_terms) == sorted(chunk.terms.tolist())


def test_a_shard_of_all_rows_has_the_chunk_s_own_arrays(chunks):
    for chunk in chunks:
        shard = shard_chunk_edges(chunk, np.arange(chunk.size))
        for name in (field.name for field in fields(ShardEdges)):
            got, expected = getattr(shard, name), getattr(chunk, name)
            assert got.dtype == expected.dtype, name
            np.testing.assert_array_equal(got, expected, err_msg=name)


def test_the_chunk_s_numbers_do_not_fit_a_shard(chunks):
    """Negative control: kept edges, sources and terms are numbered anew."""
    renumbered = {"edge_source": 0, "term_edge": 0, "source_rows": 0}
    for chunk in chunks:
        rows = rows_by_rank(chunk, 2)[1]
        shard = shard_chunk_edges(chunk, rows)
        kept = np.isin(chunk.source_rows[chunk.edge_source], rows)
        renumbered["edge_source"] += not np.array_equal(shard.edge_source, chunk.edge_source[kept])
        renumbered["term_edge"] += not np.array_equal(shard.term_edge, chunk.term_edge[kept[chunk.term_edge]])
        renumbered["source_rows"] += not np.array_equal(shard.source_rows, np.intersect1d(chunk.source_rows, rows))
    assert min(renumbered.values()) > len(chunks) / 4, renumbered


def test_without_an_edge_arrays_are_empty_and_of_the_same_kind(chunks):
    most = max(chunks, key=lambda chunk: len(chunk.edges))
    none = min(chunks, key=lambda chunk: len(chunk.edges))
    assert len(none.edges) == 0
    for chunk, rows in [(most, np.setdiff1d(np.arange(most.size), most.source_rows)), (none, np.arange(none.size))]:
        shard = shard_chunk_edges(chunk, rows)
        for name in (field.name for field in fields(ShardEdges)):
            assert len(getattr(shard, name)) == 0
            assert getattr(shard, name).dtype == getattr(chunk, name).dtype, name
