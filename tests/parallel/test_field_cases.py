"""Failures that other stacks had on several processes, as behaviour of ours.

Elsewhere: C07, a stage that never gets the mask: `test_axes.py`, pp4 among the cells and a sabotage that must be found.
C14, experts without a token: `ranks_moe.py`. C11 and C09, rows that formats and dealing need: `tests/tree`. C15, routes
that are given: `tests/mcore/test_moe.py`. A42, B02, B20 and B22: `tests/mcore/test_moe.py`, `ranks_head.py`,
`test_axes.py` and `ranks_moe.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dta.axes import Axes, check_axes
from megatron_dta.config import load_config
from megatron_dta.data.rollouts import write_jsonl
from megatron_dta.data.samples import columns
from megatron_dta.errors import UsageError
from megatron_dta.train import train
from megatron_dta.tree.cost import default_cost
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.planner import Settings, build_plan, plan_batch
from tests.batches import trained
from tests.control.spawn import ROOT, run_torch
from tests.parallel.cells import MODELS, config_of
from tests.parallel.ranks_cases import CASES, FOUR, ONE_AND_FIVE, TRAINED
from tests.parallel.test_data_parallel import FREE

VOCAB = 29
SCRIPT = str(ROOT / "tests/parallel/ranks_cases.py")
CONFIG = """
[data]
rollouts = "{folder}/rollouts.jsonl"
[model]
hf_config = "{folder}/{model}.json"
dtype = "fp64"
[engine]
budget = 8
[optimizer]
lr = 1e-4
[train]
steps = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a dense model, one with experts, a config for each, and rollouts for three steps.

    Of the groups one trains no token at all, and one is a single rollout: one of two replicas has none.
    """
    folder = tmp_path_factory.mktemp("cases")
    model = json.loads((ROOT / "configs/tiny_qwen3.json").read_text()) | {"vocab_size": VOCAB, "initializer_range": 0.2}
    for name, raw, more in (
        ("run", model, ""),
        ("moe", model | MODELS["moe"], "[moe]\naux_loss_coef = 0.1\nz_loss_coef = 0.01\n"),
    ):
        (folder / f"{name}.json").write_text(json.dumps(raw | {"num_hidden_layers": 2, "num_key_value_heads": 2}))
        (folder / f"{name}.toml").write_text(CONFIG.format(folder=folder, model=name) + more)
    prompt = list(range(1, 10))
    samples = [
        *(
            trained([*prompt, 11 + k, *range(k)], [False] * 9 + [True] * (k + 1), str(k), reward=k % 2)
            for k in range(5)
        ),
        *(trained([*prompt, 20 + k], [False] * 10, f"silent {k}", group_id="s", reward=k) for k in range(2)),
        trained([5, 6, 7, 8, 9], [False, True, True, True, True], "one", group_id="o", advantage=0.7, reward=1),
    ]
    write_jsonl(folder / "rollouts.jsonl", samples)
    return folder


@pytest.fixture(scope="module")
def printed(folder) -> list[str]:
    """Run all cases of two processes in one spawn; return the lines that were printed."""
    return run_torch(2, SCRIPT, str(folder), *CASES).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes(printed, case):
    assert f"{case} ok" in printed


@pytest.mark.slow
def test_four_processes(folder):
    lines = run_torch(4, SCRIPT, str(folder), *FOUR).splitlines()
    assert [line for line in lines if line.endswith(" ok")] == [f"{case} ok" for case in FOUR]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["run.toml", "moe.toml"])
def test_b13_metrics_whatever_the_axes(folder, printed, config):
    """B13, B11: loss, terms and norm of the gradient are those of one process; a batch that trains no token is skipped.

    Runs of the case C20, where replicas, tensor, context or expert ranks, or stages are two.
    """
    alone = folder / "alone" / config
    train(load_config(folder / config, [f"train.output={alone}"]))
    bound = 1e-12 if config == "run.toml" else 1e-6  # Megatron's router takes its softmax in fp32
    expected, weights = _outcome(alone)
    assert sorted("skipped" in record for record in expected) == [False, False, True]
    assert all(record["grad_norm"] > 1e-3 for record in expected if "skipped" not in record)
    for name in (name for name, (its_config, _) in TRAINED.items() if its_config == config):
        records, found = _outcome(folder / name)
        for record, want in zip(records, expected, strict=True):
            assert record.keys() == want.keys()
            same = record.keys() - FREE
            assert {"loss", "trained_tokens", "sequence_tokens", "num_samples"} <= same
            assert {n: record[n] for n in same} == pytest.approx({n: want[n] for n in same}, rel=0, abs=bound), name
        for parameter, weight in weights.items():
            torch.testing.assert_close(found[parameter], weight, rtol=0, atol=10 * bound, msg=f"{name}: {parameter}")


def _outcome(output: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return records, load_file(output / "model/model.safetensors")


def test_c16_more_ranks_than_key_value_heads():
    """C16: refused at start by the name of what does not fit; gathered keys need no head of their own on each rank."""
    model = replace(config_of("dense"), num_kv_heads=2)
    for axes, told in (
        (Axes(tensor=4), "query or key/value heads not a multiple of tensor"),
        (Axes(context=4), "a2a with key/value heads of a tensor rank not a multiple of context"),
    ):
        with pytest.raises(UsageError, match=f"refused: {told}. Got 4 process.*8 query and 2 key/value heads"):
            check_axes(axes, model, 4)
    check_axes(Axes(context=4, cp_comm="allgather"), model, 4)


def test_negative_control_c01_replicas_alone_make_unequal_calls():
    """What the case C01 would hang on: replicas with one tree and with five, each planned for itself."""
    alone = Settings(cost=default_cost(config_of("moe"), "cpu"), budget=16, ranks=2)
    for settings, num_kinds in ((alone, 2), (replace(alone, together=2), 1)):
        tasks = plan_batch(build_outline(*columns(ONE_AND_FIVE)), settings).tasks
        plans = [
            build_plan(task, *columns([ONE_AND_FIVE[i] for i in task.sequences.tolist()]), multiple=1) for task in tasks
        ]
        assert len({(len(plan.pushes), len(plan.chunks)) for plan in plans}) == num_kinds
