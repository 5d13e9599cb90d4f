"""Failures that other stacks had, as behaviour of the engines."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dta.axes import Axes
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.errors import UsageError
from megatron_dta.mcore import head
from megatron_dta.rl import objectives
from megatron_dta.verify import random_objective, with_random_advantages
from tests.batches import SHAPES, VOCAB, batch, grad_error, step, tiny, trained

EXACT = 1e-9
GRPO = objectives.grpo()


def both(samples, objective, **options):
    flat, flat_grads = step(FlatEngine(tiny()), samples, objective)
    tree, grads = step(TreeEngine(tiny(), poison_cache=True, **options), samples, objective)
    assert tree.metrics == pytest.approx(flat.metrics, abs=EXACT)
    assert grad_error(grads, flat_grads) < EXACT
    return tree, grads


def test_log_probs_end_with_the_sequence():
    """A01, A30: one entry per token, the first undefined, none after the last."""
    samples = [trained([1, 2, 3, 4], [0, 1, 1, 1], "a"), trained([1, 2, 5], [0, 1, 1], "b")]
    tree = TreeEngine(tiny()).forward_batch(samples)
    flat = FlatEngine(tiny()).forward_batch(samples)
    for sample, got, expected in zip(samples, tree, flat):
        assert len(got) == len(sample.tokens)
        assert np.isnan(got[0])
        assert np.isfinite(got[1:]).all()
        np.testing.assert_allclose(got, expected, atol=EXACT)


def test_untrained_tokens_have_no_log_prob():
    got = TreeEngine(tiny()).forward_batch([trained([1, 2, 3, 4], [0, 0, 1, 0])])[0]
    assert np.isnan(got).tolist() == [True, True, False, True]


def test_opposite_advantages_on_a_shared_token_add_up():
    """A02: +1 and -2 on one trained token are worth -1 together."""
    shared = [trained([1, 2, 3], [0, 0, 1], name, advantage=a) for name, a in (("a", 1.0), ("b", -2.0))]
    single = [trained([1, 2, 3], [0, 0, 1], "a", advantage=-0.5), trained([1, 2, 3], [0, 0, 1], "b", advantage=-0.5)]
    _, two = both(shared, GRPO)
    _, one = both(single, GRPO)
    assert grad_error(two, one) < EXACT


def test_masks_differ_on_a_shared_token():
    """A03: masked in one rollout, trained in the other; then trained in both."""
    once = [trained([1, 2, 3, 4], [0, 0, 0, 1], "a"), trained([1, 2, 3, 5], [0, 0, 1, 1], "b")]
    assert both(once, objectives.sft())[0].num_terms == 3
    twice = [trained([1, 2, 3, 4], [0, 0, 1, 1], "a"), trained([1, 2, 3, 5], [0, 0, 1, 1], "b")]
    assert both(twice, objectives.sft())[0].num_terms == 4


def test_inner_end_of_a_prefix_is_trained():
    """A08: [1, 2, 3] inside [1, 2, 3, 4, 5], with other rewards, and both once more."""
    sequences = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3]]
    samples = [trained(s, [0] + [1] * (len(s) - 1), str(i), advantage=float(i - 1.5)) for i, s in enumerate(sequences)]
    result, _ = both(samples, GRPO)
    assert result.executed_tokens == 5


def test_duplicates_are_executed_once_and_weigh_three_times():
    """A10: the same sequence with advantages 1, 1, -1."""
    samples = [trained([1, 2, 3, 4], [0, 1, 1, 1], str(i), advantage=a) for i, a in enumerate([1.0, 1.0, -1.0])]
    result, grads = both(samples, objectives.grpo(normalizer="sequence_mean"))
    assert result.executed_tokens == 4
    _, single = both([trained([1, 2, 3, 4], [0, 1, 1, 1], advantage=1.0)], objectives.grpo(normalizer="sequence_mean"))
    assert grad_error({n: 3 * g for n, g in grads.items()}, single) < EXACT


@pytest.mark.parametrize("budget", ["whole", 3])
def test_prefix_embeddings_get_the_sum_over_branches(budget):
    """A12: three branches, one of them without loss."""
    prefix = [1, 2, 3, 4]
    samples = [trained([*prefix, 5, 6], [0, 0, 0, 0, 1, 1], "a", advantage=1.0)]
    samples += [trained([*prefix, 7, 8], [0, 0, 0, 0, 1, 1], "b", advantage=-0.3)]
    samples += [trained([*prefix, 9], [0] * 5, "c", advantage=2.0)]
    _, grads = both(samples, GRPO, budget=budget)
    rows = grads["embedding.word_embeddings.weight"][prefix]
    assert (rows.abs().sum(1) > 0).all()


@pytest.mark.parametrize("sequences", [[[1, 2, 3, 4, 5, 6], [1, 2, 9]], [[1, 2, 3, 4, 5, 6], [7, 8, 9]]])
def test_short_sequences_weigh_as_much_as_long_ones(sequences):
    """A25: in one tree or in two, the sequence mean gives each sequence the same weight."""
    samples = [trained(s, [0] + [1] * (len(s) - 1), str(i)) for i, s in enumerate(sequences)]
    result, _ = both(samples, objectives.sft(normalizer="sequence_mean"))
    alone = [both([s], objectives.sft())[0].metrics["loss"] for s in samples]
    assert result.metrics["loss"] == pytest.approx(np.mean(alone), abs=EXACT)


def test_kl_acts_without_advantages():
    """A32: with all advantages 0 the gradient is the KL's; without KL it is exactly zero."""
    samples = batch(SHAPES["ragged"], advantage=0.0)
    _, kl = both(samples, objectives.grpo(kl_coef=0.5), budget=5)
    assert max(float(g.abs().max()) for g in kl.values()) > 0
    _, none = both(samples, GRPO, budget=5)
    assert all((g == 0).all() for g in none.values())


