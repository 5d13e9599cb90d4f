"""AdamW on master weights: low-precision parameters are rounded copies, so that small updates are not lost."""

import math
from collections.abc import Callable

import torch

from megatron_dta.config import OptimizerSection


class MasterAdamW:
    """Main gradients and master weights in at least fp32; the model keeps its own dtype."""

    def __init__(self, model: torch.nn.Module, config: OptimizerSection, *, total_updates: int):
        """Take over the model's gradients: each backward adds to the main gradients and leaves `.grad` empty."""
        self.config, self.total_updates = config, total_updates
        self.params = list(model.parameters())
        self.masters = [_master(p) for p in self.params]
        self.main_grads = [torch.zeros_like(m) for m in self.masters]
        self._hooks = []
        for param, master, main_grad in zip(self.params, self.masters, self.main_grads):
            master.grad = main_grad
            self._hooks.append(param.register_post_accumulate_grad_hook(gather_into(main_grad)))
        decay = [m for m in self.masters if m.dim() > 1]
        plain = [m for m in self.masters if m.dim() <= 1]
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps
        )
        self.num_updates = 0

    def zero_grad(self) -> None:
        """Forget the gradients gathered so far."""
        torch._foreach_zero_(self.main_grads)

    def release(self) -> None:
        """Leave the model's gradients alone again, so that another optimizer can take over."""
        for hook in self._hooks:
            hook.remove()

    def learning_rate(self, update: int) -> float:
        """Return the rate of update 0, 1, ...: linear warm-up, then constant or a cosine down to `min_lr`."""
        c = self.config
        if update < c.warmup_updates:
            return c.lr * (update + 1) / c.warmup_updates
        if c.schedule == "constant":
            return c.lr
        done = (update - c.warmup_updates) / max(self.total_updates - c.warmup_updates, 1)
        return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, round into the model, clear the main gradients; return `grad_norm` (before clipping) and `lr`.

        Raises FloatingPointError, with nothing updated and the gradients cleared, if one is not finite.
        """
        grads = self.main_grads
        grad_norm = float(torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(grads)))))
        if not math.isfinite(grad_norm):
            self.zero_grad()
            raise FloatingPointError(f"gradient norm is {grad_norm} at update {self.num_updates}; nothing was updated")
        if self.config.clip_norm is not None and grad_norm > self.config.clip_norm:
            torch._foreach_mul_(grads, self.config.clip_norm / grad_norm)
        lr = self.learning_rate(self.num_updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for param, master in zip(self.params, self.masters):
            if param.data_ptr() != master.data_ptr():
                param.copy_(master)
        self.zero_grad()
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr}


def _master(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a leaf of at least fp32: the parameter's own memory where that is wide enough, else a copy."""
    wide = torch.promote_types(param.dtype, torch.float32)
    return param.detach().to(wide).requires_grad_()


def gather_into(main_grad: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a parameter's gradient into `main_grad` after each backward."""

    def add(param: torch.Tensor) -> None:
        main_grad.add_(param.grad)  # type: ignore[arg-type]  # the hook runs when it is there
        param.grad = None

    return add
