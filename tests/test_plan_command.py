"""The plan command as a user meets it: numbers of the planned schedule, its picture, a simulated cluster."""

import json
import re

import numpy as np
import pytest

from megatron_dta.cli import main
from megatron_dta.model_config import parse_model_config
from megatron_dta.tree.cost import default_cost
from megatron_dta.tree.outline import build_outline, outline_of
from megatron_dta.tree.planner import Settings, plan_batch
from megatron_dta.tree.simulate import JITTER, repeated
from tests.forests import SHAPES, random_batch

SEQUENCES = [[1, 2, 3], [1, 2, 4, 5]]
MASKS = [[0, 1, 1], [0, 1, 1, 1]]


@pytest.fixture
def rollouts(tmp_path):
    lines = [
        {"group_id": "g", "sample_id": str(i), "tokens": tokens, "loss_mask": mask}
        for i, (tokens, mask) in enumerate(zip(SEQUENCES, MASKS))
    ]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


RAW = {
    "model_type": "qwen3",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(RAW))
    return file


def numbers_of(tmp_path, rollouts, *arguments) -> dict:
    report = tmp_path / "plan.json"
    assert main(["plan", str(rollouts), *map(str, arguments), "--json", str(report)]) == 0
    return json.loads(report.read_text())


def test_numbers_of_one_rank(rollouts, model_file, tmp_path, capsys):
    numbers = numbers_of(tmp_path, rollouts, "--budget", 2, "--config", model_file, "--dtype", "fp32")
    assert list(numbers) == ["plan", "schedule", "work", "memory_bytes"]
    plan, schedule = numbers["plan"], numbers["schedule"]
    assert (plan["sequence_tokens"], plan["tree_tokens"], plan["trained_tokens"]) == (7, 5, 5)
    assert schedule["chunks"] == [plan["chunks"]]
    assert (schedule["imbalance"], schedule["copied_share"], schedule["unsplit_tokens"]) == (1, 0, 5)
    assert schedule["bound_seconds"] <= schedule["slowest_seconds"] == schedule["step_seconds"]
    assert "7 -> 5 (1.40x)" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "plan.json", "rollouts.jsonl"]


def test_without_a_model_there_is_no_work_and_no_memory(rollouts, tmp_path):
    numbers = numbers_of(tmp_path, rollouts, "--budget", "whole", "--padding", 128)
    assert list(numbers) == ["plan", "schedule"]
    assert (numbers["plan"]["rows"], numbers["plan"]["tree_tokens"]) == (128, 5)
    assert numbers["schedule"]["padded_share"] == 1 - 5 / 128


def test_several_ranks_compute_the_shared_path_each(rollouts, model_file, tmp_path):
    numbers = numbers_of(tmp_path, rollouts, "--ranks", 2, "--config", model_file)
    assert numbers["schedule"]["chunks"] == [1, 1]
    assert numbers["plan"]["tree_tokens"] == 7
    assert numbers["schedule"]["copied_share"] == pytest.approx(2 / 5)


def test_axes_are_in_padding_and_prediction(rollouts, model_file, tmp_path):
    """A39: block 128 and six shards; devices multiply; a pipeline pays for filling and draining."""
    axes = ("--tp", 3, "--cp", 2, "--padding", 128, "--config", model_file)
    numbers = numbers_of(tmp_path, rollouts, *axes)
    assert (numbers["schedule"]["padding"], numbers["schedule"]["devices"]) == (384, 6)
    assert numbers["plan"]["rows"] == 384
    one, two = (numbers_of(tmp_path, rollouts, "--config", model_file, "--pp", pp)["schedule"] for pp in (1, 2))
    assert two["step_seconds"] > two["slowest_seconds"]
    assert two["slowest_seconds"] < one["slowest_seconds"]


def test_ranks_that_share_experts_run_equally_many_chunks(rollouts, tmp_path):
    numbers = numbers_of(tmp_path, rollouts, "--ranks", 4, "--ep", 4, "--budget", 2)
    assert len(set(numbers["schedule"]["chunks"])) == 1


