import importlib
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_dta.attention import segment
from megatron_dta.attention.api import BACKENDS, get_backend
from megatron_dta.attention.mask import TreeMask, dense_mask, tree_mask
from megatron_dta.errors import UsageError
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.plan import Call
from megatron_dta.tree.schedule import schedule
from tests.attention.inputs import NAMES, SCALE, TOLERANCE, Inputs, assert_equal, draw, run
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


def calls_of(forest: Forest, budget: int | str, multiple: int = 1) -> list[Call]:
    plan = make_plan(forest, budget, multiple=multiple)
    return [*plan.pushes, *plan.chunks]


def random_calls() -> list[Call]:
    """Scattered chunks and pushed forests: context in any order relative to the rows."""
    calls: list[Call] = []
    for seed in range(40):
        forest = random_forest(seed, most=12, longest=20)
        chunk_of = random_assignment(forest, np.random.default_rng(seed), 1 + seed % 4)
        plan = schedule(forest, chunk_of, capacity=forest.num_tokens + 1)
        calls += [*plan.pushes, *plan.chunks]
    return calls


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 3, WHOLE])
@pytest.mark.parametrize("name", SHAPES)
def test_segment_equals_reference_on_named_shapes(name, budget, groups):
    for call in calls_of(shaped(name), budget, multiple=1):
        x = draw(mask_of(call), groups)
        assert_equal(run("segment", x), run("reference", x))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_segment_equals_reference_on_scattered_chunks(groups):
    calls = random_calls()
    assert sum(len(call.context) > 0 for call in calls) > 40, "context from other chunks is part of this test"
    for call in calls:
        x = draw(mask_of(call), groups)
        assert_equal(run("segment", x), run("reference", x))


@pytest.mark.parametrize("seed", range(40))
def test_segment_equals_reference_on_any_queries_and_keys(seed):
    """Shards: context between rows of one path, context that no row sees."""
    mask, _ = mask_of_subset(random_forest(seed, most=12, longest=12), np.random.default_rng(seed))
    x = draw(mask, seed=seed)
    assert_equal(run("segment", x), run("reference", x))


def any_mask(rng: np.random.Generator) -> TreeMask:
    """Draw intervals of no forest, empty, negative and too long ones included; each row sees at least one key."""
    num_queries, num_keys = rng.integers(1, 40), rng.integers(1, 60)
    ends = rng.integers(-3, num_queries + 4, (2, num_keys))
    ends[:, rng.integers(num_keys)] = -1, num_queries + 1
    return tree_mask(*ends.astype(np.int32), int(num_queries), "cpu")


def permuted(mask: TreeMask, order: np.ndarray) -> TreeMask:
    return TreeMask(
        visible_from=mask.visible_from[order], visible_to=mask.visible_to[order], num_queries=mask.num_queries
    )


@pytest.mark.parametrize("seed", range(40))
def test_segment_equals_reference_on_any_intervals(seed):
    x = draw(any_mask(np.random.default_rng(seed)), groups=1 + seed % 3, seed=seed)
    assert_equal(run("segment", x), run("reference", x))


@pytest.mark.parametrize("seed", range(20))
def test_segment_takes_keys_in_any_order(seed):
    """The order of keys says nothing: the last of them need not be the rows themselves."""
    rng = np.random.default_rng(seed)
    mask, _ = mask_of_subset(random_forest(seed, most=12, longest=12), rng)
    x, order = draw(mask, seed=seed), rng.permutation(mask.num_keys)
    expected = run("reference", x)
    got = run("segment", Inputs(permuted(mask, order), x.q, x.k[order], x.v[order], x.dout))
    assert_equal(got, {**expected, "dk": expected["dk"][order], "dv": expected["dv"][order]})


def test_keys_in_another_order_than_their_mask_give_other_results():
    """Negative control: the mask says which keys a row sees, and the results show it."""
    mask = mask_of(calls_of(shaped("ragged tails"), WHOLE)[0])
    x, order = draw(mask), np.roll(np.arange(mask.num_keys), 1)
    one, other = run("segment", x), run("segment", Inputs(mask, x.q, x.k[order], x.v[order], x.dout))
    assert all((one[name] - other[name]).abs().max() > 0.01 for name in NAMES)


