"""Core attention of a tree call: a drop-in for `TEDotProductAttention` without parameters of its own.

Shapes: R rows, C context rows, N query heads, K key/value heads, H head size; Megatron's layout is [R, 1, heads, H].
"""

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional as F

from megatron_dta.errors import UsageError
from megatron_dta.mcore.params import Mode, TreeParams


class TreeCoreAttention(MegatronModule):
    """Attend to a call's context and own rows when `packed_seq_params` is a `TreeParams`; else ordinary causal."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type=None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        refuse_options(config, attention_type, attention_dropout)
        self.layer = layer_number - 1
        self.softmax_scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        """Return [R, 1, N * H]; raise ValueError for a bias, or a packed batch that is not a tree call."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported in tree training")
        if isinstance(packed_seq_params, TreeParams):
            out = _attend(
                query[:, 0].contiguous(), key[:, 0].contiguous(), value[:, 0].contiguous(),
                packed_seq_params, self.layer, self.softmax_scale,
            )  # fmt: skip
            return out.reshape(out.shape[0], 1, -1)
        if packed_seq_params is not None:
            raise ValueError(f"packed_seq_params is a {type(packed_seq_params).__name__}; expected TreeParams or None")
        return causal_attention(query, key, value, self.softmax_scale)


def causal_attention(query, key, value, scale: float) -> torch.Tensor:
    """Ordinary causal attention, [R, B, heads, H] -> [R, B, N * H], on torch's own kernel."""
    if query.is_cuda and query.dtype == torch.float32:
        # Only the half-precision kernel groups heads; without this the scores of all heads are materialised.
        group = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def refuse_options(config, attention_type: str, attention_dropout: float | None) -> None:
    """Raise UsageError, naming the option, for what cannot be exact or is not built."""
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    refused = {
        "attention_dropout": dropout != 0.0,
        "hidden_dropout": config.hidden_dropout != 0.0,
        "attention_type": attention_type != "self",
        "window_size": getattr(config, "window_size", None) is not None,
        "softmax_type": getattr(config, "softmax_type", "vanilla") != "vanilla",
        "mtp_num_layers": bool(config.mtp_num_layers),
        "num_moe_experts": bool(config.num_moe_experts),
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UsageError(f"{name} is not supported in tree training; leave it at its default or 0")


def _attend(q, k, v, params: TreeParams, layer: int, scale: float) -> torch.Tensor:
    if params.mode is Mode.TRAIN:
        return _TrainAttention.apply(q, k, v, params, layer, scale)
    if params.mode is Mode.PUSH:
        rows = params.store_state
        assert rows is not None
        params.cache.store(layer, rows, k[: len(rows)], v[: len(rows)])
    keys, values = params.cache.with_context(layer, params.context_state, k, v)
    return params.backend.forward(q, keys, values, params.mask, scale)[0]


class _TrainAttention(torch.autograd.Function):
    """All gradient flow between chunks: context gradients go to the cache, own keys and values take what is there.

    Saves q, own k and v, the output and its log-sum-exp; the context is read from the cache again in backward. The
    plan keeps a chunk's context alive until its backward, so it may run after later pushes and forwards.
    """

    @staticmethod
    def forward(ctx, q, k, v, params: TreeParams, layer: int, scale: float):
        keys, values = params.cache.with_context(layer, params.context_state, k, v)
        out, lse = params.backend.forward(q, keys, values, params.mask, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.params, ctx.layer, ctx.scale = params, layer, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        params, layer = ctx.params, ctx.layer
        keys, values = params.cache.with_context(layer, params.context_state, k, v)
        dq, dk, dv = params.backend.backward(
            dout.contiguous(), q, keys, values, out, lse, params.mask, ctx.scale
        )  # fmt: skip
        num_context = params.mask.num_context
        if num_context:
            params.cache.add_grads(layer, params.context_grad, dk[:num_context], dv[:num_context])
        own = [dk[num_context:], dv[num_context:]]
        if len(params.own_rows):
            left = params.cache.grads(layer, params.own_grad)
            own = [g.to(x.dtype).index_add(0, params.own_rows, x) for g, x in zip(own, left)]  # sum wide, round once
        return dq, own[0].to(k.dtype), own[1].to(v.dtype), None, None, None
