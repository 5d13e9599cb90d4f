"""Shipped rates on a mixture of experts: a token works on its own experts, a call reads the weights of all."""

from dataclasses import replace

import pytest

from megatron_dta.errors import UsageError
from megatron_dta.tree.cost import CallCost, CostModel, check_model, default_cost, model_shape
from tests.tree.test_statistics import MIXTURE, TINY


def test_a_row_costs_as_much_as_a_dense_one_of_the_chosen_experts_width():
    """On a CPU only products cost: two experts of 5 columns are an MLP of 10, and the router adds 12 of 180 weights."""
    dense = replace(TINY, ffn_size=10)
    mixed, plain = (default_cost(model, "cpu").push for model in (MIXTURE, dense))
    assert mixed.row == pytest.approx(plain.row * 180 / 168)
    assert mixed.pair == plain.pair
    assert mixed.fixed == pytest.approx(plain.fixed * (48 + 12 + 180) / 168)


def test_more_experts_cost_weights_but_no_work():
    """120 more experts are 2 x 120 x 4 more weights in the routers, which every token meets, at 6e10 FLOP/s."""
    few, many = (default_cost(replace(MIXTURE, num_experts=n), "cpu").chunk for n in (8, 128))
    assert many.row - few.row == pytest.approx(3 * 2 * 2 * 120 * 4 / 60e9)
    for machine in ("cpu", "h200"):
        few, many = (default_cost(replace(MIXTURE, num_experts=n), machine).chunk for n in (8, 128))
        assert many.fixed > 5 * few.fixed


def test_a_profile_of_experts_is_not_one_of_a_dense_model():
    call = CallCost(launch=0.0, fixed=0.0, row=0.0, pair=0.0, context=0.0, source=0.0)

    def profiled(shape: dict) -> CostModel:
        return CostModel(machine="m", chunk=call, push=call, fit={"model": shape})

    check_model(profiled(model_shape(MIXTURE)), MIXTURE)
    dense = {name: value for name, value in model_shape(TINY).items() if "expert" not in name}
    check_model(profiled(dense), TINY)
    with pytest.raises(UsageError, match="num_experts 0, this model has 3"):
        check_model(profiled(dense), MIXTURE)
    with pytest.raises(UsageError, match="num_experts 3, this model has 0"):
        check_model(profiled(model_shape(MIXTURE)), TINY)
