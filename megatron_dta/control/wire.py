"""Messages as bytes without pickle: numpy arrays as they lie in memory, everything else as JSON.

    magic (8 bytes) | header length (uint64) | header (JSON) | buffers

All numbers are little-endian; the header and each buffer are padded with zeros to 8 bytes. The header is a list of
[name, "json", value], [name, "array", dtype, shape] (one buffer) and [name, "ragged", dtype, count] (two: the int64
lengths, -1 for None, and the arrays end to end).
"""

import json
import math
from typing import Any

import numpy as np

from megatron_dta.control.communicator import as_uint8

MAGIC = b"MDTAMSG1"
DTYPES = ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
_LENGTHS = "<i8"
_START = 16
"""Where the header starts."""


def pack(message: dict[str, Any]) -> np.ndarray:
    """Return a message as bytes (uint8, 1-D).

    A value is an array of one of `DTYPES`, a list of 1-D arrays of one dtype (entries may be None), or a JSON value:
    str, int, float (nan and infinities too), bool, None, lists and dicts of them. Raises ValueError for anything else:
    a tuple, a numpy scalar that is no float, or a key that is no str would come back as something else.
    """
    items: list[list[Any]] = []
    buffers: list[np.ndarray] = []
    for name, value in message.items():
        if not isinstance(name, str):
            raise ValueError(f"key {name!r} is no str")
        if isinstance(value, np.ndarray):
            items.append([name, "array", _dtype_of(name, value), list(value.shape)])
            buffers.append(value)
        elif isinstance(value, list) and any(isinstance(entry, np.ndarray) for entry in value):
            lengths, flat = _join(name, value)
            items.append([name, "ragged", _dtype_of(name, flat), len(value)])
            buffers += [lengths, flat]
        else:
            _check_json(name, value)
            items.append([name, "json", value])
    return _assemble(json.dumps(items, separators=(",", ":")).encode(), buffers)


def unpack(buffer: Any) -> dict[str, Any]:
    """Return the message in a bytes-like `buffer`; its arrays are read-only views of the buffer.

    Raises ValueError where the buffer is not exactly one message: cut short, too long, or malformed anywhere.
    """
    data = as_uint8(buffer)
    data.flags.writeable = False
    if len(data) < _START or bytes(data[:8]) != MAGIC:
        raise ValueError(f"not a message: {len(data)} bytes that start with {bytes(data[:8])!r}")
    reader = _Reader(data)
    header = bytes(reader.take(int.from_bytes(data[8:_START].tobytes(), "little")))
    try:
        items = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"message header is not valid JSON ({error})") from None
    if not isinstance(items, list):
        raise ValueError("message header is no list")
    message: dict[str, Any] = {}
    for item in items:
        match item:
            case [str(name), "json", value]:
                pass
            case [str(name), "array", dtype, shape]:
                value = reader.array(name, dtype, shape)
            case [str(name), "ragged", dtype, count]:
                value = reader.ragged(name, dtype, count)
            case _:
                raise ValueError(f"message header has an unknown item {str(item)[:80]}")
        if name in message:
            raise ValueError(f"message has {name!r} twice")
        message[name] = value
    reader.finish()
    return message


def _join(name: str, entries: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return a ragged value as int64 lengths and one flat array."""
    arrays = [entry for entry in entries if entry is not None]
    for entry in arrays:
        if not isinstance(entry, np.ndarray) or entry.ndim != 1 or entry.dtype != arrays[0].dtype:
            raise ValueError(f"{name}: a list with arrays holds only None and 1-D arrays of one dtype")
    lengths = np.array([-1 if entry is None else len(entry) for entry in entries], _LENGTHS)
    return lengths, np.concatenate(arrays)


def _dtype_of(name: str, array: np.ndarray) -> str:
    if array.dtype.str not in DTYPES:
        raise ValueError(f"{name}: dtype {array.dtype.str}; expected one of {', '.join(DTYPES)}")
    return array.dtype.str


def _check_json(name: str, value: Any) -> None:
    # a stack instead of recursion: json itself refuses what is too deep
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise ValueError(f"{name}: a dict has keys that are no str")
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
        elif not (value is None or isinstance(value, (str, int, float))):
            raise ValueError(f"{name}: {type(value).__name__} is neither an array nor a JSON value")


def _assemble(header: bytes, buffers: list[np.ndarray]) -> np.ndarray:
    starts = [_START + _padded(len(header))]
    for buffer in buffers:
        starts.append(starts[-1] + _padded(buffer.nbytes))
    data = np.empty(starts[-1], np.uint8)
    data[:8] = np.frombuffer(MAGIC, np.uint8)
    data[8:_START] = np.frombuffer(len(header).to_bytes(8, "little"), np.uint8)
    data[_START : _START + len(header)] = np.frombuffer(header, np.uint8)
    data[_START + len(header) : starts[0]] = 0
    for start, end, buffer in zip(starts, starts[1:], buffers):
        stop = start + buffer.nbytes
        # in place and in C order, whatever the array's strides
        data[start:stop].view(buffer.dtype).reshape(buffer.shape)[...] = buffer
        data[stop:end] = 0
    return data


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


class _Reader:
    """Takes a message's parts one after the other."""

    def __init__(self, data: np.ndarray):
        self._data, self._at = data, _START

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next bytes; skip their padding."""
        start, end = self._at, self._at + _padded(num_bytes)
        if end > len(self._data):
            raise ValueError(f"message is cut short: {len(self._data)} bytes, at least {end} expected")
        if self._data[start + num_bytes : end].any():
            raise ValueError(f"message has no zeros as padding before byte {end}")
        self._at = end
        return self._data[start : start + num_bytes]

    def array(self, name: str, dtype: Any, shape: Any) -> np.ndarray:
        if dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise ValueError(f"{name}: {shape!r} is no shape")
        flat = self.take(math.prod(shape) * np.dtype(dtype).itemsize)
        if dtype == "|b1" and (flat > 1).any():
            raise ValueError(f"{name}: a bool is neither 0 nor 1")
        # raises ValueError where the shape is no array's: too many dimensions, or too large although empty
        return flat.view(dtype).reshape(shape)

    def ragged(self, name: str, dtype: Any, count: Any) -> list[np.ndarray | None]:
        lengths = self.array(name, _LENGTHS, [count]).tolist()
        if min(lengths, default=0) < -1:
            raise ValueError(f"{name}: an array of {min(lengths)} elements")
        flat = self.array(name, dtype, [sum(max(n, 0) for n in lengths)])
        entries: list[np.ndarray | None] = []
        start = 0
        for length in lengths:
            entries.append(None if length < 0 else flat[start : start + length])
            start += max(length, 0)
        return entries

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"message has {len(self._data) - self._at} bytes too many")
