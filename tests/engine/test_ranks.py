"""Data parallelism in one process: what ranks compute of a batch, one after the other, adds up to the whole batch."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from megatron_dta.config import OptimizerSection
from megatron_dta.data.samples import Sample
from megatron_dta.engine.base import StepResult
from megatron_dta.engine.batch import Scope, merged_metrics, per_sequence, sample_advantages, scope_of, term_index
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.errors import UsageError
from megatron_dta.rl import objectives
from megatron_dta.rl.terms import Loss, Objective, Terms
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.plan import Plan, StageProgram
from megatron_dta.tree.planner import Task, plan_batch
from tests.batches import SHAPES, batch, grad_error, step, tiny, trained
from tests.forests import random_assignment, random_batch

EXACT = 1e-9
RANKS = (2, 3, 5)
GRPO = {
    name: objectives.grpo(clip_low=0.1, clip_high=0.3, kl_coef=0.2, normalizer=name)
    for name in ("token_mean", "sequence_mean")
}


@dataclass(frozen=True, kw_only=True)
class Together:
    """What all ranks did together."""

    results: list[StepResult]
    plans: list[Plan]
    grads: dict[str, torch.Tensor]
    logprobs: list[np.ndarray]
    """By sample of the whole batch."""
    scope: Scope

    @property
    def metrics(self) -> dict[str, float]:
        return merged_metrics([result.totals for result in self.results], self.scope.num_terms)


def columns_of(samples):
    return [s.tokens for s in samples], [s.loss_mask for s in samples], [s.identity for s in samples]


def program_for(engine: TreeEngine, samples, task: Task) -> tuple[list[Sample], StageProgram]:
    """Return a task's samples and what its rank runs."""
    own = [samples[i] for i in task.sequences.tolist()]
    return own, engine.program(task, own)


def tasks_of(engine: TreeEngine, samples, ranks: int, together: int = 1) -> tuple[Task, ...]:
    settings = replace(engine.settings, ranks=ranks, together=together)
    return plan_batch(build_outline(*columns_of(samples)), settings).tasks


def with_advantages(samples: list[Sample]) -> list[Sample]:
    """Fill in advantages from whole groups, as they are before samples are spread."""
    return [replace(s, advantage=a) for s, a in zip(samples, sample_advantages(samples))]


def run_ranks(engine: TreeEngine, samples, objective: Objective, tasks, *, own_scope: bool = False) -> Together:
    """Train the tasks one after the other into the same gradients; `own_scope` takes each rank for the whole step."""
    model, scope = engine.model, scope_of(samples)
    model.zero_grad(set_to_none=True)
    results, plans = [], []
    logprobs: list[np.ndarray] = [np.zeros(0)] * len(samples)
    for task in tasks:
        own, program = program_for(engine, samples, task)
        results.append(engine.train_batch(own, objective, scope=scope_of(own) if own_scope else scope, plan=program))
        plans.append(program.plans[0])
        rows = per_sequence(own, term_index(own), results[-1].term_logprobs.numpy())
        for i, row in zip(task.sequences.tolist(), rows):
            logprobs[i] = row
    return Together(results=results, plans=plans, grads=take_grads(model), logprobs=logprobs, scope=scope)


