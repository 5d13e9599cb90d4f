"""The core-attention layer over a whole plan, against dense attention over the whole forest.

Shapes: T tree tokens, N query heads, K key/value heads, H head size.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dta.attention.api import get_backend
from megatron_dta.attention.mask import tree_mask
from megatron_dta.attention.reference import ReferenceBackend
from megatron_dta.engine.cache import ArenaCache
from megatron_dta.errors import UsageError
from megatron_dta.mcore import parallel
from megatron_dta.mcore.core_attention import TreeCoreAttention, causal_attention
from megatron_dta.mcore.params import Mode, TreeParams
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.plan import Kind
from tests.forests import make_plan


def segments(*lengths_and_parents):
    """Build sequences from (parent, length) segments: one sequence per segment, ids drawn per segment."""
    rng, built = np.random.default_rng(0), []
    for parent, length in lengths_and_parents:
        built.append(np.concatenate([built[parent] if parent is not None else [], rng.integers(0, 999, length)]))
    return [s.astype(np.int32) for s in built]


FORESTS = {
    "one token": segments((None, 1)),
    "chain": segments((None, 300)),
    "duplicate and prefix": [*segments((None, 130), (0, 77)), *segments((None, 130))],
    "star": segments((None, 129), *[(0, length) for length in (1, 2, 63, 64, 65, 127, 128, 1, 5, 200)]),
    "comb": segments((None, 200), (0, 40), (0, 31), (2, 50), (2, 17), (4, 300), (4, 1), (6, 90)),
    "several trees": segments((None, 257), (0, 10), (None, 1), (None, 64), (3, 500), (3, 1), (None, 128)),
    "ragged": segments((None, 1000), (0, 517), (0, 517), (1, 333), (1, 129), (2, 700), (2, 3)),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def layer(num_heads: int, num_kv_heads: int, head_size: int, **options) -> TreeCoreAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        hidden_dropout=0.0,
        kv_channels=head_size,
        num_moe_experts=None,
        mtp_num_layers=None,
        apply_query_key_layer_scaling=False,
        context_parallel_size=1,
        **options,
    )
    return TreeCoreAttention(config=config, layer_number=1, attn_mask_type=None, attention_type="self")


def random_inputs(num_tokens, num_heads, num_kv_heads, head_size, dtype, device):
    """Draw q, k, v and the output's gradient in bf16, so that every dtype computes from the same numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, n, head_size) for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [torch.randn(s, generator=generator).bfloat16().to(device=device, dtype=dtype) for s in shapes]


def run_plan(plan, backend, inputs, device):
    """Execute one layer over a plan; return out, dq, dk, dv by tree token."""
    q, k, v, dout = inputs
    module = layer(q.shape[1], k.shape[1], q.shape[2])
    cache = ArenaCache(
        num_layers=1, state_rows=plan.state_rows, grad_rows=plan.grad_rows, num_kv_heads=k.shape[1],
        head_size=q.shape[2], dtype=q.dtype, device=device, poison=True,
    )  # fmt: skip

    def rows(values):
        return torch.from_numpy(np.asarray(values, np.int64)).to(device)

    def call(item, mode, own_rows=None, **fields):
        taken = rows(np.pad(item.tokens, (0, item.size - len(item.tokens))))
        leaves = [x[taken].clone().requires_grad_(mode is Mode.TRAIN) for x in (q, k, v)]
        params = TreeParams(
            mode=mode, depth=taken, mask=tree_mask(item.visible_from, item.visible_to, item.size, device),
            backend=backend, cache=cache, context_state=cache.rows(item.context_state),
            own_rows=None if own_rows is None else rows(own_rows),
            **{name: cache.rows(value) for name, value in fields.items()},
        )  # fmt: skip
        return leaves, module(*(x[:, None] for x in leaves), None, packed_seq_params=params)[:, 0]

    results, flight = [torch.zeros_like(x) for x in (dout, q, k, v)], {}
    for op in plan.operations:
        if op.kind is Kind.PUSH:
            with torch.no_grad():
                call(plan.pushes[op.index], Mode.PUSH, store_state=plan.pushes[op.index].store_state)
        elif op.kind is Kind.FORWARD:
            chunk = plan.chunks[op.index]
            names = ("context_grad", "own_rows", "own_grad")
            flight[op.index] = call(chunk, Mode.TRAIN, **{name: getattr(chunk, name) for name in names})
        elif op.kind is Kind.BACKWARD:
            chunk, (leaves, out) = plan.chunks[op.index], flight.pop(op.index)
            cache.begin_grads(chunk.fresh_grad)
            real, taken = len(chunk.tokens), rows(chunk.tokens)
            grad = torch.zeros_like(out)
            grad[:real] = dout[taken].flatten(1)
            out.backward(grad)
            for result, value in zip(results, [out.view_as(leaves[0]), *(x.grad for x in leaves)]):
                result[taken] = value[:real].detach()
        else:
            cache.free(op.free_state, op.free_grad)
    return results


