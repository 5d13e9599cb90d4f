"""What tests of several folders share."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.data.samples import Sample


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left alone with them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of recorded rollouts; skip where there is none."""
    folder = Path(os.environ.get("MEGATRON_DTA_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no recorded rollouts at {folder}: set MEGATRON_DTA_DATA")
    return folder


@pytest.fixture(scope="session")
def assert_same_samples() -> Callable[[Sequence[Sample], Sequence[Sample]], None]:
    """Return a check that two lists of samples are equal in every field, dtype and value."""

    def check(got: Sequence[Sample], expected: Sequence[Sample]) -> None:
        assert len(got) == len(expected)
        for a, b in zip(got, expected):
            for name in (field.name for field in fields(Sample)):
                x, y = getattr(a, name), getattr(b, name)
                assert type(x) is type(y), (b.sample_id, name, x, y)
                if isinstance(x, np.ndarray):
                    assert x.dtype == y.dtype, (b.sample_id, name)
                    np.testing.assert_array_equal(x, y, err_msg=f"{b.sample_id} {name}")
                else:
                    assert x == y, (b.sample_id, name)

    return check
