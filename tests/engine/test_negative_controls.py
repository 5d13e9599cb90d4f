"""Each subtle property, broken on purpose: the comparison with each sequence alone must notice."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dta.attention.mask import TreeMask
from megatron_dta.engine import calls as calls_module
from megatron_dta.engine import executor as executor_module
from megatron_dta.engine.cache import ArenaCache
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.mcore import core_attention
from megatron_dta.mcore.params import Mode
from megatron_dta.mcore.rotary import TreeRotary
from megatron_dta.verify import random_objective, with_random_advantages
from tests.batches import SHAPES, batch, grad_error, step, tiny

SAMPLES = with_random_advantages(batch(SHAPES["siblings"] + SHAPES["comb"]))


def error(budget: int | str = "whole", *, recompute: str = "none", engine_type=TreeEngine) -> float:
    _, expected = step(FlatEngine(tiny()), SAMPLES, random_objective())
    _, got = step(engine_type(tiny(recompute=recompute), budget=budget), SAMPLES, random_objective())
    return grad_error(got, expected)


@pytest.mark.parametrize("budget", ["whole", 6])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_broken(budget, recompute):
    assert error(budget, recompute=recompute) < 1e-9


def test_rope_by_place_in_the_chunk(monkeypatch):
    """A06: positions must be depths."""
    by_depth = TreeRotary.get_rotary_seq_len

    def by_place(self, *args):
        depth = by_depth(self, *args)
        return torch.arange(len(depth)) if isinstance(depth, torch.Tensor) else depth

    monkeypatch.setattr(TreeRotary, "get_rotary_seq_len", by_place)
    assert error() > 1e-3


def test_plain_causal_mask(monkeypatch):
    """C07 in one process: siblings must not see each other."""

    def causal(visible_from, visible_to, num_queries, device):
        start = torch.as_tensor(visible_from)
        return TreeMask(visible_from=start, visible_to=torch.full_like(start, num_queries), num_queries=num_queries)

    monkeypatch.setattr(calls_module, "tree_mask", causal)
    assert error() > 1e-3


def test_edge_read_from_the_token_before(monkeypatch):
    """A07: the first token of a branch is predicted by its parent, not by the end of the branch beside it."""

    class Wrong(TreeEngine):
        def plan(self, samples):
            program = super().plan(samples)
            (plan,) = program.plans
            chunk = plan.chunks[0]
            sources, edge_source = np.unique(plan.forest.edges[chunk.edges] - 1, return_inverse=True)
            chunk = replace(chunk, source_rows=sources.astype(np.int32), edge_source=edge_source.astype(np.int32))
            return replace(program, plans=(replace(plan, chunks=(chunk,)),))

    assert error(engine_type=Wrong) > 1e-3


def test_dropped_gradient_of_one_branch(monkeypatch):
    """A12: the prefix's gradient is the sum over all branches."""
    add_grads, calls = ArenaCache.add_grads, []

    def drop_first(self, layer, rows, dk, dv):
        calls.append(layer)
        if len(calls) > 1:
            add_grads(self, layer, rows, dk, dv)

    monkeypatch.setattr(ArenaCache, "add_grads", drop_first)
    assert error(6) > 1e-6
    assert len(calls) > 2


def test_push_inferred_from_grad_mode_under_recompute(monkeypatch):
    """A chunk's first forward under recompute has no gradient either: it must not write states."""
    attend = core_attention._attend

    def inferring(q, k, v, params, layer, scale, group):
        if params.mode is Mode.TRAIN and not torch.is_grad_enabled():
            rows = torch.arange(min(len(k), params.cache.states.shape[2]))
            params.cache.store(layer, rows, k[: len(rows)], v[: len(rows)])
        return attend(q, k, v, params, layer, scale, group)

    monkeypatch.setattr(core_attention, "_attend", inferring)
    assert error(6, recompute="none") < 1e-9
    assert error(6, recompute="full") > 1e-6


def test_skipped_backward_of_a_prompt_only_chunk(monkeypatch):
    """Descendants' gradients are lost if a chunk without a loss-bearing edge is not run backward."""
    prompt = list(range(1, 11))
    samples = with_random_advantages(batch([[*prompt, 11, 12, 3], [*prompt, 2, 2, 5]]))
    for sample in samples:
        sample.loss_mask[:] = np.arange(13) > 10
    _, expected = step(FlatEngine(tiny()), samples, random_objective())
    backward = executor_module.backward

    def skip(outputs, grads):
        if len(outputs[0]):
            backward(outputs, grads)

    monkeypatch.setattr(executor_module, "backward", skip)
    _, got = step(TreeEngine(tiny(), budget=4), samples, random_objective())
    assert grad_error(got, expected) > 1e-3
