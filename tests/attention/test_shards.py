"""Context parallelism: the queries of a call dealt to ranks, each against all keys, add up to the call."""

import numpy as np
import pytest
import torch

from megatron_dta.attention import segment
from megatron_dta.attention.blocks import block_lists, classify_blocks
from megatron_dta.attention.mask import TreeMask, dense_mask, tree_mask
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.deal import deal, shard_mask, visible_counts
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.plan import Call
from megatron_dta.tree.schedule import schedule
from tests.attention.inputs import NAMES, Inputs, assert_equal, draw, run
from tests.forests import (
    SHAPES,
    LargestTensor,
    broom,
    causal_mask,
    make_plan,
    mask_of,
    random_assignment,
    random_forest,
    shaped,
)

RANKS = [2, 3, 4]


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Calls of 12 rows and more, some all padding but for one row, many with context."""
    plans = [make_plan(shaped(name), budget, multiple=12) for name in SHAPES for budget in (12, WHOLE)]
    for seed in range(25):
        forest = random_forest(seed, most=12, longest=20)
        chunk_of = random_assignment(forest, np.random.default_rng(seed), 1 + seed % 4)
        plans.append(schedule(forest, chunk_of, capacity=-(-forest.num_tokens // 12) * 12, multiple=12))
    found = [call for plan in plans for call in (*plan.pushes, *plan.chunks)]
    assert sum(len(call.context) > 0 for call in found) > 20
    return found


def rows_by_rank(call: Call, ranks: int, tile: int) -> np.ndarray:
    return deal(visible_counts(call.visible_from, call.visible_to, call.size), ranks, tile)


def mask_of_rows(call: Call, rows: np.ndarray) -> TreeMask:
    return tree_mask(*shard_mask(call.visible_from, call.visible_to, rows), len(rows), "cpu")


def run_shards(backend: str, call: Call, x: Inputs, dealt: np.ndarray, order: np.ndarray) -> dict[str, torch.Tensor]:
    """Run each rank's queries against all keys, taken in `order`; put rows back in place, add up keys' gradients."""
    total = {name: torch.full_like(x.q, torch.nan) for name in ("out", "dq")}
    total["lse"] = x.q.new_full((x.q.shape[1], len(x.q)), torch.nan)
    total |= {name: torch.zeros_like(x.k) for name in ("dk", "dv")}
    for rows in dealt:
        mask = mask_of_rows(call, rows)
        mask = TreeMask(visible_from=mask.visible_from[order], visible_to=mask.visible_to[order], num_queries=len(rows))
        y = run(backend, Inputs(mask, x.q[rows], x.k[order], x.v[order], x.dout[rows]))
        total["out"][rows], total["dq"][rows], total["lse"][:, rows] = y["out"], y["dq"], y["lse"]
        for name in ("dk", "dv"):
            total[name][order] += y[name]
    return total


@pytest.mark.parametrize("tile", [1, 3, 128])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("backend", ["segment", "reference"])
def test_shards_add_up_to_the_call(calls, backend, ranks, tile):
    for seed, call in enumerate(calls):
        x = draw(mask_of(call), seed=seed)
        order = np.arange(len(x.k))
        assert_equal(run_shards(backend, call, x, rows_by_rank(call, ranks, tile), order), run("reference", x))


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_take_keys_in_the_order_in_which_ranks_hand_them_in(calls, ranks):
    """Gathered keys come context first, then rank by rank."""
    for seed, call in enumerate(calls):
        x, dealt = draw(mask_of(call), seed=seed), rows_by_rank(call, ranks, 2)
        num_context = len(call.context)
        order = np.concatenate([np.arange(num_context), num_context + dealt.ravel()])
        assert_equal(run_shards("segment", call, x, dealt, order), run("reference", x))


@pytest.mark.parametrize("limit", [1, 4, 60])
def test_shards_do_not_depend_on_block_sizes(calls, monkeypatch, limit):
    monkeypatch.setattr(segment, "MAX_OPENING", limit)
    monkeypatch.setattr(segment, "MAX_SCORES", 40 * limit)
    for seed, call in enumerate(calls[::3]):
        x = draw(mask_of(call), seed=seed)
        got = run_shards("segment", call, x, rows_by_rank(call, 3, 2), np.arange(len(x.k)))
        assert_equal(got, run("reference", x))


def test_one_shard_alone_lacks_key_gradients_and_a_causal_shard_sees_other_keys():
    """Negative controls: keys collect from every rank; a rank's rows are not a sequence of their own."""
    (call,) = make_plan(shaped("ragged tails"), WHOLE, multiple=12).chunks
    x, dealt = draw(mask_of(call)), rows_by_rank(call, 2, 2)
    whole, mask = run("reference", x), mask_of_rows(call, dealt[0])
    one = run("segment", Inputs(mask, x.q[dealt[0]], x.k, x.v, x.dout[dealt[0]]))
    assert all((one[name] - whole[name]).abs().max() > 0.01 for name in ("dk", "dv"))
    own = Inputs(causal_mask(len(dealt[0]), "cpu"), *(part[dealt[0]] for part in (x.q, x.k, x.v, x.dout)))
    causal = run("segment", own)
    assert (causal["out"] - whole["out"][dealt[0]]).abs().max() > 0.01


