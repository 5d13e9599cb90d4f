"""Mixture of experts in Megatron's layers: a router that takes its routes from the step's `Routing`.

Shapes: n rows that this process routes, h hidden size, E experts, K experts per token.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_dta.errors import UsageError
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.routing import Routing, all_scores
from megatron_dta.model_config import ModelConfig

EXPERTS = ("sequential", "grouped")
"""How a process computes its experts: one after another, or by Transformer Engine's grouped matrix products."""


def transformer_options(config: ModelConfig, experts: str) -> dict[str, Any]:
    """Return Megatron's options for a mixture of experts; a dense model has none.

    Megatron balances nothing: the losses are those of `Routing`. Raises UsageError for an unknown `experts`, and for
    grouped ones without Transformer Engine.
    """
    if experts not in EXPERTS:
        raise UsageError(f"experts is {experts!r}; expected one of {', '.join(EXPERTS)}")
    if not config.num_experts:
        return {}
    if experts == "grouped" and not _has_grouped_products():
        raise UsageError(
            "experts is 'grouped', which needs Transformer Engine 1.9 or later; install transformer-engine[pytorch], "
            "or choose 'sequential'"
        )
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.expert_ffn_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": experts == "grouped",
    }


def _has_grouped_products() -> bool:
    from megatron.core.extensions import transformer_engine

    return getattr(transformer_engine, "TEColumnParallelGroupedLinear", None) is not None


def replace_mlp(spec: ModuleSpec, transformer: TransformerConfig) -> None:
    """Put experts in place of a layer's MLP, and a layer around them that tells the router which call it serves."""
    grouped = transformer.moe_grouped_gemm
    mlp = get_moe_module_spec(use_te=grouped, num_experts=transformer.num_moe_experts, moe_grouped_gemm=grouped)
    mlp.submodules.router = TreeRouter
    spec.module, spec.submodules.mlp = TreeLayer, mlp


