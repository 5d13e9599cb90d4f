"""A small mixture of experts in Megatron's layer, to run beside the oracle's."""

from dataclasses import replace

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.moe import TreeRouter
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.routing import Routing
from megatron_dta.model_config import ModelConfig
from tests.mcore import moe_oracle as oracle

CONFIG = ModelConfig(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=12,
    ffn_size=20,
    num_heads=2,
    num_kv_heads=1,
    head_size=6,
    vocab_size=100,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qk_norm=True,
    qkv_bias=False,
    init_std=0.4,
    max_positions=64,
    num_experts=5,
    experts_per_token=2,
    expert_ffn_size=8,
)


def new_model(*, recompute: str = "none", dtype: torch.dtype = torch.float64, **changes) -> TreeModel:
    """Build this process's share of a model for the axes that are set up; the same weights on any."""
    device = parallel.initialize(seed=3)
    return build_model(replace(CONFIG, **changes), dtype=dtype, device=device, recompute=recompute, seed=7)


class Layer:
    """The mixture of experts of a model's first layer, and the oracle's copy of its weights."""

    def __init__(self, **changes):
        model = new_model(**changes)
        self.config, self.groups = model.model_config, model.groups
        self.mlp: MoELayer = model.parts[0].decoder.layers[0].mlp
        self.router: TreeRouter = self.mlp.router

    def weights(self) -> oracle.Weights:
        return oracle.weights_of(dict(self.mlp.named_parameters()), self.config.num_experts)

    def routing(self, multiplicity, num_flat: int | None = None, **given) -> Routing:
        counts = torch.as_tensor(multiplicity)
        return Routing(
            self.groups,
            multiplicity=counts,
            num_flat=int(counts.sum()) if num_flat is None else num_flat,
            num_layers=1,
            num_experts=self.config.num_experts,
            experts_per_token=self.config.experts_per_token,
            **given,
        )

    def run(self, hidden: torch.Tensor, routing: Routing | None = None, tokens: torch.Tensor | None = None):
        """Return the output [n, h] of hidden states [n, h]; padding rows are those of token -1."""
        self.router.params = CallParams(routing=routing, routed_tokens=tokens)
        return self.mlp(hidden[:, None])[0][:, 0]

    def sweep(self, hidden: torch.Tensor, routing: Routing) -> None:
        """Route every token once, and make its statistics known."""
        with torch.no_grad():
            self.run(hidden, routing, torch.arange(len(hidden)))
        routing.finish_counts()

    def grads(self) -> dict[str, torch.Tensor]:
        """Return and forget all gradients; every parameter must have one."""
        found = {name: p.grad for name, p in self.mlp.named_parameters()}
        self.mlp.zero_grad(set_to_none=True)
        return found


def random_hidden(num_tokens: int, seed: int = 0, size: int = CONFIG.hidden_size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, size, dtype=torch.float64, generator=generator).requires_grad_()


def some_loss(out: torch.Tensor) -> torch.Tensor:
    """Weight the rows differently, so that no row's gradient can stand for another's."""
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view_as(out).cos()).sum()