def test_html_is_one_page_with_the_facts(rollouts, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["plan", str(rollouts), "--ranks", "2", "--html", str(page)]) == 0
    text = page.read_text()
    assert "rollouts.jsonl" in text
    assert "7 -&gt; 7" in text
    assert not re.search(r"(src|href)=.?https?:", text)


def test_simulation_has_a_line_for_every_number_of_ranks(rollouts, model_file, tmp_path):
    numbers = numbers_of(tmp_path, rollouts, "--config", model_file, "--simulate", 2, 8, "--budget", 4)
    assert [step["ranks"] for step in numbers["steps"]] == [2, 8]
    assert all(0 < step["efficiency"] <= 1 and step["imbalance"] >= 1 for step in numbers["steps"])
    repeats = numbers_of(tmp_path, rollouts, "--simulate", 2, "--repeat", 3)
    assert repeats["copies"] == 3


@pytest.mark.parametrize("name", SHAPES)
def test_one_copy_is_the_batch_and_more_share_only_what_all_share(name):
    outline = build_outline([np.array(t, np.int32) for t in SHAPES[name]])
    same, more = repeated(outline, 1), repeated(outline, 4)
    for field in ("length", "depth", "parent", "sources", "last"):
        np.testing.assert_array_equal(getattr(same, field), getattr(outline, field))
    assert len(more.last) == 4 * len(outline.last)
    assert (more.parent < np.arange(more.num_nodes)).all()
    above = more.parent >= 0
    ends = more.depth + more.length
    assert (more.depth[above] == ends[more.parent[above]]).all(), "a child starts where its parent ends"
    shared = 4 * outline.num_nodes - more.num_nodes
    leaf = outline.end - np.arange(outline.num_nodes) == 1
    assert shared % 3 == 0
    assert not leaf[: shared // 3].any(), "a copy has paths of its own"
    slack = np.ceil(JITTER * outline.length.max()) + 1
    assert abs(more.length.max() - outline.length.max()) <= slack


@pytest.mark.parametrize("seed", range(8))
def test_a_repeated_batch_is_planned(seed):
    """Several trees, tags, duplicates: every sequence of every copy has one rank."""
    outline = outline_of(random_batch(np.random.default_rng(seed)).forest())
    batch = repeated(outline, 5)
    cost = default_cost(parse_model_config(RAW), "h200")
    plan = plan_batch(batch, Settings(cost=cost, budget=16, ranks=3))
    assert sorted(i for task in plan.tasks for i in task.sequences.tolist()) == list(range(5 * len(outline.last)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget is 0; expected 'whole' or at least 1 tokens"),
        (["--budget", "100", "--padding", "128"], "budget is 100; expected 'whole' or at least 128 tokens"),
        (["--padding", "0"], "padding multiple is 0; expected a positive whole number"),
        (["--config", "absent/config.json"], "absent/config.json: cannot read the model config"),
        (["--json", "absent/plan.json"], "absent/plan.json: cannot write"),
        (["--html", "absent/plan.html"], "absent/plan.html: cannot write"),
        (["--ranks", "0"], "ranks is 0; expected at least 1"),
        (["--tp", "0"], "tp is 0; expected at least 1"),
        (["--ranks", "6", "--ep", "4"], "6 data-parallel ranks do not divide into groups of 4"),
        (["--cost", "absent.json"], "absent.json: cannot read the cost model"),
        (["--simulate", "0", "2"], "ranks to simulate are [0, 2]"),
        (["--simulate", "3", "--ep", "2", "--ranks", "2"], "expected positive multiples of ep = 2"),
        (["--simulate", "2", "--repeat", "0"], "repeat is 0; expected at least 1"),
        (["--repeat", "2"], "repeat is 2 without simulate"),
        (["--simulate", "2", "--html", "x.html"], "simulate draws nothing"),
        (["--state-limit", "-5"], "state_limit is -5; expected a number of cached states, at least 0"),
        (["--budget", "2", "--state-limit", "1"], "state_limit is 1; the fewest cached states found"),
    ],
)
def test_f17_bad_calls_are_refused_in_one_line(rollouts, capsys, arguments, message):
    assert main(["plan", str(rollouts), *arguments]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]