def test_empty_response():
    """A33: a rollout without a trained token neither counts nor disturbs."""
    full = batch(SHAPES["siblings"], p_trained=1.0)
    empty = trained([1, 2, 3, 4, 5, 6, 1], [0] * 7, "empty", reward=1.0)
    result, _ = both([*full, empty], objectives.sft(normalizer="sequence_mean"))
    assert result.metrics["loss"] == pytest.approx(
        both(full, objectives.sft(normalizer="sequence_mean"))[0].metrics["loss"]
    )


@pytest.mark.parametrize("engine", [TreeEngine, FlatEngine])
def test_batch_of_empty_responses(engine):
    """A33, B11: no loss, no NaN, no gradient."""
    samples = [trained([1, 2, 3], [0, 0, 0], str(i), reward=1.0) for i in range(3)]
    result, grads = step(engine(tiny()), samples, GRPO)
    assert result.num_terms == 0
    assert result.metrics["loss"] == 0.0
    assert all((g == 0).all() for g in grads.values())
    assert all(np.isnan(lp).all() for lp in engine(tiny()).forward_batch(samples))


def test_tree_without_loss_beside_one_with():
    """B11: a tree that trains nothing leaves the gradient of the others alone."""
    training = batch(SHAPES["siblings"], p_trained=1.0)
    idle = [trained([9, 9, 9, 9], [0] * 4, f"idle{i}", reward=0.5) for i in range(2)]
    _, alone = both(training, objectives.sft(), budget=5)
    _, beside = both([*training, *idle], objectives.sft(), budget=5)
    assert grad_error(beside, alone) < EXACT


def test_padded_rows_stay_finite():
    """B10: padding sees only itself; nothing of it reaches a gradient."""
    samples = batch(SHAPES["ragged"])
    _, plain = step(TreeEngine(tiny(), budget=16), samples, GRPO)
    _, padded = step(TreeEngine(tiny(), budget=16, multiple=16, poison_cache=True), samples, GRPO)
    assert grad_error(padded, plain) < 1e-12


def test_entropy_is_not_touched_by_log_probs():
    """B03: an entropy bonus has the gradient that autograd gives a plain softmax."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (5, VOCAB))
    source, target = torch.tensor([0, 0, 2, 4]), torch.tensor([1, 5, 5, 0])
    logprob, entropy = head.edge_logprobs(hidden, weight, source, target, temperature=0.6, vocab_size=11)
    plain = (hidden @ weight[:11].T / 0.6).log_softmax(-1)
    plain_entropy = -(plain.exp() * plain).sum(-1)
    coefficients = torch.randn(4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(logprob, plain[source, target], atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-12, rtol=0)
    loss = logprob @ coefficients[0] + entropy @ coefficients[1]
    expected = plain[source, target] @ coefficients[0] + plain_entropy @ coefficients[1]
    for got, wanted in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))
    ):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


class Largest(TorchDispatchMode):
    """Remembers the most elements that any result had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_no_rows_by_vocabulary_tensor(monkeypatch):
    """D01: the largest tensor of the head is a block of logits or the weight, and results do not depend on blocks."""
    rows, vocabulary, hidden_size = 300, 512, 8
    torch.manual_seed(0)
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    source, target = torch.arange(rows), torch.randint(0, vocabulary, (rows,))

    def run(max_logits):
        monkeypatch.setitem(head.MAX_LOGITS, "cpu", max_logits)
        with Largest() as largest:
            logprob, entropy = head.edge_logprobs(
                hidden, weight, source, target, temperature=1.0, vocab_size=vocabulary
            )
            grads = torch.autograd.grad(logprob.sum() + entropy.sum(), (hidden, weight))
        return largest.numel, [logprob, entropy, *grads]

    whole, blocks = run(rows * vocabulary), run(8 * vocabulary)
    assert whole[0] == rows * vocabulary
    assert blocks[0] == 8 * vocabulary
    for a, b in zip(whole[1], blocks[1]):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_head_keeps_no_logits_for_backward():
    """D02: what is saved grows with rows x hidden, never with rows x vocabulary."""

    def saved(rows):
        sizes = []
        hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(640, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            head.edge_logprobs(
                hidden, weight, torch.arange(rows), torch.zeros(rows, dtype=torch.long), temperature=1.0, vocab_size=640
            )
        return sum(sizes)

    assert saved(200) - saved(100) < 100 * 20


def test_result_is_a_copy():
    """B17: metrics are numbers of their own."""
    result, _ = step(TreeEngine(tiny(), budget=5), batch(SHAPES["comb"]), GRPO)
    assert all(type(value) is float for value in result.metrics.values())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (trained([], []), "no tokens"),
        (trained([1, VOCAB], [0, 1]), f"token id {VOCAB}"),
        (trained([1, -1], [0, 1]), "token id -1"),
        (trained([1] * 8193, [0] + [1] * 8192), "8192 positions"),
        (trained([1, 2], [0, 1]), "neither reward nor advantage"),
    ],
)
def test_bad_samples_are_refused_before_anything_runs(sample, message):
    with pytest.raises(UsageError, match=message):
        TreeEngine(tiny()).train_batch([sample], GRPO)


