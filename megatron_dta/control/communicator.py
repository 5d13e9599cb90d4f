"""Messages between the processes of a run: bytes in, bytes out, with the same calls under MPI, under gloo and alone.

A payload is anything that exposes contiguous memory: bytes, memoryview, numpy array. What comes back is a read-only
1-D uint8 array. A rank's own payload comes back as a view of it, not as a copy: do not change it afterwards.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

CHUNK_BYTES = 2**30
"""The longest single message. MPI counts elements in an int32, so 2 GiB at once overflow."""


class Communicator(Protocol):
    """Every method but `close` is collective: all ranks call it, with the same root, in the same order."""

    rank: int
    size: int
    name: str

    def gather(self, payload: Any, root: int = 0) -> list[np.ndarray] | None:
        """Return the payloads of all ranks, by rank, on the root; None elsewhere."""

    def broadcast(self, payload: Any, root: int = 0) -> np.ndarray:
        """Return the root's payload on every rank; what others pass is ignored (None)."""

    def scatter(self, payloads: Sequence[Any] | None, root: int = 0) -> np.ndarray:
        """Return this rank's entry of the root's payloads, one per rank; what others pass is ignored (None)."""

    def allgather(self, payload: Any) -> list[np.ndarray]:
        """Return the payloads of all ranks, by rank, on every rank."""

    def exchange(self, payloads: Sequence[Any]) -> list[np.ndarray]:
        """Send `payloads[r]` to rank r; return what each rank sent to this one, by rank. Sizes are free, also 0."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Free what the communicator holds. A second call does nothing."""


def as_uint8(payload: Any) -> np.ndarray:
    """Return a payload's memory as a 1-D uint8 view; raise ValueError where it is not C-contiguous."""
    return np.frombuffer(payload, np.uint8)


def gather_numbers(communicator: Communicator, numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers of every process, by rank, on every process."""
    return [json.loads(part.tobytes()) for part in communicator.allgather(json.dumps(numbers).encode())]


class Pairwise:
    """Everything above from three primitives: an all-to-all of sizes, one send with one receive, one broadcast.

    Sizes travel first, so all ranks make the same collective calls whatever their data, and no payload is sent where
    there is none. Payloads go in pieces of at most `chunk_bytes` bytes.
    """

    def __init__(self, *, rank: int, size: int, name: str, chunk_bytes: int):
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; expected at least 1")
        self.rank, self.size, self.name, self._chunk_bytes = rank, size, name, chunk_bytes

    def gather(self, payload: Any, root: int = 0) -> list[np.ndarray] | None:
        self._check_root(root)
        received = self.exchange([payload if rank == root else b"" for rank in range(self.size)])
        return received if self.rank == root else None

    def scatter(self, payloads: Sequence[Any] | None, root: int = 0) -> np.ndarray:
        self._check_root(root)
        if self.rank != root:
            payloads = [b""] * self.size
        elif payloads is None:
            raise ValueError("payloads is None on the root; expected one for each rank")
        return self.exchange(payloads)[root]

    def allgather(self, payload: Any) -> list[np.ndarray]:
        return self.exchange([payload] * self.size)

    def exchange(self, payloads: Sequence[Any]) -> list[np.ndarray]:
        if len(payloads) != self.size:
            raise ValueError(f"{len(payloads)} payloads; expected one for each of {self.size} ranks")
        outgoing = [as_uint8(payload) for payload in payloads]
        sizes = self._exchange_sizes(np.array([len(payload) for payload in outgoing], np.int64))
        incoming = [np.empty(num_bytes, np.uint8) for num_bytes in sizes.tolist()]
        incoming[self.rank] = outgoing[self.rank]
        # In step k everybody sends k ranks ahead and receives from k ranks behind. Of the ranks that have come least
        # far, each finds its two partners at the same step (they have posted its messages) or past it: no deadlock,
        # whatever the sizes.
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            self._send_receive(self._pieces(outgoing[to]), to, self._pieces(incoming[source]), source)
        return [_read_only(payload) for payload in incoming]

    def broadcast(self, payload: Any, root: int = 0) -> np.ndarray:
        self._check_root(root)
        array = as_uint8(payload) if self.rank == root else np.empty(0, np.uint8)
        num_bytes = np.array([len(array)], np.int64)
        self._broadcast_pieces([num_bytes.view(np.uint8)], root)
        if self.rank != root:
            array = np.empty(int(num_bytes[0]), np.uint8)
        self._broadcast_pieces(self._pieces(array), root)
        return _read_only(array)

    def _pieces(self, payload: np.ndarray) -> list[np.ndarray]:
        return [payload[at : at + self._chunk_bytes] for at in range(0, len(payload), self._chunk_bytes)]

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root is {root}; expected 0 to {self.size - 1}")

    def _exchange_sizes(self, sizes: np.ndarray) -> np.ndarray:
        """Send `sizes[r]` to rank r; return what each rank sent (int64, one per rank)."""
        raise NotImplementedError

    def _send_receive(self, out: list[np.ndarray], to: int, into: list[np.ndarray], source: int) -> None:
        """Send and receive any number of pieces, all at once: a send may wait for its receive."""
        raise NotImplementedError

    def _broadcast_pieces(self, pieces: list[np.ndarray], root: int) -> None:
        """Fill the pieces of all other ranks with the root's, which may be read-only."""
        raise NotImplementedError


class Alone(Pairwise):
    """The communicator of a run of one process."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, name="alone", chunk_bytes=CHUNK_BYTES)

    def barrier(self) -> None: ...

    def close(self) -> None: ...

    def _exchange_sizes(self, sizes: np.ndarray) -> np.ndarray:
        return sizes

    def _broadcast_pieces(self, pieces: list[np.ndarray], root: int) -> None: ...


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
