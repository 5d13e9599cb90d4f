"""Weights in and out of Hugging Face folders: safetensors only, checked whole before anything is written."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_dta.checkpoint.hf_names import Mapping, hf_shapes, mappings
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.shards import Alone, Peers, on_root, shards, stream_whole
from megatron_dta.model_config import ModelConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
_HF_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def load_hf(model: TreeModel, folder: str | Path) -> None:
    """Copy this process's share of the weights of a Hugging Face folder into a model; its dtype is the model's.

    Raises UsageError, before the model is touched, for files that are missing or cut short and for tensors that are
    missing, unknown or of another shape; every one of them is listed. Every process checks all of them.
    """
    files = _tensor_files(Path(folder))
    _check_tensors(Path(folder), files, model.model_config)
    by_name = _by_name(model.model_config)
    with ExitStack() as opened:
        handles: dict[Path, Any] = {}
        for shard in shards(model):
            mapping = by_name[shard.name]
            for file in (files[name] for name in mapping.hf):
                if file not in handles:
                    handles[file] = opened.enter_context(safe_open(file, framework="pt"))
            shard.take(mapping.join([handles[files[name]].get_tensor(name) for name in mapping.hf]))


def save_hf(
    model: TreeModel,
    folder: str | Path,
    raw_config: dict[str, Any],
    source: str | Path | None = None,
    communicator: Peers | None = None,
) -> None:
    """Write a model as a Hugging Face folder that `from_pretrained` reads, in place of what was there.

    raw_config: the config.json the model was built from; source: a folder whose tokenizer files come along;
    communicator: of the processes that hold the model together, which all call this. Process 0 writes, file by file;
    the new folder takes its place only when it is complete. Where that fails, every process raises.
    """
    peers, folder = communicator or Alone(), Path(folder)
    fresh = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    files = _TensorFiles(model.model_config, model.dtype, fresh)
    config = {k: v for k, v in raw_config.items() if k != "torch_dtype"} | {"dtype": _HF_DTYPES[model.dtype]}

    def finish() -> None:
        files.write_index()
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for pattern in _COMPANIONS if source else ():
            for companion in Path(source or "").glob(pattern):
                shutil.copy2(companion, fresh)
        _sync(fresh)
        _replace(fresh, folder)

    try:
        on_root(peers, lambda: _make_empty(fresh))
        stream_whole(lambda shard: shard.parameter, model, peers, files.add, list(files.mappings))
        on_root(peers, finish)
    finally:
        if peers.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)


def hf_state(model: TreeModel) -> dict[str, torch.Tensor]:
    """Return every tensor of a model that this process holds alone, under its Hugging Face name, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    by_name = _by_name(model.model_config)

    def add(whole: dict[str, torch.Tensor]) -> None:
        state.update(_hf_tensors(whole, by_name))

    stream_whole(lambda shard: shard.parameter, model, Alone(), add, list(by_name))
    return state


def _by_name(config: ModelConfig) -> dict[str, Mapping]:
    return {mapping.megatron: mapping for mapping in mappings(config)}


def _hf_tensors(whole: dict[str, torch.Tensor], by_name: dict[str, Mapping]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors that parameters are made of, each with memory of its own."""
    for name, tensor in whole.items():
        parts = by_name[name].split(tensor)
        yield from zip(by_name[name].hf, (part.clone(memory_format=torch.contiguous_format) for part in parts))


class _TensorFiles:
    """The safetensors files of a model, each written as soon as its tensors are there: little more is held."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, folder: Path):
        empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in hf_shapes(config).items()}
        self.split = split_torch_state_dict_into_shards(empty, filename_pattern="model{suffix}.safetensors")
        self.mappings, self.folder = _by_name(config), folder
        self._waiting: dict[str, dict[str, torch.Tensor]] = {file: {} for file in self.split.filename_to_tensors}

    def add(self, whole: dict[str, torch.Tensor]) -> None:
        """Take whole parameters; write the files that they complete."""
        for name, tensor in _hf_tensors(whole, self.mappings):
            file = self.split.tensor_to_filename[name]
            self._waiting[file][name] = tensor
            if len(self._waiting[file]) == len(self.split.filename_to_tensors[file]):
                save_file(self._waiting.pop(file), self.folder / file, metadata={"format": "pt"})

    def write_index(self) -> None:
        """Write which file has which tensor, where there are several."""
        if self.split.is_sharded:
            index = {"metadata": self.split.metadata, "weight_map": self.split.tensor_to_filename}
            (self.folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _replace(fresh: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in the folder."""
    if (folder / _SINGLE).exists():  # before the index, as transformers does
        return dict.fromkeys(_header(folder / _SINGLE), folder / _SINGLE)
    if (folder / _INDEX).exists():
        try:
            weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
            files = {name: folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{folder / _INDEX}: not an index of safetensors shards; fetch it again") from None
        absent = sorted({str(file.name) for file in files.values() if not file.exists()})
        if absent:
            raise UsageError(f"{folder}: the index names shards that are absent: {', '.join(absent)}; fetch them again")
        return files
    raise UsageError(f"{folder}: found neither {_SINGLE} nor {_INDEX}; other formats are not read")


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors in a file, whose length has been checked against its header."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file}: damaged or cut short ({error}); fetch it again") from None


def _check_tensors(folder: Path, files: dict[str, Path], config: ModelConfig) -> None:
    expected = hf_shapes(config)
    headers = {file: _header(file) for file in set(files.values())}
    found = {name: headers[file].get(name) for name, file in files.items()}
    extra = {name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        extra.discard("lm_head.weight")  # some exports store the shared weight twice
    problems = [f"missing {name}" for name in expected if found.get(name) is None]
    problems += [f"unknown {name}" for name in sorted(extra)]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if found.get(name) not in (None, shape)
    ]
    if problems:
        raise UsageError(f"{folder}: weights do not fit config.json: {'; '.join(problems)}")
