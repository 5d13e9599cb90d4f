"""Megatron-Core on a machine without CUDA: the only file that replaces anything, and never on a GPU.

Megatron-Core asks CUDA for the current device, for streams and for random states in places that CPU runs reach:
parameter creation, the pipeline's stream handling, recomputation (random states), the dispatch of tokens to experts
(a stream for copies to the host), and the output weight of a tied model (moved with `.cuda()`). On a CPU nothing is
queued, so a stream that does nothing is exact; tree training refuses dropout, so no random number is drawn inside the
model and empty random states are exact. The dispatcher's split sizes become plain numbers, as its collective takes
them, only on their way from a GPU. Gloo gathers and scatters equally many rows a rank, NCCL any: where ranks of an
expert have unequally many, rows are padded, and sums go to all.
"""

import contextlib
import functools

import torch
import torch.distributed as dist


class _Stream:
    """A CUDA stream, or an event of one, on a machine where every operation has finished when it returns."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        """Wait for nothing."""

    def record_event(self) -> "_Stream":
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


def _on_host(tensor, as_numpy: bool = False, record_stream: bool = False):
    """Return what moving a tensor from a GPU would."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install() -> None:
    """Replace the few CUDA calls that a CPU run reaches; raise RuntimeError on a machine with CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed on a machine with CUDA")
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    vars(torch.cuda).update(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *args, **kwargs: None,
        Stream=_Stream,
        current_stream=_Stream,
    )
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *states: None
    random._fork_rng = contextlib.nullcontext
    vars(token_dispatcher)["maybe_move_tensor_to_cpu"] = _on_host
    even = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if even[0].__module__ == mappings.__name__:  # once
        mappings._gather_along_first_dim = functools.partial(_gather_rows, even[0])
        mappings._reduce_scatter_along_first_dim = functools.partial(_scatter_sums, even[1])


def _gather_rows(even, rows, group, output_split_sizes=None, use_global_buffer=False):
    """Megatron's gather of rows; where ranks have unequally many, padded to the most."""
    if output_split_sizes is None or group.size() == 1:
        return even(rows, group, output_split_sizes, use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def _scatter_sums(even, rows, group, input_split_sizes=None, use_global_buffer=False):
    """Megatron's reduce-scatter of rows; where ranks get unequally many, all get the sums and keep theirs."""
    if input_split_sizes is None or group.size() == 1:
        return even(rows, group, input_split_sizes, use_global_buffer)
    total = rows.clone()
    dist.all_reduce(total, group=group)
    return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()
