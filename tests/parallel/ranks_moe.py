"""What two ranks run to hold experts that they share to the plain mixture: `python ranks_moe.py`.

Both ranks know all tokens, so each can ask the oracle for everything. Prints "NAME ok" on rank 0 for every check that
both passed. The bounds are those of tests/mcore/test_moe.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_dta.axes import Axes
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.routing import Routing
from megatron_dta.mcore.shards import shards
from tests.mcore import moe_oracle as oracle
from tests.mcore.moe_layer import CONFIG, random_hidden

NARROW, EXACT = 1e-6, 1e-12
MODEL = replace(CONFIG, num_experts=4, num_kv_heads=2)
LOSSES = {"aux_coef": 0.3, "z_coef": 0.2}
PREFIX = "decoder.layers.0.mlp."
LAYOUTS = {
    "experts": Axes(expert=2),
    "sequence": Axes(tensor=2, sequence=True),
    "sequence and experts": Axes(tensor=2, sequence=True, expert=2, expert_tensor=1),
    "context and experts": Axes(context=2, expert=2),
}
DEALT = [name for name, axes in LAYOUTS.items() if axes.replica_size == 2]
"""Layouts that deal the rows of one call to both ranks."""


class Shared:
    """A layer's mixture on the axes given, and the oracle's whole one."""

    def __init__(self, axes: Axes, recompute: str = "none"):
        parallel.initialize(axes=Axes())
        weights = self._model("none").named_parameters()
        named = {name.removeprefix(PREFIX): w for name, w in weights if name.startswith(PREFIX)}
        self.weights = oracle.weights_of(named, MODEL.num_experts)
        parallel.initialize(axes=axes)
        self.model = self._model(recompute)
        self.groups, self.rank = self.model.groups, dist.get_rank()
        self.layer = self.model.parts[0].decoder.layers[0]

    @staticmethod
    def _model(recompute: str) -> TreeModel:
        device = parallel.initialize()
        return build_model(MODEL, dtype=torch.float64, device=device, recompute=recompute, seed=7)

    def routing(self, multiplicity: torch.Tensor, num_flat: int, **given) -> Routing:
        return Routing(
            self.groups,
            multiplicity=multiplicity,
            num_flat=num_flat,
            num_layers=1,
            num_experts=MODEL.num_experts,
            experts_per_token=MODEL.experts_per_token,
            **given,
        )

    def run(self, hidden: torch.Tensor, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return this rank's outputs [n, h] for its rows; padding rows are zeros."""
        rows = torch.where(tokens[:, None] < 0, 0.0, hidden[tokens])
        self.layer.mlp.router.params = CallParams(routing=routing, routed_tokens=tokens)
        return self.layer.mlp(rows[:, None])[0][:, 0]

    def check_grads(self, bound: float = NARROW) -> None:
        """Hold every gradient, summed over the ranks that hold copies, to the oracle's part; then forget all."""
        expected = self.weights.grads()
        checked = 0
        for shard in shards(self.model):
            if not shard.name.startswith(PREFIX):
                continue
            grad = shard.parameter.grad
            assert grad is not None, shard.name
            if "experts" not in shard.name:
                dist.all_reduce(grad)  # every rank routed other rows
            whole = shard.cut(expected[shard.name.removeprefix(PREFIX)])
            torch.testing.assert_close(grad, whole, atol=bound, rtol=bound, msg=lambda m, s=shard: f"{s.name}: {m}")
            checked += 1
        assert checked > 1
        self.model.zero_grad()


def coefficients(num_tokens: int) -> torch.Tensor:
    """Return the gradient of every token's output, [T, h]."""
    return random_hidden(num_tokens, seed=9).detach()


def oracle_loss(shared: Shared, hidden: torch.Tensor, routes: torch.Tensor, multiplicity: torch.Tensor, **losses):
    """Return the loss of all tokens: their outputs, and the router's losses over the flat batch."""
    out = oracle.layer_output(hidden, shared.weights, routes, normalised=True)
    flat = torch.repeat_interleave(torch.arange(len(hidden)), multiplicity)
    loss = (out * coefficients(len(hidden))).sum()
    if losses:
        loss = loss + losses["aux_coef"] * oracle.aux_loss(hidden[flat], shared.weights, routes[flat])
        loss = loss + losses["z_coef"] * oracle.z_loss(hidden[flat], shared.weights)
    return out.detach(), loss


