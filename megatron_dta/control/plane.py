"""The control plane: batches that are scattered over ranks become tasks, and every task finds its samples.

Each replica, one data-parallel rank with all processes that share its model, is spoken for by a leader. Leaders hand
in the samples they have. The first leader's planner decides who trains what, while the step before trains; leaders
then send each other exactly the samples that tasks need, and share them with the processes of their replica. Results
go back to the leader that handed the sample in, in its order.

Shapes: W processes, R replicas.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dta.control.communicator import Communicator, gather_numbers
from megatron_dta.control.parcels import pack_samples, unpack_samples
from megatron_dta.control.planning import Forecast, forecast_in, request, structure_of, tasks_in
from megatron_dta.control.service import Planner
from megatron_dta.control.wire import pack, unpack
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError
from megatron_dta.tree.planner import Settings, Task


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one replica trains of a batch."""

    samples: list[Sample]
    task: Task
    rank_of: np.ndarray
    """int64 [S]: the replica of every sequence of the batch."""
    counts: tuple[int, ...]
    """Samples that each process handed in, [W]."""
    num_terms: int
    """Trained tokens of the whole batch."""
    num_trained: int
    """Sequences of the whole batch that train a token."""
    num_tokens: int
    """Tokens of all sequences of the whole batch."""
    num_without_old: int
    """Sequences of the whole batch without old log-probs."""
    forecast: Forecast
    plan_seconds: float
    """Time the planner worked."""
    wait_seconds: float
    """Time the step waited for it."""


