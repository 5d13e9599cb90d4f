"""Training on several processes, as users start it: what one process would have done, and no process left waiting."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_dta import cli
from megatron_dta.data.rollouts import write_jsonl
from tests.batches import trained
from tests.control.spawn import ROOT, run_alone, run_mpi, start_mpi

VOCAB = 29
SIZES = (7, 4, 1)
"""Rollouts of the three batches (F13): the last leaves all ranks but one without a sequence."""
GROUPS = ((3, 4), (3, 1), (1,))
"""Rollouts of each batch's groups."""
OBJECTIVES = {
    "grpo": ("rl.objective=grpo", "rl.inner_epochs=2", "rl.clip_high=0.3", "engine.budget=12"),
    "sft": ("rl.objective=sft", "rl.normalizer=sequence_mean", "engine.budget=16", "engine.padding=4"),
}
FREE = {
    *("seconds", "sequence_tokens_per_second", "tree_tokens_per_second", "memory_gib"),
    *("plan_seconds", "plan_wait_seconds", "plan_build_seconds", "sweep_seconds"),
    *("predicted_imbalance", "predicted_seconds", "copied_tokens"),
    # a path on two ranks is computed on both
    *("executed_tokens", "pushed_tokens", "reuse"),
}
"""What depends on the machine or on the ranks."""


def rollouts():
    """Groups with a common prompt and mixed rewards; a step takes two groups, in the order of an epoch's shuffle."""
    rng = np.random.default_rng(0)
    sizes = dict(zip(np.random.default_rng([0, 0]).permutation(5).tolist(), [n for batch in GROUPS for n in batch]))
    samples = []
    for group in range(5):
        prompt, turn = rng.integers(0, VOCAB, 7).tolist(), rng.integers(0, VOCAB, 4).tolist()
        for k in range(sizes[group]):
            tokens = [*prompt, *(turn if k % 3 else []), *rng.integers(0, VOCAB, 2 + 2 * k).tolist()]
            mask = rng.random(len(tokens)) < 0.7
            mask[:7], mask[-1] = False, True
            given = {"reward": float(k % 2), "group_id": f"g{group}"}
            if k == 2:
                given["old_logprobs"] = np.where(mask, -2 * rng.random(len(tokens)), 0.0)
            if sizes[group] == 1:
                given["advantage"] = 0.7
            samples.append(trained(tokens, mask, f"g{group}/{k}", **given))
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model, rollouts and a config."""
    folder = tmp_path_factory.mktemp("parallel")
    model = json.loads((ROOT / "configs/tiny_qwen3.json").read_text())
    (folder / "model.json").write_text(json.dumps(model | {"vocab_size": VOCAB, "initializer_range": 0.2}))
    write_jsonl(folder / "rollouts.jsonl", rollouts())
    (folder / "run.toml").write_text(
        f'[data]\nrollouts = "{folder}/rollouts.jsonl"\ngroups_per_step = 2\n[model]\n'
        f'hf_config = "{folder}/model.json"\ndtype = "fp64"\n[optimizer]\nlr = 1e-4\n[train]\nsteps = 3\n'
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> Callable[[str], Path]:
    """Return a function that trains an objective in this process, once, and returns the output folder."""

    def train(objective: str) -> Path:
        output = folder / f"alone {objective}"
        if not output.exists():
            assert cli.main(arguments(folder, objective, output)) == 0
        return output

    return train


def arguments(folder: Path, objective: str, output: Path, *axes: str) -> list[str]:
    return ["train", str(folder / "run.toml"), *OBJECTIVES[objective], f"train.output={output}", *axes]


def run_torchrun(num_processes: int, *command: str) -> str:
    """Run `python -m megatron_dta command` under torchrun; return what it printed to standard error."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
    ran = run_alone("-m", *launcher, "-m", "megatron_dta", *command)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def records_in(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(got: Path, expected: Path, objective: str) -> None:
    """Compare metrics and weights to 1e-12; every line is there once."""
    records, wanted = records_in(got), records_in(expected)
    epochs = 2 if objective == "grpo" else 1
    assert [(r["step"], r["inner_epoch"]) for r in records] == [(s, e) for s in range(3) for e in range(epochs)]
    assert [r["num_samples"] for r in records] == [n for n in SIZES for _ in range(epochs)]
    for record, want in zip(records, wanted, strict=True):
        assert record.keys() == want.keys()
        assert ("plan_wait_seconds" in record) == (record["inner_epoch"] == 0)
        named = record.keys() - FREE
        assert {"loss", "grad_norm", "reward", "trained_tokens", "sequence_tokens", "lr", "update"} <= named
        assert {n: record[n] for n in named} == pytest.approx({n: want[n] for n in named}, rel=0, abs=1e-12)
        assert record["executed_tokens"] >= want["executed_tokens"]
    assert min(r["grad_norm"] for r in wanted) > 1e-3
    weights, expected_weights = (load_file(f / "model/model.safetensors") for f in (got, expected))
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-12, msg=name)


