"""A mixture of experts in plain torch, as Qwen3-MoE defines it, and the router's losses over flat tokens.

Shapes: n tokens, h hidden size, f expert size, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Of one layer; leaves that get gradients."""

    router: torch.Tensor
    """[E, h]."""
    fc1: tuple[torch.Tensor, ...]
    """E times [2 f, h], the gate above the other factor."""
    fc2: tuple[torch.Tensor, ...]
    """E times [h, f]."""

    def grads(self) -> dict[str, torch.Tensor]:
        """Return every gradient by its name within Megatron's layer, zero where autograd left none."""
        named = {"router.weight": self.router}
        for e, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2)):
            named |= {f"experts.local_experts.{e}.linear_fc{i}.weight": w for i, w in ((1, fc1), (2, fc2))}
        return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in named.items()}


def weights_of(named: dict[str, torch.Tensor], num_experts: int) -> Weights:
    """Copy a layer's weights, given by their names within Megatron's layer."""

    def leaf(name: str) -> torch.Tensor:
        return named[name].detach().clone().requires_grad_()

    first, second = (
        tuple(leaf(f"experts.local_experts.{e}.linear_fc{i}.weight") for e in range(num_experts)) for i in (1, 2)
    )
    return Weights(router=leaf("router.weight"), fc1=first, fc2=second)


def top_routes(hidden: torch.Tensor, weights: Weights, per_token: int) -> torch.Tensor:
    """Return the experts of every token, int64 [n, K], most probable first."""
    return (hidden @ weights.router.T).topk(per_token, dim=-1).indices.detach()


def layer_output(hidden: torch.Tensor, weights: Weights, routes: torch.Tensor, *, normalised: bool) -> torch.Tensor:
    """Return [n, h]: the experts of each token, weighted by the softmax of their logits, or by their share of it."""
    probabilities = torch.softmax(hidden @ weights.router.T, dim=-1).gather(1, routes)
    if normalised:
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(hidden)
    for e, (fc1, fc2) in enumerate(zip(weights.fc1, weights.fc2)):
        gate, factor = (hidden @ fc1.T).chunk(2, dim=-1)
        share = (probabilities * (routes == e)).sum(dim=-1, keepdim=True)
        out = out + share * ((F.silu(gate) * factor) @ fc2.T)
    return out


def aux_loss(hidden: torch.Tensor, weights: Weights, routes: torch.Tensor) -> torch.Tensor:
    """Return the load-balancing loss of the Switch Transformer over these tokens; fractions without gradient."""
    num_experts = len(weights.router)
    fractions = torch.bincount(routes.flatten(), minlength=num_experts).to(hidden.dtype) / routes.numel()
    means = torch.softmax(hidden @ weights.router.T, dim=-1).mean(dim=0)
    return num_experts * (fractions * means).sum()


def z_loss(hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return the router's z loss over these tokens."""
    return torch.logsumexp(hidden @ weights.router.T, dim=-1).square().mean()
