"""Build a model from what a user names: a folder with weights, or a config.json alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_dta.axes import Axes
from megatron_dta.checkpoint.hf_files import load_hf
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.model_config import parse_model_config, read_model_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def open_model(
    *,
    hf_folder: str | None = None,
    hf_config: str | None = None,
    dtype: str,
    seed: int = 0,
    recompute: str = "none",
    experts: str = "sequential",
    axes: Axes | None = None,
) -> tuple[TreeModel, dict[str, Any]]:
    """Set up this process and return its share of the model with the raw config it was built from.

    hf_folder: weights and config.json; hf_config: a config.json alone, with random weights drawn from `seed`; axes: how
    all processes hold the model together, which then all call this; None: as before. Raises UsageError for whatever
    does not fit.
    """
    path = Path(hf_folder or hf_config or "")
    config = read_model_config(path)
    device = parallel.initialize(seed=seed, axes=axes)
    model = build_model(
        config,
        dtype=DTYPES[dtype],
        device=device,
        recompute=recompute,
        seed=seed if hf_folder is None else None,
        experts=experts,
    )
    if hf_folder is not None:
        load_hf(model, path)
    return model, json.loads((path / "config.json" if path.is_dir() else path).read_text())


def tiny_model(
    family: str, vocab_size: int, *, dtype: str, seed: int = 0, max_positions: int, axes: Axes | None = None
) -> TreeModel:
    """Build a small model of a family's shape, for checks without a checkpoint: two layers a model part.

    axes: those that the model has to be divided over; it is the same model on fewer.
    """
    axes = axes or Axes()
    num_kv_heads = 2 * axes.tensor * axes.context
    raw = TINY | {
        "model_type": family,
        "num_hidden_layers": 2 * axes.pipeline * axes.virtual,
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": 2 * num_kv_heads,
        "intermediate_size": 64 * axes.tensor,
    }
    if family == "qwen3_moe":
        raw |= {"num_experts": 4 * axes.expert, "num_experts_per_tok": 2, "norm_topk_prob": True}
        raw |= {"moe_intermediate_size": 32 * axes.expert_tensor_size}
    config = replace(parse_model_config(raw), vocab_size=vocab_size, max_positions=max_positions)
    return build_model(config, dtype=DTYPES[dtype], device=parallel.initialize(seed=seed), seed=seed)


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
