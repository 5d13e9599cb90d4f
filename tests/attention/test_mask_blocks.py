import time
import tracemalloc

import numpy as np
import pytest
import torch

from megatron_dta.attention.blocks import BlockIndex, block_lists, classify_blocks
from megatron_dta.attention.mask import TreeMask, dense_mask
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.plan import Call, Plan
from megatron_dta.tree.schedule import schedule
from tests.forests import (
    SHAPES,
    LargestTensor,
    broom,
    causal_mask,
    make_plan,
    mask_of,
    mask_of_subset,
    random_assignment,
    random_forest,
    shaped,
    visible_pairs,
)

BLOCKS = [(1, 1), (2, 3), (16, 8), (128, 128)]


def random_plan(seed: int, **limits) -> Plan:
    """Cut a random forest at random: chunks hold scattered tokens, pushes are forests, rows are padded."""
    rng = np.random.default_rng(seed)
    forest = random_forest(seed, **limits)
    multiple = int(rng.choice([1, 2, 4]))
    chunk_of = random_assignment(forest, rng, int(rng.integers(1, 5)))
    return schedule(forest, chunk_of, capacity=-(-forest.num_tokens // multiple) * multiple, multiple=multiple)


@pytest.fixture(scope="module")
def calls() -> list[tuple[Forest, Call]]:
    plans = [random_plan(seed) for seed in range(200)]
    plans += [random_plan(1000 + seed, most=40, longest=40) for seed in range(12)]
    plans += [make_plan(shaped(name), budget) for name in SHAPES for budget in (2, WHOLE)]
    return [(plan.forest, call) for plan in plans for call in (*plan.pushes, *plan.chunks)]


@pytest.fixture(scope="module")
def masks(calls) -> list[tuple[Forest, Call, TreeMask, np.ndarray]]:
    return [(forest, call, mask_of(call), visible_pairs(forest, call)) for forest, call in calls]


def in_blocks(visible: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (some pair visible, every pair visible), bool [QB, KB]; a ragged key block is not fully visible."""
    (rows, keys), (block_q, block_k) = visible.shape, size
    padding = ((0, -rows % block_q), (0, -keys % block_k))
    shape = (-(-rows // block_q), block_q, -(-keys // block_k), block_k)
    some = np.pad(visible, padding).reshape(shape).any((1, 3))
    whole_rows = np.pad(visible, (padding[0], (0, 0)), constant_values=True)
    return some, np.pad(whole_rows, ((0, 0), padding[1])).reshape(shape).all((1, 3))


def contiguous_key_blocks(forest: Forest, call: Call, block_k: int) -> np.ndarray:
    """Tell which key blocks hold consecutive preorder tokens, bool [KB]; padding rows are trees after the last one."""
    padding = forest.num_tokens + np.arange(call.size - len(call.tokens))
    keys = np.concatenate([call.context, call.tokens, padding])
    gaps = np.append(np.diff(keys) != 1, False)
    gaps[block_k - 1 :: block_k] = False
    return ~np.logical_or.reduceat(gaps, np.arange(0, len(keys), block_k))


def test_mask_is_the_ancestor_relation(masks):
    """A06 and padding: every row sees its ancestors and itself, a padding row itself alone."""
    for _, _call, mask, visible in masks:
        assert np.array_equal(dense_mask(mask).numpy(), visible)
        assert mask.num_keys == visible.shape[1]
        assert mask.visible_from.dtype == mask.visible_to.dtype == torch.int32


@pytest.mark.parametrize("seed", range(20))
def test_two_numbers_describe_any_queries_and_any_keys(seed):
    """Queries need not be closed under anything, keys need not be seen: a shard of a chunk is such a set."""
    mask, visible = mask_of_subset(random_forest(seed, most=15, longest=15), np.random.default_rng(seed))
    assert np.array_equal(dense_mask(mask).numpy(), visible)
    for size in BLOCKS:
        partial, full = (part.numpy() for part in classify_blocks(mask, *size))
        some, every = in_blocks(visible, size)
        assert not (some & ~(partial | full)).any()
        assert not (full & ~every).any()


def test_dense_mask_of_some_rows_is_a_slice(masks):
    for _, _, mask, visible in masks:
        start = mask.num_queries // 3
        assert np.array_equal(dense_mask(mask, start).numpy(), visible[start:])
        assert np.array_equal(dense_mask(mask, start, start + 1).numpy(), visible[start : start + 1])


@pytest.mark.parametrize("size", BLOCKS)
def test_blocks_are_sound_and_exact_where_keys_are_contiguous(masks, size):
    num_exact = 0
    for forest, call, mask, visible in masks:
        partial, full = (part.numpy() for part in classify_blocks(mask, *size))
        some, every = in_blocks(visible, size)
        assert not (partial & full).any()
        assert not (some & ~(partial | full)).any(), "a visible pair is missed"
        assert not (full & ~every).any(), "a full block hides a pair"
        exact = contiguous_key_blocks(forest, call, size[1])
        assert np.array_equal((partial | full)[:, exact], some[:, exact])
        assert np.array_equal(full[:, exact], every[:, exact])
        num_exact += int(exact.sum())
    assert num_exact > 100
    assert len(masks) * len(BLOCKS) >= 2000


def check_lists(index: BlockIndex, partial: np.ndarray, full: np.ndarray) -> None:
    """Kernels take the first entries of each row, in ascending order."""
    for counts, lists, member in (
        (index.partial_count, index.partial_index, partial),
        (index.full_count, index.full_index, full),
    ):
        assert counts.dtype == lists.dtype == torch.int32
        assert lists.is_contiguous()
        assert lists.shape == member.shape
        for count, row, expected in zip(counts.tolist(), lists.tolist(), member):
            assert row[:count] == np.flatnonzero(expected).tolist()
            assert sorted(row) == list(range(len(row))), "the filler stays in range"


@pytest.mark.parametrize("size", BLOCKS[1:])
def test_lists_of_both_directions_hold_the_classified_blocks(masks, size):
    for _, _, mask, _ in masks[::4]:
        partial, full = (part.numpy() for part in classify_blocks(mask, *size))
        lists = block_lists(mask, *size)
        check_lists(lists.forward, partial, full)
        check_lists(lists.backward, partial.T, full.T)


def test_blocks_of_any_two_vectors_are_sound():
    """No use is made of the vectors coming from a forest: empty, negative and too long intervals included."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_queries, num_keys = rng.integers(1, 40, 2)
        ends = torch.from_numpy(rng.integers(-3, num_queries + 4, (2, num_keys)).astype(np.int32))
        mask = TreeMask(visible_from=ends[0], visible_to=ends[1], num_queries=int(num_queries))
        size = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
        partial, full = (part.numpy() for part in classify_blocks(mask, *size))
        some, every = in_blocks(dense_mask(mask).numpy(), size)
        assert not (some & ~(partial | full)).any()
        assert not (full & ~every).any()


@pytest.mark.parametrize("name", SHAPES)
def test_a_plain_causal_mask_is_another_mask_unless_the_forest_is_a_chain(name):
    """Negative control: a mask by row order alone would let siblings see each other."""
    (call,) = make_plan(shaped(name), WHOLE).chunks
    causal = dense_mask(causal_mask(call.size, "cpu"))
    assert torch.equal(dense_mask(mask_of(call)), causal) == (name in ("one token", "chain", "duplicates", "prefix"))
    assert torch.equal(causal, torch.ones(call.size, call.size, dtype=torch.bool).tril())


def test_what_a_mask_caches_is_built_once_per_key():
    mask, built = causal_mask(3, "cpu"), []
    for key in ("a", "b", "a"):
        assert mask.cached(key, lambda key=key: built.append(key) or key) == key
    assert built == ["a", "b"]


@pytest.mark.parametrize("budget", [16_384, WHOLE])
def test_d04_block_lists_of_99k_tokens_without_a_square_tensor(budget):
    """Planning and block lists stay linear in tokens, or in blocks: one bool a pair would be 9.8 GB."""
    sequences = broom(prefix=11_000, num_leaves=8, leaf=11_000)
    start = time.perf_counter()
    tracemalloc.start()
    plan = make_plan(build_forest(sequences), budget)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.forest.num_tokens == 99_000
    assert peak < 500 * 99_000, "bytes per token"
    for call in (*plan.pushes, *plan.chunks):
        with LargestTensor() as largest:
            lists = block_lists(mask_of(call), 128, 128)
        num_keys = len(call.context) + call.size
        num_blocks = -(-call.size // 128) * -(-num_keys // 128)
        assert lists.forward.partial_index.numel() == num_blocks
        assert largest.numel <= max(num_blocks, num_keys + 127)
    assert time.perf_counter() - start < 20
