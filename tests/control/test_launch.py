import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_dta.control import launch as launch_module
from megatron_dta.control.communicator import Alone
from megatron_dta.control.launch import Launch, check_ranks, connect, detect_launch, rendezvous, without_launch
from megatron_dta.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SINGLE = Launch(kind="single")


def mpi(rank, size, local_rank=None):
    return Launch(kind="mpi", rank=rank, size=size, local_rank=local_rank)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, SINGLE),
        (TORCHRUN, Launch(kind="torchrun", rank=3, size=8, local_rank=1)),
        (TORCHRUN | {"WORLD_SIZE": "4"}, Launch(kind="torchrun", rank=3, size=4, local_rank=1)),
        (TORCHRUN | STEP | HYDRA, Launch(kind="torchrun", rank=3, size=8, local_rank=1)),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, SINGLE),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"} | HYDRA, mpi(1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, SINGLE),
        (HYDRA, mpi(1, 2, 1)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, SINGLE),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"} | OPEN_MPI, mpi(2, 4, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, mpi(1, 2)),
        (OPEN_MPI, mpi(2, 4, 0)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"}, mpi(3, 4)),
        (STEP, mpi(9, 16, 1)),
        (STEP | {"PMI_RANK": "9", "PMI_SIZE": "16"}, mpi(9, 16, 1)),
        # the step is the one of mpiexec's daemons, one per node
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_RANK": "9", "PMI_SIZE": "16"}, mpi(9, 16)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, SINGLE),
        (BATCH, SINGLE),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "16"}, SINGLE),
        (BATCH | HYDRA, mpi(1, 2, 1)),
    ],
)
def test_launchers_are_told_by_their_variables(environ, expected):
    assert detect_launch(environ) == expected


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=8 without RANK: set all of RANK, WORLD_SIZE"),
        (without(TORCHRUN, "MASTER_PORT"), "RANK=3, WORLD_SIZE=8 without MASTER_PORT"),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "without MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "3"}, "RANK=3 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"} | HYDRA, "WORLD_SIZE=2 without RANK"),
        (TORCHRUN | {"RANK": "8"}, "RANK is '8'; expected a number from 0 to 7"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected a number from 1"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        (HYDRA | {"PMI_RANK": "2"}, "PMI_RANK is '2'; expected a number from 0 to 1"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 without PMI_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 without OMPI_COMM_WORLD_RANK or PMIX_RANK"),
        (without(STEP, "SLURM_PROCID"), "SLURM_STEP_NUM_TASKS=16 without SLURM_PROCID"),
    ],
)
def test_partial_or_impossible_variables_are_refused_by_name(environ, words):
    with pytest.raises(UsageError, match=words):
        detect_launch(environ)


def test_nothing_of_a_launch_is_left_for_a_process_outside_it():
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": "src", "MPICH_NO_LOCAL": "1"}
    everything = (
        TORCHRUN | HYDRA | OPEN_MPI | STEP | {"PMIX_RANK": "0", "HYDI_CONTROL_FD": "7", "LOCAL_WORLD_SIZE": "2"}
    )
    assert without_launch(everything | kept) == kept
    assert detect_launch(without_launch(everything | kept)) == SINGLE


def test_asking_needs_no_more_than_the_standard_library():
    code = (
        "import sys, os; import megatron_dta.control.launch as launch; launch.detect_launch(os.environ);"
        "print([m for m in ('numpy', 'torch', 'mpi4py') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


@pytest.fixture
def torch_distributed(monkeypatch):
    """Return a function that makes torch.distributed look initialised with a rank and a size, or not."""

    def pretend(rank=0, size=0):
        module = types.ModuleType("torch.distributed")
        module.is_available = lambda: True
        module.is_initialized = lambda: size > 0
        module.get_rank, module.get_world_size = lambda: rank, lambda: size
        monkeypatch.setitem(sys.modules, "torch.distributed", module)

    pretend()
    return pretend


@pytest.mark.parametrize("kind", ["single", "mpi", "torchrun"])
def test_one_process_needs_no_mpi_and_no_torch(kind, torch_distributed):
    communicator = connect(Launch(kind=kind))
    assert (communicator.rank, communicator.size, communicator.name) == (0, 1, "alone")


def test_torchrun_needs_torch_distributed(torch_distributed):
    with pytest.raises(UsageError, match=r"torch\.distributed is not initialised: init_process_group first"):
        connect(Launch(kind="torchrun", rank=0, size=2))


def test_f06_torch_distributed_with_other_ranks_is_refused(torch_distributed):
    torch_distributed(0, 1)
    check_ranks(Alone())
    torch_distributed(1, 2)
    with pytest.raises(UsageError, match=r"rank 0 of 1 \(alone\) is rank 1 of 2 in torch\.distributed: "):
        connect(SINGLE)


def test_a_missing_mpi4py_is_refused_by_the_name_of_its_extra(monkeypatch, torch_distributed):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'megatron-dta\[mpi\]', or start it with torchrun"):
        connect(mpi(0, 2))


def test_one_host_meets_at_its_loopback():
    host, port = rendezvous(Alone())
    assert host == "127.0.0.1"
    assert 0 < port < 2**16


def test_f04_an_address_that_nobody_reaches_is_refused_with_its_name_and_port(monkeypatch):
    monkeypatch.setattr(launch_module, "_addresses", lambda hosts: ["nowhere.invalid"])
    monkeypatch.setattr(launch_module, "_PROBE_SECONDS", 1.0)
    with pytest.raises(UsageError, match=r"does not reach rank 0 on .* at nowhere\.invalid, port \d+: make the host"):
        rendezvous(Alone())


def test_hosts_of_several_names_are_offered_what_leads_to_them():
    addresses = launch_module._addresses(["node0", "localhost", "localhost"])
    assert addresses[0] == "127.0.0.1", "the way to the other host"
    assert addresses[-1] == "node0"
    assert len(set(addresses)) == len(addresses)
