"""The command line as a user meets it: exit status, one line for an error, and what a run leaves behind."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dta import cli, verify
from megatron_dta.checkpoint.open_model import TINY, open_model
from megatron_dta.engine.cache import ArenaCache
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.mcore.rotary import TreeRotary

ROOT = Path(__file__).parents[1]
VOCAB = 67
SEQUENCES = [
    ("a", 1.0, [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 0, 1, 1]),
    ("a", 0.0, [1, 2, 3, 4, 5, 8], [0, 0, 0, 1, 0, 1]),
    ("a", 0.5, [1, 2, 3, 9], [0, 0, 0, 1]),
    ("b", 2.0, [1, 2, 66, 5, 5], [0, 0, 1, 1, 1]),
    ("b", 3.0, [1, 2, 66, 6], [0, 0, 1, 1]),
]
KEYS = ("group_id", "reward", "tokens", "loss_mask", "sample_id")
ROLLOUTS = [dict(zip(KEYS, (*sequence, str(number)))) for number, sequence in enumerate(SEQUENCES)]


@pytest.fixture
def rollouts(tmp_path) -> Path:
    """Return a small rollout file: two groups, one tree, 11 trained tokens."""
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in ROLLOUTS))
    return file


@pytest.fixture
def model_json(tmp_path) -> Path:
    """Return the config.json of a tiny model."""
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY | {"model_type": "qwen3", "vocab_size": VOCAB, "max_position_embeddings": 16}))
    return file


@pytest.fixture
def train_toml(tmp_path, rollouts, model_json) -> Path:
    """Return a training config for both."""
    file = tmp_path / "train.toml"
    file.write_text(f'[data]\nrollouts = "{rollouts}"\n[model]\nhf_config = "{model_json}"\ndtype = "fp32"\n')
    return file


def status(*arguments: object) -> int:
    """Run a command in this process and return its exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        return int(exit_.code or 0)


def error_of(capsys, *arguments: object) -> str:
    """Return the last line on standard error, the only one that tells an error; the status is 2."""
    assert status(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "error: " in line or "Traceback" in line] == lines[-1:]
    return lines[-1]


def test_help_of_every_command_needs_no_torch():
    """F09: one process for all; --version too."""
    program = (
        "import contextlib, sys\n"
        "from megatron_dta import cli\n"
        "for arguments in ([], ['train'], ['verify'], ['plan']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        cli.main([*arguments, '--help'])\n"
        "with contextlib.suppress(SystemExit):\n"
        "    cli.main(['--version'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron.core', 'transformers')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for told in ("COMMAND", "section.key=value", "--tiny", "--json", "--budget", "0."):
        assert told in done.stdout


def test_module_runs_with_an_exit_status():
    command = [sys.executable, "-m", "megatron_dta", "plan", "absent.jsonl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: absent.jsonl: No such file or directory; expected a readable .jsonl or .npz file\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["train"], ["verify", "--tiny", "gpt2", "x"]], ids=str)
def test_wrong_call(arguments, capsys):
    error_of(capsys, *arguments)


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--budget", "0"], "budget is 0"),
        (["--budget", "-4"], "budget is -4"),
        (["--budget", "4", "--padding", "8"], "budget is 4"),
        (["--padding", "0"], "padding"),
        (["--limit", "0"], "limit is 0"),
        (["--truncate", "-1"], "truncate is -1"),
        (["--config", "absent.json"], "absent.json: cannot read the model config"),
        (["--dtype", "fp16"], "invalid choice: 'fp16'"),
    ],
    ids=str,
)
def test_f17_bad_option(options, told, command, rollouts, capsys):
    assert told in error_of(capsys, command, rollouts, *options)


def test_f17_budget_that_is_no_number(rollouts, capsys):
    message = error_of(capsys, "plan", rollouts, "--budget", "abc")
    assert "argument --budget" in message
    assert "'abc'" in message
    assert "_budget" not in message, "a function's name tells a user nothing"


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty file"),
        ("{", "line 1: not valid JSON"),
        (json.dumps(ROLLOUTS[0]) + "\nnull\n", "line 2: got None"),
        (json.dumps(ROLLOUTS[0] | {"tokens": [1, -2]}), "tokens[1]"),
        (json.dumps(ROLLOUTS[0] | {"token": 1}), "unknown key"),
    ],
)
def test_f17_bad_rollouts(text, told, command, rollouts, capsys):
    rollouts.write_text(text)
    message = error_of(capsys, command, rollouts)
    assert message.startswith(f"error: {rollouts}")
    assert told in message


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_token_outside_the_vocabulary_is_named(command, rollouts, model_json, capsys):
    rollouts.write_text(json.dumps(ROLLOUTS[0] | {"sample_id": "big", "tokens": [1, 2, 3, 4, 5, 6, VOCAB]}))
    message = error_of(capsys, command, rollouts, "--config", model_json)
    assert [told for told in ("big", str(VOCAB), str(VOCAB - 1)) if told not in message] == []


