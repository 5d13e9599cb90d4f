"""Routes and statistics of a step: a token is routed once, and counts as often as sequences hold it.

Every statistic is that of one microbatch that holds the whole global batch flat. A push, a sweep or a recomputation
takes the route that the token's first call found, and adds nothing.

Shapes: n rows that this process routes, T tokens, L layers of a model part, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dta.errors import UsageError

if TYPE_CHECKING:
    from megatron_dta.mcore.parallel import Groups


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What the router thinks of all experts, in fp32 or wider."""

    probabilities: torch.Tensor
    """[n, E]: summing to one in each row."""
    log_sums: torch.Tensor
    """[n]: log-sum-exp of the logits."""


def all_scores(logits: torch.Tensor, score_function: str) -> Scores:
    """Return the scores of every expert for logits [n, E]: their softmax, or sigmoids divided by their sum."""
    log_sums = torch.logsumexp(logits, dim=-1)
    if score_function == "softmax":
        return Scores(probabilities=(logits - log_sums[:, None]).exp(), log_sums=log_sums)
    sigmoids = torch.sigmoid(logits)
    return Scores(probabilities=sigmoids / sigmoids.sum(dim=-1, keepdim=True), log_sums=log_sums)


class Routing:
    """Routes and statistics of the tokens of a model part over one step, through its sweep and its training.

    Row T of every array stands for padding, so that token -1 finds it.
    """

    def __init__(
        self,
        groups: "Groups",
        *,
        multiplicity: torch.Tensor,
        num_flat: int,
        num_layers: int,
        num_experts: int,
        experts_per_token: int,
        aux_coef: float = 0.0,
        z_coef: float = 0.0,
        routes: torch.Tensor | None = None,
    ):
        """Start a step.

        multiplicity: int [T], how many sequences hold each token; num_flat: tokens of all sequences of the whole
        step, over all replicas; aux_coef, z_coef: of the load-balancing loss and of the router's z loss; routes: int
        [L, T, K], routes to use, for example those of the rollout, -1 where none is known. Raises UsageError for
        routes that name an expert twice or one that does not exist.
        """
        self.groups, device = groups, multiplicity.device
        self.num_flat, self.num_experts, self.experts_per_token = num_flat, num_experts, experts_per_token
        self.aux_coef, self.z_coef = aux_coef, z_coef
        self.multiplicity = torch.nn.functional.pad(multiplicity.to(torch.float64), (0, 1))
        shape = num_layers, len(multiplicity) + 1
        self.routes = torch.full((*shape, experts_per_token), -1, dtype=torch.int16, device=device)
        if routes is not None:
            _check_routes(routes, num_layers, len(multiplicity), num_experts, experts_per_token)
            self.routes[:, :-1] = routes.to(self.routes)
        self.counted = torch.zeros(shape, dtype=torch.bool, device=device)
        """Tokens whose statistics are in the sums of a process that `share` reaches."""
        self.sums = torch.zeros(num_layers, 2 * num_experts + 1, dtype=torch.float64, device=device)
        """Per layer, by multiplicity: tokens of every expert, probabilities of every expert, z loss."""
        self.totals: torch.Tensor | None = None
        """The sums over all processes, once `finish_counts` has made them."""

    @property
    def has_losses(self) -> bool:
        """Whether the router gets a gradient of its own."""
        return self.aux_coef > 0 or self.z_coef > 0

    def settle(self, layer: int, tokens: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return the experts of tokens int64 [n]: those known, else those found int64 [n, K], known from now on."""
        known = self.routes[layer, tokens]
        is_free = (known[:, :1] < 0) | (tokens[:, None] < 0)
        chosen = torch.where(is_free, found, known.to(found.dtype))
        self.routes[layer, tokens] = chosen.to(self.routes.dtype)
        return chosen

    def count(self, layer: int, tokens: torch.Tensor, routed: torch.Tensor, scores: Scores | None) -> None:
        """Add tokens int64 [n] with their map of experts, bool [n, E], to the sums, those not counted before."""
        if self.totals is not None:
            return  # every token has been counted
        fresh = self.multiplicity[tokens] * ~self.counted[layer, tokens]
        self.counted[layer, tokens] = True
        sums = self.sums[layer]
        sums[: self.num_experts] += fresh @ routed.to(fresh.dtype)
        if scores is not None:
            sums[self.num_experts : -1] += fresh @ scores.probabilities.to(fresh.dtype)
            sums[-1] += fresh @ scores.log_sums.square().to(fresh.dtype)

    def loss(self, layer: int, tokens: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Return these rows' share of the layer's losses, whose gradient is exact: over all rows it is the whole's.

        The fraction of tokens that an expert gets has no gradient. Raises ValueError where it is not known yet.
        """
        weights = (self.multiplicity[tokens] / self.num_flat).to(scores.log_sums.dtype)
        loss = self.z_coef * (weights @ scores.log_sums.square())
        if self.aux_coef > 0:
            slope = self.aux_coef * self.num_experts * self.fractions[layer].to(loss.dtype)
            loss = loss + weights @ (scores.probabilities @ slope)
        return loss

    @property
    def fractions(self) -> torch.Tensor:
        """Share of the routed tokens that each expert gets, float64 [L, E]; raise ValueError where unknown."""
        return self.counts / (self.experts_per_token * self.num_flat)

    @property
    def counts(self) -> torch.Tensor:
        """Tokens of each expert over the whole step, float64 [L, E]; raise ValueError before `finish_counts`."""
        return self._finished()[:, : self.num_experts]

    def share(self, tokens: torch.Tensor) -> None:
        """Give a call's tokens int64 [n] to the processes that rows are dealt to: all layers in one exchange.

        A pushed token's row may lie on another process in its chunk. n is the same on every process. After
        `finish_counts` every route is known and nothing is exchanged.
        """
        group = self.groups.tp_cp
        if group.size() == 1 or self.totals is not None:
            return
        routes = self.routes[:, tokens].transpose(0, 1).contiguous()  # [n, L, K]
        columns = tokens.to(torch.int32)[:, None].view(torch.uint8), routes.flatten(1).view(torch.uint8)
        own = torch.cat(columns, dim=1)
        every = own.new_empty(group.size() * len(own), own.shape[1])
        dist.all_gather_into_tensor(every, own, group=group)
        tokens = every[:, :4].contiguous().view(torch.int32)[:, 0].to(torch.int64)
        self.routes[:, tokens] = every[:, 4:].contiguous().view(torch.int16).view(-1, *routes.shape[1:]).transpose(0, 1)
        self.counted[:, tokens] = True

    def finish_counts(self) -> None:
        """Sum the statistics over all processes; raise ValueError where they are not those of the whole step."""
        totals = self.sums.clone()
        for group in (self.groups.tp_cp, self.groups.dp):
            if group.size() > 1:
                dist.all_reduce(totals, group=group)
        routed, expected = totals[:, : self.num_experts].sum(dim=1), self.experts_per_token * self.num_flat
        if not bool((routed == expected).all()):
            raise ValueError(
                f"{routed.tolist()} expert visits were counted in the layers, expected {expected} in each: every token "
                "of the step has to be run once before its statistics are known"
            )
        self.totals = totals

    def losses(self) -> dict[str, float]:
        """Return the losses' values, summed over this part's layers, as they enter the objective."""
        aux = self.num_experts * (self.fractions * self._finished()[:, self.num_experts : -1]).sum()
        z = self._finished()[:, -1].sum()
        return {
            name: coef * float(value) / self.num_flat
            for name, coef, value in (("aux_loss", self.aux_coef, aux), ("z_loss", self.z_coef, z))
        }

    def _finished(self) -> torch.Tensor:
        if self.totals is None:
            raise ValueError("the load of the experts is not known yet: run every token once, then call finish_counts")
        return self.totals


def _check_routes(routes: torch.Tensor, layers: int, tokens: int, experts: int, per_token: int) -> None:
    if routes.shape != (layers, tokens, per_token):
        raise UsageError(f"routes have shape {tuple(routes.shape)}; expected {(layers, tokens, per_token)}")
    ordered = routes.sort(dim=-1).values
    known = ordered[..., -1] >= 0
    twice = (ordered.diff(dim=-1) == 0).any(dim=-1)
    bad = (ordered[..., -1] >= experts) | (known & (twice | (ordered[..., 0] < 0)))
    if bool(bad.any()):
        layer, token = bad.nonzero()[0].tolist()
        raise UsageError(
            f"route {routes[layer, token].tolist()} of token {token} in layer {layer}; expected {per_token} different "
            f"experts of 0 .. {experts - 1}, or -1 in all places"
        )