def own_tokens(shared: Shared, num_tokens: int, turned: bool = False) -> torch.Tensor:
    """Deal tokens to the ranks: even numbers of rows, padded, or the whole the other way round."""
    ranks = 2
    size = -(-num_tokens // ranks)
    tokens = torch.arange(size * ranks)
    tokens = torch.where(tokens < num_tokens, tokens, -1)
    return (tokens.flip(0) if turned else tokens).view(ranks, size)[shared.rank]


def check_layout(name: str) -> None:
    """A42: outputs, gradients and losses of tokens that two ranks share; B22: nothing is doubled."""
    shared, num_tokens = Shared(LAYOUTS[name]), 13
    multiplicity = torch.arange(num_tokens) % 4 + 1
    hidden, num_flat = random_hidden(num_tokens), int(multiplicity.sum())
    routes = oracle.top_routes(hidden, shared.weights, 2)
    out, loss = oracle_loss(shared, hidden, routes, multiplicity, **LOSSES)
    loss.backward()
    tokens = own_tokens(shared, num_tokens)
    is_own = tokens >= 0
    if name == "experts":  # replicas know their own tokens alone, here of different numbers
        tokens = tokens[is_own]
        first = int(tokens[0])
        routing = shared.routing(multiplicity[tokens], num_flat, **LOSSES)
        local, rows, is_own = tokens - first, hidden.detach()[tokens], is_own[is_own]
    else:
        routing, local, rows = shared.routing(multiplicity, num_flat, **LOSSES), tokens, hidden.detach()
    with torch.no_grad():
        shared.run(rows, local, routing)
    routing.finish_counts()
    own = shared.run(rows, local, routing)
    torch.testing.assert_close(own[is_own], out[tokens[is_own]], atol=NARROW, rtol=NARROW)
    own[is_own].backward(coefficients(num_tokens)[tokens[is_own]])
    shared.check_grads()
    values = [float(value) for value in routing.losses().values()]
    flat = torch.repeat_interleave(torch.arange(num_tokens), multiplicity)
    expected = oracle.aux_loss(hidden[flat], shared.weights, routes[flat]), oracle.z_loss(hidden[flat], shared.weights)
    torch.testing.assert_close(values, [0.3 * expected[0].item(), 0.2 * expected[1].item()], atol=EXACT, rtol=EXACT)


def check_share(name: str, is_shared: bool = True) -> None:
    """A token pushed on one rank and trained on the other keeps its route and counts once."""
    shared, num_tokens = Shared(LAYOUTS[name]), 14
    hidden, multiplicity = random_hidden(num_tokens).detach(), torch.arange(num_tokens) % 3 + 1
    moved = hidden + 0.5 * random_hidden(num_tokens, seed=5).detach()
    routes, other = (oracle.top_routes(x, shared.weights, 2) for x in (hidden, moved))
    assert not torch.equal(routes.sort().values, other.sort().values), "the check could not fail"
    routing = shared.routing(multiplicity, int(multiplicity.sum()))
    pushed, tokens = own_tokens(shared, num_tokens, turned=True), own_tokens(shared, num_tokens)
    with torch.no_grad():
        shared.run(hidden, pushed, routing)
    if is_shared:
        routing.share(pushed)
    out, loss = oracle_loss(shared, moved, routes, multiplicity)
    own = shared.run(moved, tokens, routing)
    torch.testing.assert_close(own, out[tokens], atol=NARROW, rtol=NARROW)
    own.backward(coefficients(num_tokens)[tokens])
    loss.backward()
    shared.check_grads()
    routing.finish_counts()
    flat = torch.repeat_interleave(torch.arange(num_tokens), multiplicity)
    counts = torch.bincount(routes[flat].flatten(), minlength=MODEL.num_experts).double()
    assert torch.equal(routing.counts[0], counts)


def check_share_matters() -> None:
    """Negative control: without the exchange the other rank routes the token anew, on both ranks."""
    try:
        check_share("sequence and experts", is_shared=False)
    except AssertionError:
        return
    raise RuntimeError("routes were not exchanged, and nothing showed it")


def check_no_token() -> None:
    """C14: all tokens go to experts of rank 0; rank 1 has no work, and gradients of exactly zero."""
    shared, num_tokens = Shared(LAYOUTS["experts"]), 5
    hidden, ones = random_hidden(num_tokens), torch.ones(num_tokens, dtype=torch.int64)
    routes = torch.tensor([[0, 1]] * num_tokens)
    out, loss = oracle_loss(shared, hidden, routes, ones)
    loss.backward()
    tokens = own_tokens(shared, num_tokens)
    own = shared.run(hidden.detach(), tokens, shared.routing(ones, num_tokens, routes=routes[None]))
    assert own.isfinite().all()
    is_own = tokens >= 0
    torch.testing.assert_close(own[is_own], out[tokens[is_own]], atol=NARROW, rtol=NARROW)
    own[is_own].backward(coefficients(num_tokens)[tokens[is_own]])
    if shared.rank == 1:  # its padding row went somewhere, without gradient
        grads = [p.grad for name, p in shared.layer.mlp.named_parameters() if "experts" in name]
        assert all(grad is not None and not grad.any() for grad in grads)
    shared.check_grads()


def check_no_row() -> None:
    """A rank with padding alone serves the other's tokens with its experts."""
    shared, num_tokens = Shared(LAYOUTS["experts"]), 6
    hidden, ones = random_hidden(num_tokens), torch.ones(num_tokens, dtype=torch.int64)
    routes = oracle.top_routes(hidden, shared.weights, 2)
    out, loss = oracle_loss(shared, hidden, routes, ones, **LOSSES)
    loss.backward()
    tokens = torch.arange(num_tokens) if shared.rank == 0 else torch.full((2,), -1)
    own_ones, rows = (ones, hidden.detach()) if shared.rank == 0 else (ones[:0], hidden.detach()[:1])
    routing = shared.routing(own_ones, num_tokens, **LOSSES)
    with torch.no_grad():
        shared.run(rows, tokens, routing)
    routing.finish_counts()
    own = shared.run(rows, tokens, routing)
    own.backward(coefficients(num_tokens) if shared.rank == 0 else torch.zeros_like(own))
    if shared.rank == 0:
        torch.testing.assert_close(own.detach(), out, atol=NARROW, rtol=NARROW)
    shared.check_grads()


def model_grads(shared: Shared) -> dict[str, torch.Tensor]:
    """Run two calls of the whole model, both forwards first, on ids of this rank's own; return the gradients."""
    routing = Routing(
        shared.groups,
        multiplicity=torch.ones(9, dtype=torch.int64),
        num_flat=18,
        num_layers=2,
        num_experts=MODEL.num_experts,
        experts_per_token=MODEL.experts_per_token,
        **LOSSES,
    )
    ids = torch.arange(9) * (7 + shared.rank) % 100
    calls = [
        (ids[part], CallParams(routing=routing, routed_tokens=torch.arange(9)[part]))
        for part in (slice(5), slice(5, 9))
    ]
    with torch.no_grad():
        for tokens, params in calls:
            shared.model(tokens[None], tokens[None], None, params)
    routing.finish_counts()
    outputs = [shared.model(tokens[None], tokens[None], None, params) for tokens, params in calls]
    for out in outputs:
        (out[0] * coefficients(9)[: out.shape[1]]).sum().backward()
    return {name: p.grad for name, p in shared.model.named_parameters() if name != "output_layer.weight"}


def check_recompute() -> None:
    """Full recomputation exchanges tokens again, in the same order on both ranks, and changes no gradient."""
    expected, got = (model_grads(Shared(LAYOUTS["experts"], recompute)) for recompute in ("none", "full"))
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, atol=EXACT, rtol=EXACT)


CHECKS: dict[str, Callable[[], None]] = {
    **{name: lambda name=name: check_layout(name) for name in LAYOUTS},
    **{f"share, {name}": lambda name=name: check_share(name) for name in DEALT},
    "share matters": check_share_matters,
    "no token": check_no_token,
    "no row": check_no_row,
    "recompute": check_recompute,
}

if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel.initialize(world=parallel.World(rank=rank, size=size, local_rank=rank, init_method="env://"))
    for name, check in CHECKS.items():
        check()
        dist.barrier()
        if rank == 0:
            print(f"{name} ok", flush=True)
    parallel.leave()
