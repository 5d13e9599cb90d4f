"""What every rank of a launch runs: `python ranks.py CASE`. Prints "CASE RANK ok" where all is as it should be."""

import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from megatron_dta.control import launch as launch_module
from megatron_dta.control.communicator import Communicator
from megatron_dta.control.launch import check_ranks, connect, detect_launch, rendezvous
from megatron_dta.control.service import PlannerProcess
from megatron_dta.errors import UsageError

CHUNK_BYTES = 1024
SIZES = [0, 1, 7, 1023, 1024, 1025, 2048, 5000, 20_000]


def payload(source: int, to: int, num_bytes: int) -> np.ndarray:
    """Return the bytes that `source` sends to `to`; any two differ."""
    return np.random.default_rng([source, to, num_bytes]).integers(0, 256, num_bytes, np.uint8)


def size_of(draw: int, source: int, to: int) -> int:
    return random.Random(f"{draw} {source} {to}").choice(SIZES)


def check_methods(comm: Communicator) -> None:
    """Run every method with payloads of different sizes, each root, also empty ones."""
    ranks = range(comm.size)
    for draw in range(4):
        sizes = {(a, b): size_of(draw, a, b) for a in ranks for b in ranks}
        got = comm.exchange([payload(comm.rank, to, sizes[comm.rank, to]) for to in ranks])
        expect(got, [payload(source, comm.rank, sizes[source, comm.rank]) for source in ranks])
        expect(comm.allgather(payload(comm.rank, 0, sizes[comm.rank, 0])), [payload(r, 0, sizes[r, 0]) for r in ranks])
        for root in ranks:
            all_of_root = [payload(root, to, sizes[root, to]) for to in ranks]
            expect([comm.scatter(all_of_root if comm.rank == root else None, root)], [all_of_root[comm.rank]])
            expect([comm.broadcast(all_of_root[0] if comm.rank == root else None, root)], [all_of_root[0]])
            gathered = comm.gather(payload(comm.rank, root, sizes[comm.rank, root]), root)
            if comm.rank == root:
                assert gathered is not None
                expect(gathered, [payload(source, root, sizes[source, root]) for source in ranks])
            else:
                assert gathered is None


def check_extremes(comm: Communicator) -> None:
    """Run what could end in a deadlock, a mix-up, or a copy of the wrong form."""
    ranks = range(comm.size)
    expect(comm.exchange([b""] * comm.size), [np.empty(0, np.uint8)] * comm.size)
    # all large both ways; only one rank large; sizes one apart around the limit
    expect(comm.allgather(payload(comm.rank, 0, 1_000_001)), [payload(r, 0, 1_000_001) for r in ranks])
    only = [b"" if comm.rank else payload(0, to, 300_000) for to in ranks]
    expect(comm.exchange(only)[:1], [payload(0, comm.rank, 300_000)])
    expect(comm.allgather(bytes(1023 + comm.rank)), [np.zeros(1023 + r, np.uint8) for r in ranks])
    # order is kept, also where ranks arrive at different times
    for turn in range(20):
        if turn % comm.size == comm.rank:
            time.sleep(0.005)
        assert [bytes(got) for got in comm.allgather(f"{comm.rank}:{turn}".encode())] == [
            f"{r}:{turn}".encode() for r in ranks
        ]
    # any contiguous memory, read-only or not
    matrix = np.arange(600, dtype=np.int32).reshape(20, 30)
    matrix.flags.writeable = False
    for form in (matrix, matrix.tobytes(), bytearray(matrix.tobytes()), memoryview(matrix)):
        for got in comm.allgather(form):
            np.testing.assert_array_equal(got.view(np.int32).reshape(20, 30), matrix)
        np.testing.assert_array_equal(comm.broadcast(form if comm.rank == 0 else None).view(np.int32), matrix.ravel())


