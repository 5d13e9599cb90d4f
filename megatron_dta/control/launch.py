"""How this process was started (alone, by an MPI launcher, by torchrun), read from variables; and the way to connect.

Needs only the standard library until `connect`: it is asked before anything heavy is imported and before MPI starts.
"""

import contextlib
import json
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_dta.errors import UsageError

if TYPE_CHECKING:
    from megatron_dta.control.communicator import Communicator

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_ALSO = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
_PREFIXES = ("PMI_", "PMI2_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_", "PRTE_", "PALS_", "SLURM_", "TORCHELASTIC_")
_PROBE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher says of this process."""

    kind: Literal["single", "mpi", "torchrun"]
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    """Index among the processes of this host; None where the launcher does not say."""


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Return how this process was started.

    torchrun's four variables win: its agents are commonly started by srun, whose variables the workers inherit. An
    MPI launch needs a size above 1: from hydra (mpiexec of MPICH and Intel MPI), from Open MPI, or from an srun step.
    The SLURM_NTASKS of a batch script outside a step is none. Raises UsageError where a rank or size is no number, out
    of range, or missing beside the other.
    """
    return _torchrun(environ) or _mpi(environ) or Launch(kind="single")


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables less those that any launcher set: a process started with them is in no run."""
    names = (*TORCHRUN, *_TORCHRUN_ALSO)
    return {name: value for name, value in environ.items() if name not in names and not name.startswith(_PREFIXES)}


def connect(launch: Launch, *, chunk_bytes: int = 2**30) -> "Communicator":
    """Return the communicator of a launch; collective. Under MPI this initialises MPI.

    Raises UsageError, on every rank, where MPI or torch.distributed sees another rank or size than the launcher's
    variables say, where mpi4py is missing, or where torch.distributed is not initialised under torchrun.
    """
    communicator: Communicator
    if launch.size == 1:
        from megatron_dta.control.communicator import Alone

        communicator = Alone()
    elif launch.kind == "mpi":
        from megatron_dta.control.mpi import MpiCommunicator

        communicator = MpiCommunicator(chunk_bytes=chunk_bytes)
        if communicator.size != launch.size:
            raise UsageError(
                f"MPI sees {communicator.size} process(es) but the launcher's variables say {launch.size}: mpi4py runs "
                "on another MPI than the launcher; pip install mpi4py mpich and start with the mpiexec of that "
                "environment (srun: --mpi=pmi2 or pmix, whichever this MPI knows), or start with torchrun"
            )
    else:
        if not _torch_distributed():
            raise UsageError("started by torchrun but torch.distributed is not initialised: init_process_group first")
        from megatron_dta.control.gloo import GlooCommunicator

        communicator = GlooCommunicator(chunk_bytes=chunk_bytes)
    _refuse_other_ranks(communicator, launch.rank, launch.size, "by the launcher's variables")
    check_ranks(communicator)
    return communicator


def check_ranks(communicator: "Communicator") -> None:
    """Raise UsageError, on every rank, where torch.distributed is initialised with other ranks; collective."""
    dist = _torch_distributed()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist else (-1, -1)
    _refuse_other_ranks(communicator, rank, size, "in torch.distributed")


def rendezvous(communicator: "Communicator") -> tuple[str, int]:
    """Return a host and a free port of rank 0, the same on every rank, for torch.distributed to meet at; collective.

    127.0.0.1 on one host; else the first address of rank 0 that every rank has reached. Raises UsageError, on every
    rank, where there is none.
    """
    hosts = [bytes(host).decode() for host in communicator.allgather(socket.gethostname().encode())]
    with contextlib.ExitStack() as stack:
        offer = None
        if communicator.rank == 0:
            # listens while all try its addresses; after that the port is free for torch.distributed
            server = stack.enter_context(socket.create_server(("", 0), backlog=max(128, communicator.size)))
            offer = json.dumps([_addresses(hosts), server.getsockname()[1]]).encode()
        addresses, port = json.loads(bytes(communicator.broadcast(offer)))
        for address in addresses:
            votes = communicator.allgather(b"y" if _reaches(address, port) else b"n")
            missing = [host for host, vote in zip(hosts, votes) if bytes(vote) != b"y"]
            if not missing:
                break
    # nobody goes on to the port while the server above still holds it
    communicator.barrier()
    if missing:
        raise UsageError(
            f"{missing[0]} does not reach rank 0 on {hosts[0]} at {', '.join(addresses)}, port {port}: "
            "make the host names resolve and open the ports between the nodes, or start with torchrun"
        )
    return address, port


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    missing = [name for name in TORCHRUN if name not in environ]
    size = _number(environ, "WORLD_SIZE", least=1)
    rank = _number(environ, "RANK", below=size)
    if not missing:
        assert rank is not None
        assert size is not None
        return Launch(kind="torchrun", rank=rank, size=size, local_rank=_number(environ, "LOCAL_RANK"))
    # MASTER_ADDR and MASTER_PORT alone are no launch: cluster images set them for everybody
    if (size or 1) > 1 or (rank is not None and size is None):
        given = ", ".join(f"{name}={environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in environ)
        raise UsageError(
            f"{given} without {', '.join(missing)}: set all of {', '.join(TORCHRUN)} (torchrun does) or none"
        )
    return None


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    in_step = "SLURM_STEP_ID" in environ
    sources = [("PMI_SIZE", ["PMI_RANK"]), ("OMPI_COMM_WORLD_SIZE", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK"])]
    if in_step:
        sources.append(("SLURM_STEP_NUM_TASKS", ["SLURM_PROCID"]))
    for size_name, rank_names in sources:
        size = _number(environ, size_name, least=1)
        if size is None or size == 1:
            continue
        rank = next((_number(environ, name, below=size) for name in rank_names if name in environ), None)
        if rank is None:
            raise UsageError(f"{size_name}={size} without {' or '.join(rank_names)}: unset it, or start with mpiexec")
        return Launch(kind="mpi", rank=rank, size=size, local_rank=_local_rank(environ, rank, size, in_step))
    return None


def _local_rank(environ: Mapping[str, str], rank: int, size: int, in_step: bool) -> int | None:
    names = ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"]
    # the step may be one that started an mpiexec, or mpiexec's own daemons: then its numbers are not ours
    if in_step and (_number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")) == (rank, size):
        names.append("SLURM_LOCALID")
    return next((_number(environ, name) for name in names if name in environ), None)


def _number(environ: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None) -> int | None:
    if name not in environ:
        return None
    text = environ[name]
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (below is not None and number >= below):
        valid = f"a number from {least}" + ("" if below is None else f" to {below - 1}")
        raise UsageError(f"{name} is {text!r}; expected {valid}: unset it, or start with torchrun or mpiexec")
    return number


def _torch_distributed() -> Any:
    """Return the module torch.distributed if it is initialised; never import it for the question."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _refuse_other_ranks(communicator: "Communicator", rank: int, size: int, where: str) -> None:
    """Compare all ranks' numbers on every rank, so that all refuse together; negative ones are not compared."""
    numbers = [struct.unpack("<qq", bytes(row)) for row in communicator.allgather(struct.pack("<qq", rank, size))]
    for own, (rank, size) in enumerate(numbers):
        if size >= 0 and (rank, size) != (own, communicator.size):
            raise UsageError(
                f"rank {own} of {communicator.size} ({communicator.name}) is rank {rank} of {size} {where}: "
                "give both the same ranks, or use one launcher only"
            )


def _addresses(hosts: list[str]) -> list[str]:
    """Return where rank 0, which is this process, may be reached from the hosts of all ranks, the likeliest first."""
    others = [host for host in hosts if host != hosts[0]]
    # the last is a reserved address: the way to it is the way out of this host
    ways = [_address_towards(host) for host in (*others[:1], "192.0.2.1")]
    local = [] if others else ["127.0.0.1"]
    return list(dict.fromkeys([*local, *(way for way in ways if way), hosts[0]]))


def _address_towards(host: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # sends nothing: it only picks the interface
            probe.connect((host, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True