def expert_name(name: str, transformer: TransformerConfig, ep_rank: int) -> str:
    """Return a parameter's name with its expert counted over all ranks, one name for both kinds of experts."""
    if not transformer.num_moe_experts:
        return name
    first = ep_rank * (transformer.num_moe_experts // transformer.expert_model_parallel_size)
    name = re.sub(r"(\.experts)\.(linear_fc\d\.weight)(\d+)$", r"\1.local_experts.\3.\2", name)
    return re.sub(r"(?<=\.local_experts\.)\d+", lambda match: str(first + int(match[0])), name)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Replay:
    """Chooses experts for `topk_routing_with_score_function` in the way of Megatron's `RouterReplay`."""

    routing: Routing
    layer: int
    tokens: torch.Tensor

    def get_replay_topk(
        self, scores, topk: int, num_groups=None, group_topk=None, default_compute_topk: Callable | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, numbers) of every row's experts, [n, K] each; scores keep their gradient."""
        assert default_compute_topk is not None
        _, found = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
        chosen = self.routing.settle(self.layer, self.tokens, found)
        return scores.gather(1, chosen), chosen


class _AddLoss(torch.autograd.Function):
    """Pass a tensor on; in its backward a loss joins with gradient 1, whatever scales the rest."""

    @staticmethod
    def forward(ctx, passed, loss):
        ctx.save_for_backward(loss)
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class TreeRouter(TopKRouter):
    """Routes the rows of a call as its `Routing` knows them; without one, plain top-k without any loss."""

    def __init__(self, config: TransformerConfig, pg_collection=None):
        refuse_options(config)
        super().__init__(config=config, pg_collection=pg_collection)
        self.place = 0
        """Number of the layer in its model part."""
        self.params: CallParams | None = None
        """Of the call that runs; its layer sets it."""

    def forward(self, input: torch.Tensor, padding_mask=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [n, E] of hidden states [n, 1, h], 0 for experts not chosen, and the map of chosen ones."""
        self._maintain_float32_expert_bias()
        logits = self.gating(input).flatten(0, -2)
        params = self.params
        if params is None or params.routing is None:
            return self._choose(logits, None)
        routing, tokens = params.routing, params.routed_tokens
        assert tokens is not None, "a call with a routing says which tokens its rows are"
        weights, routed = self._choose(logits, _Replay(routing=routing, layer=self.place, tokens=tokens))
        scores = all_scores(logits, self.score_function) if routing.has_losses else None
        with torch.no_grad():
            routing.count(self.place, tokens, routed, scores)
        if scores is not None and logits.requires_grad:
            weights = _AddLoss.apply(weights, routing.loss(self.place, tokens, scores))
        return weights, routed

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits [n, 1, E] in fp32 or wider: half precision would tie experts and round their weights."""
        wide = torch.promote_types(input.dtype, torch.float32)
        if self.config.moe_grouped_gemm:  # Transformer Engine is there, and spares the wide copy of the input
            return moe_utils.router_gating_linear(input, self.weight, None, wide)
        return nn.functional.linear(input.to(wide), self.weight.to(wide))

    def _choose(self, logits: torch.Tensor, replay: _Replay | None) -> tuple[torch.Tensor, torch.Tensor]:
        return moe_utils.topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=replay,
        )

    def update_bias(self, routing: Routing) -> None:
        """Move the bias of every expert towards an even load, by Megatron's rule and rate, from the step's counts."""
        if self.expert_bias is not None:
            counts = routing.counts[self.place]
            step = torch.sign(counts.mean() - counts).to(self.expert_bias.dtype)
            self.expert_bias.add_(step, alpha=self.config.moe_router_bias_update_rate)


class TreeLayer(TransformerLayer):
    """Tells its router which call it serves, also when recomputation calls the layer again with other calls between."""

    def __init__(self, *args, layer_number: int = 1, **kwargs):
        super().__init__(*args, layer_number=layer_number, **kwargs)
        self.mlp.router.place = layer_number - 1  # within the model part; `self.layer_number` counts over all

    def forward(self, *args, **kwargs):
        """Run the layer on the call that `packed_seq_params` describes."""
        router = self.mlp.router
        router.params = kwargs.get("packed_seq_params")
        try:
            return super().forward(*args, **kwargs)
        finally:
            router.params = None
            vars(self.mlp.token_dispatcher).update(probs=None)  # else the call's whole graph lives until the next


_MULTIPLICITY = "counts a shared token as often as sequences hold it; Megatron's would count it once"
_ALONE = "a token's output must not depend on the rows that run beside it"
_REPLAY = "it cannot replay the routes of a step"
_REFUSED: dict[str, tuple[Any, str]] = {
    "add_bias_linear": (False, "biases of routers and experts are not built"),
    "moe_router_load_balancing_type": ("none", f"[moe] aux_loss_coef {_MULTIPLICITY}"),
    "moe_z_loss_coeff": (None, f"[moe] z_loss_coef {_MULTIPLICITY}"),
    "moe_expert_capacity_factor": (None, _ALONE),
    "moe_pad_expert_input_to_capacity": (False, _ALONE),
    "moe_token_dropping": (False, _ALONE),
    "moe_input_jitter_eps": (None, _ALONE),
    "moe_router_force_load_balancing": (False, _ALONE),
    "moe_router_num_groups": (None, "routing limited to groups of experts is not built"),
    "moe_router_group_topk": (None, "routing limited to groups of experts is not built"),
    "moe_router_fusion": (False, _REPLAY),
    "moe_enable_routing_replay": (False, _REPLAY),
    "moe_shared_expert_intermediate_size": (None, "shared experts are not built"),
}
"""Option: the only value that is right here, and why."""


def refuse_options(config: TransformerConfig) -> None:
    """Raise UsageError, naming the option, for what is not exact on shared tokens or not built."""
    for name, (allowed, why) in _REFUSED.items():
        value = getattr(config, name)
        if value != allowed:
            raise UsageError(f"{name} = {value!r} is not supported in tree training, set it to {allowed!r}: {why}")
    if config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()):
        raise UsageError(
            "recompute_modules has 'moe', which hides from the router which call it serves; recompute full"
        )