def check_refusals(comm: Communicator) -> None:
    """Refused at once, before any message."""
    for call in (
        lambda: comm.exchange([b""] * (comm.size + 1)),
        lambda: comm.gather(b"", comm.size),
        lambda: comm.broadcast(b"", -1),
        lambda: comm.allgather(np.zeros((4, 4)).T),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("not refused")
    comm.barrier()


def check_barrier(comm: Communicator) -> None:
    """The last rank comes late: nobody leaves before it came."""
    comm.barrier()
    start = time.monotonic()
    time.sleep(0.2 if comm.rank == comm.size - 1 else 0)
    comm.barrier()
    assert time.monotonic() - start > 0.15


def expect(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == np.uint8
        assert not a.flags.writeable
        np.testing.assert_array_equal(a, b)


def forbid_new_processes() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started after MPI_Init")

    for module, name in ((os, "fork"), (os, "forkpty"), (os, "posix_spawn"), (os, "posix_spawnp"), (os, "system")):
        setattr(module, name, refuse)
    subprocess.Popen = refuse  # type: ignore[misc,assignment]
    sys.addaudithook(
        lambda event, _: refuse() if event in ("os.fork", "os.posix_spawn", "subprocess.Popen", "os.system") else None
    )


def check_all(comm: Communicator) -> None:
    check_methods(comm)
    check_extremes(comm)
    check_refusals(comm)
    check_barrier(comm)


def refusal_of(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the words of a UsageError; empty where there is none."""
    try:
        function(*arguments)
    except UsageError as error:
        return str(error)
    return ""


def mpi_methods() -> Communicator:
    """F07, F08: all methods, in pieces of 1 KB, without a new process once MPI runs."""
    assert "mpi4py" not in sys.modules
    comm = connect(detect_launch(os.environ), chunk_bytes=CHUNK_BYTES)
    forbid_new_processes()
    assert comm.name == "mpi"
    check_all(comm)
    check_rendezvous(comm)
    assert "must not fork" in refusal_of(PlannerProcess, "copy:copy")
    return comm


def check_rendezvous(comm: Communicator) -> None:
    host, port = rendezvous(comm)
    assert host == "127.0.0.1"
    assert len(set(map(bytes, comm.allgather(f"{host}:{port}".encode())))) == 1
    # several hosts: rank 0 offers an address that the others have reached
    name = f"host{comm.rank}" if comm.rank else "localhost"
    real, socket.gethostname = socket.gethostname, lambda: name
    host, port = rendezvous(comm)
    socket.gethostname = real
    assert socket.gethostbyname(host)
    assert len(set(map(bytes, comm.allgather(f"{host}:{port}".encode())))) == 1
    # nobody can reach it: all refuse together
    addresses, launch_module._addresses = launch_module._addresses, lambda hosts: ["nowhere.invalid"]
    assert "at nowhere.invalid, port" in refusal_of(rendezvous, comm)
    launch_module._addresses = addresses


def gloo_methods() -> Communicator:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    launch = detect_launch(os.environ)
    assert launch.kind == "torchrun"
    comm = connect(launch, chunk_bytes=CHUNK_BYTES)
    assert (comm.name, comm.rank, comm.size) == ("gloo", dist.get_rank(), dist.get_world_size())
    check_all(comm)
    comm.close()
    dist.barrier()
    comm = connect(launch)
    check_barrier(comm)
    comm.close()
    dist.destroy_process_group()
    return comm


def mpi_then_torch() -> Communicator:
    """F06: MPI first, torch.distributed at its rendezvous; then once more with other ranks, which is refused."""
    comm = connect(detect_launch(os.environ))
    check_barrier(comm)

    import torch
    import torch.distributed as dist

    check_ranks(comm)
    for ranks in (range(comm.size), [*range(1, comm.size), 0]):
        host, port = rendezvous(comm)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=ranks[comm.rank],
            world_size=comm.size,
            timeout=timedelta(seconds=60),
        )
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [comm.size] * 3
        check_methods(comm)
        refused = refusal_of(check_ranks, comm)
        dist.barrier()
        dist.destroy_process_group()
        if ranks[0] == 0:
            assert refused == ""
        else:
            assert refused.startswith(f"rank 0 of {comm.size} (mpi) is rank 1 of {comm.size} in torch.distributed")
    return comm


def torch_then_mpi() -> Communicator:
    """F06: torch.distributed first, MPI after it."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=size)
    comm = connect(detect_launch(os.environ))
    assert (comm.name, comm.rank, comm.size) == ("mpi", dist.get_rank(), dist.get_world_size())
    check_methods(comm)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [comm.size] * 3
    dist.destroy_process_group()
    return comm


def other_variables() -> Communicator:
    """The launcher's variables name other ranks than MPI: all refuse together, and name the first that differs."""
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    launch = detect_launch(os.environ | {"PMI_RANK": str((rank + 1) % size)})
    refused = refusal_of(connect, launch)
    assert refused.startswith(f"rank 0 of {size} (mpi) is rank 1 of {size} by the launcher's variables")
    return connect(detect_launch(os.environ))


CASES = {case.__name__: case for case in (mpi_methods, gloo_methods, mpi_then_torch, torch_then_mpi, other_variables)}

if __name__ == "__main__":
    try:
        finished = CASES[sys.argv[1]]()
        finished.close()
        finished.close()
    except BaseException:
        # at once: mpi4py's way out waits for the other ranks, which wait for this one
        traceback.print_exc()
        os._exit(1)
    # in one piece, so that the lines of two ranks do not mix
    os.write(1, f"{sys.argv[1]} {finished.rank} ok\n".encode())
