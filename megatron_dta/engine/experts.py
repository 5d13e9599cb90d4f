"""A mixture of experts over one step: routes of its tokens, losses of its routers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """What routers add to the objective, over the whole step."""

    aux_coef: float = 0.0
    """Of the load-balancing loss."""
    z_coef: float = 0.0
    """Of the mean squared log-sum-exp of the router's logits."""

    def check(self, model: TreeModel) -> None:
        """Raise UsageError for losses of routers that the model does not have."""
        if not model.model_config.num_experts and (self.aux_coef > 0 or self.z_coef > 0):
            raise UsageError(
                f"router losses {self.aux_coef} and {self.z_coef} for a dense model; set both coefficients to 0"
            )


def routings(
    model: TreeModel, multiplicity: np.ndarray, num_tokens: int, losses: RouterLosses
) -> list[Routing | None]:  # fmt: skip
    """Start the routing of every model part for tokens that so many sequences each hold, [T]; None in a dense model.

    num_tokens: of all sequences of the whole step, over all replicas.
    """
    config = model.model_config
    if not config.num_experts:
        return [None] * len(model.parts)
    return [
        Routing(
            model.groups,
            multiplicity=torch.from_numpy(multiplicity).to(model.device),
            num_flat=num_tokens,
            num_layers=num_layers,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            aux_coef=losses.aux_coef,
            z_coef=losses.z_coef,
        )
        for num_layers in model.num_local_layers
    ]


def finish_counts(parts: Sequence[Routing | None]) -> None:
    """Sum up the load of the experts over all processes, if it is not yet; every token has been run."""
    for routing in parts:
        if routing is not None and routing.totals is None:
            routing.finish_counts()


def router_losses(model: TreeModel, parts: Sequence[Routing | None]) -> dict[str, float]:
    """Return the losses of this process's layers, on one process per layer: over all processes they add up."""
    speaks = model.groups.dp_cp.rank() == 0 and model.groups.tp.rank() == 0
    found: dict[str, float] = {}
    for routing in parts:
        if speaks and routing is not None and routing.has_losses:
            for name, value in routing.losses().items():
                found[name] = found.get(name, 0.0) + value
    return found


def update_expert_bias(model: TreeModel, parts: Sequence[Routing | None]) -> None:
    """Move the bias of experts, where the model has one, towards an even load over the step."""
    if not model.transformer.moe_router_enable_expert_bias:
        return
    finish_counts(parts)
    for part, routing in zip(model.parts, parts):
        for layer in part.decoder.layers:
            layer.mlp.router.update_bias(routing)
