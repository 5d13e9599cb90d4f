import numpy as np
import pytest

from megatron_dta.data.forms import QWEN3_EMPTY_THINK, apply_form, first_groups, truncated, turn_spans
from megatron_dta.data.rollouts import read_rollouts, write_jsonl
from megatron_dta.data.samples import Sample

TOKENS = [1, 2, 3, 9, 9, 4, 5]
MASK = [0, 0, 1, 0, 0, 1, 1]


def sample(sample_id="s", group_id="g", tokens=TOKENS, mask=MASK, **optional):
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        trajectory_id=sample_id,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, bool),
        **optional,
    )


def with_every_field():
    count = np.arange(7.0)
    return sample(
        reward=1.0, advantage=count, old_logprobs=-count, ref_logprobs=-2 * count, identity=np.arange(7) + 10, version=5
    )


@pytest.mark.parametrize(
    ("mask", "spans"),
    [([0, 0], []), ([0, 1], [(1, 2)]), ([0, 1, 1, 0, 1, 0], [(1, 3), (4, 5)]), ([1, 0, 1], [(0, 1), (2, 3)])],
)
def test_turns_are_maximal_runs(mask, spans):
    assert turn_spans(np.array(mask, bool)) == spans


def test_whole_form_keeps_trajectories():
    trajectory = with_every_field()
    assert apply_form([trajectory], "whole") == [trajectory]


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="valid: whole, turn, comb"):
        apply_form([sample()], "tree")


def test_turn_form_ends_at_each_turn():
    first, second = apply_form([with_every_field()], "turn")
    assert [first.sample_id, second.sample_id] == ["s#turn0", "s#turn1"]
    assert {(x.group_id, x.trajectory_id, x.reward, x.version) for x in (first, second)} == {("g", "s", 1.0, 5)}
    assert (first.tokens.tolist(), first.loss_mask.tolist()) == ([1, 2, 3], [False, False, True])
    assert (second.tokens.tolist(), second.loss_mask.tolist()) == (TOKENS, [False] * 5 + [True] * 2)
    assert first.old_logprobs.tolist() == [0, -1, -2]
    assert second.identity.tolist() == [10, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("think", [QWEN3_EMPTY_THINK, (77,), ()])
def test_comb_form_inserts_before_the_last_turn_only(think):
    """Per-token fields move with their tokens; what is inserted is untrained and carries zeros."""
    blank = [0] * len(think)
    second = apply_form([with_every_field()], "comb", think)[1]
    assert second.tokens.tolist() == [1, 2, 3, 9, 9, *think, 4, 5]
    assert second.loss_mask.tolist() == [False] * (5 + len(think)) + [True] * 2
    assert second.advantage.tolist() == [0, 1, 2, 3, 4, *blank, 5, 6]
    assert second.old_logprobs.tolist() == [0, -1, -2, -3, -4, *blank, -5, -6]
    assert second.ref_logprobs.tolist() == [0, -2, -4, -6, -8, *blank, -10, -12]
    assert second.identity.tolist() == [10, 11, 12, 13, 14, *blank, 15, 16]
    assert [second.tokens.dtype, second.loss_mask.dtype, second.identity.dtype] == [np.int32, bool, np.int64]


def test_cutting_leaves_the_trajectory_alone():
    trajectory = with_every_field()
    apply_form([trajectory], "comb")
    assert (trajectory.tokens.tolist(), trajectory.loss_mask.astype(int).tolist()) == (TOKENS, MASK)


def test_scalar_advantage_stays_scalar():
    assert [x.advantage for x in apply_form([sample(advantage=0.5)], "comb")] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("form", "ids"), [("whole", ["full", "empty"]), ("turn", ["full#turn0"]), ("comb", ["full#turn0"])]
)
def test_a33_untrained_trajectories_are_counted(tmp_path, form, ids):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [sample("full", mask=[0] * 6 + [1]), sample("empty", mask=[0] * 7)])
    warnings = []
    samples = read_rollouts(path, form=form, on_warning=warnings.append)
    assert [x.sample_id for x in samples] == ids
    assert len(warnings) == (form != "whole")
    assert all("1 of 2" in warning for warning in warnings)


def test_a33_batch_without_any_trained_token(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [sample("empty", mask=[0] * 7)])
    warnings = []
    assert read_rollouts(path, form="comb", on_warning=warnings.append) == []
    assert "1 of 1" in warnings[0]


def test_first_groups_are_whole_and_by_first_appearance():
    samples = [sample(str(i), group) for i, group in enumerate("babcab")]
    assert [x.sample_id for x in first_groups(samples, 2)] == ["0", "1", "2", "4", "5"]
    assert len(first_groups(samples, 9)) == 6


def test_limit_and_truncation_of_a_file(tmp_path):
    """Truncation is applied after the form, so it counts what the form inserts."""
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [sample("a", "g"), sample("b", "h"), sample("c", "g")])
    samples = read_rollouts(path, form="comb", think=(77,), limit=1, truncate=6)
    assert [x.sample_id for x in samples] == ["a#turn0", "a#turn1", "c#turn0", "c#turn1"]
    assert [x.tokens.tolist() for x in samples[:2]] == [[1, 2, 77, 3], [1, 2, 3, 9, 9, 77]]
    assert not samples[1].loss_mask.any()


def test_truncation_cuts_every_field():
    short = truncated(with_every_field(), 4)
    arrays = (short.tokens, short.loss_mask, short.advantage, short.old_logprobs, short.ref_logprobs, short.identity)
    assert [len(array) for array in arrays] == [4] * 6
    assert short.identity.tolist() == [10, 11, 12, 13]


def test_think_must_be_ids(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [sample()])
    for think, vocab_size in (((-1,), None), ((1.5,), None), (QWEN3_EMPTY_THINK, 1000)):
        with pytest.raises(ValueError, match="think"):
            read_rollouts(path, form="comb", think=think, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("form", "think", "num_tokens"), [("turn", (), 13_950_299), ("comb", QWEN3_EMPTY_THINK, 13_960_115)]
)
def test_recorded_trajectories_as_turns(data_dir, form, think, num_tokens):
    """Every sample is its trajectory up to the turn, then `think`, then the turn."""
    path = data_dir / "tau_airline_gpt4o.qwen3.npz"
    wholes = {x.sample_id: x for x in read_rollouts(path)}
    samples = read_rollouts(path, form=form)
    assert len(samples) == 2454
    assert sum(len(x.tokens) for x in samples) == num_tokens
    assert sum(int(x.loss_mask.sum()) for x in samples) == sum(int(x.loss_mask.sum()) for x in wholes.values())
    for x in samples:
        whole, num_trained = wholes[x.trajectory_id].tokens, int(x.loss_mask.sum())
        start = len(x.tokens) - len(think) - num_trained
        assert x.loss_mask[-num_trained:].all()
        np.testing.assert_array_equal(
            x.tokens, np.concatenate([whole[:start], np.array(think, np.int32), whole[start : start + num_trained]])
        )
