"""A process's share of a Megatron-Core GPT model whose core attention, rotary embedding and head know about trees."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_dta.axes import Axes, check_axes
from megatron_dta.errors import UsageError
from megatron_dta.mcore import moe, parallel
from megatron_dta.mcore.core_attention import TreeCoreAttention
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.rotary import TreeRotary
from megatron_dta.mcore.shards import draw_weights
from megatron_dta.model_config import ModelConfig

VOCAB_MULTIPLE = 128
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
RECOMPUTE = tuple(_RECOMPUTE)
_CP_COMM = {"a2a": "a2a", "allgather": "all_gather"}
"""Our names and those of Transformer Engine, which Megatron's config has."""


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


class TreePart(GPTModel):
    """Consecutive layers of the model, with the embedding before the first and the head's weight after the last."""

    def output_weight(self) -> torch.Tensor:
        """Return the output layer's weight, this process's rows of the padded vocabulary; of the last part only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeModel:
    """What one process holds of the model: one part, several where virtual stages are interleaved.

    Parameters go by the names that they have in a model that one process holds alone.
    """

    model_config: ModelConfig
    transformer: TransformerConfig
    axes: Axes
    groups: parallel.Groups
    parts: tuple[TreePart, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_mask=None, packed_seq_params=None
    ) -> torch.Tensor:
        """Run a model that this process holds whole: [1, R] -> final hidden states [1, R, h]."""
        (part,) = self.parts
        return part(tokens, positions, attention_mask, packed_seq_params=packed_seq_params)

    def run_part(
        self, part: int, tokens: torch.Tensor, params: CallParams, hidden: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """Run one model part on this process's rows of a call.

        tokens int64 [n]; hidden: what the part before returned, None for the first. Returns [n, 1, h], with sequence
        parallelism [n / tp, 1, h]; the last part's are final hidden states.
        """
        model = self.parts[part]
        model.set_input_tensor(hidden)
        out = model(tokens[None], tokens[None], None, packed_seq_params=params)
        return out.transpose(0, 1) if model.post_process else out

    def head_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [n, h] of all rows on every tensor rank; their gradients are summed."""
        if self.axes.sequence:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        elif self.axes.tensor > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.groups.tp)
        return hidden[:, 0]

    @property
    def has_head(self) -> bool:
        return self.parts[-1].post_process

    def output_weight(self) -> torch.Tensor:
        """See `TreePart.output_weight`; the last stage's."""
        return self.parts[-1].output_weight()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this process with its name in the whole model; shards keep the whole's name."""
        for part in self.parts:
            yield from part_parameters(part, self.groups)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of this process."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients in `.grad`."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    @property
    def num_local_layers(self) -> tuple[int, ...]:
        """Layers of every part."""
        return tuple(len(part.decoder.layers) for part in self.parts)


def part_parameters(part: TreePart, groups: parallel.Groups) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a part's parameters by their names in the whole model: layers and experts numbered over all processes."""
    numbers = [layer.layer_number - 1 for layer in part.decoder.layers]
    for name, parameter in part.named_parameters():
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(numbers[int(match[0])]), name)
        yield moe.expert_name(name, part.config, groups.ep.rank()), parameter


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str = "none",
    seed: int | None = 0,
    experts: str = "sequential",
) -> TreeModel:
    """Build this process's share of a decoder for the axes that `parallel.initialize` set up.

    Random weights are drawn per parameter from `seed` and its name: the same model on any axes; None: weights are
    loaded before they are used. experts: sequential or grouped matrix products. Raises
    UsageError for an unknown recompute and for axes that the model refuses.
    """
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute is {recompute!r}; expected one of {', '.join(RECOMPUTE)}")
    axes, groups = parallel.current_axes(), parallel.current_groups()
    check_axes(axes, config, groups.dp_cp.size() * axes.tensor * axes.pipeline)
    transformer = transformer_config(config, dtype, recompute, axes, experts)
    parts = [_build_part(config, transformer, axes, number, device) for number in range(axes.virtual)]
    model = TreeModel(
        model_config=config,
        transformer=transformer,
        axes=axes,
        groups=groups,
        parts=tuple(parts),
        dtype=dtype,
        device=device,
    )
    if seed is not None:
        draw_weights(model, seed)
    return model


def _build_part(
    config: ModelConfig, transformer: TransformerConfig, axes: Axes, number: int, device: torch.device
) -> TreePart:
    part = TreePart(
        transformer,
        _layer_specs(config, transformer, config.num_layers // (axes.pipeline * axes.virtual)),
        vocab_size=padded_vocab(config.vocab_size, axes.tensor),
        max_sequence_length=config.max_positions,
        pre_process=parallel.is_first_part(number),
        post_process=parallel.is_last_part(number),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied,
        vp_stage=number if axes.virtual > 1 else None,
    )
    part.rotary_pos_emb = TreeRotary(config, device)
    if part.post_process:
        _replace_output_layer(part, transformer)
    for place, layer in enumerate(part.decoder.layers):
        layer.self_attention.core_attention.layer = place  # the cache of this part counts from 0
    return part.to(device)


def padded_vocab(vocab_size: int, tensor: int = 1) -> int:
    """Round up to full blocks of the vocabulary padding on each of `tensor` ranks."""
    block = VOCAB_MULTIPLE * tensor
    return -(-vocab_size // block) * block


def transformer_config(
    config: ModelConfig, dtype: torch.dtype, recompute: str, axes: Axes, experts: str
) -> TransformerConfig:
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
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=axes.tensor,
        sequence_parallel=axes.sequence,
        context_parallel_size=axes.context,
        cp_comm_type=_CP_COMM[axes.cp_comm],
        pipeline_model_parallel_size=axes.pipeline,
        virtual_pipeline_model_parallel_size=axes.virtual if axes.virtual > 1 else None,
        expert_model_parallel_size=axes.expert,
        expert_tensor_parallel_size=axes.expert_tensor_size,
        **moe.transformer_options(config, experts),
        **_RECOMPUTE[recompute],
    )


def _layer_specs(config: ModelConfig, transformer: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    spec: ModuleSpec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TreeCoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if config.num_experts:
        moe.replace_mlp(spec, transformer)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=Norm)


def _replace_output_layer(part: TreePart, transformer: TransformerConfig) -> None:
    plain = part.output_layer
    part.output_layer = HiddenOutput(
        plain.input_size,
        plain.output_size,
        config=transformer,
        init_method=transformer.init_method,
        bias=False,
        skip_weight_param_allocation=True,  # it takes over the weight, or the embedding has it
        tp_group=plain.tp_group,
    )
    if plain.weight is not None:
        part.output_layer.weight = plain.weight
