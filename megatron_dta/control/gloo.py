"""The communicator over torch.distributed's gloo, for runs that torchrun started: CPU memory, plain TCP."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_dta.control.communicator import CHUNK_BYTES, Pairwise
from megatron_dta.errors import UsageError


class GlooCommunicator(Pairwise):
    """All ranks of torch.distributed's world, over a gloo group of its own; making one is collective.

    Raises UsageError where torch.distributed is not initialised.
    """

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES):
        if not dist.is_initialized():
            raise UsageError("torch.distributed is not initialised: call init_process_group before connecting")
        super().__init__(rank=dist.get_rank(), size=dist.get_world_size(), name="gloo", chunk_bytes=chunk_bytes)
        self._group = dist.new_group(backend="gloo")

    def barrier(self) -> None:
        dist.barrier(self._group)

    def close(self) -> None:
        """Leave the group. Where torch.distributed was shut down before, the group went with it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _exchange_sizes(self, sizes: np.ndarray) -> np.ndarray:
        received = np.empty(self.size, np.int64)
        dist.all_to_all_single(_tensor(received), _tensor(sizes), group=self._group)
        return received

    def _send_receive(self, out: list[np.ndarray], to: int, into: list[np.ndarray], source: int) -> None:
        # they must outlive their sends
        tensors = [_tensor(piece) for piece in out]
        works = [dist.irecv(_tensor(piece), source, group=self._group) for piece in into]
        works += [dist.isend(tensor, to, group=self._group) for tensor in tensors]
        _wait_all(works)

    def _broadcast_pieces(self, pieces: list[np.ndarray], root: int) -> None:
        tensors = [_tensor(piece) for piece in pieces]
        _wait_all([dist.broadcast(tensor, root, group=self._group, async_op=True) for tensor in tensors])


def _wait_all(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is no member of its own group"
        work.wait()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array's memory; over a copy where the memory is read-only, which torch does not know."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