def test_verify_needs_a_trained_token(rollouts, capsys):
    rollouts.write_text(json.dumps(ROLLOUTS[0] | {"loss_mask": [0] * 7}))
    assert "no sample has a trained token" in error_of(capsys, "verify", rollouts)


BAD_TRAINING = [
    ("engine.buget=4", "did you mean budget?"),
    ("engine.budget=0", "budget"),
    ("engine.budget=abc", "budget"),
    ("engine.attention=flash", "reference, segment, flash4"),
    ("engine.recompute=ful", "none, core_attention, full"),
    ("rl.normalizer=mean", "token_mean, sequence_mean"),
    ("rl.temperature=0", "temperature"),
    ("rl.kl_coef=0.1", "ref_logprobs"),
    ("data.form=turns", "whole, turn, comb"),
    ("data.rollouts=absent.jsonl", "absent.jsonl"),
    ("model.hf_config=absent.json", "absent.json"),
    ("train.output=/dev/null", "/dev/null"),
    ("train.output=/dev/null/x", "/dev/null/x"),
]


@pytest.mark.parametrize(("override", "told"), BAD_TRAINING, ids=[override for override, _ in BAD_TRAINING])
def test_f17_bad_training_config(override, told, train_toml, capsys):
    assert told in error_of(capsys, "train", train_toml, override)


def test_plan_counts(rollouts, model_json, tmp_path, capsys):
    """Counted by hand; a budget of 4 cannot hold the tree, so part of it is pushed."""
    out = tmp_path / "plan.json"
    assert status("plan", rollouts, "--budget", 4, "--config", model_json, "--json", out) == 0
    written = json.loads(out.read_text())
    expected = {"sequences": 5, "trees": 1, "sequence_tokens": 26, "tree_tokens": 13, "longest_path": 7}
    expected |= {"trained_tokens": 11, "head_rows": 6, "budget": 4, "rows": 13}
    assert {key: written["plan"][key] for key in expected} == expected
    assert written["plan"]["pushed_tokens"] > 0
    assert written["work"]["flop_ratio"] > 1
    assert written["memory_bytes"]["total"] > 0
    assert "26 -> 13 (2.00x)" in capsys.readouterr().out


@pytest.mark.parametrize("budget", ["whole", 4])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a41_verify_passes(dtype, budget, rollouts, model_json, capsys):
    options = ["--dtype", dtype, "--budget", budget, "--config", model_json]
    assert status("verify", rollouts, *options) == 0
    out = capsys.readouterr().out
    wanted = ("log-prob", "gradient", "11 trained tokens, reuse 2.00x", "PASSED")
    assert [told for told in wanted if told not in " ".join(out.split())] == []


def test_a41_verify_a_checkpoint(rollouts, train_toml, tmp_path):
    """Also one that training has just written."""
    assert status("train", train_toml, f"train.output={tmp_path}", "train.steps=1") == 0
    assert status("verify", rollouts, "--model", tmp_path / "model") == 0


def test_axes_need_processes_that_share_the_work(rollouts, capsys):
    told = "error: tp2 pp2 without --parallel; add it, and start with torchrun or mpiexec"
    assert error_of(capsys, "verify", rollouts, "--tp", 2, "--pp", 2) == told
    assert "1 process(es) do not divide into replicas of 2 (cp2(a2a))" in error_of(
        capsys, "verify", rollouts, "--parallel", "--cp", 2
    )
    assert "parallel axis tensor is 0" in error_of(capsys, "verify", rollouts, "--tp", 0)


def test_one_process_is_a_layout_too(rollouts, model_json, capsys):
    """The step runs twice: the same bits."""
    assert status("verify", rollouts, "--budget", 4, "--config", model_json, "--parallel") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 process(es): one process a replica" in out
    assert "0.000e+00 │ 0.000e+00" in out
    assert "PASSED" in out


def pack_index_for_depth(monkeypatch) -> None:
    monkeypatch.setattr(TreeRotary, "get_rotary_seq_len", lambda self, context, block, hidden, *_, **__: len(hidden))