@pytest.mark.parametrize("limits", [(2**21, 256), (60, 256), (2**21, 3)])
def test_runs_and_blocks_hold_what_their_rows_see(monkeypatch, limits):
    """All rows see the known keys, the last row the seen ones, no row another; a run is cut where a key is lost."""
    for name, limit in zip(("MAX_SCORES", "MAX_OPENING"), limits):
        monkeypatch.setattr(segment, name, limit)
    num_heads = 2
    for mask in (any_mask(np.random.default_rng(seed)) for seed in range(60)):
        visible, runs = dense_mask(mask).numpy(), segment.query_runs(mask)
        lost = (visible[:-1] & ~visible[1:]).any(1)
        assert [run.start for run in runs] == [0, *(np.flatnonzero(lost) + 1)]
        blocks = [(run, block) for run in runs for block in segment._blocks(run, num_heads)]
        rows = [row for _, block in blocks for row in range(block.rows.start, block.rows.stop)]
        assert rows == list(range(mask.num_queries))
        for whole, block in blocks:
            part, keys = visible[block.rows], whole.keys.numpy()
            assert part[:, keys[: block.known]].all()
            assert part[-1, keys[: block.seen]].all()
            assert part.sum() == part[:, keys[: block.seen]].sum()
            assert len(part) == 1 or len(part) * block.seen * num_heads <= limits[0]
            opens_inside = (~part[0, keys[: block.seen]]).sum()
            assert block.seen - block.known == opens_inside <= limits[1]


