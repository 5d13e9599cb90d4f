import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.data.rollouts import read_rollouts, write_jsonl, write_npz
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError

FULL = {
    "group_id": "g",
    "sample_id": "s",
    "tokens": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "reward": 1.0,
    "advantage": [0.0, 0.0, 0.5, -0.5],
    "old_logprobs": [0.0, -0.1, -0.2, -0.3],
    "ref_logprobs": [0.0, -0.4, -0.5, -0.6],
    "identity": [0, 0, 3, 3],
    "version": 2,
}


def file_of(folder, *records):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, **options):
    """Read with warnings as errors: a test that expects some passes its own list."""

    def no_warning(text):
        raise AssertionError(text)

    return read_rollouts(path, **{"on_warning": no_warning} | options)


def refusal(path, **options):
    with pytest.raises(UsageError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_every_field_is_read(tmp_path):
    (sample,) = read(file_of(tmp_path, FULL))
    assert (sample.group_id, sample.sample_id, sample.trajectory_id) == ("g", "s", "s")
    assert (sample.reward, sample.version) == (1.0, 2)
    assert sample.tokens.dtype == np.int32
    assert sample.loss_mask.dtype == bool
    for name in ("tokens", "loss_mask", "advantage", "old_logprobs", "ref_logprobs", "identity"):
        assert getattr(sample, name).tolist() == FULL[name]


def test_supervised_samples_need_neither_reward_nor_advantage(tmp_path):
    """Integer ids become text; null is absent."""
    path = file_of(
        tmp_path, {"group_id": 3, "sample_id": 7, "tokens": [1, 2], "loss_mask": [False, True], "reward": None}
    )
    (sample,) = read(path)
    assert (sample.group_id, sample.sample_id) == ("3", "7")
    assert [sample.reward, sample.advantage, sample.old_logprobs, sample.identity, sample.version] == [None] * 5


def test_a13_same_text_with_other_ids_stays_as_sampled(tmp_path):
    texts = [[53122, 316], [393, 30002]]
    records = [FULL | {"sample_id": i, "tokens": [1, 2, *ids]} for i, ids in enumerate(texts)]
    assert [sample.tokens[2:].tolist() for sample in read(file_of(tmp_path, *records))] == texts


@pytest.mark.parametrize("missing", [None, 0.0])
def test_a20_merged_turns_stay_aligned(tmp_path, missing):
    """Turns [1,2]+[3] and [1,2,3,9,9]+[4] as one path: observation tokens carry no log-prob and no loss."""
    logprobs = [missing, missing, -0.3, missing, missing, -0.4]
    record = {"tokens": [1, 2, 3, 9, 9, 4], "loss_mask": [0, 0, 1, 0, 0, 1], "old_logprobs": logprobs}
    path = file_of(tmp_path, {"group_id": "g", "sample_id": "s", **record})
    (sample,) = read(path)
    assert sample.old_logprobs.tolist() == [0, 0, -0.3, 0, 0, -0.4]
    first, second = read(path, form="turn")
    assert (first.tokens.tolist(), first.old_logprobs[first.loss_mask].tolist()) == ([1, 2, 3], [-0.3])
    assert (second.tokens.tolist(), second.old_logprobs[second.loss_mask].tolist()) == ([1, 2, 3, 9, 9, 4], [-0.4])
    assert second.loss_mask.tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("field", ["old_logprobs", "ref_logprobs"])
def test_a20_missing_logprob_of_a_trained_token_is_an_error(tmp_path, field):
    message = refusal(file_of(tmp_path, FULL | {field: [None, None, -0.2, None]}))
    assert f"'s': {field}[3]: got null" in message


@pytest.mark.parametrize("field", ["loss_mask", "old_logprobs", "ref_logprobs", "advantage"])
def test_a17_response_length_must_be_declared(tmp_path, field):
    path = file_of(tmp_path, FULL | {field: FULL[field][2:]})
    hint = 'got 2, expected 4; if the file holds response-only masks say data.mask = "response"'
    message = refusal(path)
    assert f"'s': {field}" in message
    assert hint in message


@pytest.mark.parametrize("field", ["loss_mask", "old_logprobs", "ref_logprobs", "advantage", "identity"])
@pytest.mark.parametrize("mask", ["full", "response"])
def test_a17_wrong_lengths_are_refused_in_either_mode(tmp_path, field, mask):
    message = refusal(file_of(tmp_path, FULL | {field: [0] * 5}), mask=mask)
    assert f"'s': {field}" in message
    assert "got 5" in message
    assert "4" in message.rpartition("expected")[2]


def test_a17_declared_response_is_right_aligned(tmp_path):
    response = {"loss_mask": [0, 1], "old_logprobs": [None, -0.3], "ref_logprobs": [-0.5, -0.6], "advantage": [2, 3]}
    (sample,) = read(file_of(tmp_path, FULL | response), mask="response")
    assert sample.loss_mask.tolist() == [False, False, False, True]
    assert sample.old_logprobs.tolist() == [0, 0, 0, -0.3]
    assert sample.ref_logprobs.tolist() == [0, 0, -0.5, -0.6]
    assert sample.advantage.tolist() == [0, 0, 2, 3]
    assert sample.identity.tolist() == FULL["identity"]


def test_a17_response_fields_of_two_lengths_are_refused(tmp_path):
    response = {"loss_mask": [1, 1], "old_logprobs": [-0.1, -0.2, -0.3]}
    message = refusal(file_of(tmp_path, FULL | response), mask="response")
    assert "old_logprobs has a wrong length: got 3, expected 4 (all tokens) or 2 (the response)" in message


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("tokens", [5, 6.0, 7, 8], "tokens[1]: got 6.0"),
        ("tokens", [5, True, 7, 8], "tokens[1]: got True"),
        ("tokens", [5, "6", 7, 8], "tokens[1]: got '6'"),
        ("tokens", [5, None, 7, 8], "tokens[1]: got None"),
        ("tokens", "5 6 7 8", "tokens: got '5 6 7 8'"),
        ("tokens", [5, 6, -1, 8], "tokens[2]: got -1"),
        ("tokens", [5, 6, 7, 2**31], "tokens[3]: got 2147483648"),
        ("tokens", [5, 6, 7, 2**70], "tokens: got 1180591620717411303424"),
        ("tokens", [], "tokens: got an empty list"),
        ("loss_mask", [0, 0, 2, 1], "loss_mask[2]: got 2"),
        ("loss_mask", [0, 0, 1.0, 1], "loss_mask[2]: got 1.0"),
        ("loss_mask", 1, "loss_mask: got 1"),
        ("reward", math.nan, "reward: got nan"),
        ("reward", -math.inf, "reward: got -inf"),
        ("reward", 10**400, "reward: got 1000"),
        ("reward", True, "reward: got True"),
        ("reward", "1", "reward: got '1'"),
        ("reward", [0, 0, 1, 1], "reward: got [0, 0, 1, 1]"),
        ("advantage", math.nan, "advantage: got nan"),
        ("advantage", [0, 0, math.inf, 0], "advantage[2]: got inf"),
        ("advantage", [0, 0, None, 0], "advantage[2]: got None"),
        ("advantage", [0, 0, 10**400, 0], "advantage: got 1000"),
        ("old_logprobs", [0, 0, math.nan, -1], "old_logprobs[2]: got nan"),
        ("old_logprobs", [0, 0, -math.inf, -1], "old_logprobs[2]: got -inf"),
        ("old_logprobs", [0, 0, 0.25, -1], "old_logprobs[2]: got 0.25"),
        ("old_logprobs", [0, 0, "-1", -1], "old_logprobs[2]: got '-1'"),
        ("ref_logprobs", [0, 3, -1, -1], "ref_logprobs[1]: got 3.0"),
        ("identity", [0, 0, 0.5, 0], "identity[2]: got 0.5"),
        ("version", 1.5, "version: got 1.5"),
        ("group_id", 1.5, "group_id: got 1.5"),
        ("group_id", True, "group_id: got True"),
        ("sample_id", "", "sample_id: got ''"),
    ],
)
def test_bad_values_are_named(tmp_path, field, value, told):
    message = refusal(file_of(tmp_path, FULL | {"sample_id": "fine"}, FULL | {field: value}))
    assert "line 2" in message
    assert told in message
    assert "expected" in message
    if field != "sample_id":
        assert "sample 's'" in message


