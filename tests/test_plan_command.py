"""The plan command as a user meets it: numbers of the planned schedule, its picture, a simulated cluster."""

import json
import re

import numpy as np
import pytest

from megatron_dta.cli import main
from megatron_dta.model_config import parse_model_config
from megatron_dta.plan_command import Layout, run_plan
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


WIDE = RAW | {"num_attention_heads": 12, "num_key_value_heads": 6, "num_hidden_layers": 8}
EXPERTS = WIDE | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(RAW))
    return file


@pytest.fixture
def wide_file(tmp_path):
    """Return a model that many axes divide."""
    file = tmp_path / "wide.json"
    file.write_text(json.dumps(WIDE))
    return file


@pytest.fixture
def equal_rollouts(tmp_path):
    """Return eight rollouts of four tokens that share nothing."""
    file = tmp_path / "equal.jsonl"
    lines = [
        {"group_id": "g", "sample_id": str(k), "tokens": [k, k, k, k], "loss_mask": [0, 1, 1, 1]} for k in range(8)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def planned(tmp_path, rollouts, model, layout: Layout, budget: int = 4) -> dict:
    run_plan(str(rollouts), budget=budget, layout=layout, model=str(model), json_file=str(tmp_path / "layout.json"))
    return json.loads((tmp_path / "layout.json").read_text())


def test_axes_are_in_padding_and_devices(rollouts, wide_file, tmp_path):
    """A39: block 128 and six shards give 384 rows; fp8 asks for 16 on each shard."""
    axes = ("--tp", 3, "--cp", 2, "--padding", 128, "--config", wide_file)
    numbers = numbers_of(tmp_path, rollouts, *axes)
    assert (numbers["schedule"]["padding"], numbers["schedule"]["devices"]) == (384, 6)
    assert numbers["plan"]["rows"] == 384
    assert numbers_of(tmp_path, rollouts, "--tp", 3, "--cp", 2, "--fp8", "fp8")["schedule"]["padding"] == 96


def test_a_pipeline_waits_while_it_fills_and_drains(rollouts, wide_file, tmp_path, capsys):
    one, two = (numbers_of(tmp_path, rollouts, "--config", wide_file, "--pp", pp)["schedule"] for pp in (1, 2))
    assert one["bubble"] == one["dense_bubble"] == 0
    assert one["step_seconds"] == one["slowest_seconds"]
    assert two["slowest_seconds"] < one["slowest_seconds"]
    assert two["step_seconds"] == pytest.approx(two["slowest_seconds"] / (1 - two["bubble"]))
    shown = capsys.readouterr().out
    assert shown.count("stages wait") == 1
    assert f"{two['bubble']:.2%}" in shown


@pytest.mark.parametrize(("pipeline", "virtual", "in_flight", "parts"), [(2, 1, 2, 2), (4, 1, 4, 4), (4, 2, 8, 11)])
def test_equal_chunks_wait_as_in_the_textbook(pipeline, virtual, in_flight, parts, equal_rollouts, wide_file, tmp_path):
    """Stage 0 holds activations of `parts` of the P * V parts of a chunk; `in_flight` chunks read their states."""
    one = planned(tmp_path, equal_rollouts, wide_file, Layout())
    numbers = planned(tmp_path, equal_rollouts, wide_file, Layout(pipeline=pipeline, virtual=virtual))
    schedule, stages = numbers["schedule"], pipeline - 1
    assert schedule["chunks"] == [8]
    assert schedule["bubble"] == pytest.approx(stages / (8 * virtual + stages), rel=1e-9)
    assert schedule["dense_bubble"] == pytest.approx(schedule["bubble"], rel=1e-9)
    assert numbers["plan"]["rows_in_flight"] == 4 * in_flight
    ratio = numbers["memory_bytes"]["activations"] / one["memory_bytes"]["activations"]
    assert ratio == pytest.approx(parts / (pipeline * virtual), rel=1e-3)


def test_ranks_that_share_experts_run_equally_many_chunks(rollouts, tmp_path):
    numbers = numbers_of(tmp_path, rollouts, "--ranks", 4, "--ep", 4, "--budget", 2)
    assert len(set(numbers["schedule"]["chunks"])) == 1


def test_experts_are_shared_within_replicas_first(equal_rollouts, tmp_path):
    """With two context ranks a replica, four expert ranks are two replicas: chunks are even in pairs, not in fours."""
    model = tmp_path / "experts.json"
    model.write_text(json.dumps(EXPERTS))
    chunks = planned(tmp_path, equal_rollouts, model, Layout(ranks=6, context=2, expert=4))["schedule"]["chunks"]
    assert chunks[::2] == chunks[1::2]
    assert set(chunks) == {1, 2}


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (Layout(ranks=2, expert=2), 2),
        (Layout(ranks=2, tensor=2, expert=2), 4),
        (Layout(ranks=2, tensor=2, expert=2, expert_tensor=1), 2),
        (Layout(ranks=2, pipeline=2, expert=2), 4),
    ],
)
def test_weights_of_experts_are_over_their_own_ranks(layout, shared, equal_rollouts, tmp_path):
    """Expert weights: 8 layers, 8 experts, 3 matrices of 4 x 12, in bf16."""
    model = tmp_path / "experts.json"
    model.write_text(json.dumps(EXPERTS))
    experts = 8 * 8 * 3 * 4 * 12 * 2
    whole = planned(tmp_path, equal_rollouts, model, Layout())["memory_bytes"]["weights"]
    weights = planned(tmp_path, equal_rollouts, model, layout)["memory_bytes"]["weights"]
    dense = (whole - experts) / (layout.tensor * layout.pipeline)
    assert weights == pytest.approx(dense + experts / shared, abs=4)


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


def test_a_simulated_cluster_has_axes_too(rollouts, wide_file, tmp_path):
    """Ranks that share experts come in multiples; stages wait in every step."""
    asked = ("--config", wide_file, "--simulate", 4, "--budget", 4)
    one, two = (numbers_of(tmp_path, rollouts, *asked, "--pp", pp)["steps"][0] for pp in (1, 2))
    assert (one["devices"], two["devices"]) == (4, 8)
    assert two["efficiency"] < one["efficiency"]
    (shared,) = numbers_of(tmp_path, rollouts, "--simulate", 4, "--budget", 4, "--ep", 4)["steps"]
    assert shared["devices"] == 4


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
        (["--tp", "0"], "parallel axis tensor is 0; expected a positive whole number"),
        (["--ranks", "6", "--ep", "4"], "6 data-parallel ranks do not divide into groups of 4"),
        (["--cost", "absent.json"], "absent.json: cannot read the cost model"),
        (["--simulate", "0", "2"], "ranks to simulate are [0, 2]"),
        (["--simulate", "3", "--ep", "2", "--ranks", "2"], "expected positive multiples of 2 that share experts"),
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


@pytest.mark.parametrize(
    ("axes", "rule"),
    [
        (("--tp", "2"), "refused: query or key/value heads not a multiple of tensor"),
        (("--pp", "4"), "refused: layers not a multiple of pipeline x virtual"),
        (("--ep", "2", "--ranks", "2"), "refused: expert parallelism of a dense model"),
    ],
)
def test_a_layout_that_training_refuses_is_not_planned(axes, rule, rollouts, model_file, capsys):
    assert main(["plan", str(rollouts), "--config", str(model_file), *axes]) == 2
    assert rule in capsys.readouterr().err
