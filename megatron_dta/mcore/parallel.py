"""Process groups: the one file that touches `parallel_state`; everywhere else groups are arguments."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dta.errors import UsageError
from megatron_dta.mcore import cpu


def initialize(*, seed: int = 0) -> torch.device:
    """Set up one process with Megatron's groups and return its device; a second call changes nothing but the seed.

    Raises UsageError under a launcher that started several processes.
    """
    refuse_several_processes()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu.install()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    if on_gpu:
        model_parallel_cuda_manual_seed(seed)
        return torch.device("cuda", torch.cuda.current_device())
    initialize_rng_tracker(inference_rng_tracker=True)  # the other tracker draws from CUDA
    return torch.device("cpu")


def refuse_several_processes() -> None:
    """Raise UsageError where a launcher started more than one process: each would train alone."""
    sizes = {name: os.environ.get(name, "1") for name in _WORLD_SIZES}
    if dist.is_initialized():
        sizes["torch.distributed world size"] = str(dist.get_world_size())
    for name, size in sizes.items():
        if size.isdigit() and int(size) > 1:
            raise UsageError(f"{name} is {size}; this version trains on one process, start it without the launcher")


_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