def dense(forest, inputs, device):
    """Attend over the whole forest at once with the oracle: out, dq, dk, dv."""
    q, k, v, dout = inputs
    mask = tree_mask(np.arange(forest.num_tokens, dtype=np.int32), forest.subtree_end, forest.num_tokens, device)
    oracle, scale = ReferenceBackend(), q.shape[2] ** -0.5
    out, lse = oracle.forward(q, k, v, mask, scale)
    return [out, *oracle.backward(dout, q, k, v, out, lse, mask, scale)]


def plans(name):
    forest = build_forest(FORESTS[name])
    return [make_plan(forest, budget, multiple=multiple) for budget, multiple in (("whole", 1), (256, 16), (100, 1))]


@pytest.mark.parametrize("name", FORESTS)
def test_plan_equals_dense_attention(name):
    for plan in plans(name):
        inputs = random_inputs(plan.forest.num_tokens, 4, 2, 8, torch.float64, "cpu")
        for got, expected in zip(
            run_plan(plan, get_backend("segment"), inputs, "cpu"), dense(plan.forest, inputs, "cpu")
        ):
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def assert_within_twice_the_eager_error(name, plan, backend, shape, dtype, device):
    """Bound: twice the error of dense eager attention in the same dtype, plus one rounding per chunk that adds to it.

    Every chunk's share of a key's gradient is rounded once to the dtype before it joins the fp32 sum.
    """
    inputs = random_inputs(plan.forest.num_tokens, *shape, dtype, device)
    exact = dense(plan.forest, [x.double() for x in inputs], device)
    eager = dense(plan.forest, inputs, device)
    got = run_plan(plan, backend, inputs, device)
    report = {}
    for label, value, baseline, reference in zip(("out", "dq", "dk", "dv"), got, eager, exact):
        roundings = 1 if label in ("out", "dq") else 1 + len(plan.chunks)
        bound = 2 * (baseline.double() - reference).abs().max() + (
            roundings * torch.finfo(dtype).eps * reference.abs().max()
        )
        error = (value.double() - reference).abs().max()
        report[label] = f"{float(error):.2e} <= {float(bound):.2e}"
        assert error <= bound, (name, label, len(plan.chunks), report)
    return report


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["star", "comb", "several trees"])
def test_low_precision_on_cpu(name, dtype):
    for plan in plans(name):
        assert_within_twice_the_eager_error(name, plan, get_backend("segment"), (4, 2, 16), DTYPES[dtype], "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with flash-attn-4")
@pytest.mark.parametrize("shape", [(32, 8, 128), (8, 2, 64), (12, 2, 128), (4, 4, 128)], ids=str)
@pytest.mark.parametrize("name", FORESTS)
def test_flash4_on_gpu(name, shape):
    for plan in plans(name):
        report = assert_within_twice_the_eager_error(
            name, plan, get_backend("flash4"), shape, torch.bfloat16, "cuda"
        )  # fmt: skip
        print(f"\n{name}, heads {shape}, {plan.forest.num_tokens} tokens, {len(plan.chunks)} chunks: {report}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with flash-attn-4")