def take_grads(model) -> dict[str, torch.Tensor]:
    """Return every parameter's gradient and clear it; zeros where there is none."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


@cache
def expected_of(shape: str, normalizer: str):
    """Return the odd batch of a name with what each of its sequences alone gives."""
    samples = with_advantages(batch(shape_of(shape)))
    result, grads = step(FlatEngine(tiny()), samples, GRPO[normalizer])
    logprobs = per_sequence(samples, term_index(samples), result.term_logprobs.numpy())
    return samples, result.metrics, grads, logprobs


def shape_of(shape: str) -> list[list[int]]:
    if not shape.startswith("random"):
        return SHAPES[shape]
    return [t.tolist() for t in random_batch(np.random.default_rng(int(shape.split()[1])), tagged=False).tokens]


def assert_equal(got: Together, metrics, grads, logprobs) -> None:
    assert grad_error(got.grads, grads) < EXACT
    assert got.metrics == pytest.approx(metrics, abs=EXACT)
    for a, b in zip(got.logprobs, logprobs):
        np.testing.assert_allclose(a, b, atol=EXACT)


@pytest.mark.parametrize("shape", [*SHAPES, "random 1", "random 3"])
def test_ranks_add_up_to_the_whole_batch(shape):
    """C01, C03: as many ranks as there are, ranks without a sequence, groups that run equally many calls."""
    for turn, ranks in enumerate(RANKS):
        for together in (1, ranks):
            normalizer = list(GRPO)[(turn + together) % 2]
            samples, *expected = expected_of(shape, normalizer)
            engine = TreeEngine(tiny(), budget=(5, 3, 6)[turn], multiple=(1, 1, 2)[turn], poison_cache=True)
            got = run_ranks(engine, samples, GRPO[normalizer], tasks_of(engine, samples, ranks, together))
            assert_equal(got, *expected)
            assert sum(result.sequence_tokens for result in got.results) == sum(len(s.tokens) for s in samples)
            if together > 1:
                assert len({tuple(op.kind for op in calls(plan)) for plan in got.plans}) == 1


def calls(plan: Plan):
    return [op for op in plan.operations if op.kind in ("push", "forward")]


def test_idle_calls_of_a_group_change_nothing():
    """Ranks of unlike trees: some of them push nothing and run chunks of padding, and all log-probs of a sweep hold."""
    long = [[1, 2, 3, 4, 5, 6, 7, k, k + 1] for k in range(6)]
    samples = with_advantages(batch([*long, [8, 9, 10], [11, 12]]))
    _, expected = step(FlatEngine(tiny()), samples, GRPO["sequence_mean"])
    swept = FlatEngine(tiny()).forward_batch(samples)
    engine = TreeEngine(tiny(), budget=4, multiple=2, poison_cache=True)
    padding_pushes = padding_chunks = 0
    for ranks in RANKS:
        tasks = tasks_of(engine, samples, ranks, ranks)
        got = run_ranks(engine, samples, GRPO["sequence_mean"], tasks)
        assert grad_error(got.grads, expected) < EXACT
        padding_pushes += sum(len(push.tokens) == 0 for plan in got.plans for push in plan.pushes)
        padding_chunks += sum(len(chunk.tokens) == 0 for plan in got.plans for chunk in plan.chunks)
        for task in tasks:
            own, program = program_for(engine, samples, task)
            for i, row in zip(task.sequences.tolist(), engine.forward_batch(own, plan=program)):
                np.testing.assert_allclose(row, swept[i], atol=EXACT)
    assert padding_pushes
    assert padding_chunks


def test_identity_tags_on_ranks():
    """A35: equal ids with other tags stay apart on every rank, whichever of them have tags at all."""
    for seed in range(4):
        drawn = random_batch(np.random.default_rng(seed), tagged=True)
        samples = with_advantages(batch([t.tolist() for t in drawn.tokens]))
        samples = [replace(s, identity=tag) for s, tag in zip(samples, drawn.identities)]
        _, expected = step(FlatEngine(tiny()), samples, GRPO["token_mean"])
        engine = TreeEngine(tiny(), budget=4, poison_cache=True)
        got = run_ranks(engine, samples, GRPO["token_mean"], tasks_of(engine, samples, 3))
        assert grad_error(got.grads, expected) < EXACT


OBJECTIVES = {"sft": objectives.sft(), "grpo": objectives.grpo(), "kl": GRPO["token_mean"]}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_c02_a_rank_without_a_sequence_runs_and_changes_nothing(objective):
    """Gradients are there for every parameter and all zero; no metric of the step knows about the rank."""
    samples = with_advantages(batch([[1, 2, 3, 4]], p_trained=1.0, ref_logprobs=None))
    if objective.needs_ref_logprobs:
        samples = [replace(s, ref_logprobs=-np.ones(4)) for s in samples]
    alone, _ = step(TreeEngine(tiny()), samples, objective)
    for engine in (TreeEngine(tiny(), poison_cache=True), TreeEngine(tiny(), budget=8, multiple=8, poison_cache=True)):
        busy, idle = sorted(tasks_of(engine, samples, 2), key=lambda task: -len(task.sequences))
        own, program = program_for(engine, samples, idle)
        (plan,) = program.plans
        assert (len(own), len(plan.chunks), len(plan.pushes)) == (0, 1, 0)
        engine.model.zero_grad(set_to_none=True)
        result = engine.train_batch(own, objective, scope=scope_of(samples), plan=program)
        for name, parameter in engine.model.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad == 0).all(), name
        engine.model.zero_grad(set_to_none=True)
        assert (result.num_terms, result.sequence_tokens, result.executed_tokens) == (0, 0, 0)
        assert result.totals == {"value": 0.0, "sums": {}, "maxima": {}}
        assert engine.forward_batch(own, plan=program) == []
        got = run_ranks(engine, samples, objective, [idle, busy, idle])
        assert got.metrics == pytest.approx(alone.metrics, abs=1e-12)


def test_a_step_without_a_trained_token_runs_on_no_rank():
    samples = [trained([1, 2, 3], [0, 0, 0], str(i), advantage=1.0) for i in range(3)]
    engine = TreeEngine(tiny())
    for task in tasks_of(engine, samples, 5):
        own, program = program_for(engine, samples, task)
        engine.model.zero_grad(set_to_none=True)
        result = engine.train_batch(own, objectives.grpo(), scope=scope_of(samples), plan=program)
        assert (result.executed_tokens, result.metrics) == (0, {"loss": 0.0})
        assert all(p.grad is None for p in engine.model.parameters())


def test_kl_is_reported_for_all_ranks_or_not_at_all():
    """A sample without reference log-probs: the KL of the ranks that have them all is not the step's."""
    samples = with_advantages(batch(SHAPES["several trees"], p_trained=1.0))
    samples[0] = replace(samples[0], ref_logprobs=None)
    alone, _ = step(TreeEngine(tiny()), samples, objectives.grpo())
    engine = TreeEngine(tiny())
    tasks = tasks_of(engine, samples, 3)
    for order in (tasks, tasks[::-1]):
        got = run_ranks(engine, samples, objectives.grpo(), order)
        assert any("kl" in result.totals["sums"] for result in got.results)
        assert got.metrics == pytest.approx(alone.metrics, abs=EXACT)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", ["siblings", "comb", "duplicates", "prefixes", "ragged"])
