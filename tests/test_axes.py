"""How a job is laid out: what is refused and why, and that ranks are numbered as Megatron-Core numbers them."""

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_dta.axes import RULES, Axes, check_axes, violations
from megatron_dta.checkpoint.open_model import TINY
from megatron_dta.config import load_config
from megatron_dta.errors import UsageError
from megatron_dta.model_config import parse_model_config, read_model_config
from megatron_dta.train import train
from tests.control.spawn import run_torch
from tests.test_cli import ROLLOUTS

ROOT = Path(__file__).parents[1]
DENSE = parse_model_config(
    TINY
    | {"model_type": "qwen3", "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"intermediate_size": 24}
)
MOE = replace(DENSE, num_experts=6, experts_per_token=2, expert_ffn_size=12)

CASES = [
    ("processes not a multiple of", DENSE, Axes(tensor=2, pipeline=2), 6, 8),
    ("sequence parallelism without", DENSE, Axes(sequence=True), 2, Axes(tensor=2, sequence=True)),
    ("query or key/value heads not", replace(DENSE, num_kv_heads=2), Axes(tensor=4), 4, Axes(tensor=2)),
    ("query or key/value heads not", DENSE, Axes(tensor=3), 3, Axes(context=3, cp_comm="allgather")),
    ("a2a with key/value heads", DENSE, Axes(tensor=2, context=4), 8, Axes(tensor=2, context=4, cp_comm="allgather")),
    ("MLP columns not a multiple of tensor", replace(DENSE, ffn_size=25), Axes(tensor=2), 2, Axes(context=2)),
    (
        "MLP columns not a multiple of tensor",
        replace(MOE, num_experts=8, expert_ffn_size=13),
        *(Axes(tensor=2, sequence=True), 2, Axes(tensor=2, sequence=True, expert=2, expert_tensor=1)),
    ),
    ("layers not a multiple of", DENSE, Axes(pipeline=4, virtual=3), 4, Axes(pipeline=4, virtual=2)),
    ("virtual stages without pipeline stages", DENSE, Axes(virtual=2), 2, Axes(pipeline=2, virtual=2)),
    ("expert parallelism of a dense model", DENSE, Axes(expert=2), 2, Axes()),
    ("expert parallelism of a dense model", DENSE, Axes(expert_tensor=1), 2, Axes()),
    (
        "expert_tensor other than tensor without",
        MOE,
        *(Axes(tensor=2, sequence=True, expert_tensor=1), 2, Axes(tensor=2, sequence=True, expert=2, expert_tensor=1)),
    ),
    ("experts not a multiple of expert", MOE, Axes(expert=4), 4, Axes(expert=2)),
    ("mixture of experts with tensor but", MOE, Axes(tensor=2), 2, Axes(tensor=2, sequence=True)),
    ("expert x expert_tensor does not tile", MOE, Axes(context=2, expert=3), 6, Axes(context=2, expert=2)),
    ("expert x expert_tensor does not tile", MOE, Axes(pipeline=2, expert=6), 6, 12),
]
"""Start of a rule's name; a model, axes and processes that break it; axes or processes that do not."""


@pytest.mark.parametrize(("name", "model", "axes", "world", "right"), CASES)
def test_each_rule_is_told_first(name, model, axes, world, right):
    rule = next(violations(axes, model, world))
    assert rule.name.startswith(name)
    with pytest.raises(UsageError) as error:
        check_axes(axes, model, world)
    told = str(error.value)
    assert told.startswith(
        f"refused: {rule.name}. Got {world} process(es) for {axes.describe()}; the model has 8 layers"
    )
    assert told.endswith(f"Remedy: {rule.remedy}")
    better = (right, world - world % right.replica_size) if isinstance(right, Axes) else (axes, right)
    assert not list(violations(better[0], model, better[1]))


def test_every_rule_has_a_case():
    assert all(any(rule.name.startswith(name) for name, *_ in CASES) for rule in RULES)


def rows_after(header: str, text: str) -> list[str]:
    """Return the rows of the table in `text` that has this header."""
    rows = itertools.takewhile(lambda line: line.startswith("|"), text.partition(f"{header}\n")[2].splitlines())
    return list(rows)[1:]


def test_the_readme_prints_the_rules():
    rows = rows_after("| refused | remedy |", (ROOT / "README.md").read_text())
    assert rows == [f"| {rule.name} | {rule.remedy} |" for rule in RULES]


def test_the_readme_names_every_key_with_its_default():
    rows = rows_after("| `[parallel]` | default | meaning |", (ROOT / "README.md").read_text())
    told = [tuple(cell.strip() for cell in row.replace("`", "").split("|")[1:3]) for row in rows]
    defaults = {name: json.dumps(value) for name, value in vars(Axes()).items()} | {"expert_tensor": "as tensor"}
    assert told == list(defaults.items())


GOOD = [
    (DENSE, Axes(), 1),
    (DENSE, Axes(), 7),
    (DENSE, Axes(tensor=4, sequence=True), 4),
    (DENSE, Axes(tensor=2, context=2), 8),
    (DENSE, Axes(context=5, cp_comm="allgather"), 5),
    (DENSE, Axes(pipeline=8), 16),
    (DENSE, Axes(tensor=2, sequence=True, context=2, pipeline=4, virtual=2), 32),
    (replace(DENSE, num_layers=1, num_heads=1, num_kv_heads=1, ffn_size=7), Axes(context=2, cp_comm="allgather"), 6),
    (MOE, Axes(), 3),
    (MOE, Axes(expert=6), 6),
    (MOE, Axes(expert=2, pipeline=2, virtual=4), 8),
    (MOE, Axes(tensor=4, sequence=True, expert=2, expert_tensor=2), 4),
    (MOE, Axes(context=2, expert=6, pipeline=2), 24),
]


@pytest.mark.parametrize(("model", "axes", "world"), GOOD)
def test_good_layouts_pass(model, axes, world):
    check_axes(axes, model, world)


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline", "virtual", "expert", "expert_tensor"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_size_that_is_none_is_refused(name, size):
    with pytest.raises(UsageError, match=f"parallel axis {name} is {size!r}; expected a positive whole number"):
        Axes(**{name: size})


def test_names():
    with pytest.raises(UsageError, match="cp_comm is 'p2p'; expected one of a2a, allgather"):
        Axes(cp_comm="p2p")
    every = Axes(tensor=2, sequence=True, context=2, cp_comm="allgather", pipeline=2, virtual=3, expert=4)
    assert replace(every, expert_tensor=1).describe() == "tp2 sp cp2(allgather) pp2 vpp3 ep4 etp1"
    assert replace(every, expert_tensor=2).describe() == every.describe() == "tp2 sp cp2(allgather) pp2 vpp3 ep4"
    assert Axes().describe() == "one process a replica"


def layouts():
    """Yield axes with a world of so many processes for each legal combination of small sizes."""
    sizes = itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2, 4), (None, 1, 2), (1, 2, 4))
    model = replace(MOE, num_heads=12, num_kv_heads=12, num_experts=8)
    for tensor, context, pipeline, expert, expert_tensor, replicas in sizes:
        axes = Axes(
            tensor=tensor,
            sequence=tensor > 1,
            context=context,
            pipeline=pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
        )
        world = axes.replica_size * replicas
        if not list(violations(axes, model, world)):
            yield axes, world


