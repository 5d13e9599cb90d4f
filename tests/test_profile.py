"""Measuring calls and fitting their cost; no timing decides a test."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from megatron_dta import cli
from megatron_dta.attention.api import get_backend
from megatron_dta.checkpoint.open_model import tiny_model
from megatron_dta.config import OptimizerSection, load_config
from megatron_dta.engine.engine import default_backend
from megatron_dta.engine.executor import Executor
from megatron_dta.engine.measure import SHORT, Measured, Shape, call_pairs, measure, row_sizes, shape_plan, shapes
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.model_config import read_model_config
from megatron_dta.profile_fit import errors, fit_calls
from megatron_dta.tree.cost import CallCost, CostModel, check_model, default_cost, load_cost, model_shape
from megatron_dta.tree.plan import Kind, Plan
from tests import forests

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny_qwen3.json"
VOCAB, CAPACITY, MULTIPLE = 31, 20, 4
PLANTED = CallCost(launch=0.03, fixed=2e-3, row=8e-6, pair=1.5e-9, context=6e-7, source=3e-6)
COLUMNS = ("rows", "pairs", "context", "sources")
SMALL = [
    Shape(rows=1, length=1, every=1),
    Shape(rows=13, length=13, every=3),
    Shape(rows=14, length=4, every=1),
    Shape(rows=16, length=4, every=2, context=9, shared=True),
    Shape(rows=16, length=4, every=2, context=9),
    Shape(rows=7, length=64, every=1, context=20),
]


def plan_of(shape: Shape, seed: int = 1) -> Plan:
    return shape_plan(shape, vocab_size=3, capacity=CAPACITY, multiple=MULTIPLE, seed=seed)


def counts_of(budget: int, multiple: int = 128) -> np.ndarray:
    """Return the counts of the shapes that a profile measures, float64 [4, n], from their plans."""
    counts = []
    for shape in shapes(budget, multiple, 40960):
        chunk = shape_plan(shape, vocab_size=1000, capacity=budget, multiple=multiple, seed=0).chunks[0]
        counts.append((chunk.size, call_pairs(chunk), len(chunk.context), len(chunk.source_rows)))
    return np.array(counts, np.float64).T


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    return counts_of(8192)


@pytest.fixture
def profile_toml(tmp_path) -> Path:
    """Return a training config whose rollouts do not exist."""
    file = tmp_path / "train.toml"
    file.write_text(
        f'[data]\nrollouts = "absent.npz"\n[model]\nhf_config = "{TINY}"\ndtype = "fp32"\n'
        "[engine]\nbudget = 256\npadding = 16\n"
    )
    return file


def test_fit_finds_planted_coefficients(counts):
    seconds = PLANTED.seconds(*counts)
    at_floor = seconds == PLANTED.launch
    assert 4 <= at_floor.sum() <= len(seconds) - 8, "the data must show both sides of the roofline"
    fitted = fit_calls(*counts, seconds)
    for name, value in asdict(PLANTED).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-6), name
    assert errors(fitted, *counts, seconds)[1] < 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_fit_stands_noise(counts, seed):
    """5% of noise on every time: the cost is off by less than that where it is used, and by little where it counts."""
    exact = PLANTED.seconds(*counts)
    noisy = exact * (1 + 0.05 * np.random.default_rng(seed).standard_normal(len(exact)))
    fitted = fit_calls(*counts, noisy)
    assert errors(fitted, *counts, exact)[0] < 0.03
    assert errors(fitted, *counts, exact)[1] < 0.10
    assert fitted.launch == pytest.approx(PLANTED.launch, rel=0.05)
    assert fitted.row == pytest.approx(PLANTED.row, rel=0.15)
    assert fitted.pair == pytest.approx(PLANTED.pair, rel=0.15)


def test_negative_control_a_linear_fit_misses_the_floor(counts):
    seconds = PLANTED.seconds(*counts)
    columns = np.stack([np.ones(len(seconds)), *counts], axis=1) / seconds[:, None]
    linear, _ = nnls(columns / columns.max(0), np.ones(len(seconds)))
    worst = np.abs(columns / columns.max(0) @ linear - 1).max()
    assert worst > 0.1
    assert errors(fit_calls(*counts, seconds), *counts, seconds)[1] < worst / 1e6


def test_fit_without_a_floor(counts):
    planted = replace(PLANTED, launch=0.0)
    seconds = planted.seconds(*counts)
    assert errors(fit_calls(*counts, seconds), *counts, seconds)[1] < 1e-9


def test_fit_of_launches_alone(counts):
    """A device so fast that the host bounds every call: all times are the floor."""
    seconds = np.full(counts.shape[1], 0.02)
    fitted = fit_calls(*counts, seconds)
    np.testing.assert_allclose(fitted.seconds(*counts), 0.02, rtol=1e-9)


def test_fit_is_never_negative(counts):
    """Times that fall with the context: its coefficient stays 0."""
    seconds = PLANTED.seconds(*counts) * (1 - 0.3 * counts[2] / counts[2].max())
    fitted = fit_calls(*counts, seconds)
    assert min(asdict(fitted).values()) >= 0
    assert fitted.context == 0


def test_a_count_that_is_always_zero_costs_nothing(counts):
    rows, pairs, context, sources = counts
    planted = replace(PLANTED, source=0.0)
    fitted = fit_calls(rows, pairs, context, 0 * sources, planted.seconds(rows, pairs, context, 0 * sources))
    assert fitted.source == 0
    assert fitted.row == pytest.approx(planted.row, rel=1e-6)


def test_fit_does_not_depend_on_units(counts):
    """Hours or nanoseconds: the columns are scaled, so the same calls give the same cost."""
    for unit in (1e-9, 3600.0):
        fitted = fit_calls(*counts, PLANTED.seconds(*counts) * unit)
        assert fitted.pair == pytest.approx(PLANTED.pair * unit, rel=1e-6)


@pytest.mark.parametrize("num_calls", [0, 1, 5])
def test_fit_refuses_fewer_calls_than_unknowns(counts, num_calls):
    chosen = counts[:, -num_calls:] if num_calls else counts[:, :0]
    with pytest.raises(UsageError, match=r"measured calls; a fit needs at least"):
        fit_calls(*chosen, PLANTED.seconds(*chosen))


def test_fit_refuses_calls_that_are_alike(counts):
    same = np.repeat(counts[:, -1:], 20, axis=1)
    with pytest.raises(UsageError, match="coefficients apart"):
        fit_calls(*same, PLANTED.seconds(*same))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_fit_refuses_impossible_times(counts, bad):
    seconds = PLANTED.seconds(*counts)
    seconds[3] = bad
    with pytest.raises(UsageError, match="expected positive times"):
        fit_calls(*counts, seconds)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_counts_are_those_of_the_chunk(shape):
    """By brute force: tokens one parent pointer at a time, pairs one by one, sources by their trained children."""
    plan = plan_of(shape)
    forest, chunk = plan.forest, plan.chunks[0]
    visible = forests.visible_pairs(forest, chunk)
    assert len(chunk.tokens) == shape.rows
    assert chunk.size == -(-shape.rows // MULTIPLE) * MULTIPLE
    assert call_pairs(chunk) == visible.sum()
    assert len(chunk.context) == shape.context == forest.num_tokens - shape.rows
    above = visible[: shape.rows, : shape.context]
    assert above.any(axis=1).sum() == (shape.context > 0) * (
        shape.rows if shape.shared else min(shape.length, shape.rows)
    )
    assert (above.all(axis=1) == above.any(axis=1)).all() or not shape.context, "all of the context or nothing"
    trained = {int(forest.parent[token]) for token in forest.edges}
    assert chunk.tokens[chunk.source_rows].tolist() == sorted(trained)
    places = [row % shape.length for row in range(shape.rows)]
    assert len(chunk.source_rows) == sum(place > 0 and place % shape.every == 0 for place in places)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_same_call_is_the_last_push(shape):
    plan = plan_of(shape)
    push, chunk = plan.pushes[-1], plan.chunks[0]
    assert (push.size, call_pairs(push), len(push.context)) == (chunk.size, call_pairs(chunk), len(chunk.context))
    taken = np.concatenate([p.store_state for p in plan.pushes])
    assert sorted(taken.tolist()) == list(range(plan.state_rows)), "no row of the cache is written twice"
    before = [op for op in plan.operations if op.kind is Kind.PUSH]
    assert sum(len(plan.pushes[op.index].tokens) for op in before) == shape.context
    assert plan.operations[len(before)].kind is Kind.FORWARD


@pytest.mark.parametrize(("budget", "multiple"), [(16384, 128), (2048, 16), (256, 16), (100, 1), (3, 1), (130, 128)])
def test_shapes_fill_the_budget_and_no_more(budget, multiple):
    sizes, chosen = row_sizes(budget, multiple), shapes(budget, multiple, 40960)
    assert sizes == sorted(set(sizes))
    assert sizes[0] <= max(SHORT, multiple)
    assert sizes[-1] == budget // multiple * multiple
    assert all(size % multiple == 0 for size in sizes)
    assert len(chosen) <= 32
    assert len(chosen) == len(set(chosen))
    assert {shape.rows for shape in chosen} == set(sizes)
    assert all(0 < shape.length <= shape.rows and shape.context <= budget for shape in chosen)


def test_no_path_is_longer_than_the_model_allows():
    for most in (1, 50, 300):
        assert all(shape.length + shape.context <= most for shape in shapes(1024, 16, most))


def test_counts_of_a_profile_do_not_grow_together():
    counts = counts_of(2048, 16)
    columns = np.stack([np.ones(counts.shape[1]), *counts], axis=1)
    assert np.linalg.cond(columns / np.linalg.norm(columns, axis=0)) < 20


def test_command_writes_a_cost_model(profile_toml, tmp_path, capsys):
    out = tmp_path / "new" / "cost.json"
    assert cli.main(["profile", str(profile_toml), "engine.budget=128", "--out", str(out), "--repeats", "1"]) == 0
    cost = load_cost(out)
    fit, config = cost.fit, read_model_config(TINY)
    assert fit["model"] == model_shape(config)
    check_model(cost, config)
    wanted = {"dtype": "fp32", "attention": "segment", "recompute": "none", "repeats": 1, "budget": 128, "padding": 16}
    assert {name: fit[name] for name in wanted} == wanted
    assert fit["machine"] == cost.machine
    assert fit["shapes"] == len(fit["chunks"]) == len(fit["pushes"]) == len(shapes(128, 16, config.max_positions))
    for call, rows in ((cost.chunk, fit["chunks"]), (cost.push, fit["pushes"])):
        table = np.array([[row[name] for name in COLUMNS] for row in rows], np.float64).T
        np.testing.assert_allclose([row["predicted"] for row in rows], call.seconds(*table), rtol=1e-12)
        kind = "chunk" if call is cost.chunk else "push"
        seconds = np.array([row["seconds"] for row in rows])
        assert fit["errors"][kind] == dict(zip(("median", "worst"), errors(call, *table, seconds)))
    assert not any(row["sources"] for row in fit["pushes"])
    shown = capsys.readouterr()
    assert "shape 1/" in shown.err
    assert f"cost model: {out}" in shown.err.replace("\n", "")
    assert "context" in shown.out
    assert list(out.parent.iterdir()) == [out], "no half-written file is left"


def run_measure(
    chosen: list[Shape], on_warning: Callable[[str], None] = pytest.fail
) -> tuple[list[Measured], TreeModel, MasterAdamW]:
    """Measure shapes of at most 20 rows on a small model."""
    model = tiny_model("qwen3", VOCAB, dtype="fp32", max_positions=4096)
    optimizer = MasterAdamW(model, OptimizerSection(), total_updates=1)
    measured = measure(
        model,
        optimizer,
        chosen,
        budget=CAPACITY,
        multiple=MULTIPLE,
        backend=get_backend(default_backend(model)),
        temperature=1.0,
        repeats=2,
        on_warning=on_warning,
    )
    return list(measured), model, optimizer


def test_measured_counts_are_the_plans_and_no_gradient_stays():
    measured, model, optimizer = run_measure(SMALL)
    for shape, got in zip(SMALL, measured, strict=True):
        plan = plan_of(shape)
        counts = plan.chunks[0].size, forests.visible_pairs(plan.forest, plan.chunks[0]).sum(), shape.context
        assert (got.rows, got.pairs, got.context, got.sources) == (*counts, len(plan.chunks[0].source_rows))
        assert got.chunk_seconds > 0
        assert got.push_seconds > 0
    assert all(grad.abs().max() == 0 for grad in optimizer.main_grads)
    assert all(p.grad is None for p in model.parameters())


def test_a_chunk_is_timed_with_its_forward_backward_and_gradients_left_to_ancestors(monkeypatch):
    """Each timed pair is one forward with gradient and one backward, after one warm-up; a push is a forward alone."""
    done = []
    execute = Executor.execute

    def spy(self, entry, chunk_loss):
        execute(self, entry, chunk_loss)
        kind = entry.operation.kind
        kept = float(self.caches[0].accumulators.abs().sum()) if kind is Kind.BACKWARD else None
        done.append((kind, kept))

    monkeypatch.setattr(Executor, "execute", spy)
    run_measure([Shape(rows=8, length=4, every=1, context=9, shared=True)])
    kinds = [kind for kind, _ in done]
    assert kinds == [Kind.PUSH, *[Kind.FORWARD, Kind.BACKWARD] * 3, *[Kind.PUSH] * 3]
    kept = [left for kind, left in done if kind is Kind.BACKWARD]
    assert kept[0] > 0
    assert kept == [kept[0]] * 3, "the same call each time: accumulators start from zero"


def test_out_of_memory_keeps_what_was_measured(monkeypatch):
    warnings = []
    execute = Executor.execute

    def full(self, entry, chunk_loss):
        if self.program.plans[0].chunks[0].size > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        execute(self, entry, chunk_loss)

    monkeypatch.setattr(Executor, "execute", full)
    chosen = [Shape(rows=rows, length=4, every=1) for rows in (4, 8, 12, 16, 20)]
    measured, _, optimizer = run_measure(chosen, warnings.append)
    assert [call.rows for call in measured] == [4, 8, 12]
    assert len(warnings) == 1
    assert "out of memory at 16 rows" in warnings[0]
    assert all(grad.abs().max() == 0 for grad in optimizer.main_grads)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats", "0"], "repeats is 0"),
        (["engine.budget=whole"], "engine.budget=16384"),
        (["engine.mode=flat"], "engine.mode=tree"),
        (["engine.attention=flash"], "reference, segment, flash4"),
        (["engine.budget=16"], "raise engine.budget"),
        (["engine.padding=512"], "engine.budget"),
        (["model.hf_config=absent.json"], "absent.json"),
        (["--out", "/dev/null/x"], "/dev/null/x: cannot write"),
        (["--out", "/"], "/: cannot write"),
    ],
    ids=str,
)
def test_f17_bad_profile(arguments, told, profile_toml, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", str(profile_toml), *arguments]) == 2
    errors_shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors_shown) == 1
    assert told in errors_shown[0]
    assert not list(tmp_path.rglob("*.json"))


def test_check_model_names_the_differing_field():
    model = read_model_config(TINY)
    call = CallCost(launch=0.0, fixed=0.0, row=0.0, pair=0.0, context=0.0, source=0.0)
    profiled = CostModel(machine="m", chunk=call, push=call, fit={"model": model_shape(model)})
    check_model(profiled, model)
    check_model(profiled, replace(model, rope_theta=1.0, tied=not model.tied))
    check_model(default_cost(model, "cpu"), replace(model, num_layers=7))
    for name, value in model_shape(model).items():
        with pytest.raises(UsageError, match=rf"{name} {value}, this model has {value + 1};"):
            check_model(profiled, replace(model, **{name: value + 1}))
    for bad in (3, {}):
        with pytest.raises(UsageError, match=r"profile"):
            check_model(replace(profiled, fit={"model": bad}), model)


def test_qwen3_8b_with_four_layers_has_the_real_shape(data_dir):
    real = read_model_config(data_dir / "hf_configs" / "Qwen3-8B.json")
    assert read_model_config(ROOT / "configs" / "qwen3_8b_4layers.json") == replace(real, num_layers=4)


def test_shipped_profile_config():
    """32 shapes at most, padded as the GPU's kernels like it; paths are relative to the repository."""
    config = load_config(ROOT / "configs" / "profile_qwen3_8b.toml")
    assert (ROOT / str(config.model.hf_config)).is_file()
    assert (config.model.dtype, config.engine.budget, config.engine.padding) == ("bf16", 16384, 128)