def test_frozen_parameters_are_refused():
    """A40: by name; scoring does not need gradients and goes on."""
    parameter = dict(tiny().named_parameters())["decoder.final_layernorm.weight"].requires_grad_(False)
    try:
        with pytest.raises(UsageError, match=r"decoder.final_layernorm.weight is frozen"):
            TreeEngine(tiny()).train_batch(batch([[1, 2, 3]]), GRPO)
        TreeEngine(tiny()).forward_batch(batch([[1, 2, 3]]))
    finally:
        parameter.requires_grad_(True)


def test_flat_engine_refuses_a_split_model():
    """Every sequence alone needs the whole model; data-parallel ranks are fine, each has it."""
    for axes in (Axes(tensor=2), Axes(context=2), Axes(pipeline=2), Axes(expert=2)):
        with pytest.raises(UsageError, match=f"not on {re.escape(axes.describe())}; choose tree mode"):
            FlatEngine(replace(tiny(), axes=axes))
    FlatEngine(tiny())


def test_kl_without_reference_is_refused():
    with pytest.raises(UsageError, match="ref_logprobs is missing"):
        TreeEngine(tiny()).train_batch(batch([[1, 2, 3]], ref_logprobs=None), objectives.grpo(kl_coef=0.1))


def test_identity_keeps_equal_ids_apart():
    """A35: equal ids with other routes or modality are computed apart, with the same result."""
    samples = with_random_advantages(batch([[1, 2, 3, 4]] * 2))
    tags = [np.zeros(4, np.int64), np.array([0, 5, 5, 5])]
    apart = [type(s)(**{f: getattr(s, f) for f in s.__slots__} | {"identity": t}) for s, t in zip(samples, tags)]
    result, grads = step(TreeEngine(tiny()), apart, random_objective())
    assert result.executed_tokens == 7
    assert grad_error(grads, step(FlatEngine(tiny()), samples, random_objective())[1]) < EXACT


@pytest.mark.parametrize("name", ["loss_mask", "advantage", "old_logprobs", "ref_logprobs", "identity"])
def test_arrays_of_another_length_are_refused(name):
    """A17: an array per prediction instead of per token would train everything one token off."""
    sample = trained([1, 2, 3, 4], [0, 1, 1, 0], advantage=np.ones(4), old_logprobs=-np.ones(4))
    short = np.zeros(3, bool if name == "loss_mask" else np.float64)
    with pytest.raises(UsageError, match=rf"{name} has shape \(3,\), expected \(4,\)"):
        TreeEngine(tiny()).train_batch([replace(sample, **{name: short})], GRPO)


@pytest.mark.parametrize("name", ["advantage", "old_logprobs", "ref_logprobs"])
def test_nan_at_a_trained_token_is_refused(name):
    """A20: a missing log-prob is an error, not 0 and not on-policy; elsewhere it is what a sweep returns."""
    sample = trained([1, 2, 3], [0, 0, 1], **({"advantage": 1.0} | {name: np.array([np.nan, np.nan, -1.0])}))
    TreeEngine(tiny()).train_batch([sample], GRPO)
    with pytest.raises(UsageError, match=f"{name} is not finite"):
        TreeEngine(tiny()).train_batch([replace(sample, **{name: np.array([0.0, 0.0, np.nan])})], GRPO)


def test_masks_changed_in_place_are_planned_anew():
    samples = batch(SHAPES["ragged"], p_trained=0.3)
    engine = TreeEngine(tiny(), budget=5)
    engine.forward_batch(samples)
    for sample in samples:
        sample.loss_mask[1:] = sample.loss_mask[1:][::-1].copy()
    _, expected = step(FlatEngine(tiny()), samples, GRPO)
    assert grad_error(step(engine, samples, GRPO)[1], expected) < EXACT


def test_equal_content_is_planned_once():
    samples = batch(SHAPES["ragged"])
    engine = TreeEngine(tiny(), budget=5)
    assert engine.plan(samples) is engine.plan([replace(s, old_logprobs=None) for s in samples])
    engine.budget = 6
    (plan,) = engine.plan(samples).plans
    assert max(chunk.size for chunk in plan.chunks) == 6