def test_grpo_under_mpiexec(folder, alone):
    output = folder / "mpi"
    run_mpi(2, "-m", "megatron_dta", *arguments(folder, "grpo", output))
    assert_same_training(output, alone("grpo"), "grpo")


@pytest.mark.parametrize(("objective", "num_ranks"), [("grpo", 2), ("sft", 3)])
def test_under_torchrun(folder, alone, objective, num_ranks):
    output = folder / f"torchrun {objective}"
    told = run_torchrun(num_ranks, *arguments(folder, objective, output))
    assert_same_training(output, alone(objective), objective)
    assert told.count(f"{num_ranks} process(es), {num_ranks} replica(s)") == 1, "one process speaks for all"
    assert told.count("update 1/") == 1


def test_pipeline_under_mpiexec(folder, alone):
    """One replica of two stages: samples, sweeps and weights go through the process that leads it."""
    output = folder / "mpi pp2"
    run_mpi(2, "-m", "megatron_dta", *arguments(folder, "grpo", output, "parallel.pipeline=2"))
    assert_same_training(output, alone("grpo"), "grpo")


@pytest.mark.parametrize(
    ("objective", "num_processes", "axes", "told_axes"),
    [
        ("grpo", 2, ("parallel.tensor=2",), "1 replica(s) on tp2"),
        ("sft", 4, ("parallel.tensor=2", "parallel.sequence=true"), "2 replica(s) on tp2 sp"),
    ],
)
def test_tensor_ranks_under_torchrun(folder, alone, objective, num_processes, axes, told_axes):
    """One replica, and two of which one has no sequence in the last batch."""
    output = folder / f"torchrun {told_axes}"
    told = run_torchrun(num_processes, *arguments(folder, objective, output, *axes))
    assert_same_training(output, alone(objective), objective)
    assert told.count(f"{num_processes} process(es), {told_axes}") == 1, "one process speaks for all"
    assert told.count("update 1/") == 1


def test_flat_training_of_a_split_model_is_refused(folder):
    """F17: every sequence alone needs the whole model in one process; each process says so, none waits."""
    command = arguments(folder, "sft", folder / "refused", "parallel.tensor=2", "engine.mode=flat")
    ran = start_mpi(2, "-m", "megatron_dta", *command)
    assert ran.returncode == 2
    assert "every sequence alone runs on models that one process holds whole, not on tp2" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        (("parallel.tensor=3",), "2 process(es) do not divide into replicas of 3 (tp3)"),
        (("parallel.pipeline=2", "parallel.virtual=2"), "refused: layers not a multiple of pipeline x virtual"),
    ],
)
def test_axes_that_do_not_fit_are_refused(folder, axes, told):
    ran = start_mpi(2, "-m", "megatron_dta", *arguments(folder, "sft", folder / "refused", *axes))
    assert ran.returncode == 2
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (folder / "refused").exists()


DRIVER = """
import sys, time
from megatron_dta.errors import UsageError
from megatron_dta.processes import joined

with joined() as processes:
    processes.communicator.barrier()
    if processes.launch.rank == 1:
        print("raised at", time.time(), file=sys.stderr, flush=True)
        raise {error}
    processes.communicator.barrier()
    print("not reached")
"""


@pytest.mark.parametrize(
    ("error", "status"), [("ZeroDivisionError('one share is empty')", 1), ("UsageError('bad share')", 2)]
)
def test_g01_an_error_on_one_rank_ends_all_under_mpiexec(tmp_path, error, status):
    """The other ranks wait in a collective; mpi4py at exit would wait for them."""
    (tmp_path / "driver.py").write_text(DRIVER.format(error=error))
    ran = start_mpi(2, str(tmp_path / "driver.py"))
    seconds = time.time() - float(ran.stderr.split("raised at ")[1].split()[0])
    assert ran.returncode == status
    assert seconds < 10
    assert "error on rank 1:" in ran.stderr
    assert error.split("'")[1] in ran.stderr
    assert ("Traceback" in ran.stderr) == (status == 1)
    assert "not reached" not in ran.stdout
