"""Experts shared by two ranks: gradients, losses, routes and loads are those of one process."""

import pytest

from tests.control.spawn import ROOT, run_torch
from tests.parallel.ranks_moe import CHECKS


@pytest.mark.slow
def test_experts_on_two_ranks():
    lines = run_torch(2, str(ROOT / "tests/parallel/ranks_moe.py")).splitlines()
    assert [line for line in lines if line.endswith(" ok")] == [f"{name} ok" for name in CHECKS]
