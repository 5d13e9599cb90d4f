"""Samples and per-token results as messages between ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dta.control.wire import pack, unpack
from megatron_dta.data.samples import Sample

_PLAIN = ("sample_id", "group_id", "trajectory_id", "reward", "version")
_PER_TOKEN = ("tokens", "loss_mask", "old_logprobs", "ref_logprobs", "identity")


def pack_samples(samples: Sequence[Sample]) -> np.ndarray:
    """Return samples as one message, uint8 [n]; nothing of them is changed or lost."""
    message: dict[str, Any] = {name: [_plain(getattr(s, name)) for s in samples] for name in _PLAIN}
    message |= {name: _alike([getattr(s, name) for s in samples]) for name in _PER_TOKEN}
    per_token = [s.advantage if isinstance(s.advantage, np.ndarray) else None for s in samples]
    message["advantage"] = [None if isinstance(s.advantage, np.ndarray) else _plain(s.advantage) for s in samples]
    message["token_advantage"] = _alike(per_token)
    return pack(message)


def unpack_samples(payload: Any) -> list[Sample]:
    """Return the samples of a message, in order; their arrays are read-only views of it."""
    message = unpack(payload)
    per_token, scalar = message.pop("token_advantage"), message.pop("advantage")
    advantages = [a if a is not None else b for a, b in zip(per_token, scalar)]
    names = (*_PLAIN, *_PER_TOKEN)
    return [
        Sample(**dict(zip(names, values)), advantage=advantage)
        for *values, advantage in zip(*(message[name] for name in names), advantages)
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _alike(arrays: list[np.ndarray | None]) -> list[np.ndarray | None]:
    """Give all arrays of a field one dtype, the widest among them: a message has one per field."""
    present = [a for a in arrays if a is not None]
    if len({a.dtype for a in present}) <= 1:
        return arrays
    dtype = np.result_type(*present)
    return [None if a is None else a.astype(dtype) for a in arrays]