class ControlPlane:
    """One per process; every method is collective over all processes."""

    def __init__(
        self,
        communicator: Communicator,
        planner: Planner | None,
        settings: Settings,
        *,
        replica_of: Sequence[int] | None = None,
    ):
        """planner: of process 0, None elsewhere; replica_of: the replica of every process [W], by default each its own.

        Raises ValueError where replicas are not 0 .. R - 1 with R = `settings.ranks`, or process 0 has no planner.
        """
        self.communicator, self.planner, self.settings = communicator, planner, settings
        self.replica_of = list(range(communicator.size) if replica_of is None else replica_of)
        if sorted(set(self.replica_of)) != list(range(settings.ranks)) or len(self.replica_of) != communicator.size:
            raise ValueError(
                f"replica_of is {self.replica_of}; expected one of 0 .. {settings.ranks - 1} for each of "
                f"{communicator.size} processes, each replica at least once"
            )
        if (planner is None) != (communicator.rank > 0):
            raise ValueError("process 0, and it alone, has the planner")
        self.leaders = [self.replica_of.index(replica) for replica in range(settings.ranks)]
        self._waiting: deque[tuple[list[Sample], dict[str, Any]]] = deque()

    @property
    def replica(self) -> int:
        """The replica that this process belongs to."""
        return self.replica_of[self.communicator.rank]

    @property
    def is_leader(self) -> bool:
        return self.leaders[self.replica] == self.communicator.rank

    def outcomes(self, samples: Sequence[Sample]) -> tuple[list[Sample], int]:
        """Return all processes' samples without their tokens, and where this process's own begin.

        Enough for group statistics, wherever the members of a group are.
        """
        parts = self.communicator.allgather(pack_samples([_outcome(s) for s in samples]))
        lists = [unpack_samples(part) for part in parts]
        start = sum(len(part) for part in lists[: self.communicator.rank])
        return [outcome for part in lists for outcome in part], start

    def submit(self, samples: Sequence[Sample]) -> None:
        """Hand in this process's samples of the next batch; planning starts. Only leaders may have some."""
        if len(samples) and not self.is_leader:
            raise ValueError(f"process {self.communicator.rank} is no leader of its replica; it has no samples")
        trained = [int(np.count_nonzero(s.loss_mask[1:])) for s in samples]
        totals = {"terms": sum(trained), "trained": sum(n > 0 for n in trained)}
        totals["all_tokens"] = sum(len(s.tokens) for s in samples)
        totals["without_old"] = sum(s.old_logprobs is None for s in samples)
        message = structure_of(samples) | totals
        gathered = self.communicator.gather(pack(message))
        packed_head = None
        if gathered is not None:
            parts = [unpack(part) for part in gathered]
            assert self.planner is not None
            self.planner.submit(request(parts, self.settings))
            counts = [len(part["tokens"]) for part in parts]
            packed_head = pack({"counts": counts} | {n: sum(part[n] for part in parts) for n in totals})
        head = unpack(self.communicator.broadcast(packed_head))
        self._waiting.append((list(samples), head))

    def collect(self) -> Share:
        """Wait for the plan of the oldest batch handed in; return what this replica trains of it.

        Raises, on every process, what the planner raised.
        """
        samples, head = self._waiting.popleft()
        counts = tuple(head["counts"])
        message = self._answer()
        tasks = tasks_in(message)
        rank_of = np.full(sum(counts), -1)
        for rank, task in enumerate(tasks):
            rank_of[task.sequences] = rank
        first = sum(counts[: self.communicator.rank])
        to = [[] for _ in range(self.communicator.size)]  # type: list[list[Sample]]
        for sample, rank in zip(samples, rank_of[first : first + len(samples)].tolist()):
            to[self.leaders[rank]].append(sample)
        received = self.communicator.exchange([pack_samples(part) for part in to])
        own = [sample for part in received for sample in unpack_samples(part)]
        return Share(
            samples=self._share_in_replica(own),
            task=tasks[self.replica],
            rank_of=rank_of,
            counts=counts,
            num_terms=head["terms"],
            num_trained=head["trained"],
            num_tokens=head["all_tokens"],
            num_without_old=head["without_old"],
            forecast=forecast_in(message),
            plan_seconds=message["plan_seconds"],
            wait_seconds=message["wait_seconds"],
        )

    def give_back(self, share: Share, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send each sample's values, 1-D arrays by `share.samples`, to the process that handed it in.

        Returns those of this process's own samples, in the order it handed them in.
        """
        if len(values) != len(share.samples):
            raise ValueError(f"{len(values)} values for {len(share.samples)} samples")
        bounds = np.cumsum([0, *share.counts])
        owner = np.searchsorted(bounds, share.task.sequences, side="right") - 1
        to: list[list[np.ndarray]] = [[] for _ in range(self.communicator.size)]
        if self.is_leader:
            for value, process in zip(values, owner.tolist()):
                to[process].append(value)
        received = self.communicator.exchange([pack({"values": part}) for part in to])
        queues = [deque(unpack(part)["values"]) for part in received]
        first, stop = bounds[self.communicator.rank], bounds[self.communicator.rank + 1]
        return [queues[self.leaders[rank]].popleft() for rank in share.rank_of[first:stop].tolist()]

    def gather_numbers(self, numbers: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the numbers of every process, on every process; those at `leaders` speak for whole replicas."""
        return gather_numbers(self.communicator, numbers)

    def _answer(self) -> dict[str, Any]:
        """Return the planner's answer on every process; an error of the planner is raised on all of them."""
        payload = None
        if self.planner is not None:
            try:
                message, worked, waited = self.planner.result()
                payload = pack(message | {"plan_seconds": worked, "wait_seconds": waited})
            except Exception as error:
                payload = pack({"error": str(error), "is_usage": isinstance(error, UsageError)})
        message = unpack(self.communicator.broadcast(payload))
        if "error" in message:
            raise (UsageError if message["is_usage"] else RuntimeError)(message["error"])
        return message

    def _share_in_replica(self, samples: list[Sample]) -> list[Sample]:
        if len(self.leaders) == self.communicator.size:
            return samples
        packed = pack_samples(samples)
        mine = [
            packed if self.is_leader and replica == self.replica else b"" for replica in self.replica_of
        ]  # fmt: skip
        received = self.communicator.exchange(mine)
        return unpack_samples(received[self.leaders[self.replica]])


def _outcome(sample: Sample) -> Sample:
    per_token = isinstance(sample.advantage, np.ndarray)
    return Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        trajectory_id=sample.trajectory_id,
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        reward=sample.reward,
        advantage=0.0 if per_token else sample.advantage,
    )
