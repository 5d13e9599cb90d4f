"""Process groups: the one file that touches `parallel_state`; everywhere else groups are arguments."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dta.errors import UsageError
from megatron_dta.mcore import cpu

BUCKET_BYTES = 2**28
"""Gradients are summed over ranks in buckets of about this size."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, as the launcher started them."""

    rank: int
    size: int
    local_rank: int | None
    """Which GPU of the host; None where the launcher does not say."""
    init_method: str
    """Where torch.distributed meets: `env://` or `tcp://host:port`."""


def initialize(*, seed: int = 0, world: World | None = None) -> torch.device:
    """Set up this process with Megatron's groups and return its device; a second call changes nothing but the seed.

    Without `world` this is the only process, or torch.distributed is initialised already. All ranks are data-parallel
    and draw the same numbers from a seed, so that they build the same weights. Raises UsageError under a launcher that
    started several processes where `world` does not say so.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu.install()
    if not dist.is_initialized():
        _join(world, on_gpu)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    if on_gpu:
        model_parallel_cuda_manual_seed(seed)
        return torch.device("cuda", torch.cuda.current_device())
    initialize_rng_tracker(inference_rng_tracker=True)  # the other tracker draws from CUDA
    return torch.device("cpu")


def _join(world: World | None, on_gpu: bool) -> None:
    backend = "nccl" if on_gpu else "gloo"
    if world is None or world.size == 1:
        if world is None:
            refuse_several_processes()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if on_gpu:
        local = world.rank if world.local_rank is None else world.local_rank
        if torch.cuda.device_count() == 1:
            local = 0  # the launcher shows each process its own GPU
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {world.rank} is number {local} on its host, which shows {torch.cuda.device_count()} GPUs; "
                "start one process per GPU, or show each process its own (CUDA_VISIBLE_DEVICES)"
            )
        torch.cuda.set_device(local)
    dist.init_process_group(backend, init_method=world.init_method, rank=world.rank, world_size=world.size)


def refuse_several_processes() -> None:
    """Raise UsageError where a launcher started more than one process: each would train alone."""
    for name in _WORLD_SIZES:
        if name.startswith("SLURM") and "SLURM_STEP_ID" not in os.environ:
            continue  # of the batch script: no step has been started
        size = os.environ.get(name, "1")
        if size.isdigit() and int(size) > 1:
            raise UsageError(f"{name} is {size}; only `train` runs on several processes, start this without a launcher")


def leave() -> None:
    """Leave the groups that `initialize` made for several processes; the last thing a process does."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


@torch.no_grad()
def sum_over_replicas(tensors: Sequence[torch.Tensor]) -> None:
    """Add up tensors of one dtype over the data-parallel ranks, in place; the same bits on all of them."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return
    bucket: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors, 1):
        bucket.append(tensor)
        if number == len(tensors) or sum(t.nbytes for t in bucket) >= BUCKET_BYTES:
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat, group=group)
            for part, total in zip(bucket, flat.split([t.numel() for t in bucket])):
                part.copy_(total.view_as(part))
            bucket = []