def test_flash4_deterministic_is_bitwise_repeatable():
    plan = plans("ragged")[1]
    inputs = random_inputs(plan.forest.num_tokens, 32, 8, 128, torch.bfloat16, "cuda")
    first, second = (run_plan(plan, get_backend("flash4", deterministic=True), inputs, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_without_a_plan_it_is_ordinary_causal():
    q, k, v, _ = random_inputs(20, 4, 2, 8, torch.float64, "cpu")
    out = layer(4, 2, 8)(q[:, None], k[:, None], v[:, None], None)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("tnh,cnh->ntc", q, keys) * 8**-0.5
    scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("ntc,cnh->tnh", scores.softmax(-1), values).flatten(1)
    torch.testing.assert_close(out[:, 0], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(causal_attention(q[:, None], k[:, None], v[:, None], 8**-0.5), out)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window_size", (128, 0)),
        ("softmax_type", "learnable"),
        ("mtp_num_layers", 1),
        ("attention_dropout", 0.1),
        ("hidden_dropout", 0.1),
    ],
)
def test_unsupported_options_are_refused_by_name(option, value):
    """A40: at construction, not in the first step."""
    config = vars(layer(4, 2, 8).config) | {option: value}
    with pytest.raises(UsageError, match=option):
        TreeCoreAttention(config=SimpleNamespace(**config), layer_number=1)


@pytest.mark.parametrize("cp_comm_type", ["p2p", None])
def test_context_parallelism_that_is_not_built_is_refused(cp_comm_type):
    config = SimpleNamespace(**(vars(layer(4, 2, 8).config) | {"context_parallel_size": 2}))
    with pytest.raises(UsageError, match=f"cp_comm_type is {cp_comm_type!r}; expected one of a2a, all_gather"):
        TreeCoreAttention(config=config, layer_number=1, cp_comm_type=cp_comm_type)


def test_context_ranks_without_a_plan_are_refused():
    """Each has some rows of the sequence: ordinary attention among them would be wrong without a sign of it."""
    config = SimpleNamespace(**(vars(layer(4, 2, 8).config) | {"context_parallel_size": 2}))
    groups = SimpleNamespace(cp=object())
    module = TreeCoreAttention(config=config, layer_number=1, cp_comm_type="a2a", pg_collection=groups)
    x = torch.zeros(3, 1, 4, 8)
    with pytest.raises(ValueError, match="without a plan there is no context parallelism"):
        module(x, x, x, None)


def test_bias_and_foreign_packing_are_refused():
    x = torch.zeros(3, 1, 4, 8)
    with pytest.raises(ValueError, match="attention_bias"):
        layer(4, 4, 8)(x, x, x, None, attention_bias=x)
    with pytest.raises(ValueError, match="TreeParams"):
        layer(4, 4, 8)(x, x, x, None, packed_seq_params=object())


def test_parallel_state_is_set_up_once():
    assert parallel.initialize().type == parallel.initialize().type


LAUNCHERS = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_several_processes_are_refused(monkeypatch, name):
    """Where nobody says that they belong together, before torch.distributed is set up: each would work alone."""
    monkeypatch.setenv(name, "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda *_, **__: pytest.fail("one process went ahead"))
    with pytest.raises(UsageError, match=f"^{name} is 2; only `train` and `verify --parallel` run on several"):
        parallel.initialize()


def test_one_process_is_not_refused(monkeypatch):
    """A batch script has SLURM_NTASKS outside a step; a launcher may start one process."""
    monkeypatch.setenv("SLURM_NTASKS", "8")
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "1")
    parallel.refuse_several_processes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FORESTS)
def test_segment_on_gpu(name):
    for plan in plans(name):
        inputs = random_inputs(plan.forest.num_tokens, 4, 2, 8, torch.float64, "cuda")
        got = run_plan(plan, get_backend("segment"), inputs, "cuda")
        for value, expected in zip(got, dense(plan.forest, inputs, "cuda")):
            torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