@pytest.mark.parametrize("ranks", RANKS)
def test_keys_that_a_shard_does_not_see_get_zeros(calls, ranks):
    num_unseen = 0
    for seed, call in enumerate(calls):
        x = draw(mask_of(call), seed=seed)
        for rows in rows_by_rank(call, ranks, 2):
            mask = mask_of_rows(call, rows)
            unseen = mask.visible_from == mask.visible_to
            y = run("segment", Inputs(mask, x.q[rows], x.k, x.v, x.dout[rows]))
            assert all(y[name].isfinite().all() for name in NAMES)
            assert not y["dk"][unseen].any()
            assert not y["dv"][unseen].any()
            num_unseen += int(unseen.sum())
    assert num_unseen > 100


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 4), (16, 8)])
@pytest.mark.parametrize("ranks", RANKS)
def test_block_lists_of_shards_are_sound_and_exact_where_keys_are_contiguous(calls, ranks, size):
    """A rank's rows have gaps and it does not see all keys: neither costs a block without a visible pair."""
    num_exact, num_unvisited = 0, 0
    for call in calls:
        keys = np.concatenate([call.context, call.tokens, 10**6 + np.arange(call.size - len(call.tokens))])
        starts = np.arange(0, len(keys), size[1])
        is_gap = np.append(np.diff(keys) != 1, False)
        is_gap[size[1] - 1 :: size[1]] = False
        contiguous = ~np.logical_or.reduceat(is_gap, starts)
        for rows in rows_by_rank(call, ranks, 2):
            mask = mask_of_rows(call, rows)
            visible = dense_mask(mask).numpy()
            queries = np.arange(0, len(rows), size[0])
            some = np.logical_or.reduceat(np.logical_or.reduceat(visible, queries, 0), starts, 1)
            every = np.logical_and.reduceat(np.logical_and.reduceat(visible, queries, 0), starts, 1)
            every[:, starts + size[1] > len(keys)] = False  # a ragged key block is never full
            partial, full = (part.numpy() for part in classify_blocks(mask, *size))
            assert not (some & ~(partial | full)).any(), "a visible pair is missed"
            assert np.array_equal(full, every)
            assert np.array_equal((partial | full)[:, contiguous], some[:, contiguous])
            lists = block_lists(mask, *size).backward
            visits = (lists.partial_count + lists.full_count).numpy()
            assert np.array_equal(visits, (partial | full).sum(0))
            num_exact, num_unvisited = num_exact + contiguous.sum(), num_unvisited + (visits == 0).sum()
    assert num_exact > 100
    assert num_unvisited > 0, "key blocks that no query of a rank visits are part of this test"


