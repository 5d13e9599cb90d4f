"""Megatron's parameters and the Hugging Face tensors they are made of.

Shapes: N query heads, K key/value heads, G = N / K, D head size, h hidden size, V vocabulary. Experts are numbered over
all processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_dta.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Mapping:
    """One Megatron parameter and its Hugging Face tensors."""

    megatron: str
    hf: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def mappings(config: ModelConfig) -> Iterator[Mapping]:
    """Yield the mapping of every parameter of a model of this shape, padded vocabulary rows left out."""
    vocabulary = {"join": lambda parts: parts[0], "split": lambda weight: (weight[: config.vocab_size],)}
    yield Mapping(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), **vocabulary)
    for i in range(config.num_layers):
        yield from _layer(config, f"decoder.layers.{i}.", f"model.layers.{i}.")
    yield _same("decoder.final_layernorm.weight", "model.norm.weight")
    if not config.tied:
        yield Mapping(megatron="output_layer.weight", hf=("lm_head.weight",), **vocabulary)


def _layer(config: ModelConfig, megatron: str, hf: str) -> Iterator[Mapping]:
    attention, hf_attention = megatron + "self_attention.", hf + "self_attn."
    yield _same(megatron + "input_layernorm.weight", hf + "input_layernorm.weight")
    yield _qkv(config, attention, hf_attention, "weight")
    if config.qkv_bias:
        yield _qkv(config, attention, hf_attention, "bias")
    if config.qk_norm:
        yield _same(attention + "q_layernorm.weight", hf_attention + "q_norm.weight")
        yield _same(attention + "k_layernorm.weight", hf_attention + "k_norm.weight")
    yield _same(attention + "linear_proj.weight", hf_attention + "o_proj.weight")
    yield _same(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight")
    if not config.num_experts:
        yield from _mlp(megatron + "mlp.", hf + "mlp.")
        return
    yield _same(megatron + "mlp.router.weight", hf + "mlp.gate.weight")
    for e in range(config.num_experts):
        yield from _mlp(f"{megatron}mlp.experts.local_experts.{e}.", f"{hf}mlp.experts.{e}.")


def _mlp(megatron: str, hf: str) -> Iterator[Mapping]:
    yield Mapping(
        megatron=megatron + "linear_fc1.weight",
        hf=(hf + "gate_proj.weight", hf + "up_proj.weight"),
        join=lambda parts: torch.cat(list(parts)),
        split=lambda weight: weight.chunk(2),
    )
    yield _same(megatron + "linear_fc2.weight", hf + "down_proj.weight")


def _same(megatron: str, hf: str) -> Mapping:
    return Mapping(megatron=megatron, hf=(hf,), join=lambda parts: parts[0], split=lambda weight: (weight,))


def _qkv(config: ModelConfig, megatron: str, hf: str, kind: str) -> Mapping:
    """Megatron keeps each key/value head's rows together: its G query heads, then key, then value."""
    groups, head = config.num_kv_heads, config.head_size
    per_group = config.num_heads // groups

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_group = weight.view(groups, (per_group + 2) * head, *weight.shape[1:])
        return tuple(part.flatten(0, 1) for part in by_group.split([per_group * head, head, head], dim=1))

    names = tuple(f"{hf}{letter}_proj.{kind}" for letter in "qkv")
    return Mapping(megatron=f"{megatron}linear_qkv.{kind}", hf=names, join=join, split=split)


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Hugging Face checkpoint of this model."""
    h, head = config.hidden_size, config.head_size
    ffn = config.expert_ffn_size if config.num_experts else config.ffn_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, h),
        "lm_head.weight": (config.vocab_size, h),
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
        "o_proj.weight": (h, q),
        "gate.weight": (config.num_experts, h),
        "gate_proj.weight": (ffn, h),
        "up_proj.weight": (ffn, h),
        "down_proj.weight": (h, ffn),
    }
    names = [name for mapping in mappings(config) for name in mapping.hf]
    return {name: shapes.get(".".join(name.split(".")[-2:]), (h,)) for name in names}
