"""Recorded rollouts through tiny models in fp64: trees against each sequence alone, at several budgets."""

import time

import pytest
import torch

from megatron_dta.checkpoint.open_model import TINY
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import build_model
from megatron_dta.model_config import parse_model_config
from megatron_dta.verify import difference, run_pass, with_random_advantages
from megatron_dta.verify_command import renumbered

EXACT = 1e-9
BUDGETS = ("whole", 1024, 64)
TAU, SWE, TOT = "tau_airline_gpt4o", "nemogym_swe_5rollouts", "tot_game24_bfs_tree_subset"

SAMPLED = {
    "tau task 0": (TAU, {"limit": 1}),
    "tau task 0 as combs": (TAU, {"limit": 1, "form": "comb"}),
    "SWE, 2000 tokens": (SWE, {"truncate": 2000}),
    "one tree of thought": (TOT, {"limit": 1}),
}
ALL = {
    "four tau tasks": (TAU, {"limit": 4}),
    "four tau tasks as combs": (TAU, {"limit": 4, "form": "comb"}),
    "all SWE rollouts": (SWE, {}),
}


def small_model(family, vocab_size):
    """Two layers and few heads: fp64 attention over long rollouts is what takes the time here."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 24}
    raw = TINY | shape | {"model_type": family, "vocab_size": vocab_size, "max_position_embeddings": 2**17}
    return build_model(parse_model_config(raw), dtype=torch.float64, device=parallel.initialize(seed=0))


def verify_at_budgets(data_dir, family, name, options):
    """Run the samples flat once, then as a forest at every budget; print and check the differences."""
    samples, vocab_size = renumbered(read_rollouts(data_dir / f"{name}.qwen3.npz", **options))
    samples = with_random_advantages(samples)
    model = small_model(family, vocab_size)
    start = time.perf_counter()
    flat = run_pass(model, FlatEngine(model), samples)
    print(f"\n{family}, {name} {options}: {len(samples)} samples; flat {time.perf_counter() - start:.0f} s")
    for budget in BUDGETS:
        start = time.perf_counter()
        engine = TreeEngine(model, budget=budget, backend="segment", poison_cache=True)
        tree = run_pass(model, engine, samples)
        found = difference(tree, flat)
        seconds = time.perf_counter() - start
        print(
            f"  budget {budget}: reuse {tree.reuse:.2f}x, {len(engine.plan(samples).plans[0].chunks)} chunks, log-prob "
            f"{found.logprob:.1e}, loss {found.loss:.1e}, gradient {found.grad:.1e}; {seconds:.0f} s"
        )
        assert found.logprob < EXACT
        assert found.loss < EXACT
        assert found.grad < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("what", sorted(SAMPLED, key=lambda what: "combs" not in what))
def test_sampled(data_dir, what, family):
    verify_at_budgets(data_dir, family, *SAMPLED[what])


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("what", ALL)
def test_all(data_dir, what, family):
    verify_at_budgets(data_dir, family, *ALL[what])
