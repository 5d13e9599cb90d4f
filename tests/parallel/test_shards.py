"""Weights on many processes, under MPI and under gloo, are those of one: drawn, loaded, saved, gathered."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dta.axes import Axes
from megatron_dta.checkpoint.hf_files import save_hf
from megatron_dta.checkpoint.open_model import DTYPES
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.shards import Alone, gather_whole
from megatron_dta.model_config import parse_model_config
from tests.control.spawn import run_mpi, run_torch
from tests.parallel.ranks_shards import DTYPE, LAYOUTS, SEED, hidden_states, small_files

RANKS = str(Path(__file__).with_name("ranks_shards.py"))
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "plain": SHAPE | {"model_type": "qwen3", "vocab_size": 130},
    "tied": SHAPE | {"model_type": "qwen2", "vocab_size": 257, "tie_word_embeddings": True},
    "one token": SHAPE | {"model_type": "llama", "vocab_size": 1},
    "experts": SHAPE
    | {"model_type": "qwen3_moe", "vocab_size": 130, "num_hidden_layers": 2, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
}


def new(name: str) -> TreeModel:
    device = parallel.initialize(axes=Axes())
    return build_model(parse_model_config(MODELS[name]), dtype=DTYPES[DTYPE[name]], device=device, seed=SEED)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with what one process draws, saves and computes, for every model."""
    root = tmp_path_factory.mktemp("shards")
    for name, raw in MODELS.items():
        model, folder = new(name), root / name
        folder.mkdir()
        drawn = gather_whole(lambda shard: shard.parameter, model, Alone())
        assert drawn is not None
        save_file(drawn, folder / "drawn.safetensors")
        generator = torch.Generator().manual_seed(1)
        for key, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.3, generator=generator)
        save_hf(model, folder / "whole", raw)
        save_hf(model, folder / "cut short", raw)
        file = folder / "cut short" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with small_files():
            save_hf(model, folder / "saved", {"model": name})
        save_file({"hidden": hidden_states(model)}, folder / "hidden.safetensors")
    return root


@pytest.mark.parametrize(("num_ranks", "run"), [(2, run_mpi), (4, run_torch)])
def test_weights_on_many_processes_are_those_of_one(num_ranks, run, root):
    output = run(num_ranks, RANKS, str(root))
    wanted = [f"{name}, {axes.describe()} {r} ok" for name, axes in LAYOUTS[num_ranks] for r in range(num_ranks)]
    assert [line for line in wanted if line not in output.split("\n")] == [], output
