"""`verify --parallel` as a user meets it: exit status, one table, one line for an error, nobody left waiting."""

import json
from pathlib import Path

import pytest

from megatron_dta.checkpoint.hf_files import save_hf
from megatron_dta.checkpoint.open_model import open_model
from tests.control.spawn import run_alone, start_mpi
from tests.test_cli import ROLLOUTS, TINY, VOCAB

MODEL = TINY | {"model_type": "qwen3", "vocab_size": VOCAB, "max_position_embeddings": 16}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with rollouts, with others that the model cannot take, a config and a model with weights."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROLLOUTS))
    (folder / "bad.jsonl").write_text(json.dumps(ROLLOUTS[0] | {"tokens": [1, 2, 3, 4, 5, 6, VOCAB]}) + "\n")
    model, raw = open_model(hf_config=str(folder / "model.json"), dtype="fp32", seed=5)
    save_hf(model, folder / "weights", raw)
    return folder


def command(folder: Path, *options: str, rollouts: str = "rollouts.jsonl") -> list[str]:
    return ["verify", str(folder / rollouts), "--budget", "4", "--parallel", *options]


def assert_one_verdict(ran, status: int, told: str) -> None:
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert ran.stdout.count("reuse 2.00x") == 1, "one process speaks for all"
    assert told in " ".join(ran.stdout.split())


def test_a_config_under_torchrun(folder):
    options = command(folder, "--config", str(folder / "model.json"), "--tp", "2", "--sp")
    ran = run_alone(*TORCHRUN, "-m", "megatron_dta", *options)
    assert_one_verdict(ran, 0, "PASSED")
    assert "2 process(es): tp2 sp" in ran.stdout


def test_weights_in_low_precision_under_mpiexec(folder):
    """The reference is one precision higher, with the weights as bf16 rounds them."""
    options = command(folder, "--model", str(folder / "weights"), "--pp", "2", "--dtype", "bf16")
    assert_one_verdict(start_mpi(2, "-m", "megatron_dta", *options), 0, "bf16 to fp32")


BROKEN = """
import sys
from megatron_dta import cli
from megatron_dta.engine.cache import ArenaCache

if __name__ == "__main__":
    ArenaCache.add_grads = lambda *_: None
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_defect_fails(folder, tmp_path):
    """Gradients between chunks are dropped: every process ends with status 1."""
    (tmp_path / "broken.py").write_text(BROKEN)
    options = command(folder, "--config", str(folder / "model.json"), "--pp", "2")
    assert_one_verdict(start_mpi(2, str(tmp_path / "broken.py"), *options), 1, "FAILED")


@pytest.mark.parametrize(
    ("options", "rollouts", "told"),
    [
        (("--tp", "3"), "rollouts.jsonl", "2 process(es) do not divide into replicas of 3 (tp3)"),
        (("--pp", "2", "--vpp", "2"), "rollouts.jsonl", "refused: layers not a multiple of pipeline x virtual"),
        (("--pp", "2"), "bad.jsonl", f"sample 0: token id {VOCAB}; the model's ids are 0 .. {VOCAB - 1}"),
        (("--pp", "2"), "absent.jsonl", "absent.jsonl: No such file"),
    ],
    ids=str,
)
def test_f17_bad_input_ends_with_status_2_on_all(folder, options, rollouts, told):
    arguments = command(folder, "--config", str(folder / "model.json"), *options, rollouts=rollouts)
    ran = start_mpi(2, "-m", "megatron_dta", *arguments)
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 2
