"""A Megatron-Core GPT model whose core attention, rotary embedding and output layer know about trees."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_dta.errors import UsageError
from megatron_dta.mcore.core_attention import TreeCoreAttention
from megatron_dta.mcore.rotary import TreeRotary
from megatron_dta.model_config import ModelConfig

VOCAB_MULTIPLE = 128
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
RECOMPUTE = tuple(_RECOMPUTE)


class Norm(nn.RMSNorm):
    """RMS norm with Megatron's constructor; its weight says whether its gradient is a sequence-parallel partial sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class HiddenOutput(ColumnParallelLinear):
    """Keeps the output layer's weight and name but passes the hidden states on: the head runs on selected rows only."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """Return (hidden states, no bias)."""
        return input_, None


class TreeModel(GPTModel):
    """GPTModel that returns final hidden states; build it with `build_model`."""

    model_config: ModelConfig

    def output_weight(self) -> torch.Tensor:
        """Return the output layer's weight [padded vocabulary, hidden], tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, recompute: str = "none") -> TreeModel:
    """Build a decoder with random weights drawn from torch's generator; raise UsageError for an unknown recompute."""
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute is {recompute!r}; expected one of {', '.join(RECOMPUTE)}")
    transformer = transformer_config(config, dtype, recompute)
    model = TreeModel(
        transformer,
        _layer_specs(config),
        vocab_size=padded_vocab(config.vocab_size),
        max_sequence_length=config.max_positions,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied,
    )
    model.model_config = config
    model.rotary_pos_emb = TreeRotary(config, device)
    _replace_output_layer(model, transformer)
    return model.to(device)


def padded_vocab(vocab_size: int) -> int:
    """Round up to full blocks of the vocabulary padding."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def transformer_config(config: ModelConfig, dtype: torch.dtype, recompute: str) -> TransformerConfig:
    """Translate a model's shape to Megatron's; fusions that need a GPU extension are off."""
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_size,
        layernorm_epsilon=config.norm_eps,
        init_method_std=config.init_std,
        normalization="RMSNorm",
        qk_layernorm=config.qk_norm,
        add_qkv_bias=config.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=False,
        **_RECOMPUTE[recompute],
    )


def _layer_specs(config: ModelConfig) -> TransformerBlockSubmodules:
    spec: ModuleSpec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TreeCoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=Norm)


def _replace_output_layer(model: TreeModel, transformer: TransformerConfig) -> None:
    plain = model.output_layer
    model.output_layer = HiddenOutput(
        plain.input_size,
        plain.output_size,
        config=transformer,
        init_method=transformer.init_method,
        bias=False,
        skip_weight_param_allocation=True,  # it takes over the weight, or the embedding has it
        tp_group=plain.tp_group,
    )
    if plain.weight is not None:
        model.output_layer.weight = plain.weight