def forest_gives(change: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """Return a defect: the forest's log-probs are changed, all else is right."""

    def broken(run: Callable, model, engine, samples) -> verify.Pass:
        done = run(model, engine, samples)
        return replace(done, logprobs=[change(row) for row in done.logprobs]) if type(engine) is TreeEngine else done

    return lambda monkeypatch: monkeypatch.setattr(verify, "run_pass", partial(broken, verify.run_pass))


DEFECTS = {
    "pack index for depth": pack_index_for_depth,
    "gradients between chunks dropped": lambda m: m.setattr(ArenaCache, "add_grads", lambda *_: None),
    "stale context": lambda m: m.setattr(ArenaCache, "store", lambda cache, *_: cache.states.zero_()),
    "log-probs a little off": forest_gives(lambda row: row + 0.1),
    "last log-prob missing": forest_gives(lambda row: np.append(row[:-1], np.nan)),
}


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a41_verify_fails_on_a_defect(defect, dtype, rollouts, model_json, monkeypatch, capsys):
    DEFECTS[defect](monkeypatch)
    assert status("verify", rollouts, "--dtype", dtype, "--budget", 4, "--config", model_json) == 1
    assert "FAILED" in capsys.readouterr().out


GPU_EXTENSIONS = ("transformer_engine", "apex")
FIELDS = {
    *("step", "update", "inner_epoch", "loss", "entropy", "clip_fraction", "policy_kl", "ratio", "ratio_max", "reward"),
    *("num_samples", "trained_tokens", "response_tokens_mean", "response_tokens_max", "sequence_tokens"),
    *("executed_tokens", "pushed_tokens", "reuse", "seconds", "sequence_tokens_per_second", "tree_tokens_per_second"),
    *("memory_gib", "grad_norm", "lr"),
    *("plan_seconds", "plan_wait_seconds", "plan_build_seconds"),
    *("predicted_imbalance", "predicted_seconds", "copied_tokens"),
}
COUNTS = ("response_tokens_mean", "response_tokens_max", "sequence_tokens", "executed_tokens", "reward")
BY_SIZE = {3: (2, 3, 17, 9, 0.5), 2: (2.5, 3, 9, 6, 2.5)}
"""`COUNTS` of the groups of three and two rollouts, by hand; prompts are no part of a response (F15)."""


def train_records(train_toml: Path, output: Path, *overrides: str) -> list[dict]:
    assert status("train", train_toml, f"train.output={output}", "optimizer.lr=1e-3", *overrides) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["tree", "flat"])
def test_f15_training_writes_metrics(mode, train_toml, tmp_path, capsys):
    """F12: the log says whether trees are on and what they save."""
    records = train_records(train_toml, tmp_path / "out", f"engine.mode={mode}")
    assert [(r["step"], r["update"], r["inner_epoch"]) for r in records] == [(0, 1, 0), (1, 2, 0)]
    assert {r["num_samples"] for r in records} == {2, 3}
    for record in records:
        assert record.keys() == FIELDS
        expected = dict(zip(COUNTS, BY_SIZE[record["num_samples"]]))
        if mode == "flat":
            expected["executed_tokens"] = expected["sequence_tokens"]
        assert {key: record[key] for key in expected} == expected
        assert record["reuse"] == pytest.approx(record["sequence_tokens"] / record["executed_tokens"])
        assert (record["ratio"], record["clip_fraction"]) == (1, 0)
    log = capsys.readouterr().err
    assert f"tree mode {'ON' if mode == 'tree' else 'OFF'}" in log
    assert ("reuse 1.50x" in log) == (mode == "tree")


def test_without_output_nothing_is_written(train_toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert status("train", train_toml, "train.steps=1") == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(any(map(importlib.util.find_spec, GPU_EXTENSIONS)), reason="this machine has a GPU extension")
def test_f09_two_steps_without_gpu_extensions_move_weights_that_transformers_reads(train_toml, model_json, tmp_path):
    records = train_records(train_toml, tmp_path / "out", "rl.objective=sft", "data.groups_per_step=2", "train.steps=2")
    assert records[1]["loss"] < records[0]["loss"]
    saved = load_file(tmp_path / "out" / "model" / "model.safetensors")["model.embed_tokens.weight"]
    model, _ = open_model(hf_config=str(model_json), dtype="fp32")
    start = dict(model.named_parameters())["embedding.word_embeddings.weight"][:VOCAB]
    moved = (saved - start).abs().amax(1) > 1e-4
    assert moved[[1, 2, 3, 4, 5, 6, 66]].all()
    assert not moved[20:66].any(), "tokens that no rollout has"
    reader = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(reader.model.embed_tokens.weight, saved)