def test_copied_prefixes_are_exact(shape, seed):
    """A task whose sequences lie in parts that share nothing, in any legal chunks of them."""
    rng = np.random.default_rng(seed)
    samples = with_advantages(batch(SHAPES[shape]))
    parts = rng.permutation(np.arange(len(samples)) % 3).astype(np.int32)
    forest = build_forest(*columns_of(samples), parts=parts)
    assert forest.num_tokens > build_forest(*columns_of(samples)).num_tokens, "nothing is copied"
    engine = TreeEngine(tiny(), poison_cache=True)
    (task,) = tasks_of(engine, samples, 1)
    task = replace(
        task,
        parts=parts,
        run_length=np.ones(forest.num_tokens, np.int64),
        run_chunk=random_assignment(forest, rng, 4),
        capacity=forest.num_tokens,
        push_capacity=3,
    )
    result, expected = step(FlatEngine(tiny()), samples, GRPO["sequence_mean"])
    got = run_ranks(engine, samples, GRPO["sequence_mean"], [task])
    assert_equal(got, result.metrics, expected, FlatEngine(tiny()).forward_batch(samples))
    assert got.results[0].executed_tokens == forest.num_tokens


def stub_loss(terms: Terms) -> Loss:
    """Lose each term's advantage, with the log-prob's gradient: denominators show in both."""
    return Loss(value=terms.weighted_sum(terms.advantages + terms.logprobs - terms.logprobs.detach()))


def test_a21_denominators_span_all_ranks():
    """100 tokens at 2.0 on one rank and 900 at 0.5 on the other are 0.65; each rank's own denominators give 2.5."""
    rng = np.random.default_rng(0)
    samples = [
        trained(rng.integers(0, 13, length + 1), [0] + [1] * length, str(length), advantage=value)
        for length, value in ((100, 2.0), (900, 0.5))
    ]
    objective = Objective(name="stub", function=stub_loss, needs_advantages=True)
    engine = TreeEngine(tiny())
    tasks = tasks_of(engine, samples, 2)
    assert [len(task.sequences) for task in tasks] == [1, 1]
    _, expected = step(FlatEngine(tiny()), samples, objective)
    together = run_ranks(engine, samples, objective, tasks)
    assert together.metrics["loss"] == pytest.approx(0.65, abs=1e-12)
    assert grad_error(together.grads, expected) < EXACT
    apart = run_ranks(engine, samples, objective, tasks, own_scope=True)
    assert apart.metrics["loss"] == pytest.approx(2.5, abs=1e-12)
    assert grad_error(apart.grads, expected) > 0.1


