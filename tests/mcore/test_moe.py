"""Experts on trees against a plain torch oracle over flat tokens: outputs, gradients, losses, routes, refusals.

Models are float64, but Megatron's router takes its softmax in float32 and rounds the weights of the chosen experts to
it: a relative error of 2^-24 each. Weights and outputs here are below 10, so 1e-6 bounds what that can do to them and
to their gradients. What does not pass through those weights, such as our losses, is held to 1e-12.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    get_default_pg_collection,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from torch.nn import functional as F

from megatron_dta.errors import UsageError
from megatron_dta.mcore import moe
from megatron_dta.mcore.moe import TreeLayer, TreeRouter, expert_name, transformer_options
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.routing import Routing
from megatron_dta.tree.forest import build_forest
from tests.forests import SHAPES, forest_of
from tests.mcore import moe_oracle as oracle
from tests.mcore.moe_layer import CONFIG, Layer, new_model, random_hidden, some_loss

NARROW = 1e-6
"""Where the float32 softmax of Megatron's router takes part."""
EXACT = 1e-12


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert grad is not None, name
        torch.testing.assert_close(grad, expected[name], atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}")


# The layer


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize(
    ("experts", "per_token", "normalised"), [(5, 2, True), (5, 2, False), (4, 4, True), (4, 4, False), (3, 1, False)]
)
def test_layer_is_the_plain_mixture(experts, per_token, normalised, num_tokens):
    layer = Layer(num_experts=experts, experts_per_token=per_token, norm_topk_prob=normalised)
    hidden, copy, weights = random_hidden(num_tokens), random_hidden(num_tokens), layer.weights()
    out = layer.run(hidden)
    expected = oracle.layer_output(copy, weights, oracle.top_routes(copy, weights, per_token), normalised=normalised)
    torch.testing.assert_close(out, expected, atol=NARROW, rtol=NARROW)
    some_loss(out).backward()
    some_loss(expected).backward()
    assert_same(layer.grads(), weights.grads(), NARROW)
    torch.testing.assert_close(hidden.grad, copy.grad, atol=NARROW, rtol=NARROW)


def test_normalised_weights_are_not_the_others():
    """Negative control: the two meanings of norm_topk_prob differ by far more than the bound."""
    layer = Layer()
    hidden, weights = random_hidden(9), layer.weights()
    routes = oracle.top_routes(hidden, weights, 2)
    other = oracle.layer_output(hidden, weights, routes, normalised=False)
    assert (layer.run(hidden) - other).abs().max() > 1e-3


def test_router_works_in_single_precision_where_the_model_does_not():
    """B05: logits that differ by less than half precision can hold decide; weights are not rounded to it."""
    layer = Layer(dtype=torch.bfloat16)
    hidden = random_hidden(64).to(torch.bfloat16)
    logits = layer.router.gating(hidden[:, None])
    weights, _ = layer.router(hidden[:, None])
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.float32)
    exact = hidden.double() @ layer.router.weight.double().T
    torch.testing.assert_close(logits[:, 0].double(), exact, atol=1e-5, rtol=1e-5)
    assert (exact - exact.to(torch.bfloat16).double()).abs().max() > 1e-3


def test_c14_an_expert_without_a_token_has_a_gradient_of_zero():
    layer = Layer()
    with torch.no_grad():
        layer.router.weight[3:] = -10 * layer.router.weight[:1]
        layer.router.weight[1:3] = layer.router.weight[:1] * torch.tensor([[0.9], [0.8]])
    hidden = layer.router.weight[:1].detach().repeat(4, 1).requires_grad_()
    out = layer.run(hidden)
    some_loss(out).backward()
    assert out.isfinite().all()
    assert hidden.grad.isfinite().all()
    grads = layer.grads()
    for e in (2, 3, 4):
        for i in (1, 2):
            grad = grads[f"experts.local_experts.{e}.linear_fc{i}.weight"]
            assert grad is not None
            assert not grad.any()
    assert all(grads[f"experts.local_experts.{e}.linear_fc1.weight"].any() for e in (0, 1))


