"""Core attention of a tree call: a drop-in for `TEDotProductAttention` without parameters of its own.

Shapes: n rows on this process, R rows over all context-parallel ranks (n where there is one), C context rows, N query
heads, K key/value heads, H head size; Megatron's layout is [n, 1, heads, H]. Heads are those of this tensor rank.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional as F

from megatron_dta.errors import UsageError
from megatron_dta.mcore.params import CallParams, Dealt, Mode, TreeParams

CP_COMMS = ("a2a", "all_gather")
"""Transformer Engine's names of the two ways that are built."""


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
        """Place in the cache; counted anew by models that hold some of the layers."""
        self.softmax_scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5
        self.cp_group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            if cp_comm_type not in CP_COMMS:
                raise UsageError(f"cp_comm_type is {cp_comm_type!r}; expected one of {', '.join(CP_COMMS)}")
            self.cp_group, self.cp_comm = pg_collection.cp, cp_comm_type

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        """Return [n, 1, N * H]; raise ValueError for a bias, or a packed batch that is not a tree call."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported in tree training")
        if isinstance(packed_seq_params, TreeParams):
            out = self._tree(
                query[:, 0].contiguous(), key[:, 0].contiguous(), value[:, 0].contiguous(), packed_seq_params
            )
            return out.reshape(out.shape[0], 1, -1)
        if packed_seq_params is not None and not isinstance(packed_seq_params, CallParams):
            raise ValueError(f"packed_seq_params is a {type(packed_seq_params).__name__}; expected TreeParams or None")
        if self.cp_group is not None:
            raise ValueError("without a plan there is no context parallelism; pass TreeParams as packed_seq_params")
        return causal_attention(query, key, value, self.softmax_scale)

    def _tree(self, q, k, v, params: TreeParams) -> torch.Tensor:
        if self.cp_group is None or params.dealt is None:
            return _attend(q, k, v, params, self.layer, self.softmax_scale, None)
        if self.cp_comm == "all_gather":
            return _attend(q, k, v, params, self.layer, self.softmax_scale, self.cp_group)
        num_q, num_kv = q.shape[1] // self.cp_group.size(), k.shape[1] // self.cp_group.size()
        own = rows_to_heads((q, k, v), params.dealt, self.cp_group)
        q, k, v = (part.contiguous() for part in own.split([num_q, num_kv, num_kv], dim=1))
        out = _attend(q, k, v, params, self.layer, self.softmax_scale, None)
        return heads_to_rows(out, params.dealt, self.cp_group)


def rows_to_heads(parts, dealt: Dealt, group: dist.ProcessGroup) -> torch.Tensor:
    """Trade n rows of all heads for all R rows of every part's share of heads, side by side: [R, heads / ranks, H]."""
    ranks = group.size()
    by_rank = torch.cat([x.unflatten(1, (ranks, -1)) for x in parts], dim=2)  # [n, ranks, heads / ranks, H]
    received = all_to_all(group, by_rank.transpose(0, 1).flatten(0, 1).contiguous())
    return received.index_select(0, dealt.place)


def heads_to_rows(out: torch.Tensor, dealt: Dealt, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo `rows_to_heads`: [R, N / ranks, H] -> [n, N, H]."""
    received = all_to_all(group, out.index_select(0, dealt.by_rank))
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


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
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UsageError(f"{name} is not supported in tree training; leave it at its default or 0")


def _attend(q, k, v, params: TreeParams, layer: int, scale: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Attend with this process's queries; `group`: keys and values are to be gathered from its ranks first."""
    if params.mode is Mode.TRAIN:
        return _TrainAttention.apply(q, k, v, params, layer, scale, group)
    k, v = _gathered(k, v, params, group)
    if params.mode is Mode.PUSH:
        params.cache.store(layer, params.store_state, k, v)
    keys, values = params.cache.with_context(layer, params.context_state, k, v)
    return params.backend.forward(q, keys, values, params.mask, scale)[0]


def _gathered(k, v, params: TreeParams, group: dist.ProcessGroup | None):
    """Return the keys and values of all R rows in their order."""
    if group is None or params.dealt is None:
        return k, v
    both = torch.stack((k, v), dim=1)
    found = both.new_empty(len(both) * group.size(), *both.shape[1:])
    dist.all_gather_into_tensor(found, both, group=group)
    found = found.index_select(0, params.dealt.place)
    return found[:, 0].contiguous(), found[:, 1].contiguous()


def _scattered(dk, dv, params: TreeParams, group: dist.ProcessGroup | None):
    """Undo `_gathered` on gradients: sum what all ranks' queries add to this rank's rows."""
    if group is None or params.dealt is None:
        return dk, dv
    both = torch.stack((dk, dv), dim=1).index_select(0, params.dealt.by_rank)
    found = both.new_empty(len(both) // group.size(), *both.shape[1:])
    dist.reduce_scatter_tensor(found, both, group=group)
    return found[:, 0], found[:, 1]


class _TrainAttention(torch.autograd.Function):
    """All gradient flow between chunks: context gradients go to the cache, own keys and values take what is there.

    Saves q, own k and v, the output and its log-sum-exp; the context is read from the cache again in backward, and
    other ranks' keys are gathered again. The plan keeps a chunk's context alive until its backward, so it may run after
    later pushes and forwards.
    """

    @staticmethod
    def forward(ctx, q, k, v, params: TreeParams, layer: int, scale: float, group):
        keys, values = params.cache.with_context(layer, params.context_state, *_gathered(k, v, params, group))
        out, lse = params.backend.forward(q, keys, values, params.mask, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.params, ctx.layer, ctx.scale, ctx.group = params, layer, scale, group
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        params, layer, group = ctx.params, ctx.layer, ctx.group
        all_k, all_v = _gathered(k, v, params, group)
        keys, values = params.cache.with_context(layer, params.context_state, all_k, all_v)
        dq, dk, dv = params.backend.backward(
            dout.contiguous(), q, keys, values, out, lse, params.mask, ctx.scale
        )  # fmt: skip
        num_context = len(keys) - len(all_k)
        if num_context:
            params.cache.add_grads(layer, params.context_grad, dk[:num_context], dv[:num_context])
        # own gradients and those left by descendants are summed wide and rounded once
        assert params.own_rows is not None, "a chunk that trains says which of its rows were pushed"
        dk, dv = params.cache.join_grads(
            layer, params.own_grad, params.own_rows, dk[num_context:], dv[num_context:]
        )  # fmt: skip
        own_k, own_v = _scattered(dk, dv, params, group)
        return dq, own_k.to(k.dtype), own_v.to(v.dtype), None, None, None, None
