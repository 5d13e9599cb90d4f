"""The communicator over mpi4py. Importing `mpi4py.MPI` initialises MPI, so it happens when one is made, not before."""

import os
import sys
import time
from typing import Any, NoReturn

import numpy as np

from megatron_dta.control.communicator import CHUNK_BYTES, Pairwise
from megatron_dta.errors import UsageError

_FORWARD_SECONDS = 1.0
"""The launcher forwards what a process printed, but drops what it has not read when the job is ended."""
_TAG = 0
"""One tag is enough: messages between two ranks keep their order, and nobody else uses our communicator."""


class MpiCommunicator(Pairwise):
    """All processes of MPI's world, over a duplicate of it, so that nobody else's messages can meet ours.

    Only buffer methods are used (the lower-case ones pickle). Making one is collective.
    """

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES):
        self._mpi = _import_mpi()
        self._comm = self._mpi.COMM_WORLD.Dup()
        super().__init__(rank=self._comm.rank, size=self._comm.size, name="mpi", chunk_bytes=chunk_bytes)

    def barrier(self) -> None:
        self._comm.Barrier()

    def abort(self, status: int) -> NoReturn:
        """End every process of the run: at exit MPI would wait for ever for those that still work."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARD_SECONDS)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)  # MPICH's Abort only asks the launcher, and returns

    def close(self) -> None:
        """Free the duplicate; collective. MPI itself is finalised at exit, by mpi4py."""
        if self._comm != self._mpi.COMM_NULL:
            self._comm.Free()

    def _exchange_sizes(self, sizes: np.ndarray) -> np.ndarray:
        received = np.empty(self.size, np.int64)
        self._comm.Alltoall([sizes, self._mpi.INT64_T], [received, self._mpi.INT64_T])
        return received

    def _send_receive(self, out: list[np.ndarray], to: int, into: list[np.ndarray], source: int) -> None:
        requests = [self._comm.Irecv([piece, self._mpi.BYTE], source, _TAG) for piece in into]
        requests += [self._comm.Isend([piece, self._mpi.BYTE], to, _TAG) for piece in out]
        self._mpi.Request.Waitall(requests)

    def _broadcast_pieces(self, pieces: list[np.ndarray], root: int) -> None:
        self._mpi.Request.Waitall([self._comm.Ibcast([piece, self._mpi.BYTE], root) for piece in pieces])


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise UsageError(
            "this run was started by an MPI launcher but mpi4py is not installed: pip install 'megatron-dta[mpi]', "
            "or start it with torchrun"
        ) from None
    except (ImportError, RuntimeError) as error:
        # what mpi4py's wheels raise where they find no MPI library, in several lines
        reason = " ".join(str(error).split())
        raise UsageError(
            f"mpi4py finds no MPI library ({reason}): pip install 'megatron-dta[mpi]' brings one, or use torchrun"
        ) from None
    return MPI
