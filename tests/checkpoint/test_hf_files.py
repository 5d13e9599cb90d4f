"""Weight files that are not as they should be are refused whole; a save is there whole or not at all."""

import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dta.checkpoint import hf_files
from megatron_dta.checkpoint.hf_files import hf_state, load_hf, save_hf
from megatron_dta.checkpoint.hf_names import hf_shapes
from megatron_dta.checkpoint.open_model import TINY, open_model
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.shards import Alone, gather_whole
from megatron_dta.model_config import read_model_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RAW = TINY | {"model_type": "qwen3", "vocab_size": 67, "max_position_embeddings": 32}


def new_model(folder: Path, *, seed: int = 0, dtype: str = "fp32", **changes) -> TreeModel:
    """Build a random model from a config.json written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(RAW | changes))
    return open_model(hf_config=str(folder), dtype=dtype, seed=seed)[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Return a folder with the weights of one model, which no test changes."""
    folder = tmp_path_factory.mktemp("stored")
    save_hf(new_model(folder / "new"), folder / "model", RAW)
    return folder / "model"


@pytest.fixture
def folder(stored, tmp_path) -> Path:
    """Return a copy of the stored weights, to be damaged."""
    return Path(shutil.copytree(stored, tmp_path / "model"))


@pytest.fixture
def sharded(folder, monkeypatch) -> Path:
    """Return a copy of the stored weights in several shards."""
    small_shards(monkeypatch)
    save_hf(loaded(folder), folder, RAW)
    return folder


def small_shards(monkeypatch) -> None:
    split = hf_files.split_torch_state_dict_into_shards
    monkeypatch.setattr(hf_files, "split_torch_state_dict_into_shards", partial(split, max_shard_size="10KB"))


def loaded(folder: Path) -> TreeModel:
    return open_model(hf_folder=str(folder), dtype="fp32", seed=1)[0]