def test_a23_who_holds_what_changes_nothing():
    """Eight unequal sequences, dealt to two ranks in any way: the same gradient to 1e-12."""
    rng = np.random.default_rng(0)
    prompt = [1, 2, 3]
    samples = with_advantages(batch([prompt[: k % 4] + rng.integers(0, 13, 2 + 3 * k).tolist() for k in range(8)]))
    engine = TreeEngine(tiny(), budget=16)
    runs = []
    for _ in range(4):
        order = rng.permutation(8)
        shuffled = [samples[i] for i in order]
        tasks = tasks_of(engine, shuffled, 2)
        runs.append(run_ranks(engine, shuffled, GRPO["sequence_mean"], tasks))
        # not what the planner would choose: the first five, then the last three
        for half in (shuffled[:5], shuffled[5:]):
            engine.train_batch(half, GRPO["sequence_mean"], scope=scope_of(samples))
        assert grad_error(take_grads(engine.model), runs[0].grads) < 1e-12
    for run in runs[1:]:
        assert grad_error(run.grads, runs[0].grads) < 1e-12
        assert run.metrics == pytest.approx(runs[0].metrics, abs=1e-12)


def test_a36_shares_of_a_batch_are_one_update():
    """As 1 and as 5 shares: the same learning rates, updates, samples and weights."""
    samples = with_advantages(batch(SHAPES["several trees"]))
    config = OptimizerSection(lr=1e-2, schedule="cosine", warmup_updates=2, eps=1e-4)
    start = [p.detach().clone() for p in tiny().parameters()]
    runs = []
    for ranks in (1, 5):
        engine = TreeEngine(tiny(), budget=6)
        optimizer = MasterAdamW(tiny(), config, total_updates=4)
        rates, consumed = [], 0
        for _ in range(4):
            for task in tasks_of(engine, samples, ranks):
                own, program = program_for(engine, samples, task)
                engine.train_batch(own, GRPO["token_mean"], scope=scope_of(samples), plan=program)
                consumed += len(own)
            rates.append(optimizer.step()["lr"])
        optimizer.release()
        runs.append((rates, optimizer.num_updates, consumed, [p.detach().clone() for p in tiny().parameters()]))
        with torch.no_grad():
            for parameter, old in zip(tiny().parameters(), start):
                parameter.copy_(old)
    assert runs[0][:3] == runs[1][:3] == (pytest.approx([5e-3, 1e-2, 1e-2, 5e-3]), 4, 4 * len(samples))
    for a, b, old in zip(runs[0][3], runs[1][3], start):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        assert (a != old).any()


@pytest.mark.parametrize("change", ["order", "ids", "mask", "fewer"])
def test_a_plan_of_other_samples_is_refused(change):
    """Its edges would be scored against tokens of other sequences, and gradients go to the wrong weights."""
    first, second = batch([[1, 2, 3, 4], [1, 2, 5, 6]], p_trained=1.0)
    engine = TreeEngine(tiny())
    plan = engine.plan([first, second])
    other = {
        "order": [second, first],
        "ids": [first, replace(second, tokens=np.array([1, 2, 5, 7], np.int32))],
        "mask": [first, replace(second, loss_mask=np.array([False, False, True, True]))],
        "fewer": [first],
    }[change]
    for refused in (
        lambda: engine.train_batch(other, objectives.sft(), plan=plan),
        lambda: engine.forward_batch(other, plan=plan),
    ):
        with pytest.raises(UsageError, match="the plan was made for other samples"):
            refused()
    assert all(p.grad is None for p in tiny().parameters())
    copies = [replace(s, tokens=s.tokens.copy()) for s in (first, second)]
    assert len(engine.forward_batch(copies, plan=plan)) == 2
