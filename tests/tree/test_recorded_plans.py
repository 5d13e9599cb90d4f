"""Plans of recorded and skewed batches, against simpler ways to cut and to spread them, in predicted seconds."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.model_config import read_model_config
from megatron_dta.tree.cost import CostModel, default_cost
from megatron_dta.tree.fill import longest_first
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.loads import path_work
from megatron_dta.tree.outline import Outline, build_outline
from megatron_dta.tree.planner import BatchPlan, Settings, plan_batch
from megatron_dta.tree.prediction import predict
from tools.bench.baselines import aligned_cuts, contiguous, naive_cuts, segment_cuts
from tools.bench.plan import least_pushed, packer_of, packing_of, slowest
from tools.bench.synthetic import levels, skewed

BUDGET, MULTIPLE = 16384, 128
TAU, SWE, TOT = "tau_airline_gpt4o", "nemogym_swe_5rollouts", "tot_game24_bfs_tree_subset"
RECORDED = [(TAU, "comb"), (TAU, "turn"), (TAU, "whole"), (SWE, "comb"), (SWE, "whole"), (TOT, "whole")]
CUTS = {"naive": naive_cuts, "aligned": aligned_cuts, "per segment": segment_cuts}
SPREADS = {"contiguous": contiguous, "longest first": longest_first}


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A batch with its structure."""

    outline: Outline
    arguments: tuple[list, list, list]

    def forest(self) -> Forest:
        return build_forest(*self.arguments)


@cache
def recorded(folder: Path, file: str, form: str) -> Recorded:
    samples = read_rollouts(folder / f"{file}.qwen3.npz", form=form, on_warning=lambda _: None)
    columns = ([s.tokens for s in samples], [s.loss_mask for s in samples], [s.identity for s in samples])
    return Recorded(outline=build_outline(*columns), arguments=columns)


@pytest.fixture(scope="module")
def cost(data_dir) -> CostModel:
    return default_cost(read_model_config(data_dir / "hf_configs" / "Qwen3-8B.json"), "h200")


def settings(cost: CostModel, ranks: int = 1) -> Settings:
    return Settings(cost=cost, budget=BUDGET, multiple=MULTIPLE, ranks=ranks)


@pytest.mark.parametrize(("file", "form"), RECORDED)
def test_one_rank_beats_simpler_cuts(data_dir, cost, file, form):
    batch = recorded(data_dir, file, form)
    outline, forest = batch.outline, batch.forest()
    (prediction,) = plan_batch(outline, settings(cost)).predictions
    others = {}
    for name, cut in CUTS.items():
        packing = packing_of(outline, forest, cut(forest, BUDGET))
        others[name] = predict(packing, cost, BUDGET, MULTIPLE).seconds
        assert prediction.seconds <= others[name], name
    assert prediction.seconds < np.mean(list(others.values()))
    # A few tokens more in the one push that is made anyway may save a row of padding: 0.2% of a tiny tree here.
    spare = 0.0025 * outline.num_tokens if file == TOT else 0
    assert prediction.pushed_tokens <= 1.05 * least_pushed(outline, BUDGET) + spare
    assert len(prediction.rows) <= math.ceil(1.08 * outline.num_tokens / BUDGET) + 1


def test_all_recordings_together_beat_each_simpler_cut(data_dir, cost):
    ours, others = 0.0, dict.fromkeys(CUTS, 0.0)
    for file, form in RECORDED:
        batch = recorded(data_dir, file, form)
        forest = batch.forest()
        ours += plan_batch(batch.outline, settings(cost)).seconds[0]
        for name, cut in CUTS.items():
            packing = packing_of(batch.outline, forest, cut(forest, BUDGET))
            others[name] += predict(packing, cost, BUDGET, MULTIPLE).seconds
    assert ours < 0.995 * min(others.values()), others


def check_spread(
    outline: Outline, cost: CostModel, ranks: int, name: tuple = (), *, strictly: bool = True
) -> BatchPlan:
    """Check that the slowest rank is no slower than in simpler spreads; strictly faster, if anything is left to win.

    Every rank's sequences are packed by the same planner in all of them.
    """
    given = settings(cost, ranks)
    packer = packer_of(outline, given)
    plan = plan_batch(outline, given)
    ours = float(plan.seconds.max())
    costliest = int(path_work(outline, packer.work)[outline.last].argmax())
    alone = packer.pack(np.array([costliest])).prediction.seconds
    for other, spread in SPREADS.items():
        theirs = slowest(packer, spread(outline, packer.work, ranks), ranks)
        assert ours <= theirs, other
        at_the_end = ours <= 1.005 * plan.bound_seconds or ours == theirs == alone
        at_the_end |= ours <= 1.002 * plan.seconds.mean()  # no other balance wins more than that
        assert ours < theirs or at_the_end or not strictly, other
    return plan


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
@pytest.mark.parametrize(("file", "form"), RECORDED)
def test_many_ranks_beat_simpler_spreads(data_dir, cost, file, form, ranks):
    plan = check_spread(recorded(data_dir, file, form).outline, cost, ranks, (file, form))
    if (file, form, ranks) == (TAU, "comb", 8):
        assert plan.seconds.max() <= 1.02 * plan.seconds.mean()
        assert plan.rank_tokens.sum() <= 1.07 * plan.tree_tokens


@pytest.mark.parametrize("ranks", [2, 8, 32, 64])
@pytest.mark.parametrize("seed", range(2))
def test_skewed_batches_on_many_ranks(cost, seed, ranks):
    """C18: the largest group is a quarter of the batch."""
    batch = skewed(400, seed)
    plan = check_spread(build_outline(batch.tokens, batch.loss_masks), cost, ranks)
    assert plan.seconds.max() < 1.2 * plan.seconds.mean()


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_batches_shared_at_several_levels_on_many_ranks(cost, ranks):
    """Alike branches next to each other are what contiguous cuts are best at."""
    batch = levels(1200, 2000, 0)
    plan = check_spread(build_outline(batch.tokens, batch.loss_masks), cost, ranks, strictly=False)
    assert plan.seconds.max() < 1.05 * plan.seconds.mean()