def assert_same_weights(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []


def refusal(folder: Path, tmp_path: Path) -> str:
    """Return the message of a refused load, in one line; the model is as it was."""
    model = new_model(tmp_path / "other", seed=2)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    with pytest.raises(UsageError) as error:
        load_hf(model, folder)
    assert_same_weights(dict(model.named_parameters()), before)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


EXTRA, MISSING, RESHAPED = "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
MISFITS: dict[str, tuple[Callable[[dict], object], str]] = {
    "extra": (lambda t: t.update({EXTRA: torch.zeros(3)}), f"unknown {EXTRA}"),
    "renamed": (lambda t: t.update({"linear_qgkv": t.pop(MISSING)}), "unknown linear_qgkv"),
    "missing": (lambda t: t.pop(MISSING), f"missing {MISSING}"),
    "padded": (lambda t: t.update({RESHAPED: torch.zeros(128, 32)}), "has shape (128, 32), expected (67, 32)"),
    "transposed": (lambda t: t.update({RESHAPED: t[RESHAPED].T.contiguous()}), "has shape (32, 67), expected (67, 32)"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_e11_tensor_that_does_not_fit(case, folder, tmp_path):
    change, told = MISFITS[case]
    rewrite(folder, change)
    assert told in refusal(folder, tmp_path)


def test_e11_every_misfit_is_listed_at_once(folder, tmp_path):
    for case in ("extra", "renamed", "padded"):
        rewrite(folder, MISFITS[case][0])
    message = refusal(folder, tmp_path)
    wanted = (str(folder), EXTRA, "linear_qgkv", f"missing {MISSING}", f"{RESHAPED} has shape")
    assert [told for told in wanted if told not in message] == []


def test_e11_rotary_buffers_of_old_exports_are_passed_over(folder, stored):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same_weights(hf_state(loaded(folder)), load_file(stored / WEIGHTS))


def test_e12_absent_shards_are_named(sharded, tmp_path):
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    for shard in (shards[0], shards[2]):
        shard.unlink()
    message = refusal(sharded, tmp_path)
    assert [shard.name in message for shard in shards[:3]] == [True, False, True]


def test_e12_tensor_that_the_named_shard_lacks(sharded, tmp_path):
    index = json.loads((sharded / INDEX).read_text())
    rewrite(sharded, lambda t: t.pop(MISSING), index["weight_map"][MISSING])
    assert f"missing {MISSING}" in refusal(sharded, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_e12_damaged_index(text, sharded, tmp_path):
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded, tmp_path)


def test_e12_index_beside_a_whole_file_is_not_read(sharded, stored):
    """As in transformers: after an unsharded save on top of a sharded one the single file is the newer."""
    changed = {key: tensor + 1 for key, tensor in load_file(stored / WEIGHTS).items()}
    save_file(changed, sharded / WEIGHTS)
    assert_same_weights(dict(AutoModelForCausalLM.from_pretrained(sharded).state_dict()), changed)
    assert_same_weights(hf_state(loaded(sharded)), changed)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "last 100 bytes": lambda data: data[:-100],
    "last byte": lambda data: data[:-1],
    "all data": lambda data: data[: 8 + int.from_bytes(data[:8], "little")],
    "half the header": lambda data: data[:500],
    "header's length": lambda data: data[:5],
    "everything": lambda data: b"",
}


@pytest.mark.parametrize("cut", CUTS)
def test_e13_file_cut_short(cut, folder, tmp_path):
    file = folder / WEIGHTS
    file.write_bytes(CUTS[cut](file.read_bytes()))
    assert str(file) in refusal(folder, tmp_path)


def test_e13_one_shard_cut_short(sharded, tmp_path):
    """No tensor of the shards before it is copied."""
    last = max(sharded.glob("model-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])
    assert str(last) in refusal(sharded, tmp_path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_e13_metadata_may_be_empty_or_absent(metadata, folder, stored):
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    header |= {} if metadata is None else {"__metadata__": metadata}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert_same_weights(hf_state(loaded(folder)), load_file(stored / WEIGHTS))


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_g03_pickled_weights_are_never_opened(folder, tmp_path):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    message = refusal(folder, tmp_path)
    assert WEIGHTS in message
    assert not (tmp_path / "touched").exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "touched").exists(), "the file would have shown that it was opened"


def test_shards_out_and_in(sharded, stored):
    assert len(list(sharded.glob("*.safetensors"))) > 3
    expected, index = load_file(stored / WEIGHTS), json.loads((sharded / INDEX).read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same_weights(hf_state(loaded(sharded)), expected)
    assert_same_weights(dict(AutoModelForCausalLM.from_pretrained(sharded).state_dict()), expected)


def most_waiting(model: TreeModel, folder: Path, names: list[str]) -> int:
    """Write a model's files tensor by tensor; return the most bytes that waited for others of their file."""
    folder.mkdir()
    files, waited = hf_files._TensorFiles(model.model_config, model.dtype, folder), []
    whole = gather_whole(lambda shard: shard.parameter, model, Alone())
    assert whole is not None
    for name in names:
        files.add({name: whole[name]})
        waited.append(sum(tensor.nbytes for waiting in files._waiting.values() for tensor in waiting.values()))
    assert waited[-1] == 0
    return max(waited)


def test_no_more_than_a_file_waits_to_be_written(tmp_path, monkeypatch):
    """Files are at most 10 kB, apart from single tensors; tensors in another order would make more of them wait."""
    small_shards(monkeypatch)
    model = new_model(tmp_path, num_hidden_layers=4)
    names = list(hf_files._by_name(model.model_config))
    assert 0 < most_waiting(model, tmp_path / "in order", names) <= 10_000
    assert most_waiting(model, tmp_path / "mixed", names[::2] + names[1::2]) > 20_000
    first, second = ({f.name: data for f, data in contents(tmp_path / n).items()} for n in ("in order", "mixed"))
    assert first == second


def test_new_save_leaves_nothing_of_the_old_one(sharded, monkeypatch):
    model = loaded(sharded)
    monkeypatch.undo()
    save_hf(model, sharded, RAW)
    assert sorted(os.listdir(sharded)) == ["config.json", WEIGHTS]
    assert os.listdir(sharded.parent) == [sharded.name]


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def failing_at(number: int, function: Callable) -> Callable:
    """Return the function, raising an error instead of its call of that number."""
    calls = itertools.count()

    def call(*args, **kwargs):
        if next(calls) == number:
            raise OSError("no space left on device")
        return function(*args, **kwargs)

    return call


STEPS = [(hf_files, "save_file"), (Path, "write_text"), (shutil, "copy2"), (os, "fsync"), (os, "rename")]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("where", "name"), STEPS, ids=[name for _, name in STEPS])
def test_failed_save_leaves_the_old_folder(where, name, number, folder, tmp_path, monkeypatch):
    """Whatever fails: the old weights are there under their name, bit by bit, and nothing else is."""
    model, source = new_model(tmp_path / "source", seed=3), tmp_path / "source"
    for file in ("tokenizer.json", "vocab.json"):
        (source / file).write_text("{}")
    small_shards(monkeypatch)
    before = contents(tmp_path)
    monkeypatch.setattr(where, name, failing_at(number, getattr(where, name)))
    with pytest.raises(OSError, match="no space left"):
        save_hf(model, folder, RAW, source=source)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["model", "source"]


TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"]
TOKENIZER += ["special_tokens_map.json", "chat_template.jinja", "generation_config.json"]


@pytest.mark.parametrize("in_place", [False, True])
def test_tokenizer_files_come_along(in_place, folder, tmp_path):
    for name in (*TOKENIZER, "pytorch_model.bin", "README.md", "model-00001-of-00002.safetensors"):
        (folder / name).write_text(name)
    target = folder if in_place else tmp_path / "deep" / "new"
    save_hf(loaded(folder), target, RAW, source=folder)
    assert {file.name for file in target.iterdir()} == {*TOKENIZER, "config.json", WEIGHTS}
    assert [(target / name).read_text() for name in TOKENIZER] == TOKENIZER


@pytest.mark.parametrize("twice", [False, True])
def test_e02_shared_weight_may_be_stored_twice(twice, tmp_path):
    """Where the embedding is tied it is the one that counts, and it is written once."""
    model = new_model(tmp_path / "model", tie_word_embeddings=True)
    raw = RAW | {"tie_word_embeddings": True}
    save_hf(model, tmp_path / "model", raw)
    expected = load_file(tmp_path / "model" / WEIGHTS)
    assert "lm_head.weight" not in expected
    if twice:
        rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_weights(hf_state(loaded(tmp_path / "model")), expected)


REAL = [
    *("Llama-2-7b-hf", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.3-70B-Instruct", "Qwen2.5-1.5B", "Qwen2.5-7B"),
    *("Qwen2.5-32B", "Qwen2.5-72B", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B"),
    *("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-480B-A35B-Instruct"),
]


@pytest.mark.parametrize("name", REAL)
def test_names_and_shapes_of_real_checkpoints(name, data_dir):
    shapes = hf_shapes(read_model_config(data_dir / "hf_configs" / f"{name}.json"))
    recorded = json.loads((data_dir / "hf_shapes" / f"{name}.json").read_text())
    assert len(shapes) == recorded["tensors"]
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == recorded["params"]
    elsewhere = re.compile(r"model\.layers\.(?![03]\.)|model\.layers\.\d+\.mlp\.experts\.(?!0\.)")
    listed = {key: list(shape) for key, shape in shapes.items() if not elsewhere.match(key)}
    assert listed == recorded["shapes_layers_0_and_3_expert_0"]
