"""Main gradients: Megatron's buffers take what every backward leaves and sum it over ranks, once a step."""

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import MegatronModule, param_is_not_shared
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dta.errors import UsageError
from megatron_dta.mcore.parallel import Groups


class Gradients:
    """The gradients of this process's model parts, in `param.main_grad`: at least fp32, `param.grad` stays empty.

    A step is `begin`, backwards, `finish`: then they are sums over all ranks that hold the same parameter. The loss has
    its denominators already; nothing is rescaled. Hooks see every backward of the parts themselves: call those.
    """

    def __init__(
        self,
        parts: Sequence[MegatronModule],
        config: TransformerConfig,
        *,
        overlap: bool = False,
        distributed_optimizer: bool | None = None,
    ):
        """Take over the parts' gradients.

        overlap: reduce a part's buckets while its last backward runs. distributed_optimizer: each data-parallel rank
        gets the sums of its shard only, for Megatron's distributed optimizer; by default on a GPU, fp64 apart. Raises
        UsageError where that optimizer cannot run, for a config that rescales, and for parts whose gradients another
        object has.
        """
        params = [p for part in parts for p in part.parameters() if p.requires_grad]
        _check(params, config)
        self.params, self.overlap = params, overlap
        self.sharded = _sharded(params, distributed_optimizer)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.params_dtype != torch.float64,
            overlap_grad_reduce=overlap,
            use_distributed_optimizer=self.sharded,
        )
        # as Megatron's own loop: only the first part's reductions are worth splitting into buckets
        self.parts = [
            DistributedDataParallel(config, ddp_config, part, disable_bucketing=number > 0)
            for number, part in enumerate(parts)
        ]
        self._held: dict[int, contextlib.ExitStack] | None = None
        self._is_clear = True

    @property
    def main_grads(self) -> list[torch.Tensor]:
        """Return the main gradient of each of `params`; after `finish`, with shards, only this rank's are sums."""
        return [p.main_grad for p in self.params]

    def zero(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad_buffer()
        self._is_clear = True

    def begin(self) -> None:
        """Start a step: forget what is left of one that was not used, and hold all reductions back."""
        if not self._is_clear:
            self.zero()
        self._is_clear, self._held = False, {}
        for number, part in enumerate(self.parts):
            self._held[number] = contextlib.ExitStack()
            self._held[number].enter_context(part.no_sync())

    def last_backward(self, part: int) -> None:
        """Announce that the next backward of a part is its last: reductions may start in it.

        With `overlap`, that backward reaches every parameter of the part (experts and the head too), equally often in
        every step; and either all ranks announce one in a step or none does.
        """
        self._holding().pop(part).close()

    def finish(self) -> None:
        """Sum over the ranks that share a parameter; of parts that announced no backward too, such as in a zero step.

        Data-parallel ranks with context ranks, expert ranks for experts, tensor ranks for what each has a share of
        (norms under sequence parallelism, norms of queries and keys), first and last stage for tied embeddings.
        """
        held, self._held = self._holding(), None
        for number, hold in held.items():
            hold.close()
            if self.overlap:
                self.parts[number].start_grad_sync()  # no backward will
        finalize_model_grads(self.parts, num_tokens=None)

    def release(self) -> None:
        """Leave the gradients alone again: hooks live as long as what DDP keeps for them; buffers go with this."""
        for part in self.parts:
            part.grad_accs.clear()
        for param in self.params:
            del param.main_grad, param.grad_added_to_main_grad

    def _holding(self) -> dict[int, contextlib.ExitStack]:
        if self._held is None:
            raise RuntimeError("no step has begun: call begin() before its backwards")
        return self._held


def can_shard(params: Sequence[torch.nn.Parameter]) -> bool:
    """Say whether Megatron's distributed optimizer can update these: on a GPU, in 16 or 32 bits."""
    return all(p.is_cuda and p.dtype != torch.float64 for p in params)


def _sharded(params: Sequence[torch.nn.Parameter], asked: bool | None) -> bool:
    if asked and not can_shard(params):
        kinds = ", ".join(sorted({f"{p.dtype} on {p.device.type}" for p in params}))
        raise UsageError(
            f"distributed_optimizer is True for {kinds}; Megatron's takes bf16, fp16 and fp32 on a GPU: leave it out"
        )
    return can_shard(params) if asked is None else asked


def _check(params: Sequence[torch.nn.Parameter], config: TransformerConfig) -> None:
    if not config.calculate_per_token_loss:
        raise UsageError(
            "config.calculate_per_token_loss is False; expected True: the loss has its denominators, Megatron would "
            "divide by the number of ranks again"
        )
    if any(hasattr(p, "main_grad") for p in params):
        raise UsageError("the model's gradients are taken over already; release() what has them")


@torch.no_grad()
def model_norm(params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor], groups: Groups) -> float:
    """Return the norm of the whole model's gradient, every parameter counted once; the same float on all ranks.

    params are this process's and grads their gradients, finished and whole; all processes call this together.
    """
    dense: list[torch.Tensor] = []
    experts: list[torch.Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        is_expert = not getattr(param, "allreduce", True)
        tensor_ranks = groups.etp if is_expert else groups.tp
        # the last stage's copy of a tied embedding counts as the first's
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tensor_ranks):
            (experts if is_expert else dense).append(grad)
    device = params[0].device
    total = _over_ranks(square_sum(dense), groups.model, device)
    return math.sqrt(total + _over_ranks(square_sum(experts), groups.expert_model, device))


def square_sum(grads: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares, in fp64: an fp32 sum over a large matrix is off in the fourth digit."""
    if not grads:
        return 0.0
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float64)
    return float(torch.stack(list(norms)).square().sum())


def _over_ranks(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Add up in rank order: an all-reduce may use another order in another replica."""
    if group.size() == 1:
        return value
    values = torch.empty(group.size(), 1, dtype=torch.float64, device=device)
    dist.all_gather(list(values), torch.full((1,), value, dtype=torch.float64, device=device), group=group)
    return sum(values.flatten().tolist())
