"""Megatron-Core on a machine without CUDA: the only file that replaces anything, and never on a GPU.

Megatron-Core asks CUDA for the current device and for random states in places that CPU runs reach: parameter
creation, the pipeline's stream handling, and recomputation. Tree training refuses dropout, so no random number is
drawn inside the model and empty random states are exact.
"""

import contextlib

import torch


def install() -> None:
    """Replace the few CUDA calls that a CPU run reaches; raise RuntimeError on a machine with CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed on a machine with CUDA")
    from megatron.core.tensor_parallel import random

    vars(torch.cuda)["current_device"] = lambda: torch.device("cpu")
    vars(torch.cuda)["synchronize"] = lambda *args, **kwargs: None
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *states: None
    random._fork_rng = contextlib.nullcontext