# Losses by multiplicity


def flat_tokens(forest) -> torch.Tensor:
    """Return the tree token of every position of every sequence, int64 [S]."""
    return torch.as_tensor(np.concatenate([forest.path(i) for i in range(forest.num_sequences)]))


def calls(num_tokens: int, size: int) -> Iterator[torch.Tensor]:
    """Cut the tokens into calls, the last padded."""
    for start in range(0, num_tokens, size):
        tokens = torch.arange(start, start + size)
        yield torch.where(tokens < num_tokens, tokens, -1)


def loss_grads(layer: Layer, hidden: torch.Tensor, routing: Routing, size: int) -> torch.Tensor:
    """Run all calls without a loss of their own; return the router's gradient. Gradients of `hidden` add up."""
    for tokens in calls(len(hidden), size):
        (layer.run(hidden[tokens], routing, tokens) * 0).sum().backward()
    return layer.grads()["router.weight"]


def flat_grads(layer: Layer, hidden: torch.Tensor, flat: torch.Tensor, aux: float, z: float):
    """Return the oracle's router gradient, hidden gradient and loss values over the flat tokens."""
    weights, copy = layer.weights(), hidden.detach().clone().requires_grad_()
    rows = copy[flat]
    routes = oracle.top_routes(rows, weights, layer.config.experts_per_token)
    values = aux * oracle.aux_loss(rows, weights, routes), z * oracle.z_loss(rows, weights)
    sum(values).backward()
    return weights.router.grad, copy.grad, [value.item() for value in values]


COEFFICIENTS = [("several trees", 3, 0.3, 0.0), ("several trees", 3, 0.0, 0.2)]


