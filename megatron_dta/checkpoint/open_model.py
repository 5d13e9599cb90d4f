"""Build a model from what a user names: a folder with weights, or a config.json alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_dta.checkpoint.hf_files import load_hf
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.model_config import parse_model_config, read_model_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def open_model(
    *, hf_folder: str | None = None, hf_config: str | None = None, dtype: str, seed: int = 0, recompute: str = "none"
) -> tuple[TreeModel, dict[str, Any]]:
    """Set up this process and return the model with the raw config it was built from.

    hf_folder: weights and config.json; hf_config: a config.json alone, with random weights drawn from `seed`.
    Raises UsageError for whatever does not fit.
    """
    path = Path(hf_folder or hf_config or "")
    config = read_model_config(path)
    device = parallel.initialize(seed=seed)
    model = build_model(config, dtype=DTYPES[dtype], device=device, recompute=recompute)
    if hf_folder is not None:
        load_hf(model, path)
    return model, json.loads((path / "config.json" if path.is_dir() else path).read_text())


def tiny_model(family: str, vocab_size: int, *, dtype: str, seed: int = 0, max_positions: int) -> TreeModel:
    """Build a two-layer model of a family's shape, for checks without a checkpoint."""
    config = replace(
        parse_model_config(TINY | {"model_type": family}), vocab_size=vocab_size, max_positions=max_positions
    )
    return build_model(config, dtype=DTYPES[dtype], device=parallel.initialize(seed=seed))


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "initializer_range": 0.1,
}
"""Heads, key/value heads and a head size apart from hidden / heads; weights large enough for gradients to flow."""