@pytest.mark.parametrize("length", [1, 2, 63, 127, 129, 500])
def test_segment_equals_reference_on_odd_lengths(length):
    """B08's lengths: nothing depends on a multiple of a block."""
    sequences = [np.arange(length), np.append(np.arange(length // 2), [9000, 9001])]
    for budget in (max(1, length // 3), WHOLE):
        for call in calls_of(build_forest(sequences), budget):
            x = draw(mask_of(call))
            assert_equal(run("segment", x), run("reference", x))


@pytest.mark.parametrize(
    ("limit", "value"), [*(("MAX_SCORES", n) for n in (1, 7, 100)), *(("MAX_OPENING", n) for n in (1, 3))]
)
def test_segment_does_not_depend_on_its_block_size(monkeypatch, limit, value):
    masks = [mask_of(call) for call in [*random_calls()[:30], *calls_of(shaped("chain"), WHOLE)]]
    masks += [any_mask(np.random.default_rng(seed)) for seed in range(20)]
    whole = [run("segment", draw(mask)) for mask in masks]
    monkeypatch.setattr(segment, limit, value)
    for mask, expected in zip(masks, whole):
        assert_equal(run("segment", draw(mask)), expected)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_reference_is_softmax_attention_over_ancestors(groups):
    """Torch's own attention, with the mask by definition, says what the oracle has to say."""
    for name in SHAPES:
        forest = shaped(name)
        for call in calls_of(forest, 2):
            x = draw(mask_of(call), groups)
            visible = torch.from_numpy(visible_pairs(forest, call))
            q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=SCALE, enable_gqa=True)
            torch.testing.assert_close(
                run("reference", x)["out"], out[0].transpose(0, 1), rtol=TOLERANCE, atol=TOLERANCE
            )


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_reference_backward_is_autograd_of_its_forward(groups):
    attention = get_backend("reference")
    for call in [*random_calls()[:20], *calls_of(shaped("several trees"), 3)]:
        x = draw(mask_of(call), groups)
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        out, lse = attention.forward(*leaves, x.mask, SCALE)
        grads = torch.autograd.grad(out, leaves, x.dout)
        assert_equal(run("reference", x), dict(zip(NAMES, (out.detach(), lse.detach(), *grads))))


@pytest.mark.parametrize("backend", ["reference", "segment"])
def test_lse_is_the_log_of_the_softmax_denominator(backend):
    x = draw(causal_mask(5, "cpu"), groups=1)
    scores = torch.einsum("tnh,cnh->ntc", x.q, x.k) * SCALE
    expected = torch.stack([scores[:, t, : t + 1].exp().sum(-1).log() for t in range(5)], dim=1)
    torch.testing.assert_close(run(backend, x)["lse"], expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segment_errs_at_most_twice_as_much_as_eager(dtype):
    """The bound is derived, not tuned: `reference` in the same dtype makes every rounding that the dtype forces.

    The error allowed is 2 x (error of eager + one rounding): the factor is for sums in another order, the rounding,
    eps / 2, is for an eager result that happens to be exact. Errors are against fp64 on inputs that the dtype holds
    exactly, as root mean squares over all forests: a maximum hangs on one entry, and fp64 above sees each entry.
    """
    calls = [*random_calls(), *calls_of(build_forest(broom(40, 5, 30)), WHOLE)]
    squares = {name: np.zeros(3) for name in NAMES}
    for seed, call in enumerate(calls):
        exact = draw(mask_of(call), seed=seed)
        expected, got, eager = (
            run("reference", exact),
            run("segment", exact.to(dtype)),
            run("reference", exact.to(dtype)),
        )
        for name in NAMES:
            parts = (got[name].double() - expected[name], eager[name].double() - expected[name], expected[name])
            squares[name] += [part.square().sum().item() for part in parts]
    for name, (error, eager_error, size) in ((name, np.sqrt(parts)) for name, parts in squares.items()):
        assert error <= 2 * (eager_error + torch.finfo(dtype).eps / 2 * size), name


@pytest.mark.parametrize("backend", ["reference", "segment"])
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_dtypes_and_shapes_of_results(backend, dtype, wide):
    x = draw(mask_of(calls_of(shaped("comb"), 3)[-1])).to(dtype)
    y = run(backend, x)
    assert y["out"].dtype == y["dq"].dtype == dtype
    assert y["lse"].dtype == wide
    assert {y["dk"].dtype, y["dv"].dtype} <= {dtype, wide}
    assert (y["out"].shape, y["dq"].shape) == (x.q.shape, x.q.shape)
    assert (y["dk"].shape, y["dv"].shape) == (x.k.shape, x.v.shape)
    assert y["lse"].shape == (x.q.shape[1], x.q.shape[0])


@pytest.mark.parametrize("backend", ["reference", "segment"])
@pytest.mark.parametrize("name", SHAPES)
def test_b10_padding_rows_are_finite_and_change_nothing(backend, name):
    for padded, plain in zip(calls_of(shaped(name), 8, multiple=8), calls_of(shaped(name), 8)):
        assert padded.tokens.tolist() == plain.tokens.tolist()
        rows, keys = len(plain.tokens), len(plain.context) + len(plain.tokens)
        x = draw(mask_of(padded))
        y = run(backend, x)
        assert all(part.isfinite().all() for part in y.values())
        expected = run(backend, Inputs(mask_of(plain), x.q[:rows], x.k[:keys], x.v[:keys], x.dout[:rows]))
        cut = {
            "lse": y["lse"][:, :rows],
            **{n: y[n][:rows] for n in ("out", "dq")},
            **{n: y[n][:keys] for n in ("dk", "dv")},
        }
        assert_equal(cut, expected)


@pytest.mark.parametrize("backend", ["reference", "segment"])
def test_plain_causal_attention_over_the_pack_is_something_else(backend):
    """Negative control: without the tree mask siblings see each other, and every result shows it."""
    mask = mask_of(calls_of(shaped("ragged tails"), WHOLE)[0])
    x = draw(mask)
    tree, causal = run(backend, x), run(backend, Inputs(causal_mask(mask.num_queries, "cpu"), x.q, x.k, x.v, x.dout))
    for name in NAMES:
        assert (tree[name] - causal[name]).abs().max() > 0.01, name


@pytest.mark.parametrize("backend", ["reference", "segment"])
def test_outputs_are_written_in_full(backend, monkeypatch):
    """Poisoned memory: a row that a backend forgets stays NaN."""

    def poisoned(like, *size, **options):
        return real(like, *size, **options).fill_(torch.nan)

    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    for call in random_calls()[:20]:
        assert all(part.isfinite().all() for part in run(backend, draw(mask_of(call))).values())


def test_d04_segment_runs_99k_tokens_in_linear_memory():
    """A square of scores would have 9.8e9 entries; what is alive at once is a block of them, and the keys."""
    leaves = broom(prefix=300, num_leaves=319, leaf=300)
    forest = build_forest([*leaves, np.append(leaves[0][:300], np.full(3_000, 999))])
    (call,) = make_plan(forest, WHOLE).chunks
    assert forest.num_tokens == 99_000
    x = torch.randn(4, forest.num_tokens, 1, 8, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    with LargestTensor() as largest:
        y = run("segment", Inputs(mask_of(call), *x))
    assert time.perf_counter() - start < 40
    assert largest.numel <= max(segment.MAX_SCORES, x.numel())
    assert all(part.isfinite().all() for part in y.values())


def test_unknown_backend_is_refused():
    with pytest.raises(
        UsageError, match="attention backend 'flash5' is unknown; choose one of reference, segment, flash4"
    ):
        get_backend("flash5")
    assert BACKENDS == ("reference", "segment", "flash4")


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_b09_f17_flash4_is_refused_in_one_line_without_its_gpu(monkeypatch, capability):
    importlib.import_module("megatron_dta.attention.flash4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UsageError) as refusal:
        get_backend("flash4")
    message = str(refusal.value)
    assert "\n" not in message
    assert "found no CUDA device" in message if capability is None else "found Old GPU, 8.0" in message
    assert "pip install 'flash-attn-4" in message
    assert "choose the backend segment or reference" in message