def groups_of(axes: Axes, world: int, token: str) -> list[list[int]]:
    """Return Megatron's groups of ranks along dense axes."""
    sizes = {"tp": axes.tensor, "cp": axes.context, "pp": axes.pipeline, "ep": 1}
    return RankGenerator(**sizes, dp=axes.replicas(world), order="tp-cp-ep-dp-pp").get_ranks(token)


def expert_groups_of(axes: Axes, world: int) -> list[list[int]]:
    """Return Megatron's groups of ranks that exchange tokens for experts."""
    shared = axes.expert * axes.expert_tensor_size
    sizes = {"tp": axes.expert_tensor_size, "cp": 1, "pp": axes.pipeline, "ep": axes.expert}
    data = world // (shared * axes.pipeline)
    return RankGenerator(**sizes, dp=data, order="tp-cp-ep-dp-pp").get_ranks("tp-ep")


def test_replicas_are_megatrons():
    """Ranks of one copy of the model, and replicas in the order of the data-parallel groups."""
    for axes, world in layouts():
        for ranks in groups_of(axes, world, "tp-cp-pp"):
            assert len(ranks) == axes.replica_size
            assert len({axes.replica_of(rank, world) for rank in ranks}) == 1, (axes, world)
        for ranks in groups_of(axes, world, "dp"):
            assert [axes.replica_of(rank, world) for rank in ranks] == list(range(axes.replicas(world))), (axes, world)


