"""Megatron's distributed optimizer behind a small interface; it needs a GPU."""

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_dta.errors import UsageError
from megatron_dta.mcore.gradients import Gradients


class ShardedAdamW:
    """AdamW whose fp32 masters and moments are dealt over the data-parallel ranks; vectors do not decay."""

    def __init__(
        self, gradients: Gradients, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float
    ):  # fmt: skip
        """Copy the parameters into masters: load weights before. Raises UsageError for gradients without shards."""
        if not gradients.sharded:
            raise UsageError("gradients are not sharded; construct them with distributed_optimizer=True, on a GPU")
        dtypes = {p.dtype for p in gradients.params}
        self.gradients, self.weight_decay = gradients, weight_decay
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=weight_decay,
                adam_beta1=betas[0],
                adam_beta2=betas[1],
                adam_eps=eps,
                bf16=torch.bfloat16 in dtypes,
                params_dtype=torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32,
                use_distributed_optimizer=True,
                clip_grad=0.0,  # the caller clips
            ),
            gradients.parts,
            use_gloo_process_groups=False,
        )

    @torch.no_grad()
    def norm(self) -> float:
        """Take the finished main gradients; return the norm of the whole model's, the same float on all ranks."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients that `norm` took."""
        grads = [p.grad for g in self.megatron.param_groups for p in g["params"]]
        if grads:  # a rank may have no shard
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Update this rank's shard with the gradients that `norm` took, round it, gather the parameters."""
        for group in self.megatron.param_groups:
            # Megatron's scheduler does this, the optimizer itself does not
            group["lr"], group["weight_decay"] = lr, self.weight_decay * group["wd_mult"]
        if not self.megatron.step_with_ready_grads():
            raise RuntimeError("Megatron's optimizer did not update")

    def zero_grad(self) -> None:
        """Forget all gradients, here and in the model's buffers."""
        self.megatron.zero_grad()
        self.gradients.zero()
