import os
import pickle
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.data.rollouts import read_rollouts, write_jsonl, write_npz
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

OFFSETS = [0, 3, 5]
ARRAYS = {
    "ids": np.array([5, 6, 7, 5, 9], np.int32),
    "loss_mask": np.array([0, 1, 1, 0, 1], np.uint8),
    "offsets": np.array(OFFSETS),
    "task": np.array([1, 0]),
    "trial": np.array([0, 4]),
    "reward": np.array([0.5, 1.0], np.float32),
    "task_names": np.array(["add", "sort"]),
}
PER_TOKEN = {
    "old_logprobs": np.array([0, -0.5, -0.25, 0, -1], np.float32),
    "ref_logprobs": np.array([0, -2, -3, 0, -4], np.float64),
    "identity": np.array([0, 1, 1, 0, 2]),
}


def file_of(folder, **changes):
    arrays = {name: array for name, array in (ARRAYS | changes).items() if array is not None}
    path = folder / "rollouts.npz"
    np.savez(path, **arrays)
    return path


def refusal(path, **options):
    with pytest.raises(UsageError) as caught:
        read_rollouts(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_ragged_arrays_become_samples(tmp_path):
    first, second = read_rollouts(file_of(tmp_path, **PER_TOKEN, version=np.array([3, 4])))
    assert (first.group_id, first.sample_id, first.trajectory_id, first.reward) == ("sort", "sort/0", "sort/0", 0.5)
    assert (second.group_id, second.sample_id, second.version) == ("add", "add/4", 4)
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([5, 6, 7], [5, 9])
    assert first.tokens.dtype == np.int32
    assert (first.loss_mask.tolist(), second.loss_mask.tolist()) == ([False, True, True], [False, True])
    assert (first.old_logprobs.tolist(), second.ref_logprobs.tolist()) == ([0, -0.5, -0.25], [0, -4])
    assert second.identity.tolist() == [0, 2]
    assert [type(first.reward), type(first.version), first.old_logprobs.dtype] == [float, int, np.float64]


@pytest.mark.parametrize(("advantage", "expected"), [([1, -2], [1.0, -2.0]), ([9, 1, 2, 9, 3], [[0, 1, 2], [0, 3]])])
def test_advantages_are_per_sample_or_per_token(tmp_path, advantage, expected):
    samples = read_rollouts(file_of(tmp_path, advantage=np.array(advantage), reward=None))
    assert [np.asarray(sample.advantage).tolist() for sample in samples] == expected
    assert [sample.reward for sample in samples] == [None, None]


def test_tokens_of_whole_samples_and_turns_are_views(tmp_path):
    path = file_of(tmp_path)
    first, second = (sample.tokens for sample in read_rollouts(path))
    assert first.base is not None
    assert first.base is second.base
    assert all(sample.tokens.base is not None for sample in read_rollouts(path, form="turn"))


class Poison:
    """What G03 plants: unpickling it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["ids", "reward", "task_names", "extra"])
def test_g03_poisoned_array_is_refused_and_not_run(tmp_path, name):
    target = tmp_path / "payload-ran"
    path = file_of(tmp_path, **{name: np.array([Poison(target), None], object)})
    message = refusal(path)
    assert name in message
    assert "never unpickled" in message
    assert not target.exists()


def test_g03_pickle_named_npz_is_refused_and_not_run(tmp_path):
    target = tmp_path / "payload-ran"
    path = tmp_path / "rollouts.npz"
    path.write_bytes(pickle.dumps(Poison(target)))
    assert "not an .npz archive" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", pickle.dumps(Poison(target)))
    assert "ids" in refusal(path)
    assert not target.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_archive_is_refused(tmp_path, share):
    path = file_of(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "not an .npz archive" in refusal(path)


def test_damaged_array_is_refused(tmp_path):
    path = file_of(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.index(ARRAYS["ids"].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert "ids" in refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("offsets", [0, 3, 4], "got 0 to 4, expected 0 to 5"),
        ("offsets", [1, 3, 5], "got 1 to 5, expected 0 to 5"),
        ("offsets", [0, 6, 5], "sample number 1: offsets[2] is 5 after 6"),
        ("offsets", [0, 0, 5], "sample number 0: offsets[1] is 0 after 0"),
        ("offsets", [0.0, 3.0, 5.0], "offsets: got dtype float64"),
        ("offsets", [0], "got no samples"),
        ("ids", [5, 6, -7, 5, 9], "sample 'sort/0': ids[2]: got -7"),
        ("ids", [5, 6, 7, 5, 2**31], "sample 'add/4': ids[1]: got 2147483648"),
        ("ids", [5.0, 6, 7, 5, 9], "ids: got dtype float64"),
        ("ids", [True] * 5, "ids: got dtype bool"),
        ("ids", ["5"] * 5, "ids: got dtype <U1"),
        ("ids", [[5, 6, 7, 5, 9]], "ids: got shape (1, 5)"),
        ("ids", 5, "ids: got shape ()"),
        ("loss_mask", [0, 1, 1, 0], "loss_mask has a wrong length: got 4, expected 5"),
        ("loss_mask", [0, 1, 2, 0, 1], "sample 'sort/0': loss_mask[2]: got 2"),
        ("loss_mask", [0, 1, 0.5, 0, 1], "loss_mask: got dtype float64"),
        ("reward", [0.5, np.nan], "sample 'add/4': reward[0]: got nan"),
        ("reward", [0.5], "reward has a wrong length: got 1, expected 2"),
        ("advantage", [1, 2, 3], "advantage has a wrong length: got 3, expected 2, one for each sample or 5"),
        ("advantage", [0, 1, np.inf, 0, 1], "sample 'sort/0': advantage[2]: got inf"),
        ("old_logprobs", [0, -1, np.nan, 0, -1], "sample 'sort/0': old_logprobs[2]: got nan"),
        ("ref_logprobs", [0, -1, -1, 0, 0.5], "sample 'add/4': ref_logprobs[1]: got 0.5"),
        ("old_logprobs", [-1, -1], "old_logprobs has a wrong length: got 2, expected 5"),
        ("identity", [0.5] * 5, "identity: got dtype float64"),
        ("version", [1], "version has a wrong length: got 1, expected 2"),
        ("task", [0, 2], "task[1]: got 2, expected 0 to 1"),
        ("task", [-1, 0], "task[0]: got -1"),
        ("trial", [0], "trial has a wrong length: got 1, expected 2"),
        ("task_names", [1, 2], "task_names: got dtype int64"),
        ("sample_id", ["x", "x"], "got id 'x' of number 0"),
        ("rewards", [0.0, 1.0], "unknown array 'rewards'; did you mean reward?"),
        ("attention_mask", [1] * 5, "samples are unpadded"),
        ("task_names", None, "missing array task_names"),
        ("loss_mask", None, "missing array loss_mask"),
    ],
)
def test_bad_arrays_are_named(tmp_path, name, value, told):
    message = refusal(file_of(tmp_path, **{name: None if value is None else np.array(value)}))
    assert told in message


def test_duplicate_trials_are_refused(tmp_path):
    path = file_of(tmp_path, task=np.array([0, 0]), trial=np.array([1, 1]))
    assert "got id 'add/1' of number 0" in refusal(path)


def test_ids_are_checked_against_the_vocabulary(tmp_path):
    path = file_of(tmp_path)
    assert len(read_rollouts(path, vocab_size=10)) == 2
    assert "sample 'add/4': ids[1]: got 9, expected an id from 0 to 8" in refusal(path, vocab_size=9)


def test_a17_response_masks_are_refused(tmp_path):
    assert "all tokens" in refusal(file_of(tmp_path), mask="response")


def test_a07_trained_first_tokens_give_one_warning(tmp_path):
    warnings = []
    path = file_of(tmp_path, loss_mask=np.array([1, 1, 1, 1, 1], bool))
    samples = read_rollouts(path, on_warning=warnings.append)
    assert [sample.loss_mask.tolist() for sample in samples] == [[False, True, True], [False, True]]
    assert len(warnings) == 1
    assert "2 of 2" in warnings[0]


@pytest.mark.parametrize(
    ("name", "num_samples", "num_tokens", "num_groups"),
    [
        ("tau_airline_gpt4o", 200, 1_316_747, 50),
        ("nemogym_swe_5rollouts", 20, 172_568, 4),
        ("tot_game24_bfs_tree_subset", 2055, 1_102_851, 30),
    ],
)
def test_recorded_rollouts(data_dir, tmp_path, assert_same_samples, name, num_samples, num_tokens, num_groups):
    path = data_dir / f"{name}.qwen3.npz"
    samples = read_rollouts(path, vocab_size=151_936)
    assert len(samples) == num_samples
    assert sum(len(sample.tokens) for sample in samples) == num_tokens
    assert len({sample.group_id for sample in samples}) == num_groups
    with np.load(path, allow_pickle=False) as archive:
        np.testing.assert_array_equal(np.concatenate([sample.tokens for sample in samples]), archive["ids"])
        np.testing.assert_array_equal([sample.reward for sample in samples], archive["reward"])
    for write, ending in ((write_npz, "npz"), (write_jsonl, "jsonl")):
        write(tmp_path / f"copy.{ending}", samples)
        assert_same_samples(read_rollouts(tmp_path / f"copy.{ending}"), samples)


def test_a_field_of_some_samples_only_does_not_fit_columns(tmp_path):
    samples = read_rollouts(file_of(tmp_path))
    partly = [samples[0], *read_rollouts(file_of(tmp_path, reward=None))[1:]]
    with pytest.raises(UsageError, match=r"reward.*\.jsonl"):
        write_npz(tmp_path / "partly.npz", partly)


def test_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = file_of(tmp_path)
    samples, before = read_rollouts(path), path.read_bytes()

    def full_disk(file, **arrays):
        file.write(b"PK")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_npz(path, samples)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@st.composite
def columns(draw):
    """Samples whose every field is given for all or for none."""
    names = draw(st.lists(NAMES | st.integers(0, 9).map(lambda n: f"g/{n}"), min_size=1, max_size=4, unique=True))
    given_fields = draw(st.sets(st.sampled_from(["reward", "advantage", "old_logprobs", "identity", "version", "cut"])))
    advantage_per_token, finite = draw(st.booleans()), st.floats(allow_nan=False, allow_infinity=False)
    rollouts = []
    for name in names:
        length = draw(st.integers(2, 5))
        values = np.array(draw(st.lists(st.floats(-50, 0), min_size=length, max_size=length)))
        mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        values[0] = mask[0] = 0
        optional = {
            "reward": draw(finite),
            "advantage": -values if advantage_per_token else draw(finite),
            "old_logprobs": values,
            "identity": np.arange(length, dtype=np.int64),
            "version": draw(st.integers(-(2**63), 2**63 - 1)),
        }
        rollouts.append(
            Sample(
                sample_id=name,
                group_id=draw(st.sampled_from(["g", "h"])),
                trajectory_id=draw(NAMES) if "cut" in given_fields else name,
                tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
                loss_mask=mask,
                **{field: value for field, value in optional.items() if field in given_fields},
            )
        )
    return rollouts


@given(rollouts=columns())
@settings(max_examples=60, deadline=None)
def test_written_samples_are_read_back(assert_same_samples, rollouts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rollouts.npz")
        write_npz(path, rollouts)
        assert_same_samples(read_rollouts(path), rollouts)
