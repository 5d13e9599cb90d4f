"""Weights in and out of Hugging Face folders: safetensors only, checked whole before anything is written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_dta.checkpoint.hf_names import hf_shapes, mappings
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
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
    """Copy the weights of a Hugging Face folder into a model; its dtype is the model's.

    Raises UsageError, before the model is touched, for files that are missing or cut short and for tensors that are
    missing, unknown or of another shape; every one of them is listed.
    """
    files = _tensor_files(Path(folder))
    _check_tensors(Path(folder), files, model.model_config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for mapping in mappings(model.model_config):
            value = mapping.join([_read(files[name], name) for name in mapping.hf])
            parameter = parameters[mapping.megatron]
            parameter[: len(value)] = value
            parameter[len(value) :] = 0  # padded vocabulary rows


def save_hf(model: TreeModel, folder: str | Path, raw_config: dict[str, Any], source: str | Path | None = None) -> None:
    """Write a model as a Hugging Face folder that `from_pretrained` reads, in place of what was there.

    raw_config: the config.json the model was built from; source: a folder whose tokenizer files come along. The new
    folder takes its place only when it is complete.
    """
    folder = Path(folder)
    fresh = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        dtype = _write_tensors(model, fresh)
        config = {k: v for k, v in raw_config.items() if k != "torch_dtype"} | {"dtype": _HF_DTYPES[dtype]}
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for pattern in _COMPANIONS if source else ():
            for companion in Path(source or "").glob(pattern):
                shutil.copy2(companion, fresh)
        _sync(fresh)
        _replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def hf_state(model: TreeModel) -> dict[str, torch.Tensor]:
    """Return every tensor of the model under its Hugging Face name, contiguous, on the CPU."""
    parameters = dict(model.named_parameters())
    state: dict[str, torch.Tensor] = {}
    for mapping in mappings(model.model_config):
        parts = mapping.split(parameters[mapping.megatron].detach())
        state.update((name, part.contiguous().cpu()) for name, part in zip(mapping.hf, parts))
    return state


def _write_tensors(model: TreeModel, folder: Path) -> torch.dtype:
    state = hf_state(model)
    split = split_torch_state_dict_into_shards(state, filename_pattern="model{suffix}.safetensors")
    for filename, names in split.filename_to_tensors.items():
        # `clone`: a tensor that shares memory with another would be refused
        save_file({name: state[name].clone() for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return next(iter(state.values())).dtype


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


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as handle:
        return handle.get_tensor(name)