def test_entry_zero_predicts_nothing_and_is_ignored(tmp_path):
    ignored = {"old_logprobs": [9, -1, -1, -1], "ref_logprobs": [None, -1, -1, -1], "advantage": [math.inf, 0, 1, 1]}
    (sample,) = read(file_of(tmp_path, FULL | ignored))
    assert [sample.old_logprobs[0], sample.ref_logprobs[0], sample.advantage[0]] == [0, 0, 0]


def test_ids_are_checked_against_the_vocabulary(tmp_path):
    path = file_of(tmp_path, FULL)
    assert len(read(path, vocab_size=9)) == 1
    assert "tokens[3]: got 8, expected an id from 0 to 7" in refusal(path, vocab_size=8)


def test_a07_trained_first_tokens_give_one_warning(tmp_path):
    records = [FULL | {"sample_id": i, "loss_mask": [int(i > 0), 0, 1, 1]} for i in range(3)]
    warnings = []
    samples = read(file_of(tmp_path, *records), on_warning=warnings.append)
    assert [bool(sample.loss_mask[0]) for sample in samples] == [False] * 3
    assert len(warnings) == 1
    assert "2 of 3" in warnings[0]


@pytest.mark.parametrize("field", ["group_id", "sample_id", "tokens", "loss_mask"])
def test_missing_fields_are_named(tmp_path, field):
    record = {name: value for name, value in FULL.items() if name != field}
    assert f"missing field {field}" in refusal(file_of(tmp_path, record))


