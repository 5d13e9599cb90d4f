"""The training loop: trees and flat training agree step by step, runs repeat, and nothing is lost on the way."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.config import Config, DataConfig, ModelSection, TrainSection, load_config
from megatron_dta.data.rollouts import write_jsonl
from megatron_dta.errors import UsageError
from megatron_dta.train import group_samples, shuffled_batches, train
from tests.batches import trained

TINY = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 29,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "initializer_range": 0.2,
}  # fmt: skip


def rollouts(num_groups=5, **given):
    """Groups of four with a common prompt, shared first turns and mixed rewards; group 1 trains nothing."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(0, 29, 8).tolist()
        turn = rng.integers(0, 29, 4).tolist()
        for k in range(4):
            tokens = [*prompt, *(turn if k < 3 else []), *rng.integers(0, 29, 3 + k).tolist()]
            mask = [0] * 8 + [int(group != 1)] * (len(tokens) - 8)
            fields = {"group_id": f"g{group}", "reward": float(k == 2)} | given
            samples.append(trained(tokens, mask, f"g{group}/{k}", **fields))
    return samples


@pytest.fixture
def config(tmp_path):
    """Write a config with its model and rollouts; return a function that loads it with overrides."""
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    write_jsonl(tmp_path / "rollouts.jsonl", rollouts())
    (tmp_path / "run.toml").write_text(
        f'[data]\nrollouts = "{tmp_path}/rollouts.jsonl"\n[model]\nhf_config = "{tmp_path}/model.json"\n'
        'dtype = "fp64"\n[engine]\nbudget = 12\n[optimizer]\nlr = 1e-2\n[train]\nsteps = 5\n'
    )
    return lambda *overrides: load_config(tmp_path / "run.toml", overrides)


def losses(records):
    return [(r["loss"], r.get("grad_norm", 0.0)) for r in records]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rl.inner_epochs=3", "data.groups_per_step=2"),
        ("rl.objective=sft", "rl.normalizer=sequence_mean", "optimizer.schedule=cosine"),
        ("data.form=turn", "data.groups_per_step=3", "rl.temperature=0.8"),
    ],
)
def test_tree_and_flat_agree_at_every_step(config, overrides):
    tree, flat = train(config(*overrides)), train(config(*overrides, "engine.mode=flat"))
    np.testing.assert_allclose(losses(tree), losses(flat), atol=1e-9)
    assert max(r.get("grad_norm", 0.0) for r in tree) > 1e-3
    assert [r["sequence_tokens"] for r in tree] == [r["sequence_tokens"] for r in flat]


def test_repeated_run_is_bit_equal(config):
    """B23, in fp32 with default settings."""
    runs = [train(config("model.dtype=fp32")) for _ in range(2)]
    assert losses(runs[0]) == losses(runs[1])


def test_first_inner_epoch_is_on_policy_and_the_next_is_not(config):
    """B07: the sweep and the first update see the same policy, bitwise."""
    records = train(config("rl.inner_epochs=2", "model.dtype=fp32"))
    moved = [r for r in records if "skipped" not in r and r["inner_epoch"] == 1]
    assert all(
        r["ratio_max"] == 1.0 and r["clip_fraction"] == 0.0
        for r in records
        if r["inner_epoch"] == 0 and r["trained_tokens"]
    )
    assert any(r["ratio_max"] != 1.0 for r in moved)


def test_group_without_a_trained_token_is_skipped(config):
    """A33, A36: no update, no Adam step; it is in the log."""
    records = train(config())
    skipped = [r for r in records if r.get("skipped")]
    assert len(skipped) == 1
    assert records[-1]["update"] == 4


def test_metrics_and_weights_are_written(config, tmp_path):
    """F15: lengths are those of responses; sequence and executed tokens are reported apart."""
    records = train(config(f"train.output={tmp_path}/out", "data.groups_per_step=5", "train.steps=1"))
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert lines == records
    samples = rollouts()
    response = [int(s.loss_mask.sum()) for s in samples]
    assert records[0]["response_tokens_mean"] == pytest.approx(np.mean(response))
    assert records[0]["response_tokens_max"] == max(response)
    assert records[0]["sequence_tokens"] == sum(len(s.tokens) for s in samples)
    assert records[0]["executed_tokens"] < records[0]["sequence_tokens"]
    assert sorted(p.name for p in (tmp_path / "out/model").iterdir()) == ["config.json", "model.safetensors"]


def test_written_weights_are_the_trained_ones(config, tmp_path):
    """Three updates, written, read: the fourth batch has the loss that it has in an unbroken run."""
    train(config(f"train.output={tmp_path}/out", "train.steps=3"))
    unbroken = train(config("train.steps=4"))
    read = train(replace_model(config("train.steps=4", "optimizer.lr=0.0"), tmp_path / "out/model"))
    assert read[3]["loss"] == unbroken[3]["loss"]
    assert read[0]["entropy"] != unbroken[0]["entropy"]


def replace_model(config, folder):
    return replace(config, model=replace(config.model, hf_config=None, hf_folder=str(folder)))


def test_every_epoch_has_every_group_once():
    groups = group_samples(rollouts(7))
    batches = shuffled_batches(groups, 3, seed=1)
    epochs = [[sample.group_id for _ in range(3) for sample in next(batches)] for _ in range(2)]
    assert all(sorted(epoch) == sorted(s.group_id for s in rollouts(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_recorded_rollouts(config, data_dir):
    """The shipped tiny config on tau-bench: fp64 trees equal flat training, and the gradient is not zero."""
    root = Path(__file__).parents[1]
    overrides = [
        f"data.rollouts={data_dir}/tau_airline_gpt4o.qwen3.npz", f"model.hf_config={root}/configs/tiny_qwen3.json",
        "data.truncate=4100", "train.steps=2", "model.dtype=fp64", "engine.budget=1024", "data.limit=1",
        "optimizer.lr=1e-3", "rl.objective=sft",
    ]  # fmt: skip
    shipped = root / "configs" / "tau_airline_tiny.toml"
    tree = train(load_config(shipped, overrides))
    flat = train(load_config(shipped, [*overrides, "engine.mode=flat"]))
    np.testing.assert_allclose(losses(tree), losses(flat), rtol=1e-9)
    assert all(r["grad_norm"] > 0 and r["reuse"] > 2 for r in tree)


def test_a_sample_that_a_later_step_would_refuse_is_refused_before_the_first(tmp_path):
    """One rollout is longer than the model has positions, in a batch that comes last: nothing is trained or written."""
    rows = [
        {"group_id": str(g), "sample_id": str(g), "tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "reward": 1.0}
        for g in range(4)
    ]
    rows[2] |= {"tokens": [1] * 9, "loss_mask": [0] + [1] * 8}
    rollouts, model = tmp_path / "rollouts.jsonl", tmp_path / "model.json"
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model.write_text(json.dumps(TINY | {"vocab_size": 8, "max_position_embeddings": 8}))
    config = Config(
        data=DataConfig(rollouts=str(rollouts)),
        model=ModelSection(hf_config=str(model), dtype="fp32"),
        train=TrainSection(output=str(tmp_path / "out")),
    )
    with pytest.raises(UsageError, match="sample 2: 9 tokens; the model has 8 positions"):
        train(config)
    assert not (tmp_path / "out").exists()
