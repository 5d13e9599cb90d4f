"""Group advantages: by ids, with the edge cases that give other stacks NaN."""

import pytest
import torch

from megatron_dta.engine.batch import sample_advantages
from megatron_dta.errors import UsageError
from megatron_dta.rl.advantages import group_advantages
from tests.batches import trained


def advantages(rewards, groups):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()


def test_standardised_within_the_group():
    got = advantages([1.0, 0.0, 5.0, 3.0, 1.0], [7, 7, 2, 2, 2])
    assert got[:2] == pytest.approx([0.5 / 0.5**0.5, -0.5 / 0.5**0.5], abs=1e-5)
    assert got[2:] == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)


def test_interleaved_groups_keep_their_members():
    """A28: statistics use the group id, not the position in the batch."""
    together = advantages([1.0, 2.0, 9.0, 5.0], [0, 0, 1, 1])
    apart = advantages([1.0, 9.0, 2.0, 5.0], [0, 1, 0, 1])
    assert [apart[0], apart[2], apart[1], apart[3]] == together


@pytest.mark.parametrize("rewards", [[3.0], [0.1] * 3, [0.7] * 7, [1e6 + 0.1] * 64, [1e8 + 0.1] * 64])
def test_groups_without_a_difference_get_zero(rewards):
    """A28: one member, or equal rewards whose mean is not exact."""
    assert advantages(rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_nan_reward_is_left_out():
    """A28: the others are standardised among themselves; the sample itself trains nothing."""
    got = advantages([1.0, float("nan"), 0.0], [0, 0, 0])
    assert got[1] == 0.0
    assert [got[0], got[2]] == pytest.approx(advantages([1.0, 0.0], [0, 0]))


def test_group_of_nans_and_empty_batch():
    assert advantages([float("nan")] * 2, [0, 0]) == [0.0, 0.0]
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_a_trajectory_counts_once_however_many_turns_it_has():
    """Three turns of a good trajectory must not outvote one turn of a bad one."""
    samples = [trained([1, 2], [0, 1], f"good#{k}", trajectory_id="good", reward=1.0) for k in range(3)]
    samples.append(trained([1, 3], [0, 1], "bad", reward=0.0))
    got = sample_advantages(samples)
    assert got[0] == got[1] == got[2] == pytest.approx(-got[3])


def test_given_advantages_win_and_missing_ones_are_named():
    samples = [trained([1, 2], [0, 1], "a", advantage=0.25, reward=9.0), trained([1, 2], [0, 1], "b", reward=1.0)]
    assert sample_advantages(samples) == [0.25, 0.0]
    with pytest.raises(UsageError, match="sample c"):
        sample_advantages([*samples, trained([1, 2], [0, 1], "c")])


def test_one_trajectory_has_one_reward():
    samples = [trained([1, 2], [0, 1], f"t{k}", trajectory_id="t", reward=float(k)) for k in range(2)]
    with pytest.raises(UsageError, match="samples t0 and t1 of trajectory t have rewards"):
        sample_advantages(samples)