def test_replicas_that_share_experts_are_neighbours():
    """Each exchange is among `together` neighbouring replicas, whole: what the planner is told."""
    spans = set()
    for axes, world in layouts():
        for ranks in expert_groups_of(axes, world):
            replicas = {axes.replica_of(rank, world) for rank in ranks}
            first = min(replicas)
            assert first % axes.together == 0, (axes, world)
            assert replicas == set(range(first, first + axes.together)), (axes, world)
        assert axes.replicas(world) % axes.together == 0
        spans.add(axes.together)
    assert {1, 2, 4} <= spans


def test_negative_control_experts_that_do_not_tile_straddle_replicas():
    """Without the rule an exchange would be among parts of three replicas, taken for one and a half."""
    axes, world = Axes(context=2, expert=3), 6
    assert [rule.name for rule in violations(axes, MOE, world)] == [RULES[-1].name]
    spans = [{axes.replica_of(rank, world) for rank in ranks} for ranks in expert_groups_of(axes, world)]
    assert spans == [{0, 1}, {1, 2}]
    assert axes.together == 1


@pytest.mark.parametrize(
    ("axes", "block", "multiple"),
    [
        (Axes(), 1, 1),
        (Axes(tensor=4), 1, 1),
        (Axes(tensor=4, sequence=True), 1, 4),
        (Axes(tensor=2, sequence=True, context=3), 128, 384),
        (Axes(context=3, pipeline=5), 1, 3),
    ],
)
def test_rows_are_padded_to_what_is_dealt(axes, block, multiple):
    assert axes.multiple(block) == multiple


@pytest.mark.parametrize("shipped", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_no_shipped_layout_is_refused(shipped, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(shipped)
    if config.model.hf_config:
        check_axes(config.parallel, read_model_config(config.model.hf_config), config.parallel.replica_size)


@pytest.mark.parametrize(
    ("variables", "axes"),
    [
        ({}, Axes(tensor=4, sequence=True, pipeline=2)),
        ({"TP": "1", "PP": "1", "CP": "8", "CP_COMM": "allgather"}, Axes(context=8, cp_comm="allgather")),
        (
            {"TP": "2", "CP": "2", "PP": "4", "VPP": "3", "EP": "4", "ETP": "1"},
            Axes(tensor=2, sequence=True, context=2, pipeline=4, virtual=3, expert=4, expert_tensor=1),
        ),
        ({"TP": "8", "SP": "false"}, Axes(tensor=8, pipeline=2)),
    ],
    ids=str,
)
def test_the_slurm_script_names_axes(variables, axes, tmp_path):
    """What it would start; overrides of the caller come last."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    file = tmp_path / "run.toml"
    file.write_text('[data]\nrollouts = "r.jsonl"\n[model]\nhf_config = "c.json"\n')
    ran = subprocess.run(
        ["bash", str(ROOT / "launch/model_parallel.sbatch"), str(file), "train.steps=3"],
        env=variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    program, options = ran.stdout.splitlines()[:6], ran.stdout.splitlines()[6:]
    assert program == ["--mpi=pmi2", "true", "-m", "megatron_dta", "train", str(file)]
    config = load_config(file, options)
    assert (config.parallel, config.train.steps) == (axes, 3)


@pytest.mark.slow
def test_the_shipped_parallel_config_trains_as_one_process(tmp_path, monkeypatch):
    """Two tensor ranks that deal rows, times two stages, on the shipped model with fewer words."""
    monkeypatch.chdir(ROOT)
    shipped = ROOT / "configs/parallel_tiny.toml"
    model = json.loads((ROOT / "configs/tiny_qwen3.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(model | {"vocab_size": 67, "initializer_range": 0.2}))
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROLLOUTS))
    overrides = [f"data.rollouts={tmp_path}/rollouts.jsonl", f"model.hf_config={tmp_path}/model.json"]
    overrides += ["model.dtype=fp64", "engine.budget=4", "train.steps=2"]
    one = ["parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1"]
    expected = train(load_config(shipped, [*overrides, *one]))
    run_torch(4, "-m", "megatron_dta", "train", str(shipped), *overrides, f"train.output={tmp_path}/out")
    found = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(found) == len(expected) == 2
    assert expected[0]["pushed_tokens"] > 0
    for name in ("loss", "grad_norm", "entropy"):
        assert [record[name] for record in found] == pytest.approx([record[name] for record in expected], rel=1e-9)
