"""The control plane: batches scattered over processes come to the ranks that train them, and results come back."""

from pathlib import Path

import numpy as np
import pytest

from megatron_dta.control.communicator import Alone
from megatron_dta.control.plane import ControlPlane
from megatron_dta.control.planning import HANDLER
from megatron_dta.control.service import InlinePlanner, PlannerProcess
from megatron_dta.tree.planner import Settings
from tests.control.plane_ranks import COST, check_batches, check_errors, check_statistics, drawn
from tests.control.spawn import run_mpi, run_torch

RANKS = str(Path(__file__).with_name("plane_ranks.py"))


def check(output, case, num_ranks):
    assert sorted(output.split("\n")) == ["", *(f"{case} {rank} ok" for rank in range(num_ranks))]


@pytest.mark.parametrize("kind", [InlinePlanner, PlannerProcess])
def test_one_process(kind):
    with kind(HANDLER) as planner:
        check_batches(Alone(), planner)
        check_errors(Alone(), planner)
        check_statistics(Alone(), planner)


def test_two_ranks_under_mpi():
    check(run_mpi(2, RANKS, "mpi"), "mpi", 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_under_gloo(num_ranks):
    check(run_torch(num_ranks, RANKS, "gloo"), "gloo", num_ranks)


def test_replicas_of_several_processes():
    check(run_torch(4, RANKS, "replicas"), "replicas", 4)


def test_as_many_results_as_samples_are_given_back():
    plane = ControlPlane(Alone(), InlinePlanner(HANDLER), Settings(cost=COST))
    plane.submit(drawn(0, 3))
    share = plane.collect()
    with pytest.raises(ValueError, match="2 values for 3 samples"):
        plane.give_back(share, [np.zeros(1)] * 2)
    empty = plane.give_back(share, [np.zeros(0), np.zeros(2), np.zeros(0)])
    assert [len(row) for row in empty] == [0, 2, 0]


def test_a_planner_process_that_dies_is_an_error_on_collect():
    with PlannerProcess(HANDLER) as planner:
        plane = ControlPlane(Alone(), planner, Settings(cost=COST))
        planner._process.kill()
        plane.submit(drawn(0, 3))
        with pytest.raises(RuntimeError, match="the planner process ended with exit status -9"):
            plane.collect()