def test_unseen_keys_widen_no_block():
    """Their empty intervals may lie anywhere: inside a query block that sees nothing of the key block."""
    first, stop = np.array([5, 5, 0, 5, 9, 9], np.int32), np.array([5, 5, 2, 5, 9, 10], np.int32)
    mask = tree_mask(first, stop, 12, "cpu")
    partial, full = classify_blocks(mask, 4, 2)
    assert partial.tolist() == [[False, True, False], [False, False, False], [False, False, True]]
    assert not full.any()


def test_a_shard_of_a_long_forest_runs_in_linear_memory():
    """Gaps between a rank's rows make many keys visible at once: no block holds more scores for that."""
    forest = build_forest(broom(prefix=10_000, num_leaves=24, leaf=200))
    (call,) = make_plan(forest, WHOLE, multiple=512).chunks
    dealt = rows_by_rank(call, 4, 128)
    q, dout = torch.randn(2, dealt.shape[1], 1, 8, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, call.size, 1, 8, generator=torch.Generator().manual_seed(1))
    computed = 0
    for rows in dealt:
        mask = mask_of_rows(call, rows)
        blocks = [block for whole in segment.query_runs(mask) for block in segment._blocks(whole, 1)]
        computed += sum((block.rows.stop - block.rows.start) * block.seen for block in blocks)
    with LargestTensor() as largest:
        y = run("segment", Inputs(mask, q, k, v, dout))
    assert all(part.isfinite().all() for part in y.values())
    assert largest.numel <= max(segment.MAX_SCORES, k.numel(), q.numel())
    # In a block of n rows at most MAX_OPENING keys are computed for nothing, by each of its rows.
    visible = visible_counts(call.visible_from, call.visible_to, call.size).sum()
    assert visible <= computed <= visible + call.size * segment.MAX_OPENING


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with flash-attn-4")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [broom(1500, 6, 333), broom(4000, 3, 129), broom(100, 40, 60)], ids=len)
def test_flash4_on_shards(tokens, ranks):
    """Bound: twice the error of dense eager bf16 against fp64, plus one rounding; key gradients sum over ranks."""
    plan = make_plan(build_forest(tokens), 2048, multiple=128 * ranks)
    for call in plan.chunks:
        generator = torch.Generator().manual_seed(0)
        q, dout = torch.randn(2, call.size, 16, 128, generator=generator).bfloat16().cuda()
        k, v = torch.randn(2, len(call.visible_from), 4, 128, generator=generator).bfloat16().cuda()
        dealt = rows_by_rank(call, ranks, 128)
        found = {name: _shards_on_gpu(*given, call, dealt, q, k, v, dout) for name, given in _GIVEN.items()}
        for name in ("out", "dq", "dk", "dv"):
            exact = found["exact"][name]
            roundings = 1 if name in ("out", "dq") else ranks
            bound = 2 * (found["eager"][name] - exact).abs().max()
            bound += roundings * torch.finfo(torch.bfloat16).eps * exact.abs().max()
            assert (found["flash4"][name] - exact).abs().max() <= bound, name


_GIVEN = {
    "flash4": ("flash4", torch.bfloat16),
    "eager": ("reference", torch.bfloat16),
    "exact": ("reference", torch.float64),
}


def _shards_on_gpu(backend: str, dtype: torch.dtype, call: Call, dealt: np.ndarray, *inputs: torch.Tensor):
    """Run each rank's queries on the GPU; return rows in place and the sums of key gradients, fp64."""
    q, k, v, dout = (x.to(dtype) for x in inputs)
    total = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in zip(("out", "dq", "dk", "dv"), (q, q, k, v))}
    for rows in dealt:
        mask = tree_mask(*shard_mask(call.visible_from, call.visible_to, rows), len(rows), "cuda")
        y = run(backend, Inputs(mask, q[rows], k, v, dout[rows]))
        total["out"][rows], total["dq"][rows] = y["out"].double(), y["dq"].double()
        for name in ("dk", "dv"):
            total[name] += y[name].double()
    return total
