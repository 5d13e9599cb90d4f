"""Process groups: the one file that touches `parallel_state`; everywhere else groups are arguments."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dta.mcore import cpu


def initialize(*, seed: int = 0) -> torch.device:
    """Set up one process with Megatron's groups and return its device; a second call changes nothing but the seed."""
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


def finalize() -> None:
    """Take down Megatron's groups and torch.distributed."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