@pytest.mark.parametrize(
    ("shape", "size", "aux", "z"), [(shape, size, 0.3, 0.2) for shape in SHAPES for size in (3, 64)] + COEFFICIENTS
)
def test_a42_losses_are_those_of_the_flat_batch(shape, size, aux, z):
    layer, forest = Layer(), forest_of(*SHAPES[shape])
    hidden, flat = random_hidden(forest.num_tokens), flat_tokens(forest)
    routing = layer.routing(forest.multiplicity, aux_coef=aux, z_coef=z)
    layer.sweep(hidden, routing)
    router_grad, hidden_grad, values = flat_grads(layer, hidden, flat, aux, z)
    torch.testing.assert_close(loss_grads(layer, hidden, routing, size), router_grad, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(hidden.grad, hidden_grad, atol=EXACT, rtol=EXACT)
    assert list(routing.losses().values()) == pytest.approx(values, abs=EXACT)


def test_a42_counting_a_shared_token_once_is_not_the_flat_batch():
    """Negative control."""
    layer, forest = Layer(), forest_of(*SHAPES["comb"])
    hidden = random_hidden(forest.num_tokens)
    routing = layer.routing(np.ones(forest.num_tokens, np.int64), aux_coef=0.3, z_coef=0.2)
    layer.sweep(hidden, routing)
    router_grad, _, _ = flat_grads(layer, hidden, flat_tokens(forest), 0.3, 0.2)
    assert (loss_grads(layer, hidden, routing, 64) - router_grad).abs().max() > 1e-3


def test_the_oracle_has_megatrons_constants():
    layer = Layer()
    hidden, weights = random_hidden(11), layer.weights()
    routes, logits = oracle.top_routes(hidden, weights, 2), hidden @ weights.router.T
    counts = torch.bincount(routes.flatten(), minlength=5)
    theirs = switch_load_balancing_loss_func(torch.softmax(logits, -1), counts, 11, 2, 5, 0.25)
    torch.testing.assert_close(theirs, 0.25 * oracle.aux_loss(hidden, weights, routes), atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(z_loss_func(logits, 0.1), 0.1 * oracle.z_loss(hidden, weights), atol=EXACT, rtol=EXACT)


def test_a42_pushes_and_repeated_calls_count_nothing():
    """The second forward of a token, with or without gradient, changes neither counts nor sums."""
    layer, forest = Layer(), forest_of(*SHAPES["ragged tails"])
    hidden, tokens = random_hidden(forest.num_tokens), torch.arange(forest.num_tokens)
    routing = layer.routing(forest.multiplicity, z_coef=0.2)
    with torch.no_grad():
        layer.run(hidden[:2], routing, tokens[:2])
        layer.run(hidden[:2], routing, tokens[:2])
    layer.run(hidden, routing, tokens)
    layer.run(hidden[1:], routing, tokens[1:])
    routing.finish_counts()
    flat = flat_tokens(forest)
    routes = oracle.top_routes(hidden[flat], layer.weights(), 2)
    assert torch.equal(routing.counts[0], torch.bincount(routes.flatten(), minlength=5).double())
    assert routing.losses()["z_loss"] == pytest.approx(0.2 * oracle.z_loss(hidden[flat], layer.weights()).item())


def test_c12_padding_is_routed_but_never_counted():
    layer, hidden = Layer(), random_hidden(5)
    routing = layer.routing(np.array([1, 3]), aux_coef=0.3)
    tokens = torch.tensor([-1, 1, -1, 0, -1])
    with torch.no_grad():
        out = layer.run(hidden, routing, tokens)
    routing.finish_counts()
    assert int(routing.counts.sum()) == 2 * 4
    torch.testing.assert_close(out, layer.run(hidden), atol=0, rtol=0)
    layer.run(hidden, routing, tokens).sum().backward()  # a padding row is routed anew, whatever it was before
    assert hidden.grad.isfinite().all()


def test_counts_of_a_part_of_the_step_are_refused():
    layer, hidden = Layer(), random_hidden(3)
    routing = layer.routing(np.array([1, 2, 1]), aux_coef=0.3)
    with pytest.raises(ValueError, match="not known yet"):
        layer.run(hidden, routing, torch.arange(3))
    with torch.no_grad():
        layer.run(hidden[:2], layer_routing := layer.routing(np.array([1, 2, 1]), aux_coef=0.3), torch.arange(2))
    with pytest.raises(ValueError, match=r"\[6\.0\] expert visits were counted in the layers, expected 8"):
        layer_routing.finish_counts()


# Routes


def forced(num_tokens: int, experts: int = 5, per_token: int = 2, seed: int = 1) -> torch.Tensor:
    """Draw routes int64 [1, T, K]."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:per_token] for _ in range(num_tokens)]
    return torch.stack(rows)[None]


@pytest.mark.parametrize("normalised", [True, False])
def test_c15_given_routes_are_taken_with_gradient_for_the_router(normalised):
    layer = Layer(norm_topk_prob=normalised)
    hidden, copy, weights = random_hidden(9), random_hidden(9), layer.weights()
    routes = forced(9)
    assert not torch.equal(routes[0].sort().values, oracle.top_routes(copy, weights, 2).sort().values)
    out = layer.run(hidden, layer.routing(np.ones(9, np.int64), routes=routes), torch.arange(9))
    expected = oracle.layer_output(copy, weights, routes[0], normalised=normalised)
    torch.testing.assert_close(out, expected, atol=NARROW, rtol=NARROW)
    some_loss(out).backward()
    some_loss(expected).backward()
    assert weights.router.grad.abs().max() > 1e-3
    assert_same(layer.grads(), weights.grads(), NARROW)


def test_c15_routes_known_for_some_tokens_leave_the_others_free():
    layer, hidden = Layer(), random_hidden(6)
    routes, weights = forced(6), layer.weights()
    routes[0, 1::2] = -1
    expected = torch.where(routes[0] < 0, oracle.top_routes(hidden, weights, 2), routes[0])
    out = layer.run(hidden, layer.routing(np.ones(6, np.int64), routes=routes), torch.arange(6))
    torch.testing.assert_close(
        out, oracle.layer_output(hidden, weights, expected, normalised=True), atol=NARROW, rtol=NARROW
    )


def test_c15_a_token_keeps_its_first_route():
    """Another call computes the same token by other roundings, here larger ones: it must not move."""
    layer, hidden, tokens = Layer(), random_hidden(40), torch.arange(40)
    moved = hidden + 0.3 * random_hidden(40, seed=5)
    first = oracle.top_routes(hidden, layer.weights(), 2)
    assert not torch.equal(first.sort().values, oracle.top_routes(moved, layer.weights(), 2).sort().values)
    routing = layer.routing(np.ones(40, np.int64))
    with torch.no_grad():
        layer.run(hidden, routing, tokens)
    out = layer.run(moved, routing, tokens)
    expected = oracle.layer_output(moved, layer.weights(), first, normalised=True)
    torch.testing.assert_close(out, expected, atol=NARROW, rtol=NARROW)
    anew = layer.run(moved, layer.routing(np.ones(40, np.int64)), tokens)
    assert (anew - expected).abs().max() > 1e-3, "negative control"


def test_a35_conflicting_routes_of_one_prefix_branch():
    """Equal ids with different routes are different tokens: the routes as identity tags keep them apart."""
    tokens = [np.array([1, 2, 3], np.int32)] * 3
    routes = [forced(3, seed=seed)[0] for seed in (0, 0, 4)]
    tags = [(r[:, 0] * 5 + r[:, 1]).numpy() for r in routes]
    forest = build_forest(tokens, None, tags)
    shared = np.flatnonzero(tags[0] != tags[2])[0]
    assert (forest.num_tokens, build_forest(tokens).num_tokens) == (2 * 3 - shared, 3)
    by_token = torch.zeros(1, forest.num_tokens, 2, dtype=torch.int64)
    for i, route in enumerate(routes):
        by_token[0, forest.path(i)] = route
    layer, ids = Layer(), torch.as_tensor(np.array(forest.tokens))
    hidden = random_hidden(4)[ids]
    out = layer.run(hidden, layer.routing(forest.multiplicity, routes=by_token), torch.arange(forest.num_tokens))
    for i, route in enumerate(routes):
        expected = oracle.layer_output(hidden[forest.path(i)], layer.weights(), route, normalised=True)
        torch.testing.assert_close(out[forest.path(i)], expected, atol=NARROW, rtol=NARROW)


@pytest.mark.parametrize(
    ("route", "told"),
    [([1, 1], r"\[1, 1\] of token 2 in layer 0"), ([0, 5], "0 .. 4"), ([-1, 2], "-1 in all places"), ([0, -2], "-2")],
)
def test_c15_bad_routes_are_refused(route, told):
    routes = forced(4)
    routes[0, 2] = torch.tensor(route)
    with pytest.raises(UsageError, match=told):
        Layer().routing(np.ones(4, np.int64), routes=routes)
    with pytest.raises(UsageError, match=r"shape \(1, 4, 2\); expected \(1, 3, 2\)"):
        Layer().routing(np.ones(3, np.int64), routes=forced(4))


# The whole model


def run_calls(model, calls_params: list[tuple[torch.Tensor, CallParams]]) -> dict[str, torch.Tensor]:
    """Run all forwards, then all backwards in the same order; return and forget the gradients."""
    outputs = [model(ids[None], ids[None], None, params) for ids, params in calls_params]
    for out in outputs:
        some_loss(out[0]).backward()
    found = {name: p.grad for name, p in model.named_parameters() if name != "output_layer.weight"}
    model.zero_grad()
    return found


def two_calls(model, routing: Routing) -> list[tuple[torch.Tensor, CallParams]]:
    """Return two sequences of one step, the second with padding."""
    ids = torch.arange(9) * 7 % 100, torch.arange(9) * 13 % 100
    tokens = torch.arange(9), torch.tensor([9, 10, 11, 12, 13, 14, -1, -1, -1])
    return [(i, CallParams(routing=routing, routed_tokens=t)) for i, t in zip(ids, tokens)]


def model_routing(model, **given) -> Routing:
    return Routing(
        model.groups,
        multiplicity=torch.ones(15, dtype=torch.int64),
        num_flat=15,
        num_layers=model.model_config.num_layers,
        num_experts=5,
        experts_per_token=2,
        **given,
    )


def swept(model, **given) -> Routing:
    routing = model_routing(model, **given)
    with torch.no_grad():
        for ids, params in two_calls(model, routing):
            model(ids[None], ids[None], None, params)
    routing.finish_counts()
    return routing


def test_d11_full_recompute_changes_no_gradient_with_two_calls_in_flight():
    plain, again = new_model(), new_model(recompute="full")
    losses = {"aux_coef": 0.3, "z_coef": 0.2}
    expected = run_calls(plain, two_calls(plain, swept(plain, **losses)))
    routing = swept(again, **losses)
    counts, values = routing.counts.clone(), routing.losses()
    assert_same(run_calls(again, two_calls(again, routing)), expected, EXACT)
    assert torch.equal(routing.counts, counts)
    assert routing.losses() == values
    alone = model_routing(again, z_coef=0.2)
    run_calls(again, two_calls(again, alone))
    alone.finish_counts()
    assert torch.equal(alone.counts, counts)
    assert alone.losses()["z_loss"] == pytest.approx(values["z_loss"], abs=EXACT)


def test_d11_a_router_that_remembers_the_last_call_fails(monkeypatch):
    """Negative control: recomputation of the first call would take the second call's routes."""
    model = new_model(recompute="full")
    expected = run_calls(model, two_calls(model, swept(model, aux_coef=0.3)))

    def forward(layer, *args, **kwargs):
        if not torch.is_grad_enabled():
            layer.mlp.router.params = kwargs["packed_seq_params"]
        return super(TreeLayer, layer).forward(*args, **kwargs)

    routing = swept(model, aux_coef=0.3)
    monkeypatch.setattr(TreeLayer, "forward", forward)
    one, other = two_calls(model, routing)
    with pytest.raises(AssertionError):
        assert_same(run_calls(model, [one, other]), expected, EXACT)


def test_every_layer_has_its_own_routes():
    model = new_model()
    routing = swept(model)
    assert (routing.routes[:, :15] >= 0).all()
    assert not torch.equal(routing.routes[0], routing.routes[1])
    assert [layer.mlp.router.place for layer in model.parts[0].decoder.layers] == [0, 1]
    assert all(layer.mlp.router.params is None for layer in model.parts[0].decoder.layers)


# Options, names, refusals


def test_options_of_a_dense_model_are_none():
    dense = replace(CONFIG, num_experts=0, experts_per_token=0, expert_ffn_size=0)
    assert transformer_options(dense, "sequential") == transformer_options(dense, "grouped") == {}
    with pytest.raises(UsageError, match="experts is 'fast'; expected one of sequential, grouped"):
        transformer_options(dense, "fast")


@pytest.mark.skipif(moe._has_grouped_products(), reason="Transformer Engine is installed")
def test_grouped_experts_need_transformer_engine():
    with pytest.raises(UsageError, match=r"Transformer Engine.*install.*'sequential'"):
        transformer_options(CONFIG, "grouped")


def test_layers_are_built_of_megatrons_experts():
    model = new_model()
    for layer in model.parts[0].decoder.layers:
        assert type(layer) is TreeLayer
        assert type(layer.mlp) is MoELayer
        assert type(layer.mlp.router) is TreeRouter
        assert type(layer.mlp.experts) is SequentialMLP


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("decoder.layers.4.mlp.experts.local_experts.2.linear_fc1.weight", 0, 2),
        ("decoder.layers.4.mlp.experts.local_experts.2.linear_fc1.weight", 3, 8),
        ("decoder.layers.4.mlp.experts.linear_fc1.weight1", 3, 7),
    ],
)
def test_experts_are_counted_over_all_ranks(name, rank, expected):
    transformer = replace_config(new_model().transformer, num_moe_experts=8, expert_model_parallel_size=4)
    canonical = f"decoder.layers.4.mlp.experts.local_experts.{expected}.linear_fc1.weight"
    assert expert_name(name, transformer, rank) == canonical
    other = "decoder.layers.4.mlp.router.weight"
    assert expert_name(other, transformer, rank) == other
    assert expert_name(name, replace_config(transformer, num_moe_experts=None), rank) == name


