"""The demo in small: the loop runs, learns nothing in two updates, and leaves files that the commands read."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_dta.cli import main as command
from megatron_dta.data.rollouts import read_rollouts

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def output(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    options = ["--sft-steps", "6", "--grpo-steps", "2", "--held-out", "8", "--output", str(folder)]
    assert demo.main(options) == 0
    return folder


def test_files(output):
    assert (output / "reward.png").stat().st_size > 1000
    assert len(json.loads((output / "rewards.json").read_text())) == 2
    samples = read_rollouts(output / "rollouts.jsonl")
    assert len(samples) == 16 * 8
    assert len({s.group_id for s in samples}) == 16


def test_next_steps_run(output, tmp_path, capsys):
    """What the demo tells its reader to do next."""
    rollouts, model = f"{output}/rollouts.jsonl", f"{output}/model"
    assert command(["plan", rollouts]) == 0
    assert command(["verify", rollouts, "--model", model, "--dtype", "fp64", "--limit", "3"]) == 0
    config = str(ROOT / "configs" / "demo_grpo.toml")
    overrides = [f"data.rollouts={rollouts}", f"model.hf_folder={model}", f"train.output={tmp_path}", "train.steps=1"]
    assert command(["train", config, *overrides]) == 0
    assert "PASSED" in capsys.readouterr().out


def test_held_out_words_are_never_trained_on(demo):
    task = demo.Task(num_held_out=50, num_dev=50, num_train=2000)
    tested = {entry["answer"].lower() for entry in task.held_out + task.dev}
    assert len(tested) == 100
    assert not tested & {entry["answer"].lower() for entry in task.train_entries}


def test_only_the_full_answer_with_an_end_is_rewarded(demo):
    task = demo.Task(num_held_out=4, num_dev=4, num_train=10)
    entry = task.held_out[0]
    answer = demo.encode(entry["answer"])
    assert task.reward([*answer, demo.EOS], entry) == 1.0
    assert task.reward(answer, entry) == 0.0
    assert task.reward([*answer[:-1], demo.EOS], entry) == 0.0
    assert task.reward([], entry) == 0.0
