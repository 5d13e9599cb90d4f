import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_dta.control.wire import DTYPES, MAGIC, pack, unpack

SMALL = {
    "ids": np.array([[5, 6], [7, 8]], np.int32),
    "mask": np.array([True, False, True]),
    "rows": [np.array([1, 2, 3], np.int64), None, np.array([], np.int64)],
    "options": {"tokens": 16, "name": "tree"},
}

arrays = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
ragged = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.lists(
        st.none() | hnp.arrays(dtype, st.integers(0, 5)), max_size=5
    )  # all None or empty is a JSON value, and comes back the same
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
messages = st.dictionaries(st.text(), arrays | ragged | values, max_size=6)


def same(a, b):
    if isinstance(b, np.ndarray):
        assert isinstance(a, np.ndarray)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(b, (list, dict)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for key in b if isinstance(b, dict) else range(len(b)):
            same(a[key], b[key])
    else:
        assert type(a) is type(b)
        assert a == b or (math.isnan(a) and math.isnan(b))


@settings(max_examples=50, deadline=None)
@given(messages)
def test_round_trip(message):
    packed = pack(message)
    assert len(packed) % 8 == 0
    for buffer in (packed, packed.tobytes(), memoryview(packed)):
        same(unpack(buffer), message)


def test_arrays_in_any_order_come_back_in_c_order():
    array = np.arange(24).reshape(2, 3, 4)
    for form in (array.T, array[:, ::2], np.asfortranarray(array), array[::-1]):
        got = unpack(pack({"x": form}))["x"]
        np.testing.assert_array_equal(got, form)
        assert got.flags.c_contiguous


def test_arrays_are_read_only_views_of_the_buffer():
    packed = pack(SMALL)
    message = unpack(packed)
    for array in (message["ids"], message["mask"], message["rows"][0]):
        assert np.shares_memory(array, packed)
        assert array.ctypes.data % 8 == packed.ctypes.data % 8
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_message_holds_a_copy():
    array = np.zeros(3)
    packed = pack({"x": array})
    array[:] = 1
    assert not unpack(packed)["x"].any()


def test_every_truncation_is_refused():
    packed = pack(SMALL).tobytes()
    for end in range(len(packed)):
        with pytest.raises(ValueError, match="message"):
            unpack(packed[:end])
    for extra in (b"\0", bytes(8)):
        with pytest.raises(ValueError, match="too many"):
            unpack(packed + extra)


def test_no_changed_byte_raises_anything_but_value_error():
    packed = pack(SMALL).tobytes()
    for at in range(len(packed)):
        for flip in (0xFF, 0x01, 0x80):
            changed = bytearray(packed)
            changed[at] ^= flip
            try:
                unpack(changed)
            except ValueError:
                continue
            assert at >= 16, "a change of the magic or the header's length went unseen"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((1, 2), "tuple"),
        ({1: "a"}, "keys"),
        ([{"a": {2: 3}}], "keys"),
        (np.int64(3), "int64"),
        (b"raw", "bytes"),
        ({1, 2}, "set"),
        (np.array(["a"]), "dtype"),
        (np.array([object()]), "dtype"),
        (np.zeros(2, np.complex64), "dtype"),
        (np.zeros(2, ">i4"), "dtype"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        ([np.zeros(2), np.zeros(2, np.int64)], "one dtype"),
        ([np.zeros(2), np.zeros((1, 2))], "1-D"),
        ([np.zeros(2), 3], "None and 1-D"),
        ([np.array(["a"])], "dtype"),
        ({"inner": np.zeros(2)}, "ndarray"),
        ([[np.zeros(2)]], "ndarray"),
    ],
)
def test_pack_refuses_what_would_not_come_back(value, words):
    with pytest.raises(ValueError, match=f"x: .*{words}"):
        pack({"x": value})


def test_pack_refuses_a_key_that_is_no_str():
    with pytest.raises(ValueError, match="key 3 is no str"):
        pack({3: 1})


def forged(header, buffers=b"", *, magic=MAGIC, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return magic + length.to_bytes(8, "little") + text + bytes(-len(text) % 8) + buffers


LENGTHS = np.array([2, -1], np.int64).tobytes()


def test_forged_messages_are_read_where_they_are_right():
    same(unpack(forged([["x", "array", "<i8", [1]]], bytes(8))), {"x": np.zeros(1, np.int64)})
    same(unpack(forged([["x", "ragged", "<i8", 2]], LENGTHS + bytes(16))), {"x": [np.zeros(2, np.int64), None]})


@pytest.mark.parametrize(
    "buffer",
    [
        b"",
        forged([], magic=b"MDTAMSG0"),
        forged([], length=2**63),
        forged(b"[" * 100_000),
        forged(b"\xff\xfe"),
        forged({"x": 1}),
        forged([["x"]]),
        forged([[1, "json", 2]]),
        forged([["x", "pickle", "gASVBAAAAAAAAABLAS4="]]),
        forged([["x", "json", 1], ["x", "json", 2]]),
        forged([["x", "array", "|O", [1]]], bytes(8)),
        forged([["x", "array", ["<i8"], [1]]], bytes(8)),
        forged([["x", "array", "<i8", [-1]]], bytes(8)),
        forged([["x", "array", "<i8", [True]]], bytes(8)),
        forged([["x", "array", "<i8", [1.0]]], bytes(8)),
        forged([["x", "array", "<i8", 1]], bytes(8)),
        forged([["x", "array", "<i8", [2]]], bytes(8)),
        forged([["x", "array", "<i8", [2**62, 2**62]]], bytes(8)),
        forged([["x", "array", "<i8", [0, 2**62, 2**62]]]),
        forged([["x", "array", "<i8", [0, 2**64]]]),
        forged([["x", "array", "<i8", [1] * 100]], bytes(8)),
        forged([["x", "array", "|b1", [1]]], b"\2" + bytes(7)),
        forged([["x", "array", "|u1", [1]]], bytes(7) + b"\1"),
        forged([["x", "ragged", "<i8", 2]], LENGTHS + bytes(8)),
        forged([["x", "ragged", "<i8", 1]], np.array([-2]).tobytes()),
        forged([["x", "ragged", "<i8", -1]]),
        forged([["x", "ragged", "<i8", 1]], np.array([2**62]).tobytes()),
        forged([["x", "ragged", "|O", 2]], LENGTHS + bytes(16)),
    ],
    ids=range(28),
)
def test_unpack_refuses_malformed_messages(buffer):
    with pytest.raises(ValueError, match=r"message|x: |array|dimension"):
        unpack(buffer)