@pytest.mark.parametrize(
    ("key", "nearest"), [("token", "tokens"), ("rewards", "reward"), ("old_logprob", "old_logprobs")]
)
def test_unknown_keys_name_the_nearest(tmp_path, key, nearest):
    assert f"unknown key '{key}'; did you mean {nearest}?" in refusal(file_of(tmp_path, FULL | {key: []}))


@pytest.mark.parametrize("key", ["attention_mask", "position_ids", "padding_mask", "pad_token_id"])
def test_a05_padded_samples_are_refused(tmp_path, key):
    assert "samples are unpadded" in refusal(file_of(tmp_path, FULL | {key: [0, 1, 1, 1]}))


def test_duplicate_sample_ids_are_refused(tmp_path):
    message = refusal(file_of(tmp_path, FULL | {"sample_id": 1}, FULL | {"sample_id": "1", "group_id": "h"}))
    assert "line 2" in message
    assert "line 1" in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty file"),
        (b"\n \n", "empty file"),
        (json.dumps(FULL).encode()[:40], "line 1: not valid JSON"),
        (json.dumps(FULL).encode() + b"\n{\n", "line 2: not valid JSON"),
        (b"[1, 2]\n", "line 1: got [1, 2], expected an object"),
        (b'{"group_id": "\xfa"}\n', "line 1: not readable"),
        (b"[" * 100_000, "line 1: not"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, told):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    assert told in refusal(path)


def test_files_that_cannot_be_rollouts_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.jsonl")
    assert "expected .jsonl or .npz" in refusal(tmp_path / "rollouts.csv")
    (tmp_path / "folder.jsonl").mkdir()
    assert "directory" in refusal(tmp_path / "folder.jsonl")


@pytest.mark.parametrize(
    "options",
    [{"form": "tree"}, {"mask": "left"}, {"limit": 0}, {"truncate": -1}, {"vocab_size": 1.5}, {"limit": True}],
)
def test_bad_options_are_refused(tmp_path, options):
    assert next(iter(options)) in refusal(file_of(tmp_path, FULL), **options)


def test_interrupted_write_keeps_the_old_file(tmp_path):
    path = file_of(tmp_path, FULL)
    before = path.read_bytes()
    (sample,) = read(path)

    def interrupted():
        yield sample
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(path, interrupted())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@st.composite
def samples(draw):
    length = draw(st.integers(1, 6))
    per_token = {
        "advantage": st.floats(-1e6, 1e6),
        "old_logprobs": st.floats(-100, 0),
        "ref_logprobs": st.floats(-100, 0),
    }
    arrays = {name: np.array(draw(st.lists(v, min_size=length, max_size=length))) for name, v in per_token.items()}
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    for array in (mask, *arrays.values()):
        array[0] = 0
    chosen = {name: array if draw(st.booleans()) else None for name, array in arrays.items()}
    if draw(st.booleans()):
        chosen["advantage"] = draw(st.floats(allow_nan=False, allow_infinity=False))
    return Sample(
        sample_id=draw(st.text(min_size=1)),
        group_id=draw(st.text(min_size=1)),
        trajectory_id=draw(st.text(min_size=1)),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        identity=draw(st.none() | st.just(np.arange(length, dtype=np.int64) - 2**62)),
        version=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        **chosen,
    )


@given(rollouts=st.lists(samples(), min_size=1, max_size=4, unique_by=lambda sample: sample.sample_id))
@settings(max_examples=60, deadline=None)
def test_written_samples_are_read_back(assert_same_samples, rollouts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rollouts.jsonl")
        write_jsonl(path, rollouts)
        assert_same_samples(read(path), rollouts)


@pytest.mark.parametrize("ending", ["jsonl", "npz"])
def test_log_probs_of_a_sweep_are_written(tmp_path, ending):
    """A sweep scores trained tokens only; a NaN at a trained token stays an error."""
    logprobs = np.array([np.nan, np.nan, -1.5])
    sample = Sample(
        sample_id="a", group_id="g", trajectory_id="a", tokens=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, False, True]), old_logprobs=logprobs,
    )  # fmt: skip
    path = tmp_path / f"swept.{ending}"
    {"jsonl": write_jsonl, "npz": write_npz}[ending](path, [sample])
    assert read_rollouts(path)[0].old_logprobs.tolist() == [0.0, 0.0, -1.5]