def replace_config(transformer, **changes):
    """Change a copy of Megatron's config, without its checks."""
    copy = type(transformer).__new__(type(transformer))
    vars(copy).update(vars(transformer) | changes)
    return copy


REFUSED: dict[str, tuple[Any, str]] = {
    **{kind: (kind, "aux_loss_coef") for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn")},
    "add_bias_linear": (True, "biases"),
    "moe_z_loss_coeff": (0.1, "z_loss_coef"),
    "moe_expert_capacity_factor": (1.0, "beside it"),
    "moe_pad_expert_input_to_capacity": (True, "beside it"),
    "moe_token_dropping": (True, "beside it"),
    "moe_input_jitter_eps": (0.1, "beside it"),
    "moe_router_force_load_balancing": (True, "beside it"),
    "moe_router_num_groups": (2, "groups"),
    "moe_router_group_topk": (1, "groups"),
    "moe_router_fusion": (True, "replay"),
    "moe_enable_routing_replay": (True, "replay"),
    "moe_shared_expert_intermediate_size": (16, "shared experts"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_a40_options_that_are_not_exact_are_refused_by_name(option):
    value, told = REFUSED[option]
    name = "moe_router_load_balancing_type" if value == option else option
    with pytest.raises(UsageError, match=rf"^{name} = {re.escape(repr(value))} .*{told}"):
        TreeRouter(replace_config(new_model().transformer, **{name: value}))


def test_a40_recomputing_the_experts_alone_is_refused():
    hidden = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    with pytest.raises(UsageError, match="recompute_modules"):
        TreeRouter(replace_config(new_model().transformer, **hidden))


# Expert bias


def biased_layer() -> Layer:
    """Return a layer whose router scores by sigmoids and balances by a bias."""
    layer = Layer()
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = replace_config(layer.router.config, **options, moe_router_bias_update_rate=0.125)
    router = TreeRouter(config, pg_collection=get_default_pg_collection())
    router.load_state_dict({"weight": layer.router.weight.detach(), "expert_bias": torch.zeros(5)})
    layer.mlp.router = layer.router = router
    return layer


def test_a42_expert_bias_moves_as_for_the_flat_batch():
    layer, forest = biased_layer(), forest_of(*SHAPES["comb"])
    hidden, flat = random_hidden(forest.num_tokens), flat_tokens(forest)
    routing = layer.routing(forest.multiplicity, aux_coef=0.1)
    layer.sweep(hidden, routing)
    routes = (hidden[flat] @ layer.router.weight.T).topk(2, dim=-1).indices
    counts = torch.bincount(routes.flatten(), minlength=5).float()
    assert torch.equal(routing.counts[0].float(), counts)
    once = torch.bincount((hidden @ layer.router.weight.T).topk(2, dim=-1).indices.flatten(), minlength=5).float()
    expected, tree = (get_updated_expert_bias(c, torch.zeros(5), 0.125) for c in (counts, once))
    assert not torch.equal(expected, tree), "negative control: counting a shared token once moves it otherwise"
    layer.router.update_bias(routing)
    assert torch.equal(layer.router.expert_bias, expected)


def test_expert_bias_chooses_but_does_not_weigh():
    layer, hidden = biased_layer(), random_hidden(7)
    layer.router.expert_bias[:] = torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0])
    weights, routed = layer.router(hidden[:, None])
    assert routed[:, :2].all()
    scores = torch.sigmoid(hidden @ layer.router.weight.T)[:, :2]
    expected = F.pad(scores / scores.sum(dim=-1, keepdim=True), (0, 3))
    torch.testing.assert_close(weights, expected, atol=NARROW, rtol=NARROW)
