"""Bring the processes of a run together, in the one order that is safe: planner, MPI, torch.distributed."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_dta.axes import Axes
from megatron_dta.control.communicator import Communicator
from megatron_dta.control.launch import Launch, check_ranks, connect, detect_launch, rendezvous
from megatron_dta.control.mpi import MpiCommunicator
from megatron_dta.control.planning import HANDLER
from megatron_dta.control.service import Planner, PlannerProcess
from megatron_dta.errors import UsageError
from megatron_dta.mcore import parallel


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among the others."""

    launch: Launch
    communicator: Communicator
    planner: Planner | None
    """Of process 0."""


@contextmanager
def joined(axes: Axes = Axes()) -> Iterator[Processes]:  # noqa: B008  # frozen
    """Join the processes that the launcher started, laid out on these axes; one process alone without a launcher.

    The planner is started first: a process must not fork once MPI is initialised. Then MPI, so that its ranks can agree
    where torch.distributed meets. Raises UsageError, on every process, where the two would number them differently.
    Under MPI an error on one process ends all: the others would wait for it for ever.
    """
    launch = detect_launch(os.environ)
    planner = PlannerProcess(HANDLER) if launch.rank == 0 else None
    communicator: Communicator | None = None
    try:
        if launch.kind == "mpi":
            communicator = connect(launch)
            host, port = rendezvous(communicator)
            _initialize(launch, f"tcp://{host}:{port}", axes)
            check_ranks(communicator)
        else:
            _initialize(launch, "env://", axes)
            communicator = connect(launch)
        yield Processes(launch=launch, communicator=communicator, planner=planner)
        communicator.close()
        if launch.size > 1:
            parallel.leave()  # not after an error: the others are in the middle of something
    except BaseException as error:
        if isinstance(communicator, MpiCommunicator):
            print(f"error on rank {launch.rank}:", file=sys.stderr)
            if isinstance(error, UsageError):
                print(error, file=sys.stderr)
                communicator.abort(2)
            traceback.print_exception(error)
            communicator.abort(1)
        raise
    finally:
        if communicator is not None:
            communicator.close()
        if planner is not None:
            planner.close()


def _initialize(launch: Launch, init_method: str, axes: Axes) -> None:
    world = parallel.World(
        rank=launch.rank, size=launch.size, local_rank=launch.local_rank, init_method=init_method
    )  # fmt: skip
    parallel.initialize(world=world if launch.size > 1 else None, axes=axes)
