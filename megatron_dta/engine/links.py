"""Point-to-point transfers between the stages of a pipeline: asynchronous, shapes known from the plan.

Megatron's own communicator pairs sends with receives in one blocking exchange, which its schedules are built around.
Here each flow has a group of its own, so that a transfer waits for nothing but its own sender.

On a GPU a posted transfer is a kernel that runs until its other end does, and now and then the host waits for all of a
GPU's kernels: when one is loaded for the first time, or memory is given back. So an operation that computes may have to
wait for all transfers posted before it. Receives are therefore posted right before the sends of the operation before,
those of a chunk together with its pushes', and none earlier. With one model part a stage, every stage then gets on
even if each operation waits so; with virtual stages that holds only while the host does not wait: load kernels at the
start (CUDA_MODULE_LOADING=EAGER).
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dta.mcore.parallel import Groups, Transfers
from megatron_dta.tree.plan import Flow, Transfer


@dataclass(frozen=True, kw_only=True, eq=False)
class Arriving:
    """A receive that has been posted."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """Return the tensor once later work on the device sees what was sent."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Links:
    """The transfers of one stage."""

    def __init__(self, groups: Groups):
        self.groups = groups
        self._leaving: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept until it has left."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group(transfer), group_dst=transfer.peer)
        self._leaving.append((work, tensor))
        while self._leaving and (first := self._leaving[0][0]) is not None and first.is_completed():
            self._leaving.popleft()

    def receive(self, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arriving:
        """Post a receive."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(tensor, group=self._group(transfer), group_src=transfer.peer)
        return Arriving(tensor=tensor, work=work)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._leaving:
            work, _ = self._leaving.popleft()
            if work is not None:
                work.wait()

    def _group(self, transfer: Transfer) -> dist.ProcessGroup:
        transfers: Transfers | None = self.groups.transfers
        assert transfers is not None, "a transfer without a pipeline"
        names = {Flow.ACTIVATION: "forward", Flow.GRADIENT: "backward"}
        return getattr(transfers, names[transfer.flow] + ("_wrap" if transfer.wraps else ""))
