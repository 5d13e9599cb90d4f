import ast
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.control import communicator
from megatron_dta.control.communicator import Alone, Pairwise, as_uint8
from tests.control.spawn import free_port, run_alone, run_mpi, run_torch

RANKS = str(Path(__file__).with_name("ranks.py"))


def check(output, case, num_ranks):
    assert sorted(output.split("\n")) == ["", *(f"{case} {rank} ok" for rank in range(num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_f07_f08_every_method_under_mpi(num_ranks):
    check(run_mpi(num_ranks, RANKS, "mpi_methods"), "mpi_methods", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_f08_every_method_under_gloo(num_ranks):
    check(run_torch(num_ranks, RANKS, "gloo_methods"), "gloo_methods", num_ranks)


def test_f06_mpi_before_torch_distributed():
    check(run_mpi(2, RANKS, "mpi_then_torch"), "mpi_then_torch", 2)


def test_f06_torch_distributed_before_mpi():
    output = run_mpi(2, RANKS, "torch_then_mpi", INIT_METHOD=f"tcp://127.0.0.1:{free_port()}")
    check(output, "torch_then_mpi", 2)


def test_f06_ranks_that_differ_from_the_launchers_are_refused_by_all():
    check(run_mpi(3, RANKS, "other_variables"), "other_variables", 3)


@pytest.mark.parametrize(
    "variables", [{"PMI_SIZE": "2", "PMI_RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}]
)
def test_a_world_of_one_under_a_launcher_of_two_is_refused(variables):
    pytest.importorskip("mpi4py")
    ran = run_alone(RANKS, "mpi_methods", **variables)
    assert ran.returncode != 0
    message = "UsageError: MPI sees 1 process(es) but the launcher's variables say 2: "
    assert message in ran.stderr
    for remedy in ("pip install mpi4py mpich", "mpiexec of that environment", "torchrun"):
        assert remedy in ran.stderr


def test_alone_every_method_returns_its_own_payload():
    comm = Alone()
    own = np.arange(5)
    results = [comm.broadcast(own), comm.scatter([own]), *comm.gather(own), *comm.allgather(own), *comm.exchange([own])]
    comm.barrier()
    comm.close()
    assert len(results) == 5
    for got in results:
        np.testing.assert_array_equal(got.view(own.dtype), own)
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 1
    assert comm.exchange([b""])[0].shape == (0,)


def test_alone_refuses_another_root_and_other_numbers_of_payloads():
    comm = Alone()
    for root in (-1, 1):
        for call in (comm.gather, comm.broadcast, comm.scatter):
            with pytest.raises(ValueError, match=f"root is {root}; expected 0 to 0"):
                call([b""], root)
    for payloads in ([], [b"", b""]):
        with pytest.raises(ValueError, match="payloads; expected one for each of 1 ranks"):
            comm.exchange(payloads)
    with pytest.raises(ValueError, match="payloads is None on the root"):
        comm.scatter(None)
    with pytest.raises(ValueError, match="chunk_bytes is 0; expected at least 1"):
        Pairwise(rank=0, size=1, name="", chunk_bytes=0)


def test_a_payload_is_any_contiguous_memory():
    matrix = np.arange(6.0).reshape(2, 3)
    for form in (matrix, matrix.tobytes(), bytearray(matrix.tobytes()), memoryview(matrix)):
        assert as_uint8(form).tobytes() == matrix.tobytes()
    assert np.shares_memory(as_uint8(matrix), matrix)
    assert as_uint8(np.empty((0, 3))).shape == (0,)
    with pytest.raises(ValueError, match="contiguous"):
        as_uint8(matrix.T)


def test_no_collective_depends_on_the_data():
    """Sizes are exchanged in one call however large or empty the payloads are, and nothing is sent for an empty one."""
    calls = []

    class Counted(Pairwise):
        def _exchange_sizes(self, sizes):
            calls.append("sizes")
            return sizes

        def _send_receive(self, out, to, into, source):
            calls.append(([len(piece) for piece in out], [len(piece) for piece in into]))

    for num_bytes in (0, 1, 10):
        comm = Counted(rank=0, size=2, name="", chunk_bytes=4)
        comm.allgather(bytes(num_bytes))
    assert calls == ["sizes", ([], []), "sizes", ([1], [1]), "sizes", ([4, 4, 2], [4, 4, 2])]


def test_no_call_pickles():
    """mpi4py's lower-case methods and torch's object collectives pickle without a word."""
    folder = Path(communicator.__file__).parent
    tree = ast.parse((folder / "mpi.py").read_text())
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and "_comm" in ast.unparse(node.value)
    }
    assert {"Alltoall", "Isend"} <= used, "nothing found: this test looks for another name"
    assert {name for name in used if name[0].islower()} <= {"rank", "size"}
    assert "object" not in (folder / "gloo.py").read_text()


def test_importing_the_package_starts_no_mpi():
    code = "import sys, megatron_dta.control.mpi, megatron_dta.control.service; assert 'mpi4py' not in sys.modules"
    assert run_alone("-c", code).returncode == 0


def test_a_missing_mpi_library_is_refused_in_one_line():
    pytest.importorskip("mpi4py")
    ran = run_alone(RANKS, "mpi_methods", PMI_SIZE="2", PMI_RANK="0", MPI4PY_LIBMPI="/no/such/libmpi.so")
    if "MPI sees" in ran.stderr:
        pytest.skip("this mpi4py was built for one MPI and does not look for a library")
    assert "UsageError: mpi4py finds no MPI library (" in ran.stderr.strip().split("\n")[-1]
