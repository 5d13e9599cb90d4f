"""The training config: frozen, every key known, every value of its type and range, told in one line otherwise."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from megatron_dta.config import Config, DataConfig, ModelSection, load_config, one_of
from megatron_dta.errors import UsageError
from megatron_dta.model_config import read_model_config

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
TEXT = """
[data]
rollouts = "r.jsonl"
[model]
hf_config = "c.json"
"""


@pytest.fixture
def file(tmp_path) -> Path:
    """Return a config with what is required and nothing else."""
    (tmp_path / "c.toml").write_text(TEXT)
    return tmp_path / "c.toml"


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load_config(file, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_shipped_config(shipped, monkeypatch):
    """Parses, and the model config it names is one that we read."""
    config = load_config(shipped)
    monkeypatch.chdir(ROOT)
    if config.model.hf_config:
        read_model_config(config.model.hf_config)


def test_configs_are_shipped():
    assert SHIPPED


def test_defaults(file):
    assert load_config(file) == Config(data=DataConfig(rollouts="r.jsonl"), model=ModelSection(hf_config="c.json"))


def test_every_key_of_every_section_is_frozen(file):
    config = load_config(file)
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, section.name, None)
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.learning_rat=1", None),
        ("engine.buget=1", "budget"),
        ("engine.microbatch=1", None),
        ("data.rollout='x'", "rollouts"),
        ("optimizer.weigth_decay=0.1", "weight_decay"),
        ("optimiser.lr=1", "optimizer"),
        ("model.a.b=1", None),
        ("megatron.x=1", None),
        ("parallel.tensro=2", "tensor"),
        ("paralel.tensor=2", "parallel"),
        ("moe.z_loss=0.1", "z_loss_coef"),
    ],
)
def test_f12_unknown_key_names_the_nearest(override, nearest, file):
    message = refusal(file, override)
    assert message.startswith(f"{file}: unknown key ")
    assert "valid: " in message
    assert message.endswith(f"did you mean {nearest}?") == (nearest is not None)


def test_f12_unknown_key_in_the_file(file):
    file.write_text(TEXT + "[engine]\nbuget = 5\n")
    assert "unknown key engine.buget" in refusal(file)
    file.write_text("seed = 3\n" + TEXT)
    assert "unknown key seed; valid: data, model" in refusal(file)


VALUES = [
    ("engine.budget=4096", 4096),
    ("engine.budget=whole", "whole"),
    ('engine.budget="whole"', "whole"),
    ("engine.budget=16_384", 16384),
    ("engine.attention=segment", "segment"),
    ("optimizer.lr=1e-5", 1e-5),
    ("optimizer.lr=1", 1.0),
    ("optimizer.betas=[0.5, 0.75]", (0.5, 0.75)),
    ("optimizer.betas=[0, 0.75]", (0.0, 0.75)),
    ("optimizer.clip_norm=0.5", 0.5),
    ("optimizer.schedule=cosine", "cosine"),
    ("data.rollouts=/a b/r=1.jsonl", "/a b/r=1.jsonl"),
    ("data.rollouts=../x.npz", "../x.npz"),
    ("data.limit=3", 3),
    ("train.output=out/run-1", "out/run-1"),
    ("rl.objective=sft", "sft"),
    ("model.dtype=fp64", "fp64"),
    ("parallel.tensor=2", 2),
    ("parallel.sequence=true", True),
    ("parallel.cp_comm=allgather", "allgather"),
    ("parallel.expert_tensor=1", 1),
    ("moe.experts=grouped", "grouped"),
    ("moe.aux_loss_coef=1e-3", 1e-3),
]


@pytest.mark.parametrize(("override", "expected"), VALUES, ids=[override for override, _ in VALUES])
def test_override(override, expected, file):
    section, key = override.partition("=")[0].split(".")
    value = getattr(getattr(load_config(file, [override]), section), key)
    assert value == expected
    assert type(value) is type(expected)


def test_last_override_wins_and_the_file_is_left_alone(file):
    assert load_config(file, ["data.limit=3", "data.limit=4"]).data.limit == 4
    assert load_config(file).data.limit is None


@pytest.mark.parametrize("override", ["", "data", "data.limit", "limit=3", "=3", ".limit=3", "data.=3", "--data.limit"])
def test_override_without_section_key_and_value(override, file):
    assert refusal(file, override) == f"override {override!r}: expected section.key=value"


WRONG = [
    ("engine.budget=1.5", "engine.budget is 1.5; expected int or str"),
    ("engine.padding=true", "engine.padding is True; expected int"),
    ("engine.padding=x", "engine.padding is 'x'; expected int"),
    ("data.limit=[1]", "data.limit is [1]; expected int"),
    ("data.limit='3'", "data.limit is '3'; expected int"),
    ("data.rollouts=3", "data.rollouts is 3; expected str"),
    ("data.rollouts=true", "data.rollouts is True; expected str"),
    ("optimizer.lr=fast", "optimizer.lr is 'fast'; expected float"),
    ("optimizer.lr=true", "optimizer.lr is True; expected float"),
    ("optimizer.betas=0.9", "optimizer.betas is 0.9; expected "),
    ("optimizer.betas=[0.9]", "optimizer.betas is [0.9]; expected "),
    ("optimizer.betas=['a', 0.9]", "optimizer.betas is 'a'; expected float"),
    ("train.steps=1e3", "train.steps is 1000.0; expected int"),
    ("parallel.tensor=2.0", "parallel.tensor is 2.0; expected int"),
    ("parallel.tensor=true", "parallel.tensor is True; expected int"),
    ("parallel.sequence=1", "parallel.sequence is 1; expected bool"),
    ("parallel.expert_tensor='1'", "parallel.expert_tensor is '1'; expected int"),
]
OUT_OF_RANGE = [
    ("data.groups_per_step=0", "data.groups_per_step"),
    ("data.shuffle_seed=-1", "data.shuffle_seed"),
    ("rl.inner_epochs=0", "rl.inner_epochs"),
    ("train.steps=0", "train.steps"),
    ("optimizer.warmup_updates=-1", "optimizer.warmup_updates"),
    ("optimizer.lr=-1", "optimizer.lr"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("optimizer.lr=inf", "optimizer.lr"),
    ("optimizer.weight_decay=-0.1", "optimizer.weight_decay"),
    ("optimizer.clip_norm=-1", "optimizer.clip_norm"),
    ("optimizer.betas=[1.5, 0.9]", "optimizer.betas"),
    ("optimizer.eps=-1", "optimizer.eps"),
    ("rl.clip_low=-0.1", "rl.clip_low"),
    ("rl.clip_low=1.1", "rl.clip_low"),
    ("rl.kl_coef=nan", "rl.kl_coef"),
    ("rl.normalizer=tokenmean", "rl.normalizer"),
    ("rl.objective=ppo", "rl.objective is 'ppo'; expected one of sft, grpo"),
    ("engine.mode=trees", "did you mean tree?"),
    ("engine.budget=0", "engine.budget"),
    ("engine.budget=wole", "engine.budget"),
    ("engine.padding=0", "engine.padding"),
    ("model.dtype=bf32", "model.dtype is 'bf32'; expected one of bf16, fp32, fp64; did you mean"),
    ("optimizer.schedule=linear", "optimizer.schedule"),
    ("parallel.pipeline=0", "parallel axis pipeline is 0; expected a positive whole number"),
    ("parallel.expert_tensor=-1", "parallel axis expert_tensor is -1"),
    ("parallel.cp_comm=p2p", "cp_comm is 'p2p'; expected one of a2a, allgather"),
    ("moe.experts=group", "moe.experts is 'group'; expected one of sequential, grouped; did you mean grouped?"),
    ("moe.aux_loss_coef=-1", "moe.aux_loss_coef"),
    ("moe.z_loss_coef=nan", "moe.z_loss_coef"),
]


@pytest.mark.parametrize(("override", "told"), WRONG, ids=[override for override, _ in WRONG])
def test_wrong_type_is_told_with_the_value(override, told, file):
    assert refusal(file, override).startswith(f"{file}: {told}")


@pytest.mark.parametrize(("override", "told"), OUT_OF_RANGE, ids=[override for override, _ in OUT_OF_RANGE])
def test_f17_value_out_of_range_is_told_before_anything_runs(override, told, file):
    assert told in refusal(file, override)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "data.rollouts is missing"),
        ("[data]\n", "data.rollouts is missing"),
        ("data = 3\n", "data is 3; expected a section"),
        ('[data]\nrollouts = "x"\n[model]\n', "exactly one of model.hf_folder (weights) and model.hf_config"),
        (TEXT + 'hf_folder = "f"\n', "exactly one of model.hf_folder (weights) and model.hf_config"),
        ("[data\n", "not valid TOML"),
        (TEXT + TEXT, "not valid TOML"),
    ],
)
def test_incomplete_or_damaged_file(text, told, file):
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(f"{file}: ")
    assert told in message


def test_override_cannot_turn_a_value_into_a_section(file):
    file.write_text("data = 3\n")
    assert "data is not a section" in refusal(file, "data.limit=3")


def test_file_that_cannot_be_read(tmp_path):
    assert "cannot read the config (No such file" in refusal(tmp_path / "absent.toml")
    assert "cannot read the config (Is a directory" in refusal(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in refusal(tmp_path / "b.toml")


@pytest.mark.parametrize("place", ["file", "key", "override"])
def test_g09_yaml_that_runs_a_command_is_refused(place, file, tmp_path):
    """A config is data: nothing in it is ever called."""
    assert shutil.which("touch")
    payload = f"!!python/object/apply:os.system [touch {tmp_path / 'x'}]"
    if place == "override":
        config = load_config(file, [f"data.rollouts={payload}"])
        assert config.data.rollouts == payload
    else:
        file.write_text(payload if place == "file" else f"data:\n  rollouts: {payload}\n")
        assert "not valid TOML" in refusal(file)
    assert not (tmp_path / "x").exists()


def test_one_of_names_the_choices():
    one_of("x", "tree", ("tree", "flat"))
    with pytest.raises(UsageError, match=r"^x is 'flatt'; expected one of tree, flat; did you mean flat\?$"):
        one_of("x", "flatt", ("tree", "flat"))
