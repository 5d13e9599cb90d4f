"""Experts by their Hugging Face names: real checkpoints, and transformers' own model as the oracle."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatron_dta.checkpoint.hf_names import hf_shapes, mappings
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.model_config import parse_model_config

VOCAB = 101


def random_hf(normalised: bool) -> torch.nn.Module:
    """Build a random model whose norms are not 1 and whose router is not even."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=56,
        moe_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=normalised,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def loaded(raw: dict, tensors: dict[str, torch.Tensor]) -> TreeModel:
    """Build our model of a config and set every parameter from the tensors of its mapping."""
    device = parallel.initialize()
    model = build_model(parse_model_config(raw), dtype=torch.float32, device=device)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == {mapping.megatron for mapping in mappings(model.model_config)}
    with torch.no_grad():
        for mapping in mappings(model.model_config):
            whole = mapping.join([tensors[name] for name in mapping.hf])
            parameters[mapping.megatron][: len(whole)] = whole
    return model


@pytest.mark.parametrize("normalised", [True, False])
def test_transformers_model_gives_the_same_logits_and_gradients(normalised, tmp_path):
    """Both are fp32: logits of order 10 over two layers, sums of at most 56 products, 2^-24 each."""
    theirs = random_hf(normalised)
    theirs.save_pretrained(tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == hf_shapes(parse_model_config(raw))
    ours = loaded(raw, tensors)
    ids = torch.randint(VOCAB, (1, 33))
    expected = theirs(ids).logits
    logits = ours(ids, torch.arange(33)[None]) @ ours.output_weight()[:VOCAB].T
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    for values in (expected, logits):
        torch.log_softmax(values, dim=-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
    theirs_router = theirs.get_parameter("model.layers.1.mlp.gate.weight").grad
    ours_router = dict(ours.named_parameters())["decoder.layers.1.mlp.router.weight"].grad
    torch.testing.assert_close(ours_router, theirs_router, atol=1e-3, rtol=1e-3)
    assert theirs_router.abs().max() > 0.1


def test_the_other_normalisation_gives_other_logits(tmp_path):
    """Negative control: a lost norm_topk_prob would show."""
    theirs = random_hf(True)
    theirs.save_pretrained(tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    ours, ids = loaded(raw | {"norm_topk_prob": False}, tensors), torch.arange(9)[None]
    logits = ours(ids, ids) @ ours.output_weight()[:VOCAB].T
    assert (logits - theirs(ids).logits).abs().max() > 0.1


def test_join_and_split_undo_each_other():
    config = parse_model_config(random_hf(True).config.to_dict())
    shapes = hf_shapes(config)
    parts = {name: torch.randn(shape) for name, shape in shapes.items()}
    seen = []
    for mapping in mappings(config):
        back = mapping.split(mapping.join([parts[name] for name in mapping.hf]))
        assert all(torch.equal(got, parts[name]) for name, got in zip(mapping.hf, back, strict=True))
        seen += mapping.hf
    assert sorted(seen) == sorted(shapes)
